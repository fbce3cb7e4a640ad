#!/bin/sh
# From a bundle to a static page in FOLDER, tested on the bundle's golden answers, with a page of your own beside it.
#
#     examples/web/build.sh out/digits page
#     cd page && npm start                    # and open /gallery.html
#
# Needs: Node 18 or newer, with npm.
set -eu
[ $# -eq 2 ] || { echo "usage: $0 BUNDLE FOLDER" >&2; exit 2; }

vitdeploy embed "$1" --as web -o "$2"
cp "$(dirname "$0")"/gallery.* "$2"
cd "$2"
npm ci --ignore-scripts
npm run build
npm test
