"""The TensorRT back end as far as a machine without TensorRT goes: what it says there, what it reads of an engine."""

import dataclasses
import json

import pytest

from tests.tensorrt_api.api import each_version, run_with
from vitdeploy.compilation.backend import BuildOptions, CompileRequest, default_batches
from vitdeploy.compilation.tensorrt import (
    _BuildRequest,
    _BuildResult,
    check_typed,
    compile_graph,
    count_layers,
)
from vitdeploy.errors import CapabilityError, EngineError, MissingPackageError, TargetError
from vitdeploy.runtime import cuda
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.tensorrt import Messages, TensorRtRunner, version_numbers
from vitdeploy.spec import EngineSpec, TensorSpec, decode, encode

# Layers as TensorRT's inspector writes them with all details: the forms of 10.x seen in NVIDIA/TensorRT's issues 4397,
# 4020 and 3665.
LAYERS = [
    {
        "Name": "Reformatting CopyNode for Input Tensor 0 to /patch_embed/Conv",
        "LayerType": "Reformat",
        "Inputs": [{"Name": "image", "Format/Datatype": "Row major Int8 format"}],
        "TacticValue": "0x00000000000003e8",
        "Metadata": "[ONNX Layer: /patch_embed/Conv]",
    },
    {
        "Name": "/patch_embed/Conv",
        "LayerType": "CaskConvolution",
        "Inputs": [{"Name": "x", "Format/Datatype": "Row major linear FP16 format"}],
        "TacticName": "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32",
        "Metadata": "[ONNX Layer: /patch_embed/Conv]",
    },
    {
        "Name": "/blocks/0/qkv/MatMul_myl0_7",
        "LayerType": "gemm",
        "Inputs": [{"Name": "y", "Format/Datatype": "Int8"}, {"Name": "scale", "Format/Datatype": "Float"}],
        "TacticName": "sm80_xmma_gemm_i8f16_i8i32_f32_tn_n_tilesize32x32x64",
        "Metadata": "[ONNX Layer: /blocks/0/q/MatMul]\x1e[ONNX Layer: /blocks/0/k/MatMul]",
    },
    {
        "Name": "_gemm_mha_v2_myl0_8",
        "LayerType": "kgen",
        "Inputs": [{"Name": "q", "Format/Datatype": "Half"}],
        "TacticName": "_gemm_mha_v2_0xf2543c36ff9f104b",
        "Metadata": "[ONNX Layer: /blocks/0/attn/MatMul][ONNX Layer: /blocks/0/attn/Softmax]",
    },
    {
        "Name": "/blocks/0/self_mha_attention/proj/MatMul_myl0_9",
        "LayerType": "gemm",
        "Inputs": [{"Name": "z"}],
        "TacticName": "sm80_xmma_gemm_bf16bf16_bf16f32_f32",
        "Metadata": "[ONNX Layer: /blocks/0/self_mha_attention/proj/MatMul]",
    },
    "a layer without details",
]
TEXT = json.dumps({"Layers": LAYERS, "Bindings": ["image", "logits"]})
HERE = {"tensorrt": "11.4.0.106", "compute_capability": "8.9"}
ENGINE = EngineSpec(
    *("tensorrt", "int8", "graph.onnx", ("engine.plan", "layers.json"), 2, True, "TensorRT"),
    inputs=(TensorSpec("image", "uint8", (2, 32, 32, 3)),),
    outputs=(TensorSpec("logits", "float32", (2, 10)),),
    device=HERE,
)


def linear(name):
    return f"[ONNX Layer: {name}]"


# --- what the engine says of itself -----------------------------------------------------------------------------------


def test_linears_are_counted_by_the_precision_of_the_layer_that_computes_them():
    names = ["patch_embed/Conv", "blocks/0/q/MatMul", "blocks/0/k/MatMul", "blocks/0/self_mha_attention/proj/MatMul"]
    facts = count_layers(TEXT, [linear(f"/{name}") for name in names])
    assert facts["kernels"] == {"bf16": 1, "fp16": 1, "int8": 2}


def test_a_linear_that_no_layer_names_is_unknown():
    assert count_layers(TEXT, [linear("/head/MatMul")])["kernels"] == {"unknown": 1}


def test_a_fused_attention_is_known_by_its_kernel_and_not_by_the_path_of_a_node():
    assert count_layers(TEXT, [])["attention"] == ["_gemm_mha_v2_0xf2543c36ff9f104b"]


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", '{"Layers": 1}', '{"Layers": ["a", "b"]}'])
def test_an_inspector_that_says_nothing_leaves_all_unknown(text):
    assert count_layers(text, ["a", "b"]) == {"kernels": {"unknown": 2}, "attention": [], "layers": []}


