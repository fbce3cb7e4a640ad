"""Measures, on the target, an INT8 engine with its float operators in fp32 and in bf16: time, and answers."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.graph.analysis.linears import count_int8
from vitdeploy.graph.io.files import load_graph
from vitdeploy.search.alternatives import compiled, time_alternatives
from vitdeploy.search.float_rest import FloatRestTable
from vitdeploy.search.latency import fingerprint
from vitdeploy.search.reference_outputs import ReferenceOutputs
from vitdeploy.search.trial import answers_of
from vitdeploy.spec import FloatRest

RESTS: tuple[FloatRest, FloatRest] = ("fp32", "bf16")


def not_measured(target: str, batch: int, reason: str) -> FloatRestTable:
    return FloatRestTable(target, batch, _now(), fingerprint(target), reason)


def measure_float_rest(
    graph: Path,
    target: str,
    batch: int,
    reference_outputs: ReferenceOutputs,
    *,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> FloatRestTable:
    """Time a placed INT8 graph with its float operators in fp32 and in bf16, in alternating blocks, and run both on the
    images of the reference outputs.

    Raises:
        CapabilityError, EngineError, WorkerError: as `compile_engine` and `run_benchmark`.
    """
    model = load_graph(graph)
    placed, text = count_int8(model), f"float operators in bf16 for {target}"
    candidates, distances = [], list[npt.NDArray[np.float64]]()
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        for done, rest in enumerate(RESTS):
            progress(text, done, len(RESTS))
            answers = answers_of(load_graph(graph), target, "int8", reference_outputs, rest)
            distances.append(reference_outputs.distance(answers))
            candidates.append(compiled(graph, Path(folder) / rest, target, "int8", batch, placed, rest, rest))
        progress(text, len(RESTS), len(RESTS))
        (_, timing), disturbed = time_alternatives(
            candidates, lambda done, total: progress("time bf16 against fp32", done, total)
        )
    return FloatRestTable(
        *(target, batch, _now(), fingerprint(target), ""),
        *(timing.ratio, timing.low, timing.high),
        (float(distances[0].mean()), float(distances[1].mean())),
        _interval(distances[1] - distances[0]),
        disturbed,
    )


def _interval(differences: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences, by Student's t; the mean itself where nothing varies."""
    mean = float(differences.mean())
    if len(differences) < 2 or float(differences.std()) == 0:
        return mean, mean
    from scipy import stats

    found = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return float(found.low), float(found.high)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
