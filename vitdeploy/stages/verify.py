"""An engine's answers to the evaluation samples, compared with those of the original."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.document.verified import SameTensor, Verified, diagnosed
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.runtime.engine import make_runner
from vitdeploy.spec import EngineSpec, Postprocess, PreprocessSpec, encode
from vitdeploy.stages.answers import read_answers, write_answers
from vitdeploy.stages.engines import read_engine
from vitdeploy.stages.files import write_json
from vitdeploy.stages.step import REFERENCE, Candidate, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions
from vitdeploy.tasks.adapter import Data, TaskAdapter
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.diagnosis import diagnose


def run_engine(
    engine: EngineSpec,
    folder: Path,
    adapter: TaskAdapter,
    data: Data,
    out: Path,
    progress: Progress = silent,
    scratch: Path | None = None,
) -> None:
    """Writes what an engine says to the evaluation samples; `scratch` as for `write_answers`."""
    count = Counter(progress, f"{engine.artifact} on the evaluation {adapter.noun}s", len(data.evaluation))
    write_answers(adapter, make_runner(folder, engine, spinning=False), data, out, count, scratch)


def judge(
    adapter: TaskAdapter,
    ours: Answers,
    reference: Answers,
    data: Data,
    precision: str,
    preprocess: tuple[PreprocessSpec | None, PreprocessSpec | None],
    reference_on_our_tensor: Answers | None,
) -> Verified:
    """Compare one artifact with the original: on the same image, on the same tensor, and why they differ.

    preprocess: of the artifact and of the original. reference_on_our_tensor: the original's answers to the artifact's
    tensors if their preprocessing differs; None if it cannot take these.
    """
    image = adapter.verify(ours, reference, data)
    tensor: Comparison | None = image
    if preprocess[0] != preprocess[1]:
        tensor = None if reference_on_our_tensor is None else adapter.verify(ours, reference_on_our_tensor, data)
    return explained(image, tensor, precision, preprocess)


def explained(
    image: Comparison,
    tensor: Comparison | None,
    precision: str,
    preprocess: tuple[PreprocessSpec | None, PreprocessSpec | None],
) -> Verified:
    """A comparison on the same images with why the two differ. `tensor`: the same on the artifact's tensors, None if
    the original cannot take these; the others as of `judge`."""
    same = None if tensor is None else SameTensor(tensor.agreement, tensor.max_difference)
    return diagnosed(image, same, diagnose(tensor, image, *preprocess, precision))


def verify_step(
    candidate: Candidate,
    preprocess: PreprocessSpec | None,
    postprocess: Postprocess | None,
    adapter: TaskAdapter,
    data: Data,
) -> Step:
    """The step for the answers of a candidate's engine, judged by `judge`. The original keeps its own preprocessing."""

    def write(folders: Folders, out: Path, progress: Progress, scratch: Path) -> None:
        folder = folders[candidate.step("compile")].path
        engine = read_engine(folder)
        run_engine(engine, folder, adapter, data, out, progress, scratch)
        ours, reference = read_answers(out), read_answers(folders[REFERENCE].path)
        found = judge(adapter, ours, reference, data, engine.precision, (preprocess, preprocess), None)
        write_json(out / "verify.json", found)

    return Step(
        candidate.step("verify"),
        "verify",
        write,
        {
            "preprocess": encode(preprocess),
            "postprocess": encode(postprocess),
            "mapping": data.mapping.digest if data.mapping is not None else None,
        },
        (candidate.step("compile"), REFERENCE),
        {"samples": data.evaluation_digest},
        {**target_tools(candidate.target), **package_versions(("pillow", "numpy", "scipy", "pycocotools"))},
        resumable=True,
    )
