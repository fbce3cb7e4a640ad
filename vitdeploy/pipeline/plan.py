"""From a job to its plan: the steps in order, each with everything its key is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitdeploy.backends import TARGETS
from vitdeploy.compile.backend import COMPILE
from vitdeploy.pipeline.examples import choose
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.progress import Progress
from vitdeploy.pipeline.reference_model import ReferenceModel
from vitdeploy.pipeline.stages import attention as looking
from vitdeploy.pipeline.stages import compile as compiling
from vitdeploy.pipeline.stages import verify as judging
from vitdeploy.pipeline.stages.export import export
from vitdeploy.pipeline.stages.files import MODEL_FILE, graphs_in, write_json
from vitdeploy.pipeline.stages.optimize import optimize
from vitdeploy.pipeline.stages.quantize import PlaceConfig, calibrate, place_graphs
from vitdeploy.pipeline.stages.search import SearchConfig, find_mixed, read_mixed
from vitdeploy.pipeline.stages.typed import place_typed
from vitdeploy.pipeline.tasks.adapter import ImageKit
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import Precision, encode
from vitdeploy.store.store import Artifact

Folders = Mapping[str, Artifact]
EXPORT, OPTIMIZE, CALIBRATE, REFERENCE, ATTENTION = "export", "optimize", "calibrate", "reference", "attention"
QUANTIZED = ("int8", "mixed", "fp8")
EXPORT_TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "numpy", "timm", "transformers")


@dataclass(frozen=True)
class Step:
    """One stage with its config. `inputs` are names of earlier steps; `outside` are digests of files from outside.

    `write` takes the inputs' folders, the empty folder to fill, and a progress; where the step is `resumable` also
    `scratch`: a folder of its key, to keep what an interrupted run needs to go on.
    `measured`: it holds times of this device, whose reuse is told. `usable` says of a stored folder whether it may be
    used by this user; one that may not is made again.
    """

    name: str
    kind: str
    write: Callable[..., None]
    config: dict[str, Any]
    inputs: tuple[str, ...] = ()
    outside: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    version: int = 1
    resumable: bool = False
    measured: bool = False
    usable: Callable[[Path], bool] = lambda folder: True


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
    """Every target in the recipe's precision, and beside it in FP32, so that "INT8 is slower here" can be said; mixed
    precision beside INT8 too, which it is to be better than."""
    precision = job.recipe.precision
    asked = [Candidate(target, precision, True) for target in job.recipe.targets]
    baselines = [Candidate(c.target, "int8", False) for c in asked] if precision == "mixed" else []
    baselines += [Candidate(c.target, "fp32", False) for c in asked] if precision != "fp32" else []
    return asked + baselines


def make_plan(job: Job) -> list[Step]:
    """All storable steps of a job; measuring and bundling come after them and are never stored. The original answers
    first: that says what the budget can prove."""
    contenders = candidates(job)
    reference, *verdicts = judge_plan(job, contenders)
    steps = [reference, *engine_plan(job, contenders), *verdicts]
    return [*steps, _attention(job, contenders)] if job.reference_model.task in looking.TASKS else steps


def engine_plan(job: Job, contenders: Sequence[Candidate]) -> list[Step]:
    """From the original to the compiled engines of some candidates."""
    steps = [_export(job), _optimize(job)]
    if any(candidate.precision in QUANTIZED for candidate in contenders):
        steps.append(_calibrate(job))
    for candidate in contenders:
        if candidate.precision == "mixed":
            steps.append(_search(job, candidate))
        steps += [_place(job, candidate), _compile(job, candidate)]
    return steps


def judge_plan(job: Job, contenders: Sequence[Candidate]) -> list[Step]:
    """The answers of the original, and of compiled engines, to the evaluation samples."""
    return [reference_step(job), *(_verify(job, candidate) for candidate in contenders)]


def _original(reference_model: ReferenceModel) -> dict[str, Any]:
    """What answers of the original depend on, beside the bytes of its files; no path of this machine is part of it."""
    source = reference_model.source
    return {
        "model": None if reference_model.digests and source.checkpoint is None else source.model,
        "image_size": source.image_size,
        "batch": source.only_batch,
        "heads": source.heads,
        "preprocess": encode(reference_model.preprocess),
        "postprocess": encode(reference_model.postprocess),
        "labels": list(reference_model.labels),
    }


def _export(job: Job) -> Step:
    config = job.recipe.to_export()

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        export(job.reference_model, config, out, progress)

    return Step(
        EXPORT,
        "export",
        write,
        {**_original(job.reference_model), **encode(config)},
        outside=dict(job.reference_model.digests),
        tools=tool_versions(EXPORT_TOOLS),
        version=3,
    )


def _optimize(job: Job) -> Step:
    options = job.recipe.optimize.to_options()

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        optimize(graphs_in(folders[EXPORT].path), options, out, progress)

    tools = tool_versions(("onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy"))
    return Step(OPTIMIZE, "optimize", write, asdict(options), (EXPORT,), tools=tools)


def _calibrate(job: Job) -> Step:
    def write(folders: Folders, out: Path, progress: Progress, scratch: Path) -> None:
        calibrate(folders[OPTIMIZE].path / MODEL_FILE, job.data.calibration, out, progress, scratch)

    return Step(
        CALIBRATE,
        "calibrate",
        write,
        {},
        (OPTIMIZE,),
        {"images": job.data.calibration_digest},
        tool_versions(("onnxruntime", "pillow", "numpy")),
        version=5,
        resumable=True,
    )


def _search(job: Job, candidate: Candidate) -> Step:
    config = SearchConfig(candidate.target, weight_bits=job.weight_bits)
    budget = job.recipe.to_budget()

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph, statistics = folders[OPTIMIZE].path / MODEL_FILE, folders[CALIBRATE].path / "statistics.npz"
        find_mixed(config, budget, graph, statistics, job.data.calibration, out, progress)

    return Step(
        candidate.step("search"),
        "search",
        write,
        {**asdict(config), "min_agreement": budget.min_agreement, "max_drop": budget.max_drop},
        (OPTIMIZE, CALIBRATE),
        {"images": job.data.calibration_digest},
        {**target_tools(candidate.target), **tool_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        version=2,
        measured=True,
    )


def _place(job: Job, candidate: Candidate) -> Step:
    quantized, mixed = candidate.precision in QUANTIZED, candidate.precision == "mixed"
    typed = TARGETS[candidate.target].typed and candidate.precision != "fp32"
    bits = job.weight_bits if quantized and not typed else 8
    config = PlaceConfig(candidate.target, candidate.precision, weight_bits=bits)

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        statistics = folders[CALIBRATE].path / "statistics.npz" if quantized else None
        progress(candidate.step("place"), 0, 1)
        found = read_mixed(folders[candidate.step("search")].path) if mixed else None
        if typed:
            graph = folders[OPTIMIZE].path / MODEL_FILE
            place_typed(config, graph, statistics, job.data.calibration, out, progress)
        else:
            place_graphs(config, folders[OPTIMIZE].path, statistics, out, found)
        progress(candidate.step("place"), 1, 1)

    return Step(
        candidate.step("place"),
        "place",
        write,
        asdict(config),
        (OPTIMIZE, *((CALIBRATE,) if quantized else ()), *((candidate.step("search"),) if mixed else ())),
        {"images": job.data.calibration_digest} if typed else {},
        tools=tool_versions(("onnx", "onnx-ir", "numpy", *(("onnxruntime", "pillow") if typed else ()))),
        version=6,
    )


def _compile(job: Job, candidate: Candidate) -> Step:
    batch = job.recipe.engine_batch
    build = job.recipe.to_build() if COMPILE[candidate.target].profiles is not None else None

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        progress(candidate.step("compile"), 0, 1)
        compiling.compile_graphs(folders[candidate.step("place")].path, candidate.target, batch, out, progress, build)
        progress(candidate.step("compile"), 1, 1)

    return Step(
        candidate.step("compile"),
        "compile",
        write,
        {"target": candidate.target, "batch": batch, **({"build": encode(build)} if build else {})},
        (candidate.step("place"),),
        tools=target_tools(candidate.target),
        version=2,
        usable=compiling.may_load,
    )


def reference_step(job: Job) -> Step:
    """What the original says to the evaluation samples; it needs no other step."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        judging.run_reference(job.reference_model, job.adapter, job.data, out, progress)

    return Step(
        REFERENCE,
        "reference",
        write,
        _original(job.reference_model),
        (),
        {**job.reference_model.digests, "samples": job.data.evaluation_digest},
        {**tool_versions(("torch", "timm", "transformers", "pillow", "numpy")), "host": str(describe_host())},
        version=2,
    )


