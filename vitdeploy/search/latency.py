"""Times of layers: tiny graphs of one layer each, timed in pairs."""

import json
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from scipy import stats

from vitdeploy.benchmark import process, summary
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import ENGINE_WORKER, BenchCandidate, alone, engine_candidate, measure_candidates, started
from vitdeploy.errors import GraphError, InputError, MissingFileError, TargetError
from vitdeploy.graph.analysis.rows import Linear, find_linears
from vitdeploy.graph.edit import constant
from vitdeploy.graph.io.files import save_graph
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import UNKNOWN, Dims, FreeSize
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization import placement, ranges
from vitdeploy.search.frame import FINGERPRINT, counted, engine_of, fingerprint, now
from vitdeploy.spec import DecodeError, Precision, decode, encode

# --- Tiny graphs of several parallel copies of one layer, for measuring its time --------------------------------------


OPSET = 20
SEED = 0
# Enough layers in one graph, each with weights of its own, that no cache holds them between two calls.
COPIES, MOST_BYTES = 8, 128 * 2**20


@dataclass(frozen=True)
class Convolution:
    """What a convolution's time depends on besides its matrix product: its image and its ONNX attributes."""

    channels: int
    height: int
    width: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Shape:
    """One layer at batch 1 as a matrix product: `rows` x `k` times `k` x `n`.

    For a convolution, the rows are its output positions, and k the weights of one output channel. `front`: the chain of
    operators in front of the layer that are timed with it ("Gelu", "Mul", "Add").
    """

    rows: int
    k: int
    n: int
    convolution: Convolution | None = None
    front: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["matmul", "conv"]:
        return "matmul" if self.convolution is None else "conv"

    @property
    def macs(self) -> int:
        return self.rows * self.k * self.n

    @property
    def copies(self) -> int:
        """How many copies of the layer a tiny graph holds."""
        return max(1, min(COPIES, MOST_BYTES // (4 * self.k * self.n)))

    def __str__(self) -> str:
        return " ".join([*self.front, f"{self.kind} {self.rows} x {self.k} x {self.n}"])


def shapes_of(model: ir.Model, layers: Collection[str]) -> dict[str, Shape]:
    """The shape of each of these layers by name, at batch 1 if the batch is dynamic.

    Raises:
        GraphError: a layer's input has another dynamic axis than the batch, or a convolution pads by itself.
    """
    dims = Inference(model).dims
    inputs = [dims[value] for value in model.graph.inputs if dims.get(value)]
    batch = {name for sizes in inputs if isinstance(sizes[0], FreeSize) for name in sizes[0].names}
    chosen = [linear for linear in find_linears(model) if linear.name in layers]
    return {
        linear.name: _shape(
            linear, *(_at_batch_one(linear, dims.get(each), batch) for each in (linear.input, linear.output))
        )
        for linear in chosen
    }


def _at_batch_one(linear: Linear, sizes: Dims | None, batch: Collection[str]) -> list[int]:
    found = [
        each.factor if isinstance(each, FreeSize) and set(each.names) <= set(batch) else each
        for each in sizes or (UNKNOWN,)
    ]
    numbers = [each for each in found if isinstance(each, int)]
    if len(numbers) < len(found):
        raise GraphError(
            f"the size of what {linear.name} reads is not known",
            found=" x ".join(map(str, found)),
            wanted="numbers, but for the batch",
            fix="export with a fixed image size",
        )
    return numbers


def _shape(linear: Linear, before: list[int], after: list[int]) -> Shape:
    if linear.kind == "matmul":
        k, n = linear.weight.shape
        return Shape(int(np.prod(before[:-1])), k, n)
    attributes = {name: each.value for name, each in linear.node.attributes.items()}
    if attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise GraphError(f"{linear.name} pads by itself", found=str(attributes["auto_pad"]), wanted="explicit pads")
    n, inside, *kernel = linear.weight.shape
    _, channels, height, width = before

    def numbers(name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(each) for each in attributes.get(name, default))

    layout = Convolution(
        channels,
        height,
        width,
        tuple(kernel),
        numbers("strides", (1, 1)),
        numbers("pads", (0, 0, 0, 0)),
        numbers("dilations", (1, 1)),
        int(attributes.get("group", 1)),
    )
    return Shape(int(np.prod(after[2:])), inside * kernel[0] * kernel[1], n, layout)


def layer_graph(shape: Shape, copies: int | None = None) -> ir.Model:
    """So many such layers, by default `shape.copies`, called "0", "1" ..., each with its own input, weights and bias.

    Only one row of each output leaves the graph, so that the time is that of the layer and not of copying its result.
    """
    generator = np.random.default_rng(SEED)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="layers")
    model = ir.Model(graph, ir_version=9, producer_name="vitdeploy")

    def initializer(array: Any, name: str) -> ir.Value:
        value = constant(array, name)
        graph.register_initializer(value)
        return value

    def node(operator: str, name: str, inputs: list[ir.Value], sizes: list[int], **attributes: Any) -> ir.Value:
        made = ir.node(operator, inputs, attributes, name=f"{name}/{operator}")
        output = made.outputs[0]
        output.name, output.type, output.shape = f"{name}/{operator}", inputs[0].type, ir.Shape(sizes)
        graph.append(made)
        return output

    row = initializer(np.array([0], np.int64), "row")
    for i in range(shape.copies if copies is None else copies):
        layout = shape.convolution
        sizes = [1, shape.rows, shape.k] if layout is None else [1, layout.channels, layout.height, layout.width]
        x = ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(sizes))
        graph.inputs.append(x)
        for operator in shape.front:
            vector = () if operator == "Gelu" else (generator.uniform(0.5, 2, sizes[-1]).astype(np.float32),)
            constants = [initializer(each, f"{i}.{operator}") for each in vector]
            x = node(operator, f"{i}.front", [x, *constants], sizes)
        bias = initializer(generator.standard_normal(shape.n, dtype=np.float32), f"{i}.bias")
        if layout is None:
            weight = initializer(generator.standard_normal((shape.k, shape.n), dtype=np.float32), f"{i}.weight")
            wide = [1, shape.rows, shape.n]
            y = node("Add", str(i), [node("MatMul", str(i), [x, weight], wide), bias], wide)
            last = node("Gather", f"row {i}", [y, row], [1, 1, shape.n], axis=1)
        else:
            filters = (shape.n, layout.channels // layout.group, *layout.kernel)
            weight = initializer(generator.standard_normal(filters, dtype=np.float32), f"{i}.weight")
            attributes = {name: getattr(layout, name) for name in ("strides", "pads", "dilations", "group")}
            y = node("Conv", str(i), [x, weight, bias], [], **attributes)
            y.shape = None
            last = node("Gather", f"row {i}", [y, row], [], axis=2)
            last.shape = ir.Shape([1, shape.n, 1, None])
        graph.outputs.append(last)
    return model


# --- The latency table: how long single layers take on this device, in float and in INT8, measured and kept -----------
# A layer's MACs do not determine its time: it depends on the runtime, on the CPU and, because of tiles, on the number
# of rows. The table is measured once and saved, so every choice made from it is reproducible.


FORMAT = 1
ROUNDS, BLOCK_SECONDS, WARMUP_SECONDS = 9, 0.05, 0.15
BOUNDS = ranges.Range(-4.0, 4.0)


@dataclass(frozen=True)
class Timing:
    """One shape in one precision: microseconds per layer, the median of each round."""

    shape: Shape
    precision: Precision
    rounds_us: tuple[float, ...]

    @property
    def microseconds(self) -> float:
        return float(np.median(self.rounds_us))


@dataclass(frozen=True)
class LatencyTable:
    """Times of layers on one target of one device. `measured`: ISO date; `device`: see `fingerprint`."""

    format: int
    target: str
    measured: str
    device: dict[str, str]
    timings: tuple[Timing, ...]

    def timing(self, shape: Shape, precision: Precision) -> Timing:
        """The timing; raises InputError if it was not measured."""
        for each in self.timings:
            if (each.shape, each.precision) == (shape, precision):
                return each
        raise InputError(
            f"the latency table for {self.target} has no {shape} in {precision}",
            found=f"{len(self.timings)} other times",
            fix="measure the table for this model",
        )

    def saved(self, shape: Shape) -> tuple[float, float, float]:
        """Microseconds that INT8 saves over FP32 for one layer (negative: INT8 is slower): the median over the rounds,
        in which both were measured in direct succession, with its 95 % interval by order statistics (the sign test:
        Conover, Practical Nonparametric Statistics, 3.2), which is robust to slow rounds. Errors as `timing`."""
        slow, fast = (np.asarray(self.timing(shape, kind).rounds_us) for kind in ("fp32", "int8"))
        differences = slow - fast
        bounds = stats.quantile_test(differences, p=0.5).confidence_interval(0.95)
        return float(np.median(differences)), float(bounds.low), float(bounds.high)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(encode(self), indent=1) + "\n", encoding="utf-8")


