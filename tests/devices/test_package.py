"""The agent as one file: the same bytes everywhere, and nothing needed beside numpy and Pillow."""

import io
import json
import subprocess
import sys
import zipfile

from tests.test_imports import device_python  # noqa: F401  # a Python with numpy and Pillow only
from vitdeploy.devices.client import agent_package

IMPORT_ALL = """
import importlib, json, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import vitdeploy
names = [module.name for module in pkgutil.walk_packages(vitdeploy.__path__, "vitdeploy.")]
for name in names:
    importlib.import_module(name)
assert vitdeploy.__file__.startswith(sys.argv[1])
print(json.dumps(names))
"""


def test_it_is_packed_to_the_same_bytes():
    first = agent_package()
    agent_package.cache_clear()
    assert agent_package() == first
    with zipfile.ZipFile(io.BytesIO(first.data)) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        names = archive.namelist()
    assert names[0] == "__main__.py" and names[1:] == sorted(names[1:])
    assert not [name for name in names if "pipeline" in name or "verify" in name or "client" in name]


def test_all_of_it_imports_where_numpy_and_pillow_are_alone(device_python, tmp_path):  # noqa: F811
    path = tmp_path / "agent.pyz"
    path.write_bytes(agent_package().data)
    command = [device_python, "-I", "-c", IMPORT_ALL, path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"vitdeploy.devices.agent.tasks", "vitdeploy.devices.agent.serve"} <= set(json.loads(done.stdout))


def test_asking_for_the_state_of_a_job_needs_not_even_numpy(tmp_path):
    path = tmp_path / "agent.pyz"
    path.write_bytes(agent_package().data)
    command = [sys.executable, "-S", path, "status", "0" * 64]
    done = subprocess.run(command, env={"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[0] == "vitdeploy-agent ok"
    assert json.loads(done.stdout.splitlines()[1])["state"] == "absent"
