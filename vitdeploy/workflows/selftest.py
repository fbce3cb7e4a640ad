"""The self-test: small models through the whole pipeline."""

import functools
import json
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import vitdeploy
from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import BenchCandidate, engine_candidate
from vitdeploy.compilation.backend import finding_lines
from vitdeploy.compilation.engine import examine, probe_target
from vitdeploy.document.bench import Bench, ErrorFacts
from vitdeploy.document.commands import SelftestDocument, SelftestEngine, SelftestModel, StepFacts, StepStatus
from vitdeploy.errors import GateError, MissingFileError, VitdeployError
from vitdeploy.pipeline import outcome, run
from vitdeploy.pipeline.job import Job, prepare, tool_versions
from vitdeploy.pipeline.measure import measure, original_candidate
from vitdeploy.pipeline.plan import engine_plan, judge_plan
from vitdeploy.progress import Progress
from vitdeploy.recipe.load import load_recipe, validate
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.report.html import render_selftest
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.spec import Precision, encode
from vitdeploy.stages.reference_model import to_request
from vitdeploy.stages.step import QUANTIZED, Candidate, read_engine
from vitdeploy.store.store import Artifact, Store
from vitdeploy.verification.comparison import follows
from vitdeploy.verification.gate import accuracy_gate, proves_nothing

# --- The models of a self-test: a small trained one, and a ViT-B/16 with seeded random weights ------------------------


DIGITS = "recipes/digits.yaml"


@dataclass(frozen=True)
class Case:
    """A model by its name; `recipe` returns the FP32 recipe for a target.

    `trained`: its accuracy is meaningful, in INT8 too.
    """

    name: str
    trained: bool
    recipe: Callable[[str], Recipe]


def default_cases() -> tuple[Case, ...]:
    return (Case("digits", True, _digits), Case("vit-b16-seeded", False, _vit_base))


def _digits(target: str) -> Recipe:
    """The recipe of `make demo`, for this target.

    Raises:
        MissingFileError: not run in a checkout, which has the recipe, the checkpoint and the images.
    """
    return load_recipe(_root() / DIGITS, (f"targets=[{target}]", "precision=fp32"))


def _vit_base(target: str) -> Recipe:
    """ViT-B/16 at 224 pixels on the images of the digits: its answers are noise, but its times are real."""
    data: dict[str, object] = {
        "path": str(_root() / "calibration" / "digits"),
        "labels": "none",
        "calibration": {"images": 32},
        "evaluation": {"images": 128},  # enough to prove the guard's 95 % with one changed answer
    }
    return validate(
        {
            "vitdeploy": 1,
            "name": "vit-b16-seeded",
            "source": {"model": "vit_base_patch16_224"},
            "data": data,
            "targets": [target],
            "precision": "fp32",
        },
        "vit-b16-seeded",
    )


def _root() -> Path:
    """The checkout of this package, or the one in the working folder."""
    for folder in (Path(vitdeploy.__file__).parents[1], Path.cwd()):
        if (folder / DIGITS).is_file():
            return folder
    raise MissingFileError(
        f"the self-test needs {DIGITS}",
        found=f"neither next to the package nor in {Path.cwd()}",
        expected="a checkout of vitdeploy: the package does not contain the weights and images",
        fix="run the command in a checkout of vitdeploy",
    )


# --- The steps of a self-test: each is attempted; failures are recorded, and the rest continues -----------------------


DONE: StepStatus = "done"
FAILED: StepStatus = "failed"
NOT_RUN: StepStatus = "not run"
LOGS = "logs"

T = TypeVar("T")