def load_table(path: Path, target: str) -> LatencyTable:
    """A table that was measured for `target` on this device.

    Raises:
        MissingFileError: no such file.
        InputError: not a latency table.
        TargetError: measured for another target, on another device, or with another version of the runtime.
    """
    if not path.is_file():
        raise MissingFileError(f"no latency table at {path}", fix="leave it out, and it is measured")
    try:
        table = decode(LatencyTable, json.loads(path.read_text(encoding="utf-8")))
    except (DecodeError, ValueError) as error:
        raise InputError(f"{path} is not a latency table", found=str(error)[:300]) from None
    if table.format != FORMAT:
        raise InputError(f"{path} has another format", found=str(table.format), wanted=str(FORMAT))
    own = fingerprint(target)
    if table.target != target or table.device != own:
        there = {"target": table.target, **table.device}
        here = {"target": target, **own}
        named = dict.fromkeys([*here, *(key for key in FINGERPRINT if key in there)])
        differing = [key for key in named if there.get(key) != here.get(key)]
        raise TargetError(
            f"{path} was measured elsewhere",
            found=", ".join(f"{key}: {there.get(key, 'unknown')}" for key in differing),
            wanted=", ".join(f"{key}: {here.get(key, 'unknown')}" for key in differing),
            fix="measure it on this machine",
        )
    return table


