"""Measures, on the target and the model itself, the number of rows at which the linears of a ViT are fastest.

The placements for this use arbitrary ranges: times depend on shapes, not on values.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark.candidate import BenchCandidate, engine_candidate
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.linears import count_int8, find_linears
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.row_alignment import align_rows, token_stream
from vitdeploy.quantization.placement import place, shape
from vitdeploy.quantization.scores import score_tensors
from vitdeploy.search.alternatives import time_alternatives
from vitdeploy.search.latency import BOUNDS, fingerprint
from vitdeploy.spec import Precision

MULTIPLES = (8, 16, 32, 64)


@dataclass(frozen=True)
class RowTiming:
    """The model with `rows` rows. `rounds_ms`: its median latency in each round. `ratio`, `low`, `high`: its latency
    over that with one row per token, with the interval; 1 for that one itself."""

    rows: int
    rounds_ms: tuple[float, ...]
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class RowTable:
    """The measurements of one model at batch 1; the first of `timings` is that of one row per token.

    The intervals hold jointly at 95 % (Bonferroni). `measured`: ISO date; `device`: as in a latency table. `disturbed`:
    why the times are unreliable, in which case none is the best.
    """

    target: str
    precision: Precision
    measured: str
    device: dict[str, str]
    tokens: int
    timings: tuple[RowTiming, ...]
    disturbed: str = ""

    @property
    def best(self) -> RowTiming:
        """The fastest of those that are provably faster than one row per token; without any, that one."""
        first, *others = self.timings
        surely = (each for each in others if each.high < 1 and not self.disturbed)
        return min(surely, key=lambda each: each.ratio, default=first)

    @property
    def aligned(self) -> int | None:
        """The number of rows that is provably faster than one per token; None without any."""
        return None if self.best.rows == self.tokens else self.best.rows


def candidates(tokens: int) -> tuple[int, ...]:
    """The number of tokens, and the next multiples of likely kernel tile sizes."""
    rounded = {-(-tokens // of) * of for of in MULTIPLES}
    return (tokens, *sorted(rows for rows in rounded if tokens < rows < 2 * tokens))


def measure_rows(
    graph: Path,
    target: str,
    precision: Precision = "int8",
    *,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> RowTable:
    """Measure a model with each number of rows in `candidates` against the others, in alternating blocks.

    Args:
        graph: a float graph as `optimize` leaves it, with one row for each token.
        precision: "int8", with every layer in it that the target places, or one of a float graph.

    Raises:
        GraphError: the rows cannot be aligned, as `align_rows` says.
        CapabilityError, EngineError, WorkerError: as `compile_engine` and `run_benchmark`.
    """
    tokens = token_stream(find_attentions(load_graph(graph)))[1]
    numbers = candidates(tokens)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        bench_candidates = []
        for done, rows in enumerate(numbers):
            progress(f"prepare {rows} rows for {target}", done, len(numbers))
            bench_candidates.append(_bench_candidate(graph, rows, target, precision, Path(folder)))
        found, disturbed = time_alternatives(
            bench_candidates, lambda done, total: progress("time the rows", done, total)
        )
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    timings = tuple(RowTiming(rows, **vars(each)) for rows, each in zip(numbers, found, strict=True))
    return RowTable(target, precision, now, fingerprint(target), tokens, timings, disturbed)


def _bench_candidate(graph: Path, rows: int, target: str, precision: Precision, folder: Path) -> BenchCandidate:
    model = load_graph(graph)
    align_rows(model, rows)
    if precision == "int8":
        shape(model, target)
        names = [str(linear.input.name) for linear in find_linears(model)]
        place(model, dict.fromkeys([*names, *score_tensors(model).values()], BOUNDS), target)
        drop_unused(model)
    placed, out = folder / f"{rows}.onnx", folder / str(rows)
    save_graph(model, placed)
    out.mkdir()
    engine = compile_engine(placed, out, target=target, precision=precision, batch=1, placed=count_int8(model))
    placed.unlink()
    return engine_candidate(engine, out, str(rows))
