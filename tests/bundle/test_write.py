"""A bundle that was written is read back the same, with a real graph and a real engine."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from tests.replaced import replace_while_loading
from tests.targets import CPU_TARGETS
from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, is_bundle, read_bundle, verify_files
from vitdeploy.bundle.write import Golden, GoldenAnswers, write_bundle
from vitdeploy.errors import DigestError, TargetError
from vitdeploy.runtime.engine import make_runner
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
    from vitdeploy.compilation.engine import compile_engine

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
        **{"engines": [engine], **more},
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
    given = {name: array + 1 for name, array in outputs.items()}
    golden = Golden(inputs, outputs, {"onnxruntime-cpu-fp32": GoldenAnswers(given, 1e-4, 2)})
    manifest = write(tmp_path, small_export, engine, golden=golden)
    found = manifest.golden.engines["onnxruntime-cpu-fp32"]
    for file, arrays in (
        (manifest.golden.inputs, inputs),
        (manifest.golden.outputs, outputs),
        (found.outputs, given),
    ):
        with np.load(tmp_path / file, allow_pickle=False) as kept:
            assert set(kept.files) == set(arrays)
            for name, array in arrays.items():
                assert kept[name].dtype == array.dtype
                assert np.array_equal(kept[name], array)
    assert (found.outputs, found.tolerance, found.least_same) == ("golden/onnxruntime-cpu-fp32.npz", 1e-4, 2)
    assert manifest.golden.tolerance == {}


def test_a_second_engine_of_a_target_has_a_folder_of_its_own(tmp_path, small_export, engine):
    spec, home = engine
    other = dataclasses.replace(spec, precision="int8")
    manifest = write(tmp_path, small_export, engine, engines=[(other, home), (spec, home)])
    assert [each.graph for each in manifest.engines] == [
        "engines/onnxruntime-cpu/graph.onnx",
        "engines/onnxruntime-cpu-fp32/graph.onnx",
    ]


def test_gates_and_the_recommendation_travel(tmp_path, small_export, engine):
    manifest = write(
        tmp_path, small_export, engine, gates={"onnxruntime-cpu-fp32": "pass"}, recommended="onnxruntime-cpu-fp32"
    )
    again = read_bundle(tmp_path)
    assert again == manifest and again.gate(again.engines[0]) == "pass"
    assert again.recommended == "onnxruntime-cpu-fp32"
    assert again.gate(dataclasses.replace(again.engines[0], precision="int8")) == "none"  # it was never judged


def test_weights_beside_a_graph_go_with_it_and_are_verified(tmp_path, external_graph, engine):
    from vitdeploy.compilation.engine import compile_engine
    from vitdeploy.runtime import load

    for name in ("engine", "bundle"):
        (tmp_path / name).mkdir()
    spec = compile_engine(
        external_graph, tmp_path / "engine", target="onnxruntime-cpu", precision="fp32", batch=1, placed=0
    )
    manifest = write_bundle(
        tmp_path / "bundle",
        name="large",
        task="classification",
        graphs={"model": (external_graph, GRAPH)},
        preprocess=PREPROCESS,
        engines=[(spec, tmp_path / "engine")],
    )
    home = "engines/onnxruntime-cpu"
    assert manifest.engines[0].files == (f"{home}/graph.onnx", f"{home}/model.onnx.data")
    assert {"model.onnx", "model.onnx.data", *manifest.engines[0].files} == {entry.path for entry in manifest.files}
    moved = (tmp_path / "bundle").rename(tmp_path / "moved")
    pixels = [np.random.default_rng(0).integers(0, 256, (32, 32, 1), np.uint8)]
    with load(moved) as ours, make_runner(engine[1], engine[0]) as theirs:
        expected = theirs.infer({"image": pixels[0][None]})["logits"]
        np.testing.assert_array_equal(ours.outputs(pixels)["logits"], expected)
    data = moved / home / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(DigestError, match=r"model\.onnx\.data"):
        load(moved)


@pytest.fixture(scope="module")
def sequence_bundle(tmp_path_factory, sequence_export):
    """A bundle of two graphs with an engine for every target that is installed."""
    from vitdeploy.graph.io.files import get_metadata, graph_spec, load_graph
    from vitdeploy.stages.compile import compile_graphs
    from vitdeploy.stages.place import PlaceConfig, place_graphs
    from vitdeploy.stages.step import graphs_in

    engines = []
    for target in CPU_TARGETS:
        pytest.importorskip(CPU_TARGETS[target].package)
        placed, folder = tmp_path_factory.mktemp("placed"), tmp_path_factory.mktemp("engine")
        place_graphs(PlaceConfig(target, "fp32"), sequence_export, None, placed)
        engines.append((compile_graphs(placed, target, 1, folder), folder))
    graphs = graphs_in(sequence_export)
    assert get_metadata(load_graph(graphs["encoder"]), "encoder").task == "sequence"
    out = tmp_path_factory.mktemp("bundle")
    write_bundle(
        out,
        name="reverse",
        task="sequence",
        graphs={name: (file, graph_spec(load_graph(file), "")) for name, file in graphs.items()},
        preprocess=None,
        engines=engines,
    )
    return out


def test_a_model_of_two_graphs_has_both_with_the_parts_of_its_engines(sequence_bundle):
    manifest = read_bundle(sequence_bundle)
    assert {name: graph.file for name, graph in manifest.graphs.items()} == {
        "encoder": "encoder.onnx",
        "decoder_step": "decoder_step.onnx",
    }
    assert manifest.graphs["decoder_step"].inputs[0].name == "token"
    for engine in manifest.engines:
        home = f"engines/{engine.target}"
        assert [part.graph for part in engine.parts] == [f"{home}/{part}/graph.onnx" for part in manifest.graphs]
        named = [file for part in engine.parts for file in (part.graph, *part.files)]
        assert all((sequence_bundle / file).is_file() for file in (*engine.files, *named))
    verify_files(sequence_bundle, manifest)


def test_a_model_of_two_graphs_is_used_from_its_bundle(sequence_bundle):
    from vitdeploy.runtime import load, load_sequence

    digits = {str(digit): 3 + digit for digit in range(10)}
    sources = [[digits[d] for d in text] + [2] for text in ("314", "0", "2718281828")]
    for target in CPU_TARGETS:
        with load_sequence(sequence_bundle, target) as predictor:
            assert predictor.target == f"{target}-fp32"
            answers = predictor.predict(sources)
        assert [list(answer.tokens) for answer in answers] == [source[-2::-1] for source in sources]
        assert all(-1 < answer.score <= 0 for answer in answers)
    with pytest.raises(TargetError, match="does not take images") as caught:
        load(sequence_bundle)
    assert "load_sequence" in caught.value.fix


def test_a_bundle_of_sequences_that_is_replaced_while_it_is_loaded_is_read_again(
    sequence_bundle, tmp_path, monkeypatch
):
    from vitdeploy.runtime import load_sequence

    bundle = shutil.copytree(sequence_bundle, tmp_path / "bundle")
    made = replace_while_loading(bundle, monkeypatch, [1])
    load_sequence(bundle).close()
    assert len(made) == 2


def test_a_bundle_for_images_has_no_sequences(tmp_path, small_export, engine):
    from vitdeploy.runtime import load_sequence

    write(tmp_path, small_export, engine)
    with pytest.raises(TargetError, match="does not take tokens") as caught:
        load_sequence(tmp_path)
    assert caught.value.found == "the task classification"


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
    (tmp_path / "here").mkdir()
    manifest = write(tmp_path / "here", small_export, engine, labels=LABELS)
    there = tmp_path / "with a space" / "ü"
    shutil.copytree(tmp_path / "here", there)
    assert read_bundle(there) == manifest
    assert verify_files(there, manifest) is None


def test_the_manifest_is_plain_json(tmp_path, small_export, engine):
    write(tmp_path, small_export, engine)
    assert json.loads((tmp_path / MANIFEST_FILE).read_text(encoding="utf-8"))["format"] == 1
