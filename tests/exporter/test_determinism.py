"""The same model gives the same bytes, and the file tells nothing about the machine that made it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

ROOT = Path(__file__).parent.parent.parent
EXPORT = """
import sys
from pathlib import Path
from vitdeploy.models.source import Source
from vitdeploy.stages.reference_model import Overrides, find_reference_model
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.spec import PreprocessSpec

preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
origin = find_reference_model(Source("vit_w32d2h2_patch8_32", Path(sys.argv[1])), Overrides(preprocess))
export(origin, ExportConfig("small", opset=20, batch=None, in_graph=True), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, small_checkpoint):
    """The folder of the export of a process with another working folder and another hash seed than this one."""
    home, out = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("out")
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # where it is not set, this process's is random
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "TMPDIR": str(home)}
    command = [sys.executable, "-c", EXPORT, str(small_checkpoint), str(out)]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return out


def strings(proto):
    """Every free text of the file: names are not, metadata and doc strings are."""
    graph = proto.graph
    holders = [proto, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer]
    for holder in holders:
        yield holder.doc_string
        yield from (f"{entry.key}={entry.value}" for entry in holder.metadata_props)
    yield from (proto.producer_name, proto.producer_version, proto.domain, graph.name)


def test_two_processes_write_the_same_bytes(elsewhere, small_export):
    first, second = ((folder / "model.onnx").read_bytes() for folder in (elsewhere, small_export))
    assert len(first) > 50_000
    assert first == second


def test_the_facts_are_the_same_too(elsewhere, small_export):
    first, second = ((folder / "export.json").read_bytes() for folder in (elsewhere, small_export))
    assert first == second


def test_the_file_holds_no_path_and_no_trace_of_source(elsewhere, small_checkpoint, tmp_path):
    content = (elsewhere / "model.onnx").read_bytes()
    traces = [str(ROOT), str(small_checkpoint.parent), str(tmp_path.parent), sys.prefix]
    traces += ["stack_trace", "pkg.torch", 'File "', "site-packages"]
    assert [trace for trace in traces if trace.encode() in content] == []


def test_free_text_is_the_metadata_of_vitdeploy_and_holds_no_date(elsewhere):
    proto = onnx.load(str(elsewhere / "model.onnx"))
    texts = {text for text in strings(proto) if text}
    assert {text.split("=")[0] for text in texts} == {"vitdeploy", "small"}
    assert not [text for text in texts if re.search(r"\b(19|20)\d\d\b", text)]
