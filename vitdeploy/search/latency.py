"""The latency table: how long single layers take on this device, in float and in INT8, measured and kept.

A layer's MACs do not determine its time: it depends on the runtime, on the CPU and, because of tiles, on the number of
rows. The table is measured once and saved, so every choice made from it is reproducible.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.candidate import ENGINE_WORKER, BenchCandidate, engine_candidate
from vitdeploy.benchmark.process import WorkerProcess
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import alone, measure_candidates, started
from vitdeploy.benchmark.summary import block_medians
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.errors import InputError, MissingFileError, TargetError
from vitdeploy.graph.analysis.linears import count_int8, find_linears
from vitdeploy.graph.io.files import save_graph
from vitdeploy.quantization.placement import place
from vitdeploy.quantization.ranges import Range
from vitdeploy.runtime.host import describe_host
from vitdeploy.search.layer_graph import Shape, layer_graph
from vitdeploy.spec import DecodeError, Precision, decode, encode

FORMAT = 1
# What identifies the device of a time; a different operating system kernel or Python does not change the device.
FINGERPRINT = ("cpu", "isa", "cores", "quota", "machine", "board", "caches", "emulated")
ROUNDS, BLOCK_SECONDS, WARMUP_SECONDS = 9, 0.05, 0.15
BOUNDS = Range(-4.0, 4.0)


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

    def of(self, rows: int, k: int, n: int, precision: Precision) -> float:
        """Microseconds of one linear of `rows` x `k` times `k` x `n`; errors as `timing`."""
        return self.timing(Shape(rows, k, n), precision).microseconds

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


def fingerprint(target: str) -> dict[str, str]:
    """What identifies this machine's times: the CPU, its instruction sets and cores, the board if it has a name, the
    version of the runtime."""
    host, package = describe_host(), TARGETS[target].package
    return {**{key: host[key] for key in FINGERPRINT if key in host}, package: importlib.metadata.version(package)}


def measure_latencies(
    shapes: Iterable[Shape],
    target: str,
    *,
    precisions: Sequence[Precision] = ("fp32", "int8"),
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
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
        for done, shape in enumerate(distinct):
            progress(f"time the layers of {target}", done, len(distinct))
            timings += _measure(shape, target, precisions, workers)
    progress(f"time the layers of {target}", len(distinct), len(distinct))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return LatencyTable(FORMAT, target, now, fingerprint(target), tuple(timings))


def _measure(
    shape: Shape, target: str, precisions: Sequence[Precision], workers: Sequence[WorkerProcess]
) -> list[Timing]:
    protocol = Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        bench_candidates = [_bench_candidate(shape, target, precision, Path(folder)) for precision in precisions]
        medians = block_medians(measure_candidates(bench_candidates, workers, protocol))
    return [
        Timing(shape, precision, tuple(1e3 * each / shape.copies for each in medians[precision]))
        for precision in precisions
    ]


def _bench_candidate(shape: Shape, target: str, precision: Precision, folder: Path) -> BenchCandidate:
    model = layer_graph(shape)
    if precision == "int8":
        place(model, {str(linear.input.name): BOUNDS for linear in find_linears(model)}, target)
    graph, out = folder / f"{precision}.onnx", folder / precision
    save_graph(model, graph)
    out.mkdir()
    engine = compile_engine(graph, out, target=target, precision=precision, batch=1, placed=count_int8(model))
    return engine_candidate(engine, out, precision)