def measure_latencies(
    shapes: Iterable[Shape],
    target: str,
    *,
    precisions: Sequence[Precision] = ("fp32", "int8"),
    progress: Progress = silent,
) -> LatencyTable:
    """Time each distinct shape in each precision, in the form that this target runs such layers in.

    The precisions of one shape are measured against each other in alternating blocks, each in a process of its own that
    continues with the next shape. An INT8 layer quantizes its own input. A time includes its share of one call of the
    runtime, the same in every precision.

    Raises:
        CapabilityError: the target cannot run a precision, or has no INT8 for such a layer.
        EngineError, WorkerError: as `compile_engine`, `measure_candidates`.
    """
    distinct = tuple(dict.fromkeys(shapes))
    timings: list[Timing] = []
    with alone(progress), started(dict.fromkeys(precisions, ENGINE_WORKER)) as workers:
        for shape in counted(distinct, f"time the layers of {target}", progress):
            timings += _measure(shape, target, precisions, workers)
    return LatencyTable(FORMAT, target, now(), fingerprint(target), tuple(timings))


def _measure(
    shape: Shape, target: str, precisions: Sequence[Precision], workers: Sequence[process.WorkerProcess]
) -> list[Timing]:
    protocol = Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        bench_candidates = [_bench_candidate(shape, target, precision, Path(folder)) for precision in precisions]
        medians = summary.block_medians(measure_candidates(bench_candidates, workers, protocol))
    return [
        Timing(shape, precision, tuple(1e3 * each / shape.copies for each in medians[precision]))
        for precision in precisions
    ]


def _bench_candidate(shape: Shape, target: str, precision: Precision, folder: Path) -> BenchCandidate:
    model = layer_graph(shape)
    if precision == "int8":
        placement.place(model, {str(linear.input.name): BOUNDS for linear in find_linears(model)}, target)
    save_graph(model, folder / f"{precision}.onnx")
    engine = engine_of(model, folder / f"{precision}.onnx", folder / precision, target, precision, 1, "fp32")
    return engine_candidate(engine, folder / precision, precision)
