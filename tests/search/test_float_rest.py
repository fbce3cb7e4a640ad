"""Float operators of INT8 engines in bf16: chosen by costs and by answers, and run elsewhere."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from vitdeploy.compilation import openvino as compilation
from vitdeploy.data.folder import split
from vitdeploy.devices.agent.documents import PlacedArtifact
from vitdeploy.devices.results import check_engine
from vitdeploy.errors import DeviceResultError, GraphError
from vitdeploy.pipeline.plan import LEAST_PARAMETERS, candidates
from vitdeploy.runtime import openvino as runtime
from vitdeploy.runtime.engine import make_runner
from vitdeploy.search.costs import costs_for
from vitdeploy.search.frame import mean_interval
from vitdeploy.search.precision import FloatRestChoice
from vitdeploy.spec import decode, encode
from vitdeploy.stages import search as stages
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.compile import CompileOptions, compile_graphs
from vitdeploy.stages.place import FLOAT_REST_SEARCH, AskedRest, PlaceConfig, place_graph, rest_of
from vitdeploy.stages.search import CalibratedGraph, find_float_rest, has_half_rest
from vitdeploy.stages.step import Candidate

openvino = pytest.importorskip("openvino")
TARGET = "openvino-cpu"


def choice(**changes):
    found = {"ratio": 0.85, "distances": (0.004, 0.0041), "further": (-0.0002, 0.0004)}
    return FloatRestChoice(TARGET, 1, "the cost table", **{**found, **changes})


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ({}, "bf16"),
        ({"ratio": 1.0}, "fp32"),  # no faster
        ({"further": (0.0001, 0.0004)}, "bf16"),  # surely further, and little
        ({"further": (0.0009, 0.0012)}, "fp32"),  # surely further by more than a fifth
    ],
)
def test_bf16_is_taken_where_it_is_faster_and_not_surely_worse(changes, best):
    found = choice(**changes)
    assert found.best == best
    assert decode(FloatRestChoice, encode(found)) == found


def test_the_interval_of_paired_differences_is_students():
    # t(0.975, 3) = 3.1824, of the numbers 1, 2, 3, 4: mean 2.5, standard error 0.6455
    assert np.allclose(
        mean_interval(np.array([1.0, 2, 3, 4])), (2.5, 2.5 - 3.18245 * 0.645497, 2.5 + 3.18245 * 0.645497)
    )
    assert mean_interval(np.array([0.5, 0.5])) == (0.5, 0.5, 0.5)
    assert mean_interval(np.array([0.25])) == (0.25, 0.25, 0.25)


@pytest.fixture(scope="module")
def samples(digits):
    return split(digits, "none", calibration=8, evaluation=1, seed=0).calibration


@pytest.fixture(scope="module")
def calibrated(small_export, samples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    calibrate(small_export / "model.onnx", samples, folder)
    return folder / "statistics.npz"


@pytest.fixture(scope="module")
def placed(small_export, calibrated, tmp_path_factory):
    folder = tmp_path_factory.mktemp("placed")
    place_graph(PlaceConfig(TARGET, "int8"), small_export / "model.onnx", calibrated, folder)
    return folder


@pytest.fixture(scope="module")
def in_bf16(placed, tmp_path_factory):
    """An engine that is to have its float operators in bf16, and its folder."""
    out = tmp_path_factory.mktemp("engine")
    return compile_graphs(placed, TARGET, 1, out, options=CompileOptions(float_rest="bf16")), out


def needs_bf16():
    if not runtime.has_bf16():
        pytest.skip("this CPU has no BF16 for OpenVINO")


def test_an_engine_says_what_its_float_operators_are_in_and_its_answers_are_near(in_bf16, placed, tmp_path):
    needs_bf16()
    engine, folder = in_bf16
    assert (engine.precision, engine.float_rest, engine.options["INFERENCE_PRECISION_HINT"]) == ("int8", "bf16", "bf16")
    assert engine.form_told == "float operators in bf16"
    written = json.loads((folder / "engine.json").read_text())
    assert written["float_rest"] == "bf16"
    plain = compile_graphs(placed, TARGET, 1, tmp_path)
    assert plain.float_rest is None and "float_rest" not in json.loads((tmp_path / "engine.json").read_text())
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 1)).astype(np.uint8)
    [name] = [each.name for each in engine.inputs]
    answers = []
    for each, home in ((engine, folder), (plain, tmp_path)):
        with make_runner(home, each) as runner:
            ran = runner.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
            assert ran == each.options["INFERENCE_PRECISION_HINT"]
            answers.append(next(iter(runner.infer({name: pixels}).values())))
    assert 0 < np.abs(answers[0] - answers[1]).max() < 0.1 * np.abs(answers[1]).max()


def test_a_cpu_without_bf16_computes_them_in_fp32(in_bf16, monkeypatch):
    """Such a CPU is not at hand: what OpenVINO says of this one is changed."""
    engine, folder = in_bf16
    monkeypatch.setattr(runtime, "has_bf16", lambda: False)
    with make_runner(folder, dataclasses.replace(engine, float_rest="bf16")) as runner:
        assert runner.compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
    assert runtime.hint_of("int8", "bf16") == "f32"


def test_only_int8_has_a_rest_in_bf16():
    needs_bf16()
    found = [runtime.hint_of(each, "bf16") for each in ("int8", "fp32", "mixed", "bf16")]
    assert found == ["bf16", "f32", "f32", "bf16"]
    assert runtime.hint_of("int8") == "f32"


def test_it_is_tried_on_cpus_with_amx_alone(monkeypatch):
    for isa, tried in (("avx512f avx512_bf16 amx_bf16", True), ("avx512f avx512_bf16", False)):
        monkeypatch.setattr(compilation, "describe_host", lambda isa=isa: {"isa": isa})
        assert has_half_rest(TARGET, "int8", "classification") is tried
        assert not has_half_rest(TARGET, "fp32", "classification")
        assert not has_half_rest(TARGET, "int8", "sequence")
        assert not has_half_rest("onnxruntime-cpu", "int8", "classification")


@pytest.mark.parametrize(("precision", "more"), [("int8", ["bf16"]), ("mixed", ["int8", "bf16"]), ("fp16", [])])
def test_there_the_float_model_is_tried_in_bf16_too(precision, more, monkeypatch):
    def precisions(parameters):
        recipe = SimpleNamespace(precision=precision, targets=(TARGET, "onnxruntime-cpu"))
        model = SimpleNamespace(parameters=parameters, task="classification")
        found = candidates(SimpleNamespace(recipe=recipe, reference_model=model))
        assert [each.shipped for each in found] == [each.precision == precision for each in found]
        return [each.precision for each in found if each.target == TARGET]

    monkeypatch.setattr(compilation, "describe_host", lambda: {"isa": "avx512f avx512_bf16 amx_bf16"})
    assert precisions(LEAST_PARAMETERS) == [precision, *more, "fp32"]
    assert "bf16" not in precisions(LEAST_PARAMETERS - 1)
    monkeypatch.setattr(compilation, "describe_host", lambda: {"isa": "avx512f avx512_bf16"})
    assert "bf16" not in precisions(LEAST_PARAMETERS)


@pytest.mark.parametrize("faster", [True, False])
def test_both_are_run_where_bf16_is_faster(faster, small_export, calibrated, samples, monkeypatch, tmp_path):
    """By the table for CPUs with AMX; by that of others bf16 saves nothing, and no engine is made."""
    if faster:
        needs_bf16()
    monkeypatch.setattr(stages, "LEAST_MACS", 0)
    table = costs_for(TARGET, {"isa": "avx512_vnni amx_int8 amx_bf16" if faster else "avx512_vnni"})
    told = []
    config, given = PlaceConfig(TARGET, "int8"), CalibratedGraph(small_export / "model.onnx", calibrated, samples)
    found = find_float_rest(config, 1, given, table, tmp_path, lambda *each: told.append(each[0]))
    assert (found.ratio < 1, "float operators in bf16 for openvino-cpu" in told) == (faster, faster)
    assert FLOAT_REST_SEARCH.read(tmp_path) == found
    if faster:
        assert found.further[0] <= found.distances[1] - found.distances[0] <= found.further[1]
        assert found.distances[0] != found.distances[1] and min(found.distances) > 0
    else:
        assert found.best == "fp32"


def test_a_small_model_has_them_in_fp32(small_export, calibrated, samples, tmp_path):
    given = CalibratedGraph(small_export / "model.onnx", calibrated, samples)
    table = costs_for(TARGET, {"isa": "avx512_vnni amx_int8 amx_bf16"})
    found = find_float_rest(PlaceConfig(TARGET, "int8"), 1, given, table, tmp_path)
    assert (found.best, found.ratio, found.distances) == ("fp32", 1.0, (0.0, 0.0))


def test_of_unknown_sizes_they_are_in_fp32(small_export, calibrated, samples, monkeypatch, tmp_path):
    def unknown(model, batch):
        raise GraphError("the input size of a layer is unknown")

    monkeypatch.setattr(stages, "LEAST_MACS", 0)
    monkeypatch.setattr(stages.costs, "workload_of", unknown)
    given = CalibratedGraph(small_export / "model.onnx", calibrated, samples)
    table = costs_for(TARGET, {"isa": "avx512_vnni amx_int8 amx_bf16"})
    assert find_float_rest(PlaceConfig(TARGET, "int8"), 1, given, table, tmp_path).best == "fp32"


def test_what_a_step_asks_of_its_plan():
    candidate = Candidate(TARGET, "int8", True)
    chosen, given, plain = (rest_of(candidate, each) for each in ("chosen", "bf16", "fp32"))
    assert (chosen.inputs, chosen.config) == (("float_rest openvino-cpu-int8",), {})
    assert (given.inputs, given.config, given.of({})) == ((), {"float_rest": "bf16"}, "bf16")
    assert plain == AskedRest() and (plain.inputs, plain.config, plain.of({})) == ((), {}, "fp32")


def test_a_device_may_lack_bf16_and_may_not_add_it(in_bf16):
    engine, _ = in_bf16
    engine = dataclasses.replace(engine, float_rest="bf16")
    asked = PlacedArtifact("x", TARGET, "int8", 1, (), weight_bits=engine.weight_bits)
    with pytest.raises(DeviceResultError, match="float operators in a different precision"):
        check_engine("board", engine, asked)
