"""OpenVINO's targets beside the CPU. AUTO runs here, on the CPU that it finds; of GPU and NPU only the refusals do."""

import dataclasses

import numpy as np
import pytest

import vitdeploy as vd
from tests.graph.builder import Builder, values
from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import ENGINE_OPTIONS
from vitdeploy.compilation import openvino as compilation
from vitdeploy.compilation.backend import CompileRequest
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.errors import CapabilityError, EngineError
from vitdeploy.runtime import load
from vitdeploy.runtime import openvino_device as device
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner

openvino = pytest.importorskip("openvino", reason="pip install 'vitdeploy[openvino]'")
HERE = openvino.Core().available_devices
CPU_ALONE = pytest.mark.skipif(HERE != ["CPU"], reason=f"AUTO has more than a CPU to choose from here: {HERE}")
ABSENT = [name for name in (device.GPU, device.NPU) if device.DEVICES[name] not in map(device.kind_of, HERE)]


def images(batch):
    return np.random.default_rng(batch).integers(0, 256, (batch, 32, 32, 1), np.uint8)


@pytest.fixture(scope="module")
def engine(small_export, tmp_path_factory):
    """(EngineSpec, folder) of the small model in float32."""
    out = tmp_path_factory.mktemp("auto")
    graph = small_export / "model.onnx"
    return compile_engine(graph, out, target=device.AUTO, precision="fp32", batch=1, placed=0), out


@CPU_ALONE
@pytest.mark.parametrize("batch", [1, 3])
def test_auto_says_what_ran_and_answers_as_the_graph(engine, small_export, batch):
    spec, folder = engine
    assert (spec.provider, spec.device[device.RAN_ON]) == ("CPU", "CPU")
    assert set(spec.kernels) == {"fp32"}
    assert set(spec.options) <= ENGINE_OPTIONS
    feeds = {"image": images(batch)}
    graph = small_export / "model.onnx"
    with make_runner(folder, spec, batch=batch) as ours, OnnxRuntimeRunner(graph, name="graph") as theirs:
        found, expected = ours.infer(feeds)["logits"], theirs.infer(feeds)["logits"]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@CPU_ALONE
def test_int8_goes_from_images_to_a_bundle(small_export, digits, tmp_path):
    graph = vd.quantize(
        vd.Graph(small_export), digits / "calibration", device.AUTO, tmp_path / "int8", num_samples=8, progress=False
    )
    made = vd.compile(graph, device.AUTO, tmp_path / "engine", progress=False)
    [spec] = made.manifest.engines
    assert spec.kernels["int8"] > 4 and spec.precision == "int8"
    image = next((digits / "evaluation" / "7").glob("*.png"))
    with load(tmp_path / "engine") as ours, OnnxRuntimeRunner(small_export / "model.onnx", name="float") as whole:
        pixels, _ = ours.prepare(image)
        found, expected = ours.run(pixels)["logits"], whole.infer({"image": pixels})["logits"]
    assert np.abs(found - expected).max() < 0.2 * np.abs(expected).max()


def test_what_the_cpu_answers_is_no_float16(small_export, tmp_path):
    """Its plugin computes float16 in float32 here: what AUTO ran is told, not what was asked."""
    if HERE != ["CPU"] or "FP16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this machine has float16")
    with pytest.raises(CapabilityError, match="openvino-auto did not run the graph in fp16"):
        compile_engine(small_export / "model.onnx", tmp_path, target=device.AUTO, precision="fp16", batch=1, placed=0)


@CPU_ALONE
def test_another_device_than_the_engine_was_made_on_is_refused(engine):
    spec, folder = engine
    elsewhere = dataclasses.replace(spec, device={**spec.device, device.RAN_ON: "GPU"})
    with pytest.raises(EngineError, match="was built for GPU") as refused:
        make_runner(folder, elsewhere).load()
    assert refused.value.found == "OpenVINO would run it on CPU here"


def test_a_fallback_to_the_cpu_is_refused():
    for target, ran, available in (
        (device.AUTO, "CPU", ["CPU", "GPU.0"]),
        (device.AUTO, "NPU+CPU", ["CPU", "NPU"]),
        (device.GPU, "CPU", ["CPU", "GPU"]),
    ):
        with pytest.raises(CapabilityError, match=f"{target} fell back"):
            device._require_no_fallback(target, ran, available)
    for target, ran, available in (
        (device.AUTO, "CPU", ["CPU"]),
        (device.AUTO, "GPU", ["CPU", "GPU.0", "GPU.1"]),
        (device.NPU, "NPU", ["CPU", "NPU"]),
    ):
        device._require_no_fallback(target, ran, available)
    assert [device.kind_of(each) for each in ("GPU.1", "(CPU)", "NPU")] == ["GPU", "CPU", "NPU"]


@CPU_ALONE
def test_a_graph_that_the_cpu_runs_wrongly_without_a_property_is_refused(tmp_path):
    """As many queries as heads: AUTO does not hand SNIPPETS_MODE on."""
    b = Builder()
    x = b.input("x", ["batch", 2, 16])

    def heads(seed):
        product = b.add("MatMul", x, values(16, 16, seed=seed))
        return b.add("Transpose", b.add("Reshape", product, np.array([-1, 2, 2, 8])), perm=[0, 2, 1, 3])

    scores = b.add("MatMul", heads(1), b.add("Transpose", heads(2), perm=[0, 1, 3, 2]))
    proto = b.model(b.add("MatMul", b.add("Softmax", scores, axis=-1), heads(3)), rank=4)
    graph = tmp_path / "graph.onnx"
    graph.write_bytes(proto.SerializeToString())
    request = CompileRequest(graph, device.AUTO, "fp32", 1, None, lambda *progress: None)
    with pytest.raises(CapabilityError, match="gives wrong answers for this graph on a CPU") as refused:
        compilation.compile_on_device(request)
    assert "SNIPPETS_MODE" in refused.value.found


