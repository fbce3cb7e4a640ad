#!/bin/sh
# From a bundle to a C++ program: its source and model in FOLDER, built, and tested on the bundle's golden answers.
#
#     examples/cpp/build.sh out/digits app
#     app/build/digits seven.png
#
# Needs: apt-get install g++ cmake libjpeg-dev libpng-dev; pip install openvino (its wheel holds the C++ headers).
set -eu
[ $# -eq 2 ] || { echo "usage: $0 BUNDLE FOLDER" >&2; exit 2; }

vitdeploy embed "$1" --as cpp -o "$2"
cd "$2"
cmake -B build -DOpenVINO_DIR="$(python -c 'import openvino.utils as u; print(u.get_cmake_path())')"
cmake --build build
ctest --test-dir build --output-on-failure