@dataclass
class Steps:
    """`rows` are those of selftest.json; the logs of failures are in `folder`."""

    folder: Path
    rows: list[StepFacts] = field(default_factory=list)

    def attempt(self, model: str, step: str, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None if it fails: only an interruption ends the self-test."""
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            self._fail(model, step, time.perf_counter() - start, error)
            return None
        self._add(StepFacts(model, step, DONE, time.perf_counter() - start))
        return result

    def skip(self, model: str, step: str, why: str) -> None:
        self._add(StepFacts(model, step, NOT_RUN, 0.0, why))

    def count(self, status: StepStatus) -> int:
        return sum(row.status == status for row in self.rows)

    def _fail(self, model: str, step: str, seconds: float, error: Exception) -> None:
        log = f"{LOGS}/{len(self.rows):02d}-{_file_name(model)}-{_file_name(step)}.txt"
        (self.folder / LOGS).mkdir(exist_ok=True)
        trace = "".join(traceback.format_exception(error))
        (self.folder / log).write_text(f"{error}\n\n{trace}", encoding="utf-8")
        known = error if isinstance(error, VitdeployError) else VitdeployError(f"a bug in vitdeploy: {error!r}"[:300])
        found = known.found.splitlines()[0] if known.found else ""
        detail = f"{known.message} ({found})" if found else known.message
        self._add(StepFacts(model, step, FAILED, seconds, detail, log, ErrorFacts.of(known)))

    def _add(self, row: StepFacts) -> None:
        self.rows.append(replace(row, seconds=round(row.seconds, 3)))


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


# --- The self-test of a target ----------------------------------------------------------------------------------------
# Every precision of every case is built, verified against PyTorch, and benched in alternating rounds.


# The precisions that a self-test tries, in this order.
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "fp8")
# Every name in a report's folder; a folder with other names is never replaced.
REPORT_NAMES = ("selftest.json", "report.html", "doctor.txt", "logs")
GPU_TOOLS = ("onnxruntime-gpu", "tensorrt", "tensorrt-cu13", "tensorrt-cu12", "cuda-python", "triton")
COMPILED = "torch.compile-fp16"


def run_selftest(
    target: str, cases: Sequence[Case], out: Path, store: Store, *, protocol: Protocol, progress: Progress
) -> SelftestDocument:
    """Fill the empty folder `out` with selftest.json, report.html, doctor.txt and the logs of failed steps.

    If the target does not work, nothing is attempted: the report then lists the missing requirements. `store` gets the
    engines; it should be new, because artifacts found in it are not made again.

    Returns: selftest.json.
    """
    findings = examine(target)
    missing = [finding.name for finding in findings if not finding.ok]
    why = f"needs {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "") if missing else ""
    steps, models = Steps(out), list[SelftestModel]()
    for case in cases:
        if missing:
            _skip_all(steps, case.name, target, why)
        else:
            models.append(_deploy(case, target, steps, store, protocol, functools.partial(_told, progress, case.name)))
    document = SelftestDocument(
        format=1,
        target=target,
        created=outcome.now(),
        works=not missing,
        passed=not missing and not steps.count(FAILED),
        sentence=_sentence(target, why, steps),
        doctor=tuple(findings),
        steps=tuple(steps.rows),
        models=tuple(models),
        environment={**describe_host(), **tool_versions((*outcome.TOOLS, *GPU_TOOLS))},
    )
    (out / "doctor.txt").write_text("".join(f"{line}\n" for line in finding_lines(findings)), encoding="utf-8")
    (out / "selftest.json").write_text(json.dumps(encode(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (out / "report.html").write_text(render_selftest(document), encoding="utf-8")
    return document


def _told(progress: Progress, model: str, text: str, done: int, total: int) -> None:
    progress(f"{model}: {text}", done, total)


def _sentence(target: str, why: str, steps: Steps) -> str:
    if why:
        return f"{target} does not work here, so nothing was run: it {why}."
    failed, left = steps.count(FAILED), steps.count(NOT_RUN)
    tried = len(steps.rows) - left
    not_run = f"; {left} not run" if left else ""
    return f"{target}: {tried - failed} of {tried} steps done{not_run}." + (f" {failed} failed." if failed else "")


def _candidates(target: str) -> list[Candidate]:
    return [Candidate(target, p, shipped=True) for p in PRECISIONS if p in TARGETS[target].precisions]


def _skip_all(steps: Steps, model: str, target: str, why: str, *, begun: bool = False) -> None:
    made = [step for c in _candidates(target) for step in (c.artifact, f"{c.artifact} answers")]
    for step in (*(() if begun else ("prepare",)), *made, "bench"):
        steps.skip(model, step, why)


def _deploy(
    case: Case, target: str, steps: Steps, store: Store, protocol: Protocol, progress: Progress
) -> SelftestModel:
    """One case: its engines and their times."""
    name = case.name
    job = steps.attempt(name, "prepare", lambda: prepare(case.recipe(target), skip_bad=False, progress=progress)[0])
    if job is None:
        _skip_all(steps, name, target, "the model or its images are missing", begun=True)
        return SelftestModel(name, case.trained)
    usable, fresh, engines = probe_target(target).precisions, set[str](), {}
    for candidate in _candidates(target):
        if candidate.precision not in usable:
            for step in (candidate.artifact, f"{candidate.artifact} answers"):
                steps.skip(name, step, f"this device does not support {candidate.precision}")
            continue
        plan = [*engine_plan(job, [candidate]), *judge_plan(job, [candidate])]
        made = steps.attempt(
            name,
            candidate.artifact,
            lambda plan=plan: run.run_plan(plan, store, resume=False, progress=progress, fresh=fresh),  # type: ignore[misc]
        )
        if made is not None:
            engines[candidate] = made
            _judge(steps, case, job, candidate, made)
    tested = tuple(_engine_facts(made, candidate) for candidate, made in engines.items())
    return SelftestModel(name, case.trained, tested, _bench(job, engines, target, steps, name, protocol, progress))


def _judge(steps: Steps, case: Case, job: Job, candidate: Candidate, made: dict[str, Artifact]) -> None:
    """Compare the engine's answers with the original's, as a separate step."""
    step = f"{candidate.artifact} answers"
    if candidate.precision in QUANTIZED and not case.trained:
        steps.skip(case.name, step, "rounding decides the answers of a model with random weights")
        return

    def judge() -> None:
        found = outcome.verified(made, candidate)
        gate = accuracy_gate(found, job.budget, guard=job.adapter.guard)
        # A seeded model may give all images the same class while its outputs still differ.
        if gate.status != "pass" and not (proves_nothing(gate) and follows(found)):
            raise GateError(
                f"the answers of {candidate.artifact} do not provably match the original's",
                found="; ".join(gate.reasons),
                expected=str(job.budget),
            )

    steps.attempt(case.name, step, judge)


def _engine_facts(artifacts: dict[str, Artifact], candidate: Candidate) -> SelftestEngine:
    engine = read_engine(artifacts[candidate.step("compile")].path)
    return SelftestEngine(
        candidate.artifact,
        engine.precision,
        engine.provider,
        engine.kernels,
        engine.options,
        engine.device,
        outcome.engine_bytes(artifacts, candidate),
        outcome.verified(artifacts, candidate),
    )


def _bench(
    job: Job,
    engines: dict[Candidate, dict[str, Artifact]],
    target: str,
    steps: Steps,
    name: str,
    protocol: Protocol,
    progress: Progress,
) -> Bench | None:
    """Measure all engines and PyTorch in one benchmark run; only the engines if PyTorch itself fails."""
    if not engines:
        steps.skip(name, "bench", "no engine was built")
        return None
    bench_candidates = []
    for candidate, artifacts in engines.items():
        folder = artifacts[candidate.step("compile")].path
        bench_candidates.append(engine_candidate(read_engine(folder), folder, candidate.artifact))
    reference = _reference(job, target)
    pairs = [(each.artifact, reference.artifact) for each in bench_candidates]
    found = steps.attempt(name, "bench", lambda: measure([reference, *bench_candidates], protocol, pairs, progress))
    if found is not None:
        return found
    first = bench_candidates[0].artifact
    pairs = [(each.artifact, first) for each in bench_candidates[1:]]
    return steps.attempt(
        name, f"bench without {reference.artifact}", lambda: measure(bench_candidates, protocol, pairs, progress)
    )


def _reference(job: Job, target: str) -> BenchCandidate:
    """The reference: PyTorch at its best on a GPU; on a CPU, the original as usual."""
    source = job.reference_model.source
    if TARGETS[target].device != "GPU":
        return original_candidate(source)
    worker = *module_argv("vitdeploy.pipeline.reference_worker"), "compiled"
    return BenchCandidate(COMPILED, "torch", "fp16", worker, to_request(source))