def test_free_sizes_are_refused(tmp_path):
    b = Builder()
    proto = b.model(b.add("Relu", b.input("x", ["batch", "length"])), rank=2)
    graph = tmp_path / "graph.onnx"
    graph.write_bytes(proto.SerializeToString())
    with pytest.raises(EngineError, match="openvino-auto needs fixed shapes") as refused:
        compilation.compile_on_device(CompileRequest(graph, device.AUTO, "fp32", 1, None, lambda *progress: None))
    assert refused.value.found == "dynamic axes in x"


@pytest.mark.parametrize("target", ABSENT)
def test_a_device_that_is_not_here_is_told(target, small_export, tmp_path):
    with pytest.raises(CapabilityError, match=f"no device for {target} here"):
        require_runtime(target)
    [runtime, found] = compilation.findings(target)
    assert (runtime.ok, found.ok, bool(found.fix)) == (True, False, True)
    assert not compilation.probe_device(target).works
    with pytest.raises(CapabilityError, match=f"no device for {target} here"):
        compile_engine(small_export / "model.onnx", tmp_path, target=target, precision="fp16", batch=1, placed=0)


def test_a_machine_without_such_a_device_has_nothing_to_install(tmp_path):
    assert not compilation._absent("GPU", tmp_path)  # nobody lists what there is
    for index, (vendor, code) in enumerate((("0x8086", "0x030000"), ("0x10de", "0x120000"))):
        pci = tmp_path / "sys/bus/pci/devices" / str(index)
        pci.mkdir(parents=True)
        (pci / "vendor").write_text(f"{vendor}\n")
        (pci / "class").write_text(f"{code}\n")
    assert not compilation._absent("GPU", tmp_path)
    assert compilation._absent("NPU", tmp_path)


def test_properties_are_those_of_the_plugins():
    """What no device is needed for: the names that AUTO's and the CPU's plugin know."""
    core = openvino.Core()
    known = set(core.get_property("AUTO", "SUPPORTED_PROPERTIES"))
    assert {*device.OPTIONS[device.AUTO], "PERFORMANCE_HINT"} <= known
    assert {*device.OPTIONS[device.GPU]} <= set(core.get_property("CPU", "SUPPORTED_PROPERTIES"))
    if device.NPU in ABSENT:
        assert {"CACHE_DIR", "PERFORMANCE_HINT"} <= set(core.get_property("NPU", "SUPPORTED_PROPERTIES"))


def test_a_plugin_that_does_not_tell_its_layers_is_not_judged_by_them(engine):
    class Silent:
        def get_runtime_model(self):
            raise RuntimeError("not implemented")

    assert compilation._kernels(Silent()) == {}
    spec = dataclasses.replace(engine[0], kernels={})
    compilation.check_ran_on_device(spec, "int8", 5)
    with pytest.raises(CapabilityError, match="did not run the graph in int8"):
        compilation.check_ran_on_device(dataclasses.replace(spec, kernels={"fp16": 9, "int8": 4}), "int8", 5)


def test_models_of_several_graphs_are_refused(sequence_export):
    with pytest.raises(CapabilityError, match="openvino-auto does not support models with several graphs"):
        vd.compile(vd.Graph(sequence_export), device.AUTO, progress=False)
    assert {TARGETS[name].typed for name in device.DEVICES} == {True}


class Odd(openvino.Op):
    """An operation that no plugin has."""

    def __init__(self, inputs=None):
        super().__init__(self)
        if inputs is not None:
            self.set_arguments(inputs)
            self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self):
        self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, inputs):
        return Odd(inputs)

    def has_evaluate(self):
        return False


def test_the_layers_that_a_plugin_does_not_take_are_named():
    """Asked of the CPU's plugin, as there is no other here."""
    core, ops = openvino.Core(), openvino.opset13
    image = ops.parameter([1, 3], np.float32, name="x")
    odd = Odd([ops.relu(image)])
    odd.set_friendly_name("blocks.3.odd")
    model = openvino.Model([ops.relu(odd)], [image], "model")
    assert device.not_taken(core, model, "CPU") == ["blocks.3.odd (Odd)"]
    with pytest.raises(RuntimeError) as refused:
        core.compile_model(model, "CPU")
    assert device.reason_of(refused.value) == "Unsupported operation of type: Odd name: blocks.3.odd"
    assert device.not_taken(core, model, "NPU") == device.not_taken(core, model, "AUTO") == []  # nobody to ask
    assert device.not_taken(core, openvino.Model([ops.relu(image)], [image], "model"), "CPU") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "Exception from src/core.cpp:107:\nL0 pfnCreate2 result: code 0x7ffffffe. Unsupported precision : 'u1'\n"
            "Failed to create executable\n",
            "L0 pfnCreate2 result: code 0x7ffffffe. Unsupported precision : 'u1'",
        ),
        (
            "Converting input model\nCannot create MaxPool layer a/MaxPool id:9 from unsupported opset: opset14\n\n"
            "Failed to parse model info! Incorrect format!",
            "Cannot create MaxPool layer a/MaxPool id:9 from unsupported opset: opset14",
        ),
        ("one\ntwo\n", "two"),
    ],
)
def test_the_line_that_says_why_is_taken_from_a_drivers_error(text, found):
    """As users of NPUs report them (openvino#27626, openvino_notebooks#2167)."""
    assert device.reason_of(RuntimeError(text)) == found
