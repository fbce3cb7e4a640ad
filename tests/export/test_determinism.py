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
from vitdeploy.pipeline.origin import Overrides, find_origin
from vitdeploy.pipeline.stages.export import ExportConfig, export
from vitdeploy.spec import PreprocessSpec

preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
origin = find_origin(Source("vit_w32d2h2_patch8_32", Path(sys.argv[1])), Overrides(preprocess))
export(origin, ExportConfig("small", opset=20, batch=None, in_graph=True), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def twice(tmp_path_factory, small_checkpoint):
    """The folders of two exports, made at the same time by processes with other working folders and hash seeds."""
    folders, children = [], []
    for i in range(2):
        home, out = tmp_path_factory.mktemp(f"home{i}"), tmp_path_factory.mktemp(f"out{i}")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(i), "TMPDIR": str(home)}
        command = [sys.executable, "-c", EXPORT, str(small_checkpoint), str(out)]
        children.append(subprocess.Popen(command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True))
        folders.append(out)
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    return folders


def strings(proto):
    """Every free text of the file: names are not, metadata and doc strings are."""
    graph = proto.graph
    holders = [proto, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer]
    for holder in holders:
        yield holder.doc_string
        yield from (f"{entry.key}={entry.value}" for entry in holder.metadata_props)
    yield from (proto.producer_name, proto.producer_version, proto.domain, graph.name)


def test_two_processes_write_the_same_bytes(twice):
    first, second = ((folder / "model.onnx").read_bytes() for folder in twice)
    assert len(first) > 50_000
    assert first == second


def test_this_process_writes_the_same_bytes_too(twice, small_export):
    assert (twice[0] / "model.onnx").read_bytes() == (small_export / "model.onnx").read_bytes()


def test_the_facts_are_the_same_too(twice):
    first, second = ((folder / "export.json").read_bytes() for folder in twice)
    assert first == second


def test_the_file_holds_no_path_and_no_trace_of_source(twice, small_checkpoint, tmp_path):
    content = (twice[0] / "model.onnx").read_bytes()
    traces = [str(ROOT), str(small_checkpoint.parent), str(tmp_path.parent), sys.prefix]
    traces += ["stack_trace", "pkg.torch", 'File "', "site-packages"]
    assert [trace for trace in traces if trace.encode() in content] == []


def test_free_text_is_the_metadata_of_vitdeploy_and_holds_no_date(twice):
    proto = onnx.load(str(twice[0] / "model.onnx"))
    texts = {text for text in strings(proto) if text}
    assert {text.split("=")[0] for text in texts} == {"vitdeploy", "small"}
    assert not [text for text in texts if re.search(r"\b(19|20)\d\d\b", text)]
