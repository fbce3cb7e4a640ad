"""Where the real APIs are, and how to run Python with them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tensorrt_api.make_stubs import VERSIONS

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(os.environ.get("VITDEPLOY_TENSORRT_API") or Path(sys.prefix) / "tensorrt-api")
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "vitdeploy").rglob("*.py"))}
IMPORT = re.compile(r"^ +import tensorrt as trt$", re.MULTILINE)
TENSORRT_FILES = [path for path, text in SOURCES.items() if IMPORT.search(text)]
CUDA_FILES = [path for path, text in SOURCES.items() if "cudart" in text or "cuda.require()" in text]
# The CUDA that each TensorRT is published for.
BESIDE = {"11.4.0.106": "cuda-13", "10.3.0": "cuda-12"}
each_version = pytest.mark.parametrize("version", VERSIONS)


def need(key):
    """The folder of one of the APIs; skips where it could not be made."""
    folder = FOLDER / key
    if not (folder / "done.txt").is_file():
        why = folder / "missing.txt"
        reason = why.read_text(encoding="utf-8").strip() if why.is_file() else f"not in {FOLDER}"
        pytest.skip(f"the API of {key} was not made ({reason}); run `make tensorrt-api`")
    return folder


def environment(version):
    """For a process that imports the real bindings of a TensorRT, and cuda-python; nothing of it can run."""
    folder, calls = need(version), need(BESIDE[version])
    paths = (str(ROOT), str(folder / "site"), str(calls))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": str(folder / "lib")}


def run_with(version, code, *arguments):
    """What `code`, run with the real bindings of a version, prints as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(version),
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])
