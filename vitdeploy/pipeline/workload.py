"""The work (MACs and bytes moved) of each engine of a bench, counted from the graph that it was made from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vitdeploy.benchmark.run import BenchCandidate
from vitdeploy.errors import VitdeployError
from vitdeploy.graph.analysis.work import Work, count_work
from vitdeploy.graph.io.admit import admit_graph
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.spec import EngineSpec, decode


def workloads_of(bench_candidates: Sequence[BenchCandidate], batch: int) -> dict[str, Work | str]:
    """The work of one query at `batch`, or why it is unknown, by artifact; only for candidates that are engines."""
    found = {}
    for bench_candidate in bench_candidates:
        if "engine" in bench_candidate.request:
            engine = decode(EngineSpec, bench_candidate.request["engine"])
            found[bench_candidate.artifact] = work_of(
                Path(bench_candidate.request["folder"]) / engine.graph, engine, batch
            )
    return found


def work_of(graph: Path, engine: EngineSpec, batch: int) -> Work | str:
    """The work of an engine that was made of `graph`, by the precisions that it runs in; or why it is not known."""
    if engine.parts:
        return "it depends on how long the sequences are"
    try:
        work = count_work(admit_graph(graph), batch)
    except VitdeployError as error:
        return f"{error.message}: {error.found}"
    # Half precision that is a setting of the runtime stands in no graph.
    float_precision = RUNTIME[engine.target].float_precision(engine.options)
    flops = Counter[str]()
    for precision, count in work.flops.items():
        flops[float_precision if precision == "fp32" else precision] += count
    return dataclasses.replace(work, flops=dict(flops))
