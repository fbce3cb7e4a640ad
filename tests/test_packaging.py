"""What is shipped: the wheel holds the package and nothing else."""

import importlib
import re
import zipfile
from pathlib import Path

import pytest

import vitdeploy

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vitdeploy"
SHIPPED = {".py", ".jinja", ".typed"}
SITE = PACKAGE / "embed" / "web" / "site"  # files of a page, of whatever kind


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built by hatchling in this process, which needs no network."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="pip install hatchling")
    out = tmp_path_factory.mktemp("wheel")
    (path,) = builder.WheelBuilder(str(ROOT)).build(directory=str(out), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def sources():
    site = {path for path in SITE.rglob("*") if path.is_file()}
    shipped = site | {path for path in PACKAGE.rglob("*") if path.suffix in SHIPPED}
    return {path.relative_to(ROOT).as_posix() for path in shipped}


def test_the_wheel_holds_every_module_and_template(wheel):
    assert sources() <= set(wheel.namelist())
    assert any(name.endswith(".jinja") for name in sources())
    assert "vitdeploy/embed/web/site/app/page.js" in sources()


def test_the_wheel_holds_nothing_else(wheel):
    info = f"vitdeploy-{vitdeploy.__version__}.dist-info"
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"vitdeploy", info}
    assert {name for name in names if name.startswith("vitdeploy/")} == sources()


def test_the_wheel_has_the_command_and_the_license(wheel):
    info = f"vitdeploy-{vitdeploy.__version__}.dist-info"
    assert "vitdeploy = vitdeploy.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_wheel_asks_for_three_packages_and_offers_the_extras(wheel):
    metadata = wheel.read(f"vitdeploy-{vitdeploy.__version__}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(required) == ["click", "numpy", "pillow"]
    assert set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.MULTILINE)) == {
        "all",
        "bench",
        "embed",
        "coco",
        "cuda",
        "export",
        "hub",
        "onnxruntime",
        "openvino",
        "tensorrt",
        "serve",
        "sign",
        "timm",
        "transformers",
    }


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_command_of_the_project_file_exists():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    module, function = re.search(r'^vitdeploy = "([\w.]+):(\w+)"$', text, re.MULTILINE).groups()
    assert callable(getattr(importlib.import_module(module), function))
