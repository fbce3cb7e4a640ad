"""What we call of TensorRT and CUDA is there, under that name and with those parameters, in the oldest and newest API.

Nothing is executed here: no machine of this test has TensorRT's libraries. The APIs are the published ones
(make_stubs.py), not written by hand.
"""

import json
import re
import subprocess
import sys

import pytest

from tests.tensorrt_api.api import (
    CUDA_FILES,
    FOLDER,
    ROOT,
    SOURCES,
    TENSORRT_FILES,
    each_version,
    environment,
    need,
    run_with,
)
from tests.tensorrt_api.names import used_names

NAMES = ROOT / "tests" / "tensorrt_api" / "names.py"
# Wrong on purpose, to see that the check looks: a method, an attribute, a keyword, a type that are not there.
MISUSE = """
import tensorrt as trt


def misuse(builder: trt.Builder, engine: trt.ICudaEngine) -> None:
    builder.build_engine_quickly()
    trt.BuilderFlag.FASTER
    builder.create_network(flagz=1)
    engine.get_tensor_name("first")
"""
MISUSE_LINES = {6, 7, 8, 9}
CONFIG = """
[mypy]
python_version = 3.10
strict = true
warn_unused_ignores = false
# The generated stubs leave some types open; what is checked is that names, parameters and results exist.
disallow_any_generics = false
follow_imports = silent
mypy_path = {stubs}
[mypy-tensorrt.*]
ignore_errors = true
follow_imports = silent
[mypy-cuda.*]
ignore_missing_imports = true
"""


@each_version
def test_mypy_finds_no_error_against_the_real_api(tmp_path, version):
    stubs = need(version) / "stubs"
    misuse, config = tmp_path / "misuse.py", tmp_path / "mypy.ini"
    misuse.write_text(MISUSE)
    config.write_text(CONFIG.format(stubs=stubs))
    argv = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", FOLDER / f"mypy-{version}"]
    result = subprocess.run(
        [*argv, "--no-error-summary", "--hide-error-context", *TENSORRT_FILES, misuse],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        cwd=ROOT,
    )
    errors = [line for line in result.stdout.splitlines() if ": error:" in line]
    caught = {int(re.search(r"misuse\.py:(\d+):", line)[1]) for line in errors if "misuse.py" in line}
    assert caught == MISUSE_LINES, result.stdout + result.stderr
    assert [line for line in errors if "misuse.py" not in line] == []


@each_version
def test_every_name_that_we_use_is_in_the_real_module(version):
    names = set().union(*(used_names(SOURCES[path], "trt") for path in TENSORRT_FILES))
    assert {"Builder", "BuilderFlag.VERSION_COMPATIBLE", "OnnxParser"} <= names
    assert absent("tensorrt_bindings", names | {"Builder.not_there"}, environment(version)) == ["Builder.not_there"]


@each_version
def test_every_cuda_name_that_we_use_is_in_the_real_module(version):
    names = set().union(*(used_names(SOURCES[path], "cudart") for path in CUDA_FILES))
    assert {"cudaMalloc", "cudaMemcpyKind.cudaMemcpyHostToDevice", "cudaGraphLaunch"} <= names
    found = absent("cuda.bindings.runtime", names | {"cudaNotThere"}, environment(version))
    assert found == ["cudaNotThere"]


# Of CUDA 13 and of CUDA 12.
NO_DRIVER = re.compile(r'cudaErrorInsufficientDriver|Failed to dlopen libcuda|Function "cuInit" not found')
CALLS = """
import json, sys
from types import SimpleNamespace
import numpy as np
from vitdeploy.errors import VitdeployError
from vitdeploy.runtime import cuda

try:
    print(json.dumps(str(cuda.describe_device())))
    sys.exit()  # with a driver, calls with made-up addresses could crash
except VitdeployError:
    pass
stream, event = cuda.Stream.__new__(cuda.Stream), cuda.Event.__new__(cuda.Event)
buffer, pinned = cuda.DeviceBuffer.__new__(cuda.DeviceBuffer), cuda.PinnedArray.__new__(cuda.PinnedArray)
stream.handle = event._event = buffer.pointer = pinned.pointer = 4096
host = SimpleNamespace(pointer=4096, array=np.zeros(4))
graph = cuda.Graph.__new__(cuda.Graph)
graph._executable, graph._stream = 4096, stream
calls = [
    cuda.free_memory, cuda.Stream, cuda.Event,
    lambda: cuda.DeviceBuffer(16), lambda: cuda.PinnedArray((2, 2), "float32"), buffer.close, pinned.close,
    lambda: stream.copy_to_device(4096, host), lambda: stream.copy_to_host(host, 4096), stream.synchronize,
    lambda: stream.capture(lambda: None), stream.close, lambda: cuda.Graph(4096, stream), graph.launch, graph.close,
    lambda: event.record(stream), lambda: event.milliseconds_since(event), event.close,
]
found = []
for call in calls:
    try:
        found.append(repr(call()))
    except VitdeployError as error:
        found.append(f"{error.code} {error.found}")
    except Exception as error:
        found.append(repr(error))
print(json.dumps(found))
"""


@each_version
def test_cuda_takes_the_arguments_of_every_call_of_ours(version):
    """Without a driver cuda-python still converts all arguments, and then says that there is none."""
    found = run_with(version, CALLS)
    if isinstance(found, str):
        pytest.skip(f"this machine has a driver: {found}")
    assert len(found) == 18
    assert [text for text in found if not NO_DRIVER.search(text)] == []


def test_names_are_read_from_attribute_chains_only():
    source = "import x as trt\ntrt.A.B(trt.C)\nother.A.D\ngetattr(trt.E, 'F')\n"
    assert used_names(source, "trt") == {"A", "A.B", "C", "E"}
    assert used_names("cuda.require().cudaFree(1)\ncheck(require().cudaX)\n", "cudart") == {"cudaFree", "cudaX"}


def absent(module, names, env):
    result = subprocess.run(
        [sys.executable, NAMES, module],
        input=json.dumps(sorted(names)),
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=120,
    )
    if result.returncode:
        pytest.fail(result.stderr[-2000:])
    return json.loads(result.stdout)
