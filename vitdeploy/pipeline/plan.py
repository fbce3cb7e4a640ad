"""From a job to its plan: the steps in order, each with everything its key is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.errors import DataError
from vitdeploy.pipeline import stages
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.stages import MODEL_FILE, PlaceConfig, Progress
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import TARGETS, Precision, encode
from vitdeploy.store.store import Artifact

Folders = Mapping[str, Artifact]
EXPORT, CALIBRATE, REFERENCE = "export", "calibrate", "reference"
EXPORT_TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "numpy")


@dataclass(frozen=True)
class Step:
    """One stage with its config. `inputs` are names of earlier steps; `outside` are digests of files from outside."""

    name: str
    kind: str
    write: Callable[[Folders, Path, Progress], None]
    config: dict[str, Any]
    inputs: tuple[str, ...] = ()
    outside: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True)
class Candidate:
    """A target in one precision; `shipped` where it is what the recipe asks for, else a float baseline."""

    target: str
    precision: Precision
    shipped: bool

    @property
    def artifact(self) -> str:
        return f"{self.target}-{self.precision}"

    def step(self, kind: str) -> str:
        return f"{kind} {self.artifact}"


def candidates(job: Job) -> list[Candidate]:
    """Every target in the recipe's precision, and in FP32 beside it: only so can "INT8 is slower here" be said."""
    precision = job.recipe.precision
    asked = [Candidate(target, precision, True) for target in job.recipe.targets]
    baselines = [] if precision == "fp32" else [Candidate(c.target, "fp32", False) for c in asked]
    return asked + baselines


def make_plan(job: Job) -> list[Step]:
    """All storable steps of a job; measuring and bundling come after them and are never stored."""
    steps = [_export(job)]
    if job.recipe.precision == "int8":
        steps.append(_calibrate(job))
    for candidate in candidates(job):
        steps += [_place(candidate), _compile(job, candidate)]
    steps.append(_reference(job))
    steps += [_verify(job, candidate) for candidate in candidates(job)]
    return steps


def _export(job: Job) -> Step:
    config = replace(job.recipe.to_export(), preprocess=job.preprocess)

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        facts = stages.export(config, job.checkpoint, out, progress)
        check_classes(job.split.classes, facts["model"]["classes"])

    return Step(
        EXPORT,
        "export",
        write,
        encode(config),
        outside={"checkpoint": job.checkpoint_sha256 or "none"},
        tools=tool_versions(EXPORT_TOOLS),
    )


def check_classes(classes: tuple[str, ...], outputs: int) -> None:
    """Raise DataError where labels come from folders and there is not one folder a class."""
    if classes and len(classes) != outputs:
        raise DataError(
            "the class folders do not fit the model",
            found=f"{len(classes)} folders, {outputs} outputs of the model",
            wanted="one folder a class, in the model's class order by name",
            fix="add the missing folders (they may be empty), or set data.labels to none",
        )


def _calibrate(job: Job) -> Step:
    def write(folders: Folders, out: Path, progress: Progress) -> None:
        stages.calibrate(folders[EXPORT].path / MODEL_FILE, job.split.calibration, out, progress)

    return Step(
        CALIBRATE,
        "calibrate",
        write,
        {"observer": "minmax"},
        (EXPORT,),
        {"images": job.calibration_digest},
        tool_versions(("onnxruntime", "pillow", "numpy")),
    )


def _place(candidate: Candidate) -> Step:
    quantized = candidate.precision == "int8"
    config = PlaceConfig(candidate.target, candidate.precision)

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        ranges = folders[CALIBRATE].path / "ranges.json" if quantized else None
        progress(candidate.step("place"), 0, 1)
        stages.place_graph(config, folders[EXPORT].path / MODEL_FILE, ranges, out)
        progress(candidate.step("place"), 1, 1)

    return Step(
        candidate.step("place"),
        "place",
        write,
        asdict(config),
        (EXPORT, CALIBRATE) if quantized else (EXPORT,),
        tools=tool_versions(("onnx", "onnx-ir", "numpy")),
    )


def _compile(job: Job, candidate: Candidate) -> Step:
    batch = job.recipe.engine_batch

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        placed = folders[candidate.step("place")].path
        progress(candidate.step("compile"), 0, 1)
        stages.compile_graph(placed / MODEL_FILE, candidate.target, batch, out)
        progress(candidate.step("compile"), 1, 1)

    return Step(
        candidate.step("compile"),
        "compile",
        write,
        {"target": candidate.target, "batch": batch},
        (candidate.step("place"),),
        tools=_target_tools(candidate),
    )


def _reference(job: Job) -> Step:
    def write(folders: Folders, out: Path, progress: Progress) -> None:
        stages.run_reference(
            job.recipe.source.model, job.checkpoint, job.preprocess, job.split.evaluation, out, progress
        )

    config = {"model": job.recipe.source.model, "preprocess": encode(job.preprocess)}
    outside = {"checkpoint": job.checkpoint_sha256 or "none", "images": job.evaluation_digest}
    return Step(
        REFERENCE,
        "reference",
        write,
        config,
        (),
        outside,
        {**tool_versions(("torch", "pillow", "numpy")), "host": str(describe_host())},
    )


def _verify(job: Job, candidate: Candidate) -> Step:
    def write(folders: Folders, out: Path, progress: Progress) -> None:
        folder = folders[candidate.step("compile")].path
        engine = stages.read_engine(folder)
        samples = job.split.evaluation
        stages.run_engine(engine, folder, job.preprocess, samples, out, progress)
        found = stages.agreement_of(
            np.load(out / "logits.npy"),
            np.load(folders[REFERENCE].path / "logits.npy"),
            samples,
            engine.precision,
            job.preprocess,
            job.preprocess,
        )
        stages.write_json(out / "verify.json", found)

    return Step(
        candidate.step("verify"),
        "verify",
        write,
        {"preprocess": encode(job.preprocess)},
        (candidate.step("compile"), REFERENCE),
        {"images": job.evaluation_digest},
        {**_target_tools(candidate), **tool_versions(("pillow", "numpy", "scipy"))},
    )


def _target_tools(candidate: Candidate) -> dict[str, str]:
    """An engine belongs to its runtime's version and to this machine."""
    return {**tool_versions((TARGETS[candidate.target].package,)), "host": str(describe_host())}
