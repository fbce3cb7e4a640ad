"""Answers of the original and of the engines to the evaluation samples, and their comparison."""

import contextlib
import dataclasses
import functools
import hashlib
import shutil
from pathlib import Path

import numpy as np

from vitdeploy.data.decoding import DecodedSet
from vitdeploy.document.verified import SameTensor, Verified, diagnosed
from vitdeploy.extensions import extension_versions
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.publish import storage_errors
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.trust import open_atomic
from vitdeploy.spec import EngineSpec, Postprocess, PreprocessSpec, encode
from vitdeploy.stages import step
from vitdeploy.stages.reference_model import ReferenceModel, reference_runner
from vitdeploy.tasks.adapter import Count, Data, TaskAdapter
from vitdeploy.tasks.images import scratch_folder
from vitdeploy.verification.comparison import Comparison, diagnose
from vitdeploy.verification.records import PIECE, Answers, LazyColumn
from vitdeploy.zip_members import DAMAGED

# --- The answer files of the original and of every engine: one file, or one per `PIECE` samples -----------------------
# With several files, an interrupted stage resumes after the last complete file, and readers keep one file in memory.


ANSWERS_FILE = "answers.npz"
PIECE_FILE = "answers-{:06}.npz"


def write_answers(
    adapter: TaskAdapter, runner: Runner, data: Data, out: Path, count: Count, scratch: Path | None = None
) -> None:
    """Write a runner's answers to the evaluation samples into `out`. `scratch` keeps the files of many answers, so that
    an interrupted call can resume. Errors of the runner and of images propagate."""
    samples = len(data.evaluation)
    if samples <= PIECE or not adapter.divisible:
        adapter.answers(runner, data, count).save(out / ANSWERS_FILE)
        return
    ranges = [range(start, min(start + PIECE, samples)) for start in range(0, samples, PIECE)]
    missing = []
    for number, part in enumerate(ranges):
        file = PIECE_FILE.format(number)
        if scratch is not None and _is_whole(scratch / file, len(part)):
            shutil.copyfile(scratch / file, out / file)
            count(len(part))
        else:
            missing.append(number)
    found = adapter.parts(runner, data, [ranges[number] for number in missing], count) if missing else iter(())
    for number, answers in zip(missing, found, strict=True):
        file = PIECE_FILE.format(number)
        answers.save(out / file)
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            _keep(out / file, scratch)


def _keep(file: Path, scratch: Path) -> None:
    # Another run may have finished the stage and removed the folder.
    with (
        contextlib.suppress(FileNotFoundError),
        storage_errors(scratch),
        file.open("rb") as written,
        open_atomic(scratch / file.name) as kept,
    ):
        shutil.copyfileobj(written, kept)


