"""Survey of a machine after a benchmark run: its peak rates, and a profile of each artifact.

Each measurement has its own process: profilers slow down what they watch, and threads of one runtime disturb another.
Failed measurements are left out with the reason: a bench is useful without them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import results, run
from vitdeploy.benchmark.context import Context, LeftOut, Memory, Profile, RateFacts
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.errors import VitdeployError, WorkerError
from vitdeploy.progress import Progress
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.host import default_threads, usable_cores
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.spec import EngineSpec, decode

SURVEY_WORKER = module_argv("vitdeploy.benchmark.survey_worker")
# Seconds for the memory, each rate and each profile: a share of a scenario's time, so that a quick bench stays quick.
MOST_SECONDS, SHARE = 2.0, 0.1
# A shorter bench needs no survey.
LEAST_DURATION = 1.0

KINDS = {"memory": Memory, "rate": RateFacts, "profile": Profile}


# One measurement: its description if it is left out, and the worker's command.
Ask = tuple[LeftOut, dict[str, Any]]


def surveyed(
    bench_run: results.BenchRun, candidates: Sequence[run.BenchCandidate], progress: Progress
) -> results.BenchRun:
    """The run with its context: the memory rate, the rates that its engines need, and the layers of each engine. The
    run is unchanged if its scenarios took less than a second each.

    `progress(text, done, total)` is called before each of them. Candidates that are not engines, such as an original in
    PyTorch, are not surveyed.
    """
    if bench_run.protocol.duration < LEAST_DURATION:
        return bench_run
    processes = plan(candidates, bench_run.protocol)
    total, counted = sum(map(len, processes)), itertools.count()

    def tell(what: LeftOut) -> None:
        progress(f"measure peak rates and profiles: {what}", next(counted), total)

    found = [answer for asks in processes for answer in _answers(asks, bench_run.protocol.timeout, tell)]
    progress("measure peak rates and profiles", total, total)
    elsewhere = [each.target for each in candidates if "engine" in each.request and not _on_cpu(each)]
    found += [LeftOut("rate", target, "not measured on a GPU") for target in dict.fromkeys(elsewhere)]
    context = Context(
        tuple(each for each in found if isinstance(each, RateFacts)),
        next((each for each in found if isinstance(each, Memory)), None),
        tuple(each for each in found if isinstance(each, Profile)),
        tuple(each for each in found if isinstance(each, LeftOut)),
    )
    return dataclasses.replace(bench_run, context=context)


def plan(candidates: Sequence[run.BenchCandidate], protocol: Protocol) -> list[list[Ask]]:
    """The measurements for engines on the CPU, in their order; each list runs in its own process."""
    engines = [each for each in candidates if "engine" in each.request and _on_cpu(each)]
    how = {"threads": protocol.threads, "seconds": min(MOST_SECONDS, SHARE * protocol.duration)}
    threads = protocol.threads or default_threads() or usable_cores()
    memory = LeftOut("memory", "memory"), {"do": "memory", **how, "threads": threads}
    needed: dict[str, set[str]] = {}
    for candidate in engines:
        precisions = needed.setdefault(candidate.target, set())
        precisions |= precisions_of(decode(EngineSpec, candidate.request["engine"]))
    rates = [
        [
            (LeftOut("rate", f"{target} {precision}"), {"do": "rate", "target": target, "precision": precision, **how})
            for precision in sorted(precisions)
        ]
        for target, precisions in needed.items()
    ]
    batch = protocol.batch_of(protocol.latency_scenario)
    profiles = []
    for engine in engines:
        request = {key: engine.request[key] for key in ("folder", "engine")}
        command = {"do": "profile", "name": engine.artifact, "request": request, "batch": batch, **how}
        profiles.append([(LeftOut("profile", engine.artifact), command)])
    return [[memory], *rates, *profiles] if engines else []


def _on_cpu(candidate: run.BenchCandidate) -> bool:
    return TARGETS[candidate.target].device == "CPU"


def precisions_of(engine: EngineSpec) -> set[str]:
    """The precisions of an engine's matrix products, with and without weights. INT4 applies to weights only: such
    kernels multiply in INT8."""
    kernels = {"int8" if kernel == "int4" else kernel for kernel in engine.kernels}
    return {*kernels, RUNTIME[engine.target].float_precision(engine.options)}


def _answers(asks: Sequence[Ask], timeout: float, tell: Callable[[LeftOut], None]) -> list[Any]:
    """The answers of one process, with a LeftOut for each missing one."""
    found: list[Any] = []
    try:
        with run.started({str(asks[0][0]): SURVEY_WORKER}) as [worker]:
            for what, command in asks:
                tell(what)
                try:
                    found.append(decode(KINDS[what.what], worker.ask(command, timeout)))
                except VitdeployError as error:
                    found.append(_because(what, error))
    except WorkerError as error:  # the process did not start
        found += [_because(what, error) for what, _ in asks[len(found) :]]
    return found


def _because(what: LeftOut, error: VitdeployError) -> LeftOut:
    first = error.found.splitlines()[0] if error.found else ""
    return dataclasses.replace(what, why=f"{error.message} ({first})" if first else error.message)
