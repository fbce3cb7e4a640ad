"""Each wing may be left out: the rest imports none, and works in a package without its folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitdeploy.cli.main import COMMANDS, OF_WINGS
from vitdeploy.extensions import WINGS

ROOT = Path(__file__).parent.parent
RECIPE = """
vitdeploy: 1
name: digits
source: {{model: vit_w32d2h2_patch8_32}}
preprocess: {{resize: 32, crop: 32, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}}
data: {{path: {data}, labels: none, calibration: {{images: 16}}}}
targets: [onnxruntime-cpu]
"""
CODE = """
import sys
from click.testing import CliRunner
import vitdeploy
from vitdeploy.cli.main import cli
recipe, graph, bundle, image = sys.argv[1:]
long = [["run", recipe, "--dry-run"], ["compile", graph, "--target", "onnxruntime-cpu", "-o", bundle + "-again"]]
for words in (["--help"], ["bench", bundle, "--on", "pi"], ["predict", bundle, image], *(long if recipe else [])):
    done = CliRunner().invoke(cli, words)
    print("exit", done.exit_code, repr(done.exception))
    print(done.output)
"""


def without(wings, folder):
    """A package without these folders, to be on the path."""
    (folder / "vitdeploy").mkdir()
    for path in (ROOT / "vitdeploy").iterdir():
        if path.name not in wings:
            (folder / "vitdeploy" / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("wing", [*WINGS, "all"])
def test_the_rest_works_without(wing, digits, small_export, small_bundle, tmp_path):
    hidden = WINGS if wing == "all" else (wing,)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(data=digits / "evaluation"))
    bundle = shutil.copytree(small_bundle, tmp_path / "bundle")
    image = next((digits / "evaluation").rglob("*.png"))
    done = subprocess.run(
        [sys.executable, "-c", CODE, recipe if wing == "all" else "", small_export, bundle, image],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(without(hidden, tmp_path)), "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, usage, told, *others = done.stdout.split("exit ")
    assert usage[0] == "0" and [each[0] for each in others] == ["0"] * (3 if wing == "all" else 1), done.stdout
    gone = [name for name, home in OF_WINGS.items() if name in COMMANDS and home.partition(".")[0] in hidden]
    assert {name for name in COMMANDS if not re.search(rf"^  {name} ", usage, re.MULTILINE)} == set(gone)
    why = "installed without vitdeploy.devices" if "devices" in hidden else "unknown device"
    assert why in told
