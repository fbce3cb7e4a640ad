"""A bundle that was written is read back the same, with a real graph and a real engine."""

import json

import numpy as np
import pytest

from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, is_bundle, read_bundle, verify_files
from vitdeploy.bundle.write import Golden, write_bundle
from vitdeploy.spec import GraphSpec, PreprocessSpec, TensorSpec

GRAPH = GraphSpec(
    "anything.onnx",
    (TensorSpec("image", "uint8", ("batch", 32, 32, 1)),),
    (TensorSpec("logits", "float32", ("batch", 10)),),
)
PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
LABELS = [f"digit {i}" for i in range(10)]


@pytest.fixture(scope="module")
def engine(small_export, tmp_path_factory):
    """(EngineSpec, folder) of the small model on ONNX Runtime."""
    pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
    from vitdeploy.compile.engine import compile_engine

    folder = tmp_path_factory.mktemp("engine")
    graph = small_export / "model.onnx"
    return compile_engine(graph, folder, target="onnxruntime-cpu", precision="fp32", batch=1, placed=0), folder


def write(out, small_export, engine, **more):
    return write_bundle(
        out,
        name="small",
        task="classification",
        graphs={"model": (small_export / "model.onnx", GRAPH)},
        preprocess=PREPROCESS,
        engines=[engine],
        **more,
    )


def test_what_was_written_is_read_back(tmp_path, small_export, engine):
    written = write(tmp_path, small_export, engine, labels=LABELS, provenance={"tools": {"onnx": "1"}, "seed": 1})
    assert is_bundle(tmp_path)
    assert read_bundle(tmp_path) == written
    assert written.preprocess == PREPROCESS
    assert written.provenance == {"tools": {"onnx": "1"}, "seed": 1}
    assert written.engines[0].kernels == engine[0].kernels


def test_every_file_but_the_manifest_is_listed_with_its_digest(tmp_path, small_export, engine):
    manifest = write(tmp_path, small_export, engine, labels=LABELS, documents={"report.json": "{}\n"})
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {entry.path for entry in manifest.files} == found - {MANIFEST_FILE}
    assert {"model.onnx", "labels.txt", "report.json", "engines/onnxruntime-cpu/graph.onnx"} <= found
    assert all(file_sha256(tmp_path / entry.path) == entry.sha256 for entry in manifest.files)


def test_the_graph_and_the_engine_are_named_where_they_lie(tmp_path, small_export, engine):
    manifest = write(tmp_path, small_export, engine)
    assert manifest.graphs["model"].file == "model.onnx"
    assert (tmp_path / "model.onnx").read_bytes() == (small_export / "model.onnx").read_bytes()
    assert manifest.engines[0].files == ("engines/onnxruntime-cpu/graph.onnx",)
    assert manifest.engines[0].graph == "engines/onnxruntime-cpu/graph.onnx"


def test_the_golden_set_is_kept_exactly(tmp_path, small_export, engine):
    generator = np.random.default_rng(0)
    inputs = {"image": generator.integers(0, 256, (2, 32, 32, 1), np.uint8)}
    outputs = {
        "logits": generator.standard_normal((2, 7, 10)).astype(np.float32),
        "labels": generator.integers(0, 10, (2, 7)),
    }
    manifest = write(tmp_path, small_export, engine, golden=Golden(inputs, outputs, {"onnxruntime-cpu": 1e-4}))
    for file, arrays in ((manifest.golden.inputs, inputs), (manifest.golden.outputs, outputs)):
        with np.load(tmp_path / file, allow_pickle=False) as kept:
            assert set(kept.files) == set(arrays)
            for name, array in arrays.items():
                assert kept[name].dtype == array.dtype
                assert np.array_equal(kept[name], array)
    assert manifest.golden.tolerance == {"onnxruntime-cpu": 1e-4}


def test_labels_and_golden_set_may_be_absent(tmp_path, small_export, engine):
    manifest = write(tmp_path, small_export, engine)
    assert manifest.labels is None
    assert manifest.golden is None
    assert not (tmp_path / "labels.txt").exists()


def test_the_same_input_gives_the_same_bytes(tmp_path, small_export, engine):
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
        write(folder, small_export, engine, labels=LABELS)
    assert (folders[0] / MANIFEST_FILE).read_bytes() == (folders[1] / MANIFEST_FILE).read_bytes()


def test_a_number_that_is_no_json_is_not_written(tmp_path, small_export, engine):
    with pytest.raises(ValueError, match="JSON compliant"):
        write(tmp_path, small_export, engine, provenance={"drop": float("nan")})
    assert not is_bundle(tmp_path)


def test_a_copied_bundle_is_as_good(tmp_path, small_export, engine):
    import shutil

    (tmp_path / "here").mkdir()
    manifest = write(tmp_path / "here", small_export, engine, labels=LABELS)
    there = tmp_path / "with a space" / "ü"
    shutil.copytree(tmp_path / "here", there)
    assert read_bundle(there) == manifest
    assert verify_files(there, manifest) is None


def test_the_manifest_is_plain_json(tmp_path, small_export, engine):
    write(tmp_path, small_export, engine)
    assert json.loads((tmp_path / MANIFEST_FILE).read_text(encoding="utf-8"))["format"] == 1
