"""The run of one recipe of a sweep, here or on a node that measures."""

from __future__ import annotations

import shutil
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.document.read import read_report
from vitdeploy.document.report import Report
from vitdeploy.errors import WorkerError
from vitdeploy.pipeline.assemble import run_pipeline
from vitdeploy.pipeline.job import Job
from vitdeploy.progress import silent
from vitdeploy.publish import replacing
from vitdeploy.stages.files import OUTPUT_NAMES
from vitdeploy.stages.step import Step
from vitdeploy.store.key import artifact_key
from vitdeploy.store.places import shared_store
from vitdeploy.store.store import Store
from vitdeploy.workflows.sweeps.entries import Entry

# The kind of artifact by which a bundle travels, and its folder in there.
TRAVELS, BUNDLE = "swept", "bundle"


def measure(entry: Entry, jobs: tuple[Job, ...], out: Path, told: Callable[[str], None]) -> Report:
    """Run a recipe, whose `jobs` are those of `Entry.prepare`, with the bundle at `out`. What the store has is taken
    from there. `told`: called with a line on what a user should know. Errors of stages and of the bench propagate."""
    recipe = entry.load()

    def finished(job: Job, step: Step, reused: bool) -> None:
        if step.measured and reused:
            told(f"{recipe.name}: {step.name} was chosen by times that were measured earlier on this device")

    for note in dict.fromkeys(note for job in jobs for note in (*job.data.notes, *job.data.warnings)):
        told(f"{recipe.name}: {note}")
    report, _ = run_pipeline(
        jobs,
        recipe,
        out,
        Store(entry.store, shared_store()),
        resume=True,
        progress=lambda job: silent,
        finished=finished,
        note=lambda job, text: told(f"{recipe.name}: {text}"),
    )
    return report


@dataclass(frozen=True)
class MeasuredThere:
    """What a node has measured: its bundle is in the store under `key`. `told`: lines for the user; `host`: its
    name."""

    key: str
    told: tuple[str, ...]
    host: str


def measure_there(entry: Entry) -> MeasuredThere:
    """Run a recipe on this node; its bundle goes to the store, where the command that asked takes it from. Errors as
    those of `measure`."""
    told: list[str] = []
    asked = {"recipe": entry.load().name, "of": uuid.uuid4().hex}
    key = artifact_key(TRAVELS, asked, {}, {})
    store = Store(entry.store, shared_store())

    def write(work: Path) -> None:
        measure(entry, entry.prepare(), work / BUNDLE, told.append)

    store.make(key, TRAVELS, asked, {}, {}, write)
    if store.shared is not None:  # from there it is taken
        store.remove(key)
    return MeasuredThere(key, tuple(told), socket.gethostname())


def bring(found: MeasuredThere, store: Store, out: Path) -> Report:
    """Give the bundle that a node has measured its place, and take it out of the store of this machine.

    Raises:
        WorkerError: it is not in the store. OutputError: `out` holds something that is not a bundle.
    """
    artifact = store.find(found.key)
    if artifact is None:
        raise WorkerError(
            f"the bundle that {found.host} has measured is not in the store",
            found=f"no artifact {found.key[:12]} that is whole",
            wanted="a store that the node and this machine share",
            fix="the same command measures it again",
        )
    with replacing(out, OUTPUT_NAMES) as work:
        shutil.copytree(artifact.path / BUNDLE, work, dirs_exist_ok=True)
    store.remove(found.key)
    return read_report(out / "report.json")
