"""What stages and measurements cost, as far as it is known: a stage by what such stages took before."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from vitdeploy.benchmark.candidate import BenchCandidate
from vitdeploy.benchmark.expected import Expected, expected
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.document.sweep_plan import Estimate
from vitdeploy.stages.step import ORIGINAL, Outline
from vitdeploy.store.log import Line, this_machine
from vitdeploy.workflows.sweeps.entries import Outlined

# A stage is like another one if its numbers, of parameters, pixels and images, differ by no more than this factor.
ALIKE = 1.25
# Estimates are from the last ones.
LAST = 20


class Costs:
    """What the log of a store says of stages. `anywhere`: also of those that other kinds of machines have made."""

    def __init__(self, log: Iterable[Line], *, anywhere: bool) -> None:
        self._seen: dict[str, deque[Line]] = defaultdict(lambda: deque(maxlen=1000))
        cpu, cores = this_machine()
        for line in log:
            if anywhere or (line.made.cpu, line.made.cores) == (cpu, cores):
                self._seen[line.made.name].append(line)

    def of(self, step: Outline) -> tuple[Estimate | None, Estimate | None, int]:
        """The seconds and the bytes of a stage, and of how many such ones; None where there was none."""
        found = [line for line in self._seen[step.name] if _alike(line.made.about, step.about)][-LAST:]
        if not found:
            return None, None, 0
        return _estimate([line.made.seconds for line in found]), _estimate([line.bytes for line in found]), len(found)


def _alike(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return one.keys() == other.keys() and all(
        max(one[name], other[name]) <= ALIKE * min(one[name], other[name]) for name in one
    )


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(min(values), statistics.median(values), max(values))


def added(estimates: Sequence[Estimate]) -> Estimate | None:
    """Of several stages one after the other; None of none."""
    if not estimates:
        return None
    return Estimate(
        sum(each.least for each in estimates),
        sum(each.median for each in estimates),
        sum(each.most for each in estimates),
    )


def measuring(outlined: Outlined) -> Expected:
    """How long the bench of a recipe takes, at all its image sizes."""
    bench = outlined.recipe.bench
    protocol = Protocol(scenarios=bench.scenarios, batch=bench.batch, duration=bench.duration)
    found = []
    for plan in outlined.plans:
        engines = [step.name for step in plan if step.kind == "compile"]
        requests = {ORIGINAL: {}, **{name: {"engine": {}} for name in engines}}
        candidates = [BenchCandidate(name, "", "", (), dict(request)) for name, request in requests.items()]
        found.append(expected(candidates, protocol, context=True))
    return Expected(sum(each.seconds for each in found), sum(each.most for each in found))
