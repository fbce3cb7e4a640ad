"""Run a plan: find each step's artifact in the store, or make it. A second run resumes where the first one stopped."""

from collections.abc import Callable, Mapping

from vitdeploy.progress import Progress
from vitdeploy.stages.step import Step
from vitdeploy.store.store import Artifact, Store, shared_store, store_folder


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
        finished: called with each step that is not of this run already, and whether it was reused.
        artifacts: artifacts of steps before the plan; the result includes them.
        fresh: keys of the steps that this run has computed, which it always reuses; later plans take the same set.
    """
    artifacts, fresh = dict(artifacts or {}), set() if fresh is None else fresh
    for step in plan:
        by = step.identity(artifacts)
        key = by.key
        found = store.find(key) if resume or key in fresh else None
        measured_now = step.measured and key in fresh  # once is enough, whatever it says
        if found is not None and not measured_now and not step.usable(found.path):
            store.remove(key)
            found = None
        if found is None:
            if not resume:
                store.remove(key)
            kept = {"scratch": store.unfinished(key)} if step.resumable else {}
            found = store.make(
                by,
                lambda out, s=step, k=kept: s.write(artifacts, out, progress, **k),  # type: ignore[misc]
                name=step.name,
                about=step.about,
            )
            fresh.add(key)
            finished(step, False)
        elif key not in fresh:
            finished(step, True)
        artifacts[step.name] = found
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
