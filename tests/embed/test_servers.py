"""Model repositories: their form, where their settings come from, and the client's golden answers."""

import dataclasses
import importlib.util
import json
import shutil

import numpy as np
import pytest
import yaml

from tests.command_line import command_line
from tests.golden_bundle import golden_of
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import write_bundle
from vitdeploy.embed.servers import (
    MANIFEST,
    TRITON,
    find_serving,
    of_one_graph,
    server_name,
    write_kserve,
    write_ovms,
    write_triton,
)
from vitdeploy.embed.source import find_embedded, refuse_fit
from vitdeploy.errors import CapabilityError, ManifestError, TargetError
from vitdeploy.runtime.engine import make_runner

ONNXRUNTIME = "onnxruntime-cpu"


def bench(single=100.0, offline=150.0, **changed):
    found = {
        "artifact": f"{ONNXRUNTIME}-fp32",
        "latency_ms": {"p50": 9.5},
        "peak_memory_bytes": 100_000_000,
        "machine": {"affinity": [0, 1, 2]},
        "scenarios": {"single": {"batch": 1, "throughput": single}, "offline": {"batch": 8, "throughput": offline}},
    }
    return {"bench": {"results": [{"artifact": "original"}, {**found, **changed}]}}


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1), np.uint8)


@pytest.fixture(scope="module")
def make(small_bundle, pixels, tmp_path_factory):
    """The small model's bundle with golden answers and a report; engines changed by `target` are renamed only."""
    manifest = read_bundle(small_bundle)
    (engine,) = manifest.engines
    with make_runner(small_bundle, engine) as runner:
        (tensor,) = runner.inputs
        logits = np.concatenate([runner.infer({tensor.name: each[None]})["logits"] for each in pixels])

    def build(report=None, name="My Model!", home=small_bundle, **changed):
        out = tmp_path_factory.mktemp("bundle")
        spec = dataclasses.replace(engine, graph="graph.onnx", files=("graph.onnx",), **changed)
        if spec.target == "openvino-cpu":
            home = tmp_path_factory.mktemp("ir")
            for file in ("graph.onnx", "model.xml", "model.bin"):
                (home / file).write_bytes(file.encode())
            spec = dataclasses.replace(spec, files=("model.xml", "model.bin"))
        else:
            home = small_bundle / "engines" / ONNXRUNTIME
        write_bundle(
            out,
            name=name,
            task=manifest.task,
            graphs={"model": (small_bundle / "model.onnx", manifest.graphs["model"])},
            preprocess=manifest.preprocess,
            engines=[(spec, home)],
            golden=golden_of({tensor.name: pixels}, {"logits": logits}, spec.artifact, 1e-4),
            documents={}
            if report is None
            else {"report.json": report if isinstance(report, str) else json.dumps(report)},
        )
        return out

    return build


def settings(bundle):
    return find_serving(find_embedded(bundle, (ONNXRUNTIME,), "a server", of_one_graph))


def test_triton_gets_the_engine_with_batches_as_they_were_measured(make, tmp_path):
    bundle = make(bench())
    commands = write_triton(bundle, tmp_path)
    home = tmp_path / "models" / "my-model"
    assert (home / "1" / "model.onnx").read_bytes() == (bundle / "engines" / ONNXRUNTIME / "graph.onnx").read_bytes()
    assert (home / "config.pbtxt").read_text(encoding="utf-8").splitlines() == [
        "# report.json: onnxruntime-cpu-fp32 processed 100.0 images/s one by one and 150.0 in batches of 8.",
        "# It used 3 cores and 100 MB.",
        "# A request waits for others at most 9500 microseconds, the time of one image (p50).",
        'name: "my-model"',
        'backend: "onnxruntime"',
        "max_batch_size: 8",
        'input [ { name: "image", data_type: TYPE_UINT8, dims: [32, 32, 1] } ]',
        'output [ { name: "logits", data_type: TYPE_FP32, dims: [10] } ]',
        "# One instance uses all cores, as measured.",
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        "dynamic_batching { max_queue_delay_microseconds: 9500 }",
    ]
    assert "python client.py --url localhost:8000" in commands


def test_what_triton_gets_is_a_configuration_of_tritons(make, tmp_path):
    pytest.importorskip("grpc", reason="pip install tritonclient[grpc]")
    model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    for report, target in ((bench(), ONNXRUNTIME), (None, "openvino-cpu")):
        out = tmp_path / target
        out.mkdir()
        write_triton(make(report, target=target), out)
        text = (out / "models/my-model/config.pbtxt").read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert (config.backend, list(config.input[0].dims)) == (TRITON.backends[target], [32, 32, 1])


@pytest.mark.parametrize(
    ("report", "changed", "expected"),
    [
        (bench(), {}, (8, 9500)),
        (bench(offline=90.0), {}, (1, 0)),
        (None, {}, (1, 0)),
        (bench(scenarios={"single": {"batch": 1, "throughput": 1.0}}), {}, (1, 0)),
        (bench(artifact="another"), {}, (1, 0)),
        (bench(), {"dynamic_batch": False}, (0, 0)),
    ],
    ids=["gains", "loses", "no report", "no offline", "another engine", "fixed"],
)
def test_settings_come_from_the_bench(make, report, changed, expected):
    found = settings(make(report, **changed))
    assert (found.max_batch, found.delay_us) == expected
    assert found.measured
    assert found.batching


