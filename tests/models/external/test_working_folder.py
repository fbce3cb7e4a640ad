"""The working folder is a place for the user's own modules, and for no package of that name."""

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest

from vitdeploy.cli.options import outside_working_folder
from vitdeploy.errors import UserCodeError
from vitdeploy.models.external.module import WorkingFolder, from_function, shown_folder
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.pipeline.measure import original_candidate
from vitdeploy.stages.reference_model import find_reference_model

NETWORK = """
import torch
from torch import nn
from {name}_parts.layers import POOL

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_size = 8
        self.conv = nn.Conv2d(1, 4, 2, 2)
        self.scale = {scale}

    def forward(self, image):
        from {name}_late import SIGN
        return SIGN * self.scale * POOL(self.conv(image))

def build():
    return Net()

def other():
    net = Net()
    net.drawn = {name}_counts()
    with torch.no_grad():
        net.conv.bias += net.drawn
    return net

def lists():
    import {name}_folder
    return {name}_folder

def {name}_counts(calls=[]):
    calls.append(0)
    return len(calls)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working folder with a user's modules, whose names are new each time, and with folders of other names."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / "work"
    (folder / f"{name}_parts").mkdir(parents=True)
    (folder / f"{name}_parts" / "layers.py").write_text("def POOL(x):\n    return x.mean(dim=(2, 3))\n")
    (folder / f"{name}_late.py").write_text("SIGN = 1\n")
    (folder / f"{name}.py").write_text(NETWORK.format(name=name, scale=2))
    for other in (f"{name}_folder", "triton", "onnx", "timm"):
        (folder / other).mkdir()
    (folder / "numpy.py").write_text("raise SystemExit('the numpy of somebody else')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_modules_of_the_folder_are_for_its_own_code(work):
    original = from_function(f"{work}:build", None)
    assert original.signature.image_size == (8, 8)
    assert {f"{work}_parts", f"{work}_parts.layers", f"{work}_late"} <= sys.modules.keys()
    for other in (f"{work}_folder", f"{work}_late_too", "triton_of_nobody"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(other)
    assert importlib.util.find_spec(f"{work}_folder") is None
    assert sys.modules[work].lists().__path__  # its own code sees its folders
    assert [finder for finder in sys.meta_path if isinstance(finder, WorkingFolder)] == [shown_folder()]


def test_a_library_finds_them_by_name_while_the_model_is_made(work, tmp_path):
    """A pickle names classes, a registry modules: they ask in the place of the user's code."""
    finder = shown_folder()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{work}_late")
    with finder.build():
        assert importlib.util.find_spec(f"{work}_late") is None  # whether there is one is asked for other reasons
        assert importlib.import_module(f"{work}_late").SIGN == 1
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{work}_folder")


def test_code_of_an_environment_in_the_folder_is_not_the_users(work, tmp_path):
    package = tmp_path / "work" / ".venv" / "lib" / "site-packages" / f"{work}_installed.py"
    package.parent.mkdir(parents=True)
    package.write_text(f"def ask():\n    import {work}_late\n")
    shown_folder()
    spec = importlib.util.spec_from_file_location(f"{work}_installed", package)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ModuleNotFoundError):
        module.ask()


def test_a_name_that_is_taken_is_refused(work, tmp_path):
    (tmp_path / "work" / "json.py").write_text("def build(): pass\n")
    with pytest.raises(UserCodeError, match="has the name of another, already loaded module") as caught:
        from_function("json:build", None)
    assert (caught.value.found, caught.value.fix) == (json.__file__, "rename the file")


# --- what its answers depend on ---------------------------------------------------------------------------------------


def again(work):
    """The identity of the module, as a new process would find it."""
    for module in [module for module in sys.modules if module.startswith(work)]:
        del sys.modules[module]
    reference_model = find_reference_model(Source(function=f"{work}:build"))
    return reference_model.digests[f"{work}:build"], reference_model.source.weights


def test_code_weights_and_answers_are_parts_of_the_key(work, tmp_path):
    folder = tmp_path / "work"
    first = again(work)
    assert again(work) == first
    (folder / f"{work}.py").write_text(NETWORK.format(name=work, scale=30))
    scaled = again(work)
    assert (scaled[0] != first[0], scaled[1]) == (True, first[1])  # the same weights
    (folder / f"{work}_late.py").write_text("SIGN = -1\n")
    assert again(work)[0] != scaled[0]


def test_another_model_at_each_call_is_refused(work):
    reference_model = find_reference_model(Source(function=f"{work}:other"))
    with pytest.raises(UserCodeError, match="returned different weights than before") as caught:
        load_model(reference_model.source)
    assert "--checkpoint" in caught.value.fix


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_measuring_process_imports_it_as_the_command_did(work):
    bench_candidate = original_candidate(find_reference_model(Source(function=f"{work}:build")).source)
    commands = [{"do": "load", "request": {**bench_candidate.request, "threads": 1}, "batches": [1]}, {"do": "close"}]
    done = subprocess.run(
        bench_candidate.argv,
        input="".join(f"{json.dumps(each)}\n" for each in commands),
        capture_output=True,
        text=True,
    )
    loaded = json.loads(done.stdout.splitlines()[0])
    assert "error" not in loaded, loaded
    assert done.returncode == 0, done.stderr


def test_the_command_leaves_the_folder_that_it_is_started_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    before = ["", str(tmp_path), *sys.path]
    monkeypatch.setattr(sys, "path", before)
    with outside_working_folder():
        assert not {"", str(tmp_path)} & set(sys.path)
    assert sys.path == before
    monkeypatch.setenv("PYTHONPATH", f".:{tmp_path / 'other'}")  # named, so meant
    with outside_working_folder():
        assert str(tmp_path) in sys.path


def test_an_export_beside_folders_of_packages_names(work, cli, tmp_path):
    """As `python -m` starts it, which begins with the working folder on its path."""
    done = cli("export", "--model", f"{work}:build", "-o", "out", cwd=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "out" / "model.onnx").is_file()