@pytest.mark.parametrize(
    ("precision", "kernels", "placed", "runs"),
    [
        ("int8", {"int8": 4, "fp16": 2}, 4, True),
        ("int8", {"int8": 3, "fp16": 3}, 4, False),
        ("int8", {"int8": 3, "unknown": 1}, 4, True),
        ("int8", {"fp16": 6}, 0, False),
        ("fp8", {"fp8": 1, "fp16": 5}, 0, True),
        ("fp8", {"fp16": 6}, 0, False),
        ("fp16", {"fp16": 5, "fp32": 1}, 0, True),
        ("fp16", {"fp32": 6}, 0, False),
        ("fp32", {"unknown": 6}, 0, True),
        ("bf16", {}, 0, False),
    ],
)
def test_an_engine_runs_in_the_precision_it_was_placed_in(precision, kernels, placed, runs):
    spec = dataclasses.replace(ENGINE, precision=precision, kernels=kernels)
    if runs:
        check_typed(spec, precision, placed)
        return
    with pytest.raises(CapabilityError, match=f"did not run the graph in {precision}") as caught:
        check_typed(spec, precision, placed)
    assert str(kernels) in caught.value.found


# --- requests, options, dispatch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "profiles"),
    [((1,), ((1, 1, 1), (1, 8, 8))), ((16,), ((16, 16, 16), (1, 16, 16))), ((1, 32), ((1, 1, 1), (1, 32, 32)))],
)
def test_an_engine_is_built_for_its_batch_and_runs_at_others(batches, profiles):
    assert default_batches(*batches) == profiles


def test_a_request_and_its_answer_survive_the_pipe():
    request = _BuildRequest("g", "o", "c", 2, BuildOptions(((1, 2, 4),), ((224, 224),), 1 << 30, 5, "ampere+", "newer"))
    assert decode(_BuildRequest, json.loads(json.dumps(encode(request)))) == request
    result = _BuildResult("0" * 64, HERE, "TensorRT", ENGINE.inputs, ENGINE.outputs, True, {"int8": 3})
    assert decode(_BuildResult, json.loads(json.dumps(encode(result)))) == result


def test_the_target_tensorrt_has_its_own_runner(tmp_path):
    runner = make_runner(tmp_path, ENGINE, batch=4)
    assert isinstance(runner, TensorRtRunner)
    assert (runner.plan, runner.batch, runner.device) == (tmp_path / "engine.plan", 4, HERE)


def test_running_without_tensorrt_says_what_to_install(tmp_path, without_tensorrt):
    with pytest.raises(MissingPackageError, match="TensorRT engine needs the package tensorrt") as caught:
        make_runner(tmp_path, ENGINE).load()
    assert caught.value.fix.startswith("pip install 'vitdeploy[tensorrt]'; `vitdeploy doctor --target tensorrt`")


def request(graph, build=None):
    return CompileRequest(graph, "tensorrt", "fp16", 1, build, lambda text, done, total: None)


def test_an_engine_that_would_not_run_at_its_own_batch_is_not_built(tmp_path):
    with pytest.raises(TargetError, match="no profile includes the batch 1, at which the engine is compiled") as caught:
        compile_graph(request(tmp_path / "graph.onnx", BuildOptions(((2, 4, 8), (16, 16, 16)))))
    assert caught.value.found == "profiles for 2 to 8, 16 to 16"


def test_a_load_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    """What comes before the plan is let pass, and the stream is one that only says when it is closed."""
    closed = []

    class Stream:
        def close(self):
            closed.append(True)

    class Failing(TensorRtRunner):
        def _open(self, data):
            self._context, self._keep = object(), (object(),)
            raise EngineError("TensorRT makes no execution context")

    monkeypatch.setattr("vitdeploy.runtime.tensorrt.fingerprint", lambda: HERE)
    monkeypatch.setattr("vitdeploy.runtime.tensorrt.read_trusted", lambda plan, trusted: b"plan")
    monkeypatch.setattr(cuda, "Stream", Stream)
    runner = Failing(tmp_path / "engine.plan", name="vit", batch=1, device=HERE)
    with pytest.raises(EngineError, match="no execution context"):
        runner.load()
    assert (closed, runner._context, runner._keep) == ([True], None, ())
    with pytest.raises(RuntimeError, match=r"before infer_device\(\)"):
        runner.infer_device({})


def test_building_without_tensorrt_says_what_to_install(tmp_path, without_tensorrt):
    with pytest.raises(MissingPackageError, match="needs the package tensorrt"):
        compile_graph(request(tmp_path / "graph.onnx"))


@pytest.fixture
def without_tensorrt(monkeypatch):
    """None in sys.modules is what Python takes for a module that is not there."""
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt", None)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[virtualMemoryBuffer.cpp] OutOfMemory (Requested size was 34359738368 bytes.)", "VD4203"),
        ("Cuda Runtime (out of memory)", "VD4203"),
        ("[graphShapeAnalyzer.cpp] Error Code 4: Internal Error", "VD4201"),
        ("", "VD4201"),
    ],
)
def test_a_failure_is_told_by_what_tensorrt_said(text, code):
    messages = Messages()
    messages.errors += [text] if text else []
    error = messages.failure("TensorRT cannot build graph.onnx")
    assert error.code == code
    assert error.found == (text or "no message")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("11.4.0.106", (11, 4, 0, 106)), ("10.3.0", (10, 3, 0)), ("10.16.0+cu12", (10, 16, 0)), ("", ())],
)
def test_versions_are_compared_as_numbers(text, numbers):
    assert version_numbers(text) == numbers


