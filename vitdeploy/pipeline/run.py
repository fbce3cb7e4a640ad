"""Run a plan: find each step's artifact in the store, or compute it. A second run resumes where the first stopped."""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from vitdeploy.benchmark.run import ExpectedTime
from vitdeploy.document.sweep import Estimate
from vitdeploy.progress import Progress
from vitdeploy.runtime.host import usable_cores
from vitdeploy.stages.step import Step
from vitdeploy.store.store import Artifact, Line, Store, read_log, shared_store, store_folder, this_machine


def default_store() -> Store:
    """The store of this user."""
    return Store(store_folder(), shared_store())


def run_plan(
    plan: list[Step],
    store: Store,
    *,
    resume: bool,
    progress: Progress,
    finished: Callable[[Step, bool], None] = lambda step, reused: None,
    artifacts: Mapping[str, Artifact] | None = None,
    fresh: set[str] | None = None,
) -> dict[str, Artifact]:
    """The artifact of every step, by step name.

    Args:
        resume: reuse what earlier runs have stored.
        finished: called once with each step, and whether its artifact was reused.
        artifacts: artifacts of steps before the plan; the result includes them.
        fresh: keys of the steps that this run has computed, which it always reuses; later plans take the same set.
    """
    artifacts, fresh = dict(artifacts or {}), set() if fresh is None else fresh
    for step in plan:
        by = step.identity(artifacts)
        key = by.key
        artifact = store.find(key) if resume or key in fresh else None
        measured_now = step.measured and key in fresh  # a measurement of this run is used even if it was disturbed
        if artifact is not None and not measured_now and not step.usable(artifact.path):
            store.remove(key)
            artifact = None
        if artifact is None:
            if not resume:
                store.remove(key)
            kept = {"scratch": store.unfinished(key)} if step.resumable else {}
            artifact = store.make(
                by,
                lambda out, s=step, k=kept: s.write(artifacts, out, progress, **k),  # type: ignore[misc]
                name=step.name,
                about=step.about,
            )
            fresh.add(key)
            finished(step, False)
        elif key not in fresh:
            finished(step, True)
        artifacts[step.name] = artifact
    return artifacts


def preview(plan: list[Step], store: Store) -> list[tuple[str, bool]]:
    """Preview a run: each step's name, and whether its artifact exists already. Computes nothing.

    A step's key needs its inputs' digests, so all steps after a missing one that depend on it count as missing.
    """
    artifacts: dict[str, Artifact] = {}
    rows = []
    for step in plan:
        known = all(name in artifacts for name in step.inputs)
        found = store.find(step.key(artifacts)) if known else None
        if found is not None and not step.usable(found.path):
            found = None
        if found is not None:
            artifacts[step.name] = found
        rows.append((step.name, found is not None))
    return rows


# --- The expected time of stages: from similar stages in the log, otherwise by a rule ---------------------------------


# Stages are similar if their numbers of parameters, pixels and images differ by no more than this factor.
ALIKE = 1.25
# Estimates use at most this many of the latest similar stages.
LAST = 20
# Seconds by the kind of a stage: fixed, per million parameters, and per 1e9 MACs (estimated as parameters times patches
# of 16x16 pixels); on two cores of an Intel Xeon with AVX512-VNNI.
RULES: Mapping[str, tuple[float, float, float]] = {
    "reference": (2, 0, 0.013), "export": (5.5, 0.1, 0), "optimize": (0.5, 0.08, 0), "calibrate": (5, 0, 0.012),
    "high_precision": (10, 0.5, 0), "float_rest": (4, 0.2, 0), "search": (40, 1, 0), "place": (1.5, 0.08, 0),
    "parts": (0, 0.002, 0), "compile": (1, 0.03, 0), "verify": (1, 0, 0.01), "attention": (1, 0.02, 0),
}  # fmt: skip
OTHER, CORES = (5, 0.2, 0.01), 2
# A stage takes at most this many times the rule's estimate, over all models that were tested.
MOST_BY_RULE = 3


class StepTimes:
    """Times and sizes of stages from the log of a store. `anywhere`: include stages from other kinds of machines."""

    def __init__(self, log: Iterable[Line], *, anywhere: bool) -> None:
        self._seen: dict[str, deque[Line]] = defaultdict(lambda: deque(maxlen=1000))
        cpu, cores = this_machine()
        for line in log:
            if anywhere or (line.made.cpu, line.made.cores) == (cpu, cores):
                self._seen[line.made.name].append(line)

    def of(self, step: Step) -> tuple[Estimate | None, Estimate | None, int]:
        """The expected seconds and bytes of a stage, and the number of similar stages that they come from; (None, None,
        0) without any."""
        found = [line for line in self._seen[step.name] if _alike(line.made.about, step.about)][-LAST:]
        if not found:
            return None, None, 0
        return _estimate([line.made.seconds for line in found]), _estimate([line.bytes for line in found]), len(found)


def expected_stages(plan: list[Step], store: Store, *, resume: bool) -> ExpectedTime:
    """The expected time of the stages of a plan that are not in the store."""
    times, seconds, most = StepTimes(read_log(store.root), anywhere=False), 0.0, 0.0
    stored = dict(preview(plan, store)) if resume else {}
    for step in plan:
        if stored.get(step.name):
            continue
        known, _, _ = times.of(step)
        one = by_rule(step.kind, step.about) if known is None else known.median
        seconds += one
        most += MOST_BY_RULE * one if known is None else max(known.most, MOST_BY_RULE * one / 2)
    return ExpectedTime(seconds, most)


def by_rule(kind: str, about: Mapping[str, int]) -> float:
    """The expected seconds of a stage by `RULES`, for a stage that never ran on this machine."""
    fixed, by_size, by_products = RULES.get(kind, OTHER)
    size = about.get("parameters", 0) / 1e6
    products = size * about.get("pixels", 0) / 256 * (about.get("images", 0) + about.get("samples", 0)) / 1e3
    return fixed + (by_size * size + by_products * products) * CORES / min(usable_cores(), 2 * CORES)


def _alike(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return one.keys() == other.keys() and all(
        max(one[name], other[name]) <= ALIKE * min(one[name], other[name]) for name in one
    )


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(min(values), statistics.median(values), max(values))