def read_answers(folder: Path) -> Answers:
    """The answers in a folder. If they are in several files, only the file in use is held in memory."""
    if (folder / ANSWERS_FILE).exists():
        return Answers.load(folder / ANSWERS_FILE)
    files = sorted(folder.glob(PIECE_FILE.format(0).replace("000000", "*")))
    if not files:
        raise FileNotFoundError("no answer files")

    @functools.lru_cache(maxsize=1)
    def read(number: int) -> Answers:
        return Answers.load(files[number])

    last, size = len(read(len(files) - 1)), len(read(0))

    def column(name: str) -> LazyColumn:
        make = lambda index: np.asarray(read(index // size).columns[name][index % size])  # noqa: E731
        return LazyColumn((len(files) - 1) * size + last, make)

    return Answers({name: column(name) for name in read(0).columns})


def _is_whole(file: Path, samples: int) -> bool:
    try:
        return len(Answers.load(file)) == samples
    except DAMAGED:
        return False


# --- Answers of the original to the evaluation samples, which all engines are compared with ---------------------------


def run_reference(
    reference_model: ReferenceModel,
    adapter: TaskAdapter,
    data: Data,
    out: Path,
    progress: Progress = silent,
    scratch: Path | None = None,
) -> None:
    """Write the original's answers to the evaluation samples; `scratch` as for `write_answers`."""
    count = Counter(progress, f"original on the evaluation {adapter.noun}s", len(data.evaluation))
    write_answers(adapter, reference_runner(reference_model.source), data, out, count, scratch)


def _tools(adapter: TaskAdapter) -> dict[str, str]:
    """What the original's answers depend on besides the model and the samples."""
    versions = step.package_versions(("torch", "timm", "transformers", "pillow", "numpy"))
    return {**versions, **extension_versions(adapter.setting.task), "host": str(describe_host())}


def reference_step(reference_model: ReferenceModel, adapter: TaskAdapter, data: Data) -> step.Step:
    """The step that computes the original's answers to the evaluation samples; it depends on no other step."""

    def write(folders: step.Folders, out: Path, progress: Progress, scratch: Path) -> None:
        run_reference(reference_model, adapter, data, out, progress, scratch)

    return step.Step(
        step.REFERENCE,
        "reference",
        write,
        reference_model.identity(),
        (),
        {**reference_model.digests, "samples": data.evaluation_digest},
        _tools(adapter),
        resumable=True,
    )


# --- Post-processing parameters that are chosen on the original's answers to labelled calibration samples -------------


FITTED, FITTED_FILE = "fit_outputs", "postprocess.json"


def fit_step(reference_model: ReferenceModel, adapter: TaskAdapter, data: Data) -> step.Step:
    """The step that writes FITTED_FILE, for a task with parameters to choose (`TaskAdapter.fits`), such as thresholds.
    It reads no evaluation sample."""
    samples, known = data.calibration, hashlib.sha256()
    if data.truth is not None:
        known.update(b"".join(hashlib.sha256(data.truth[sample.path].content()).digest() for sample in samples))

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        count = Counter(progress, f"original on the calibration {adapter.noun}s", len(samples))
        labelled = dataclasses.replace(data, evaluation=samples, decoded=DecodedSet(samples, scratch_folder()))
        found = adapter.answers(reference_runner(reference_model.source), labelled, count)
        postprocess, note = adapter.fit(found, labelled)
        step.write_json(out / FITTED_FILE, {"postprocess": encode(postprocess), "note": note})

    return step.Step(
        FITTED,
        FITTED,
        write,
        reference_model.identity(),
        (),
        {**reference_model.digests, "images": data.calibration_digest, "labels": known.hexdigest()},
        _tools(adapter),
    )


# --- An engine's answers to the evaluation samples, compared with those of the original -------------------------------


def run_engine(
    engine: EngineSpec,
    folder: Path,
    adapter: TaskAdapter,
    data: Data,
    out: Path,
    progress: Progress = silent,
    scratch: Path | None = None,
) -> None:
    """Write an engine's answers to the evaluation samples; `scratch` as for `write_answers`."""
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
    """Compare one artifact with the original, on the same images and on the same tensors, and explain the differences.

    preprocess: the specs of the artifact and of the original. reference_on_our_tensor: the original's answers to the
    artifact's tensors if their preprocessing differs; None if the original cannot take these tensors.
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
    """A comparison on the same images, with the likely cause of the differences. `tensor`: the comparison on the
    artifact's tensors, None if the original cannot take these; other arguments as for `judge`."""
    same = None if tensor is None else SameTensor(tensor.agreement, tensor.max_difference)
    return diagnosed(image, same, diagnose(tensor, image, *preprocess, precision))


def verify_step(
    candidate: step.Candidate,
    preprocess: PreprocessSpec | None,
    postprocess: Postprocess | None,
    adapter: TaskAdapter,
    data: Data,
) -> step.Step:
    """The step that computes the answers of a candidate's engine and compares them (`judge`). The original keeps its
    own preprocessing."""

    def write(folders: step.Folders, out: Path, progress: Progress, scratch: Path) -> None:
        folder = folders[candidate.step("compile")].path
        engine = step.read_engine(folder)
        run_engine(engine, folder, adapter, data, out, progress, scratch)
        ours, reference = read_answers(out), read_answers(folders[step.REFERENCE].path)
        found = judge(adapter, ours, reference, data, engine.precision, (preprocess, preprocess), None)
        step.write_json(out / "verify.json", found)

    return step.Step(
        candidate.step("verify"),
        "verify",
        write,
        {
            "preprocess": encode(preprocess),
            "postprocess": encode(postprocess),
            "mapping": data.mapping.digest if data.mapping is not None else None,
        },
        (candidate.step("compile"), step.REFERENCE),
        {"samples": data.evaluation_digest},
        {
            **step.target_tools(candidate.target),
            **step.package_versions(("pillow", "numpy", "scipy", "pycocotools")),
            **extension_versions(adapter.setting.task),
        },
        resumable=True,
    )