@pytest.mark.parametrize("report", ["[", "[]", '{"bench": {"results": [1]}}'])
def test_a_report_of_another_kind_is_refused(make, report):
    with pytest.raises(ManifestError, match=r"report\.json is not a vitdeploy report"):
        settings(make(report))


def test_a_fixed_batch_is_among_the_dimensions(make, tmp_path):
    write_triton(make(bench(), dynamic_batch=False), tmp_path)
    text = (tmp_path / "models/my-model/config.pbtxt").read_text(encoding="utf-8")
    assert "max_batch_size: 0" in text
    assert "dims: [1, 32, 32, 1]" in text
    assert "dynamic_batching" not in text


def test_the_model_server_gets_the_precision_that_was_verified(make, tmp_path):
    write_ovms(make(target="openvino-cpu"), tmp_path)
    (model,) = json.loads((tmp_path / "models/config.json").read_text(encoding="utf-8"))["model_config_list"]
    assert model["config"]["name"] == model["config"]["base_path"] == "my-model"
    assert model["config"]["plugin_config"] == {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    assert sorted(path.name for path in (tmp_path / "models/my-model/1").iterdir()) == ["model.bin", "model.xml"]
    with pytest.raises(TargetError, match="no engine that OpenVINO Model Server can run"):
        write_ovms(make(), tmp_path)


@pytest.mark.parametrize("target", [ONNXRUNTIME, "openvino-cpu"])
def test_kserve_is_told_of_the_server_and_its_repository(make, tmp_path, target):
    report = bench(artifact=f"{target}-fp32")
    write_kserve(make(report, target=target), tmp_path)
    documents = list(yaml.safe_load_all((tmp_path / MANIFEST).read_text(encoding="utf-8")))
    service = documents[-1]
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["resources"] == {"requests": {"cpu": "3", "memory": "191Mi"}, "limits": {"cpu": "3"}}
    assert model["protocolVersion"] == "v2"
    if target == ONNXRUNTIME:
        assert (len(documents), model["runtime"]) == (1, "kserve-tritonserver")
        assert (tmp_path / "models/my-model/config.pbtxt").is_file()
    else:
        assert (documents[0]["kind"], documents[0]["metadata"]["name"]) == ("ServingRuntime", model["runtime"])
        assert (tmp_path / "models/config.json").is_file()


@pytest.mark.parametrize(
    ("name", "expected"), [("Ü", "model"), ("1a", "model-1a"), ('a"""\nx', "a-x"), ("a" * 90, "a" * 50)]
)
def test_names_are_such_as_servers_take(make, name, expected):
    assert server_name(find_embedded(make(name=name), (ONNXRUNTIME,), "a server", of_one_graph)) == expected


@pytest.mark.parametrize(
    ("fit", "told"),
    [
        ("topdown", "the page can crop boxes from images only for key points"),
        ("longest-pad", "the page cannot resize images by their longer side and pad them yet"),
        ("contain", "the page cannot pad images yet"),
    ],
)
def test_images_are_the_clients_part_but_not_of_a_program_that_prepares_them(make, fit, told):
    folder = make()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["preprocess"].update(fit=fit, resize=manifest["preprocess"]["crop"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = find_embedded(folder, (ONNXRUNTIME,), "a server", of_one_graph)
    with pytest.raises(CapabilityError, match=told):
        refuse_fit(found, "the page")


def load_client(folder, monkeypatch):
    """The client as a module. Its library is only looked up: no server is there to talk to."""
    import sys
    import types

    library, utils, http = (types.ModuleType(f"tritonclient{name}") for name in ("", ".utils", ".http"))
    utils.np_to_triton_dtype, library.http = str, http
    for module in (library, utils, http):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("client", folder / "client.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_client_holds_the_answers_against_the_originals(make, pixels, tmp_path, monkeypatch):
    bundle = make(bench())
    write_triton(bundle, tmp_path)
    client = load_client(tmp_path, monkeypatch)
    assert (client.TOLERANCE, client.BATCH) == (1e-4, 8)
    with np.load(tmp_path / "golden/inputs.npz") as arrays:
        assert np.array_equal(arrays["image"], pixels)
    expected = np.load(tmp_path / "golden/outputs.npz")["logits"]
    assert client.difference(expected, expected) == 0
    assert client.difference(expected + np.abs(expected).max(), expected) == pytest.approx(1)
    assert client.difference(expected[:1], expected) == float("inf")
    assert client.difference(np.array([1]), np.array([2])) == float("inf")


def test_the_command_writes_them(make, tmp_path):
    with command_line(tmp_path, tmp_path / "store") as run:
        done = run("embed", make(bench()), "--as", "triton", "-o", "out")
        assert (done.returncode, "docker run" in done.stdout) == (0, True), done.stderr
        readme = (tmp_path / "out/README.md").read_text(encoding="utf-8")
        assert "no such server was\nrun" in readme.replace("**", "")
        shutil.rmtree(tmp_path / "out")
        done = run("embed", make(bench()), "--as", "ovms", "-o", "out")
        assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
