"""Answers of the original and of an engine to the evaluation samples, and what they say of each other."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.document.engine import SameTensor, Verified, diagnosed
from vitdeploy.pipeline.progress import Counter, Progress, silent
from vitdeploy.pipeline.reference_model import ReferenceModel, reference_runner
from vitdeploy.pipeline.tasks.adapter import Data, TaskAdapter
from vitdeploy.runtime.engine import make_runner
from vitdeploy.spec import EngineSpec, PreprocessSpec
from vitdeploy.verify.collect import Answers
from vitdeploy.verify.comparison import Comparison
from vitdeploy.verify.diagnosis import diagnose

ANSWERS_FILE = "answers.npz"


def run_reference(
    reference_model: ReferenceModel, adapter: TaskAdapter, data: Data, out: Path, progress: Progress = silent
) -> None:
    """Writes answers.npz: what the original says to the evaluation samples."""
    count = Counter(progress, f"original on the evaluation {adapter.noun}s", len(data.evaluation))
    adapter.answers(reference_runner(reference_model.source), data, count).save(out / ANSWERS_FILE)


def run_engine(
    engine: EngineSpec, folder: Path, adapter: TaskAdapter, data: Data, out: Path, progress: Progress = silent
) -> None:
    """Writes answers.npz: what an engine says to the evaluation samples."""
    count = Counter(progress, f"{engine.artifact} on the evaluation {adapter.noun}s", len(data.evaluation))
    adapter.answers(make_runner(folder, engine), data, count).save(out / ANSWERS_FILE)


def read_answers(folder: Path) -> Answers:
    return Answers.load(folder / ANSWERS_FILE)


def judge(
    adapter: TaskAdapter,
    ours: Answers,
    reference: Answers,
    data: Data,
    precision: str,
    preprocess: tuple[PreprocessSpec | None, PreprocessSpec | None],
    reference_on_our_tensor: Answers | None,
) -> Verified:
    """What `verify` says of one artifact: on the same image, on the same tensor, and why they differ.

    preprocess: of the artifact and of the original. reference_on_our_tensor: what the original says to the artifact's
    tensors, where their preprocessing differs; None where it cannot be fed these.
    """
    image = adapter.compare(ours, reference, data)
    tensor: Comparison | None = image
    if preprocess[0] != preprocess[1]:
        tensor = None if reference_on_our_tensor is None else adapter.compare(ours, reference_on_our_tensor, data)
    same = None if tensor is None else SameTensor(tensor.agreement, tensor.max_difference)
    return diagnosed(image, same, diagnose(tensor, image, *preprocess, precision))
