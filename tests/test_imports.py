"""What imports what: the layers, and the device zone in an environment that has numpy and Pillow only."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEVICE_ZONE = ("vitdeploy.runtime", "vitdeploy.compilation", "vitdeploy.benchmark", "vitdeploy.bundle")
# Packages with the folder that holds their shared libraries, as wheels for Linux have it.
DEVICE_PACKAGES = (("numpy", "numpy.libs"), ("PIL", "pillow.libs"))

IMPORT_ALL = """
import importlib, json, pkgutil, sys
names = []
for name in ZONE:
    package = importlib.import_module(name)
    names.append(name)
    names += [module.name for module in pkgutil.walk_packages(package.__path__, name + ".")]
for name in names:
    importlib.import_module(name)
print(json.dumps(names))
"""


def run_python(python, code, **options):
    return subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False, **options
    )


@pytest.fixture(scope="module")
def device_python(tmp_path_factory):
    """The Python of a new environment in which only numpy, Pillow and vitdeploy can be imported."""
    home = tmp_path_factory.mktemp("device") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=120)
    packages = next(home.glob("lib/python*/site-packages"))
    for name, libraries in DEVICE_PACKAGES:
        folder = Path(importlib.util.find_spec(name).submodule_search_locations[0])
        (packages / name).symlink_to(folder)
        if (folder.parent / libraries).is_dir():
            (packages / libraries).symlink_to(folder.parent / libraries)
    (packages / "vitdeploy").symlink_to(ROOT / "vitdeploy")
    return home / "bin" / "python"


def test_every_import_rule_is_kept():
    pytest.importorskip("importlinter", reason="pip install import-linter")
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken" in done.stdout


def test_the_device_environment_has_nothing_else(device_python):
    code = """
import importlib.util, json
names = ["numpy", "PIL", "torch", "onnx", "click", "scipy", "pydantic", "yaml", "onnxruntime", "openvino"]
print(json.dumps([name for name in names if importlib.util.find_spec(name)]))
"""
    assert json.loads(run_python(device_python, code).stdout) == ["numpy", "PIL"]


def test_the_device_zone_imports_with_numpy_and_pillow_only(device_python):
    done = run_python(device_python, f"ZONE = {DEVICE_ZONE!r}\n{IMPORT_ALL}")
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    expected = {"vitdeploy.runtime.predictor", "vitdeploy.compilation.engine", "vitdeploy.benchmark.worker"}
    expected |= {f"vitdeploy.runtime.{name}" for name in ("openvino", "ort", "tasks.panoptic", "sequence_predictor")}
    assert expected | {"vitdeploy.bundle.read"} <= set(imported)


def test_without_a_runtime_the_device_is_told_what_to_install(device_python):
    code = """
from pathlib import Path
from vitdeploy.errors import MissingPackageError
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
for runner in OnnxRuntimeRunner, OpenVinoRunner:
    try:
        runner(Path("model.onnx"), name="engine").load()
    except MissingPackageError as error:
        print(error.fix)
"""
    done = run_python(device_python, code)
    assert done.stdout.splitlines() == ["pip install 'vitdeploy[onnxruntime]'", "pip install 'vitdeploy[openvino]'"]


def test_preprocessing_works_with_numpy_and_pillow_only(device_python):
    code = """
import numpy as np
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.spec import PreprocessSpec
spec = PreprocessSpec(8, (8, 8))
pixels = load_pixels(np.full((20, 30, 3), 255, np.uint8), spec)
print(normalise(pixels[None], spec).tolist() == np.ones((1, 3, 8, 8)).tolist())
"""
    done = run_python(device_python, code)
    assert done.stdout.strip() == "True", done.stderr


def test_the_server_imports_the_device_zone_and_its_own_packages_only():
    pytest.importorskip("starlette", reason="pip install 'vitdeploy[serve]'")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import json, vitdeploy.serve.server
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})))
"""
    done = run_python(sys.executable, code)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout))
    assert {"starlette", "uvicorn", "prometheus_client"} <= imported
    assert not imported & {"torch", "onnx", "onnxruntime", "openvino", "scipy", "pydantic", "yaml", "rich", "fastapi"}


BLOCKED = """
import sys
sys.path.insert(0, ROOT)
class Missing:
    def find_spec(name, path, target=None):
        if name in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
"""
# The packages of the extra `export` that `bench` and `history` lack.
EXPORT_ALONE = ("torch", "safetensors", "rich", "jinja2", "markupsafe", "matplotlib", "cloudpickle", "cyclonedx")


def test_commands_and_wings_need_no_pytorch_before_a_model_is_made():
    zone = tuple(f"vitdeploy.{name}" for name in ("api", "cli", "devices", "embed", "history", "releases", "workflows"))
    code = f"ROOT, NAMES, ZONE = {str(ROOT)!r}, ['torch'], {zone!r}\n{BLOCKED}\n{IMPORT_ALL}"
    done = run_python(sys.executable, code)
    assert done.returncode == 0, done.stderr
    assert {"vitdeploy.api.deploy", "vitdeploy.devices.api"} <= set(json.loads(done.stdout))


@pytest.mark.parametrize("module", ["api.bench", "history.api", "history.command"])
def test_a_bench_and_its_history_need_their_own_extras_only(module):
    pytest.importorskip("pyarrow", reason="pip install 'vitdeploy[data]'")
    code = f"ROOT, NAMES = {str(ROOT)!r}, {EXPORT_ALONE!r}\n{BLOCKED}\nimport vitdeploy.{module}"
    done = run_python(sys.executable, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["torch", "onnx", "click", "PIL", "onnxruntime", "openvino", "scipy", "pydantic"])
def test_importing_the_runtime_does_not_import(package, imported_by_runtime):
    assert package not in imported_by_runtime


@pytest.fixture(scope="module")
def imported_by_runtime():
    """The top-level modules in a process of this environment that has imported vitdeploy.runtime."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import json, vitdeploy.runtime
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})))
"""
    done = run_python(sys.executable, code)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))