# --- the real bindings, whose libraries give nothing ------------------------------------------------------------------

COMPILE = """
import json, sys
from pathlib import Path
from vitdeploy.compilation.backend import CompileRequest
from vitdeploy.compilation.tensorrt import compile_graph
from vitdeploy.errors import VitdeployError
try:
    compile_graph(CompileRequest(Path(sys.argv[1]), "tensorrt", "fp16", 1, None, lambda text, done, total: None))
except VitdeployError as error:
    print(json.dumps(error.to_dict()))
"""
NO_CUDA = """
import json, sys
from vitdeploy.errors import VitdeployError
from vitdeploy.runtime.tensorrt import fingerprint
sys.modules["cuda.bindings.runtime"] = None
try:
    fingerprint()
except VitdeployError as error:
    print(json.dumps(error.to_dict()))
"""
BUILDER = """
import json
from vitdeploy.compilation.tensorrt import _BuildRequest
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.compilation.probe_nvidia import _checked, _start_tensorrt
from vitdeploy.compilation.tensorrt import _Builder
from vitdeploy.errors import VitdeployError
try:
    _Builder(_BuildRequest("g.onnx", ".", ".", 1, BuildOptions()), {"tensorrt": "0"}, print)
except VitdeployError as error:
    print(json.dumps([error.to_dict(), _checked("TensorRT starts", _start_tensorrt, "", None).detail]))
"""
PROCESS = """
import json
from vitdeploy.runtime.interpreter import run_child
from vitdeploy.compilation.tensorrt import BUILDER, _BuildRequest
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.errors import VitdeployError
from vitdeploy.spec import encode
try:
    run_child(BUILDER, encode(_BuildRequest("g.onnx", ".", ".", 1, BuildOptions())), "the build", print)
except VitdeployError as error:
    print(json.dumps(error.to_dict()))
"""
OBJECTS = """
import json
import tensorrt as trt
from vitdeploy.compilation.tensorrt import _make_monitor
from vitdeploy.runtime import tensorrt as tensorrt_api
logger, messages = tensorrt_api.make_logger()
logger.log(trt.ILogger.Severity.WARNING, "a warning")
logger.log(trt.ILogger.Severity.ERROR, "an error\\n")
told = []
def tell(*step):
    told.append(step)
    return len(told) < 3
monitor = _make_monitor(tell)
monitor.phase_start("outer", "", 10)
monitor.phase_start("inner", "outer", 5)
going = [monitor.step_complete("inner", 0), monitor.step_complete("inner", 1)]
monitor._told = 0.0
going.append(monitor.step_complete("outer", 7))
monitor.phase_finish("inner")
monitor.phase_finish("outer")
spec = tensorrt_api.tensor_spec("x", trt.DataType.HALF, trt.Dims([-1, 3, -1]))
levels = []
for name in ("this", "ampere+", "same-compute-capability"):
    try:
        levels.append(tensorrt_api.hardware_level(name).name)
    except Exception as error:
        levels.append(type(error).__name__)
try:
    tensorrt_api.tensor_spec("x", trt.DataType.BF16, trt.Dims([1]))
except Exception as error:
    refused = error.to_dict()["found"]
print(json.dumps([tensorrt_api.require(), messages.errors, told, going, str(spec), levels, refused]))
"""


@each_version
def test_our_logger_and_monitor_are_what_the_bindings_want(version):
    found, errors, told, going, spec, levels, refused = run_with(version, OBJECTS)
    assert found == version
    assert errors == ["an error"]
    assert told == [["outer", 0, 10], ["inner", 1, 5], ["outer", 8, 10]]
    assert going == [True, True, False]  # nobody listens any more: the build is cancelled
    assert spec == "x: float16[batch, 3, dynamic]"
    assert levels[:2] == ["NONE", "AMPERE_PLUS"]
    assert levels[2] == ("SAME_COMPUTE_CAPABILITY" if version.startswith("11") else "CapabilityError")
    assert refused == "BF16"


@each_version
def test_a_builder_that_does_not_start_is_an_error_of_the_engine(version):
    error, detail = run_with(version, BUILDER)
    assert (error["code"], error["message"]) == ("VD4201", "TensorRT cannot create a builder")
    assert detail == "TensorRT cannot create a builder (no message)"  # what doctor says


@each_version
def test_the_building_process_itself_says_what_it_lacks(version):
    error = run_with(version, PROCESS)
    assert (error["code"], error["message"]) == ("VD4002", "no NVIDIA GPU can be used here")


@each_version
def test_a_machine_with_tensorrt_but_without_a_driver_says_so(tmp_path, version):
    graph = str(tmp_path / "graph.onnx")
    error = run_with(version, COMPILE, graph)
    assert (error["code"], error["message"]) == ("VD4002", "no NVIDIA GPU can be used here")
    assert "nvidia-smi" in error["fix"]
    assert not list(tmp_path.iterdir())


@each_version
def test_tensorrt_without_cuda_python_says_what_to_install(version):
    error = run_with(version, NO_CUDA)
    assert error["code"] == "VD4001"
    assert "cuda-python" in error["message"]