def _verify(job: Job, candidate: Candidate) -> Step:
    def write(folders: Folders, out: Path, progress: Progress) -> None:
        folder = folders[candidate.step("compile")].path
        engine = compiling.read_engine(folder)
        judging.run_engine(engine, folder, job.adapter, job.data, out, progress)
        found = judging.judge(
            job.adapter,
            judging.read_answers(out),
            judging.read_answers(folders[REFERENCE].path),
            job.data,
            engine.precision,
            (job.reference_model.preprocess, job.reference_model.preprocess),
            None,
        )
        write_json(out / "verify.json", found)

    return Step(
        candidate.step("verify"),
        "verify",
        write,
        {
            "preprocess": encode(job.reference_model.preprocess),
            "postprocess": encode(job.reference_model.postprocess),
            "mapping": job.data.mapping.digest if job.data.mapping is not None else None,
        },
        (candidate.step("compile"), REFERENCE),
        {"samples": job.data.evaluation_digest},
        {**target_tools(candidate.target), **tool_versions(("pillow", "numpy", "scipy", "pycocotools"))},
        version=3,
    )


def _attention(job: Job, contenders: Sequence[Candidate]) -> Step:
    """Attention is read of the original, and of what is shipped in INT8, on the first examples of the report."""
    assert isinstance(job.adapter, ImageKit)
    adapter, shown = job.adapter, [c for c in contenders if c.shipped and c.precision in ("int8", "mixed")]

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        reference = judging.read_answers(folders[REFERENCE].path)
        answers = {c.artifact: judging.read_answers(folders[c.step("verify")].path) for c in contenders}
        numbers = [each.index for each in choose(adapter, reference, answers, job.data)[: looking.IMAGES]]
        preprocess, pixels = adapter.setting.images, adapter.pixels(job.data)
        images = {number: pixels[number][0] for number in numbers}
        placements = {c.artifact: folders[c.step("place")].path / MODEL_FILE for c in shown}
        looking.find_attention(folders[EXPORT].path / MODEL_FILE, placements, images, preprocess, out, progress)

    return Step(
        ATTENTION,
        "attention",
        write,
        {"preprocess": encode(job.reference_model.preprocess), "images": looking.IMAGES},
        (EXPORT, REFERENCE, *(c.step("place") for c in shown), *(c.step("verify") for c in contenders)),
        {"samples": job.data.evaluation_digest},
        tool_versions(("onnx", "onnx-ir", "onnxruntime", "numpy", "pillow")),
        version=2,
    )


def target_tools(target: str) -> dict[str, str]:
    """An engine belongs to its runtime's version and to this machine; on a GPU to that and its driver too.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT or GPU, where the target needs them.
    """
    tools = {**tool_versions((TARGETS[target].package,)), "host": str(describe_host())}
    return {**tools, **RUNTIME[target].describe_device()}
