"""Answers of the original to the evaluation samples: what all engines are compared with."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.runtime.host import describe_host
from vitdeploy.stages.answers import write_answers
from vitdeploy.stages.reference_model import ReferenceModel, reference_runner
from vitdeploy.stages.step import REFERENCE, Folders, Step
from vitdeploy.stages.tools import package_versions
from vitdeploy.tasks.adapter import Data, TaskAdapter


def run_reference(
    reference_model: ReferenceModel,
    adapter: TaskAdapter,
    data: Data,
    out: Path,
    progress: Progress = silent,
    scratch: Path | None = None,
) -> None:
    """Writes what the original says to the evaluation samples; `scratch` as for `write_answers`."""
    count = Counter(progress, f"original on the evaluation {adapter.noun}s", len(data.evaluation))
    write_answers(adapter, reference_runner(reference_model.source), data, out, count, scratch)


def reference_step(reference_model: ReferenceModel, adapter: TaskAdapter, data: Data) -> Step:
    """The step that computes the original's answers to the evaluation samples; it needs no other step."""

    def write(folders: Folders, out: Path, progress: Progress, scratch: Path) -> None:
        run_reference(reference_model, adapter, data, out, progress, scratch)

    return Step(
        REFERENCE,
        "reference",
        write,
        reference_model.identity(),
        (),
        {**reference_model.digests, "samples": data.evaluation_digest},
        {**package_versions(("torch", "timm", "transformers", "pillow", "numpy")), "host": str(describe_host())},
        resumable=True,
    )
