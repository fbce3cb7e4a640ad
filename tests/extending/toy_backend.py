"""A back end from outside of the package: ONNX's own reference implementation, which interprets a graph in numpy.

Four rows, one for each layer that asks something of a back end, and the target that they serve. A real one would have
a file for each layer; the entry points that name them stand in `test_backend.py`.
"""

import statistics
import time
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from vitdeploy.backends import Target
from vitdeploy.benchmark.context import BenchBackend, Layer, Profile, ProfileRequest
from vitdeploy.compilation.backend import CompileBackend, CompileRequest, TargetState
from vitdeploy.errors import CapabilityError
from vitdeploy.quantization.folds import GainThreshold
from vitdeploy.quantization.placement import PlacementBackend, Quantizers, dequantized_weight
from vitdeploy.runtime.backend import RunnerRequest, RuntimeBackend
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec, TensorSpec

TARGET = Target(
    name="numpy-cpu",
    backend="numpy",
    device="CPU",
    extra="",
    package="onnx",
    module="onnx",
    precisions=("fp32", "int8"),
)


# --- runtime: load, infer, close --------------------------------------------------------------------------------------


class NumpyRunner(Runner):
    """Interprets an ONNX file, at one batch or at any."""

    def __init__(self, file, name, batch=None):
        super().__init__(name)
        self.file, self.batch = file, batch

    def _load(self):
        model = onnx.load(self.file)
        self._evaluator = ReferenceEvaluator(model)
        self.inputs = tuple(_tensor(each, self.batch) for each in model.graph.input)
        self.outputs = tuple(_tensor(each, self.batch) for each in model.graph.output)
        self.provider = "numpy"

    def _infer(self, feeds):
        return dict(zip([each.name for each in self.outputs], self._evaluator.run(None, dict(feeds)), strict=True))

    def _close(self):
        self._evaluator = None


def _tensor(value, batch):
    kind = value.type.tensor_type
    shape = tuple(each.dim_param or each.dim_value for each in kind.shape.dim)
    spec = TensorSpec(value.name, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name, shape)
    return spec if batch is None else spec.with_batch(batch)


def make_runner(request: RunnerRequest) -> Runner:
    return NumpyRunner(request.file, request.engine.artifact, request.batch)


RUNTIME = RuntimeBackend(make_runner)


# --- compile: the placement is the engine, and its nodes say what it computes in --------------------------------------


def compile_graph(request: CompileRequest) -> EngineSpec:
    with NumpyRunner(request.graph, "probe") as dynamic, NumpyRunner(request.graph, "probe", request.batch) as runner:
        runner.infer({each.name: np.zeros(each.shape, each.dtype) for each in runner.inputs})
        return EngineSpec(
            target=request.target,
            precision=request.precision,
            graph=request.graph.name,
            files=(request.graph.name,),
            batch=request.batch,
            dynamic_batch=isinstance(dynamic.inputs[0].shape[0], str),
            provider=runner.provider,
            inputs=runner.inputs,
            outputs=runner.outputs,
            kernels=_kernels(onnx.load(request.graph)),
            device={**describe_host(), "onnx": onnx.__version__},
        )


def _kernels(model):
    """Of the products with a constant: those behind a DequantizeLinear stand for INT8."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    constants = {each.name for each in model.graph.initializer}
    counts = Counter()
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Conv", "Gemm"):
            maker = makers.get(node.input[1])
            if node.input[1] in constants or maker in ("Constant", "DequantizeLinear"):
                counts["int8" if maker == "DequantizeLinear" else "fp32"] += 1
    return dict(counts)


def probe(target: str) -> TargetState:
    return TargetState(True, onnx.__version__, TARGET.precisions, f"{onnx.__version__}, in numpy", "")


COMPILE = CompileBackend(compile_graph, probe)


# --- quantize: Q/DQ around every linear; a convolution stays in float -------------------------------------------------


def reasons_for_float(model, linears):
    return {each.name: "a convolution is interpreted too slowly" for each in linears if each.kind != "matmul"}


def write(model, linears, ranges, weights):
    quantizers = Quantizers(model, ranges)
    for linear in linears:
        quantized, scale, zero_point = quantizers.quantize(linear.input, linear.node)
        back = ir.Node("", "DequantizeLinear", [quantized, scale, zero_point], name=f"{linear.name}/DequantizeLinear")
        model.graph.insert_before(linear.node, back)
        linear.node.replace_input_with(0, back.outputs[0])
        linear.node.replace_input_with(1, dequantized_weight(model, linear, *weights[linear.name]))
    return ()


QUANTIZE = PlacementBackend(GainThreshold(scale=2.0, copies=3.0), reasons_for_float, write)


# --- bench: where the time goes, and the best rate of products --------------------------------------------------------


def profile(request: ProfileRequest) -> Profile:
    with NumpyRunner(request.file, request.name, request.batch) as runner:
        feeds = {each.name: np.zeros(each.shape, each.dtype) for each in runner.inputs}
        times = []
        for _ in range(3):
            start = time.perf_counter()
            runner.infer(feeds)
            times.append((time.perf_counter() - start) * 1e3)
    latency = statistics.median(times)
    whole = Layer("the whole graph", "numpy", request.engine.precision, latency, True)
    return Profile(request.name, request.batch, len(times), (whole,), latency)


def products(rows: int, width: int, precision: str, threads: int):
    if precision != "fp32":
        raise CapabilityError(f"numpy has no {precision} product", expected="fp32")
    a, b = np.ones((rows, width), np.float32), np.ones((width, width), np.float32)
    return lambda: a @ b @ b @ b, "numpy.matmul"


BENCH = BenchBackend(profile, products)
