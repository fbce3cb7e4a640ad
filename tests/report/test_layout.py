"""Every page in a real browser, at the widths of a phone, a tablet and a desktop, light and dark.

One start of headless Chromium for all: each page is in a frame of each width, whose colour scheme the page takes for
that of its reader. `layout.js` looks for what is wrong.
"""

import html
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.report.pages import pages

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

PHONE, TABLET, LAPTOP, DESKTOP = 390, 768, 1100, 1280
EVERYWHERE = ((PHONE, "light"), (PHONE, "dark"), (TABLET, "dark"), (LAPTOP, "light"), (DESKTOP, "dark"))
PAPER = {"light": (255, 255, 255), "dark": (20, 23, 27)}
# These are in the screenshot, side by side; what is below or beside them is not.
PICTURED = ("run 390 light", "run 1280 dark")
HEIGHT = 1400
# One fault of each kind that is looked for.
FAULTY = """<!doctype html><html lang="en"><body style="margin: 0"><p id="a">good</p>
<div style="width: 3000px; height: 9px"></div>
<div style="overflow-x: auto; width: 300px"><p style="width: 500px">good</p></div>
<p style="width: 40px; overflow: hidden; white-space: nowrap">words that have no room</p>
<svg aria-label="words" viewBox="0 0 100 50" width="100" height="50"><text x="5" y="20" font-size="12">one</text>
<text x="8" y="22" font-size="12">other</text></svg>
<p style="color: #999">words too faint</p><p style="font-size: 7px">words too small</p>
<img src="https://example.org/x.png"><section aria-labelledby="b"></section></body></html>"""
KINDS = {"sideways", "outside", "clipped", "overlap", "contrast", "small", "alt", "request"}


def frame(name, content, width, scheme):
    style = f"width: {width}px; height: {HEIGHT}px; border: 0; float: left; color-scheme: {scheme}"
    return f'<iframe name="{name}" style="{style}" srcdoc="{html.escape(content)}"></iframe>'


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """(errors of every frame by its name, the screenshot of those that are PICTURED)."""
    folder = tmp_path_factory.mktemp("browser")
    frames = [frame("faulty", FAULTY, DESKTOP, "light")]
    for name, content in pages().items():
        for width, scheme in EVERYWHERE if name == "run" else ((PHONE, "dark"), (LAPTOP, "light")):
            frames.append(frame(f"{name} {width} {scheme}", content, width, scheme))
    frames.sort(key=lambda each: not any(f'name="{name}"' in each for name in PICTURED))
    script = Path(__file__).with_name("layout.js").read_text()
    look = """addEventListener("load", () => {
      const found = {};
      for (const each of document.querySelectorAll("iframe")) found[each.name] = layoutErrors(each);
      for (const each of document.querySelectorAll("iframe")) if (!PICTURED.includes(each.name)) each.remove();
      document.getElementById("found").textContent = JSON.stringify(found).replaceAll("<", "\\u003c");
    });""".replace("PICTURED", json.dumps(PICTURED))
    page = f'<!doctype html><meta charset="utf-8"><body style="margin: 0">{"".join(frames)}'
    page += '<script id="found" type="text/plain"></script>'
    (folder / "frames.html").write_text(f"{page}<script>{script}\n{look}</script>", encoding="utf-8")
    # The browser looks up no name, as it would to keep itself up to date.
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND")
    size = f"--window-size={PHONE + DESKTOP},{HEIGHT}"
    output = ("--hide-scrollbars", size, "--dump-dom", f"--screenshot={folder / 'screen.png'}")
    done = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={folder / 'profile'}", *output, (folder / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(re.findall(r'<script id="found"[^>]*>(.*?)</script>', done.stdout, re.DOTALL)[-1])
    screen = np.asarray(Image.open(io.BytesIO((folder / "screen.png").read_bytes())).convert("RGB"))
    return found, screen


def test_every_kind_of_fault_is_found(seen):
    found = seen[0]["faulty"]
    assert {error.partition(":")[0] for error in found} == KINDS, found


def test_no_page_has_a_fault_at_any_width_and_in_any_colours(seen):
    found = {name: errors for name, errors in seen[0].items() if name != "faulty"}
    assert len(found) == len(EVERYWHERE) + 2 * 7
    assert {name: errors for name, errors in found.items() if errors} == {}


@pytest.mark.parametrize(("name", "left"), [(PICTURED[0], 0), (PICTURED[1], PHONE)])
def test_a_screenshot_shows_the_page_in_its_colours_and_with_empty_margins(seen, name, left):
    _, width, scheme = name.split()
    picture = seen[1][:, left : left + int(width)]
    for margin in (picture[:, :8], picture[:, -8:]):
        assert (margin == PAPER[scheme]).all()
    assert 0.02 < (picture != PAPER[scheme]).any(axis=2).mean() < 0.6
    assert len(np.unique(picture.astype(np.uint32) @ np.array([1, 256, 65536], np.uint32))) > 100
