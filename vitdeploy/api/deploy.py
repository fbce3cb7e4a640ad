"""The whole pipeline: from a model and images to a verified bundle, or to the best engine that can be built."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitdeploy.api import artifacts, bench, calls, graph
from vitdeploy.api.images import images
from vitdeploy.api.model import model
from vitdeploy.api.options import (
    Deploy,
    OfModel,
    Run,
    Tune,
    TuneRecipe,
)
from vitdeploy.api.values import (
    Column,
    Line,
    Reporter,
    Shown,
    Table,
    home_of,
    human_bytes,
    latency_plots,
    placed,
    reporting,
)
from vitdeploy.api.workers import workers_of
from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.summary import Row
from vitdeploy.document.report import Report
from vitdeploy.document.sweep import TuneDocument
from vitdeploy.errors import CapabilityError, HostError
from vitdeploy.graph.io.bound import named
from vitdeploy.pipeline import assemble, early, schedule, setting, verdict
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.outcome import Outcome
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import default_store, preview
from vitdeploy.recipe.load import given_recipe, validate
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.spec import GateStatus, Grade, Precision, encode
from vitdeploy.stages.step import OUTPUT_NAMES, RECIPE_FILE, TUNED_NAMES, Step, in_words
from vitdeploy.verification.gate import guards
from vitdeploy.workflows import tuning, variants

BOUNDS = ("max_drop", "min_agreement", "max_latency", "max_memory")
GUARDED = " (default guard: the budget sets neither max_drop nor min_agreement)"


@dataclass(frozen=True, repr=False)
class Deployment(Shown):
    """A verified bundle in `folder`; `document` is its report.json.

    `status` is the result of the budget: "pass", "fail", or "undecided" if the images do not prove either; `reasons`
    has a sentence for each bound that is not met, and `budget` is the budget.
    """

    folder: Path
    document: Report
    status: GateStatus
    reasons: tuple[str, ...]
    budget: str
    tables: tuple[Line, ...]

    @property
    def bundle(self) -> artifacts.Bundle:
        """The bundle, for every command and app."""
        return artifacts.Bundle(self.folder)

    @property
    def recommended(self) -> str | None:
        """The name of the engine to ship, "original" if none is better; None without a recommendation."""
        return self.document.verdict.recommended

    @property
    def grade(self) -> Grade:
        """Certainty of the ranking: "recommended", "leading" (the first engine of the bundle is ahead, others may be as
        fast), or "no ranking" (engines in a fixed order); for several image sizes, the least certain."""
        order: tuple[Grade, ...] = ("no ranking", "leading", "recommended")
        grades = {each.grade for each in self.document.sizes or ()} or {self.document.verdict.grade}
        return next((each for each in order if each in grades), "no ranking")

    @property
    def report(self) -> Path:
        """The page with tables, plots and examples."""
        return self.folder / "report.html"

    def load(self, target: str = "auto", **options: Any) -> Predictor:
        """Return a predictor of the bundle; options and errors as `vitdeploy.load`."""
        return self.bundle.load(target, **options)

    def lines(self) -> list[Line]:
        return [*self.tables, placed(self.folder)]

    def plots(self) -> list[str]:
        return latency_plots(self.document.bench)


@dataclass(frozen=True)
class PlannedStep:
    """A step of a planned run by `name`; `reuse`: whether a result of an earlier run is taken."""

    name: str
    reuse: bool

    def __str__(self) -> str:
        return f"{'reuse' if self.reuse else 'run':<5}  {in_words(self.name)}"


@calls.takes(Deploy)
def deploy(options: Deploy) -> Deployment:
    """Run the whole pipeline: export, optimize, quantize, compile, verify and measure, into one bundle with its report.

    The result's `status` reports a budget that is not met, or not provably; no error is raised for it.

    Raises:
        RecipeError: invalid arguments. Errors of the model, the images, the targets and the stages.

    >>> import vitdeploy as vd
    >>> how = {"calibration": 32, "duration": 0.1, "progress": False}
    >>> deployed = vd.deploy(MODEL, DIGITS, precision="fp32", targets=["onnxruntime-cpu"], min_agreement=90, **how)
    >>> deployed.status
    'pass'
    """
    read = model(options.source)
    recipe = recipe_of(read, options, options.precision, {"max_size": options.max_size})
    chosen = options.passed_on(Run, recipe=recipe, source=read)
    calls.check_early(chosen)
    return _run(chosen)


@calls.takes(Run)
def run(options: Run) -> Deployment:
    """Run the whole pipeline of a recipe, like `vitdeploy run`.

    Raises:
        RecipeError, MissingFileError: the recipe is invalid. Errors of the model, images, targets and stages.
    """
    return _run(options)


def _run(options: Run) -> Deployment:
    loaded = given_recipe(options.recipe, options.overrides, options.function)
    home, reporter = home_of(options.folder, "bundle", OUTPUT_NAMES), reporting(options.progress)
    workers, store = workers_of(options.executor, options.jobs, resume=options.resume), default_store()
    code = own_model(options.function, options.source)
    source = schedule.LoadedRecipe(loaded, store.root.absolute(), options.skip_bad, *code)
    with reporter:
        report, outcomes = assemble.run_pipeline(
            source,
            _jobs(source, reporter),
            home,
            store,
            resume=options.resume,
            progress=lambda job: lambda text, done, total: reporter.progress(f"{job.prefix}{text}", done, total),
            finished=lambda job, step, reused: tell_finished(reporter, f"{job.prefix}{step.name}", step, reused),
            note=lambda job, text: reporter.note(f"{job.prefix}{text}"),
            workers=workers,
        )
    return _deployment(home, report, outcomes, loaded)


def plan(
    recipe: Recipe | str | Path,
    *,
    overrides: Sequence[str] = (),
    function: str | None = None,
    skip_bad: bool = False,
    executor: str | None = None,
    jobs: int = 0,
    progress: bool | Reporter = True,
) -> list[PlannedStep]:
    """Preview `run`: check every input, compute nothing. Arguments and errors as in `run`."""
    how: Any = {"overrides": overrides, "function": function, "executor": executor, "jobs": jobs, "progress": progress}
    return planned(Run(recipe, skip_bad=skip_bad, **how))


def planned(options: Run) -> list[PlannedStep]:
    """The steps that `run` would do; a given folder is checked too."""
    calls.check_early(options)
    loaded = given_recipe(options.recipe, options.overrides, options.function)
    workers_of(options.executor, options.jobs)
    reporter, store = reporting(options.progress), default_store()
    with reporter:
        jobs = _jobs(schedule.LoadedRecipe(loaded, store.root, options.skip_bad, options.function), reporter)
        steps = ((job.prefix, *step) for job in jobs for step in preview(make_plan(job), store))
        return [PlannedStep(f"{prefix}{name}", reuse) for prefix, name, reuse in steps]


def recipe_of(
    read: artifacts.Model,
    options: OfModel,
    precision: Precision,
    bounds: Mapping[str, float | None] = MappingProxyType({}),
) -> Recipe:
    """The recipe of a model and images with these arguments; raises RecipeError if they are invalid."""
    chosen, targets = images(options.data), options.targets
    place, kind = chosen.place(setting.reference_setting(read.reference))
    fields: dict[str, Any] = {
        "vitdeploy": 1,
        "name": options.name or graph.graph_name(read.source.name),
        "source": _source_fields(read),
        "data": {
            "path": str(place),
            "labels": kind,
            "annotations": str(chosen.annotations) if chosen.annotations else None,
            "texts": str(chosen.texts) if chosen.texts else None,
            "template": chosen.template,
            "inputs": str(chosen.inputs) if chosen.inputs else None,
            "calibration": {"images": options.calibration},
            "evaluation": {"images": options.evaluation},
            "seed": options.seed,
        },
        "precision": precision,
        "targets": list(targets) if targets is not None else targets_here(precision),
        "budget": {name: getattr(options, name) for name in BOUNDS} | dict(bounds),
        "bench": {"duration": options.duration},
    }
    for key in ("preprocess", "postprocess"):
        if (value := getattr(read.overrides, key)) is not None:
            fields[key] = encode(value)
    for key, value in (options.settings or {}).items():
        fields[key] = {**fields.get(key, {}), **value} if isinstance(value, Mapping) else value
    return validate(fields, "the arguments", _code_of(read))


def targets_here(precision: str) -> list[str]:
    """The CPU targets that support a precision and whose runtimes are installed.

    Raises:
        CapabilityError: no CPU target does.
    """
    found = []
    for row in TARGETS.values():
        if row.device == "CPU" and precision in row.precisions:
            try:
                early.require_target(row.name, precision)
            except HostError:
                continue
            found.append(row.name)
    if not found:
        raise CapabilityError(
            f"no CPU target runs {precision} on this machine",
            found="targets=None",
            expected=f"targets=[...] with some of {', '.join(TARGETS)}",
            fix="vitdeploy doctor shows what each target needs",
        )
    return found


def _source_fields(read: artifacts.Model) -> dict[str, Any]:
    given, labels = read.source, read.overrides.labels
    files = {"checkpoint": given.checkpoint, "text_features": given.text_features, "labels": labels}
    files["normal"] = given.normal
    return {
        "model": given.model,
        "image_size": list(given.image_size) if given.image_size else None,
        "heads": given.heads,
        "task": given.task,
        "bind": dict(map(named, given.bind)),
        **{key: None if file is None else str(file) for key, file in files.items()},
    }


def _code_of(read: artifacts.Model) -> str | None:
    """The name of the model for messages, if the recipe cannot name it."""
    return read.source.function or (read.source.name if read.source.module is not None else None)


def own_model(function: str | None, source: artifacts.Model | None) -> tuple[str | None, Path | None]:
    """The user's own model for a recipe without one: `function` and `module` of `pipeline.job.prepare`."""
    given = None if source is None else source.source
    return function or (given.function if given else None), given.module if given else None


def _jobs(source: schedule.LoadedRecipe, reporter: Reporter) -> Sequence[Job]:
    jobs = source.prepare(reporter.progress)
    notes = [
        (*job.reference_model.notes, *job.data.notes, *job.data.warnings, *verdict.split_notes(job)) for job in jobs
    ]
    for note in dict.fromkeys(itertools.chain(*notes)):
        reporter.note(note)
    return jobs


def tell_finished(reporter: Reporter, name: str, step: Step, reused: bool) -> None:
    """Report a finished step; reuse of earlier measurements is always reported."""
    if step.measured and reused:
        reporter.note(f"{name}: reused times measured earlier on this device; --no-resume measures again")
    reporter.detail(f"{'reused' if reused else 'made'} {name}")


def _deployment(home: Path, report: Report, outcomes: Sequence[Outcome], recipe: Recipe) -> Deployment:
    several, lines = len(outcomes) > 1, list[Line]()
    for outcome in outcomes:
        lines += [f"{outcome.job.size}:"] if several else []
        warnings = [f"warning: {text}" for text in outcome.report.warnings]
        lines += [table_of(outcome.report), "", *warnings, outcome.verdict.sentence, *outcome.verdict.remarks]
        lines += [""] if several else []
    unmet = [outcome for outcome in outcomes if outcome.verdict.gate.status in ("fail", "undecided")]
    statuses = {outcome.verdict.gate.status for outcome in outcomes}
    order: tuple[GateStatus, ...] = ("fail", "undecided", "pass")
    first = (unmet or list(outcomes))[0]
    return Deployment(
        home,
        report,
        next((status for status in order if status in statuses), "none"),
        tuple(
            reason
            for gate in (each.verdict.gate.named(each.job.size) if several else each.verdict.gate for each in unmet)
            for reason in gate.reasons
        ),
        f"{first.job.budget}{GUARDED if guards(recipe.to_budget()) else ''}",
        tuple(lines),
    )


def _p99(row: Row) -> str:
    return next(bench.claim(claim, 2) for claim in bench.claims_of(row) if claim.name == "p99")


def table_of(report: Report) -> Table:
    assert report.bench is not None
    first = report.engines[0].verify
    columns = (
        Column("artifact"),
        Column(first.metric or "", 90, least=6),
        Column("agreement", 80),
        Column("p50 ms", 100, least=7),
        Column("p99 ms", 40, least=8),
        Column(f"{report.data.noun}s/s", 50, least=8),
        Column("size", 30, least=8),
        Column("latency / original", 70, left=True),
    )
    rows = []
    for row in report.bench.results:
        name, engine = row.artifact, report.engine(row.artifact)
        value = engine.verify.value if engine else first.reference_value
        ratio = report.bench.ratio(name, "original")
        against = bench.ratio_text(ratio) if ratio else ""
        rows.append(
            (
                name,
                "" if value is None else f"{value:.2f}",
                f"{engine.verify.agreement:.2f}" if engine else "",
                f"{row.latency_ms.p50:.2f}",
                _p99(row),
                f"{row.throughput:.1f}",
                human_bytes(engine.bytes) if engine else "",
                f"{against} {' '.join(row.flags)}".strip(),
            )
        )
    return Table(columns, tuple(rows))


# --- The best engine that can be built here ---------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """The result of a search in `folder`; `document` is its tune.json. `status` is "pass" if the best variant provably
    meets the budget; `reasons` has a sentence for each bound that is not met, and `budget` is the budget."""

    folder: Path
    document: TuneDocument
    status: GateStatus
    reasons: tuple[str, ...]
    budget: str

    @property
    def best(self) -> str | None:
        """The name of the variant to ship."""
        return self.document.verdict.recommended

    @property
    def recipe(self) -> Path:
        """The recipe of the variant to ship: `vitdeploy.run` makes its bundle."""
        return self.folder / RECIPE_FILE

    @property
    def report(self) -> Path:
        """The page with the Pareto front."""
        return self.folder / "tune.html"

    def lines(self) -> list[Line]:
        document = self.document
        lines: list[Line] = [_variants(document), "", _finalists(document), ""]
        lines += [f"warning: {text}" for text in document.warnings]
        lines += [document.verdict.sentence, *document.verdict.remarks]
        return [*lines, *(f"not tried: {each.what}: {each.why}" for each in document.left_out)]


@calls.takes(Tune)
def tune(options: Tune) -> Tuned:
    """Find the best engine: try every precision, mixed precision and token merging on this machine.

    Raises:
        RecipeError, InputError: invalid arguments. Errors of the model, the images, the targets and the stages.

    >>> import vitdeploy as vd
    >>> how = {"calibration": 32, "duration": 0.1, "time_budget": 1, "progress": False}
    >>> found = vd.tune(MODEL, DIGITS, targets=["onnxruntime-cpu"], **how)
    >>> found.recipe.name
    'recipe.yaml'
    """
    read = model(options.source)
    recipe = recipe_of(read, options, "fp32")
    chosen = options.passed_on(TuneRecipe, recipe=recipe, source=read, targets=())
    calls.check_early(chosen)
    return _tuned(chosen)


@calls.takes(TuneRecipe)
def tune_recipe(options: TuneRecipe) -> Tuned:
    """`tune` for a recipe, like `vitdeploy tune`; errors are those of `vitdeploy.run`."""
    return _tuned(options)


def _tuned(options: TuneRecipe) -> Tuned:
    loaded = given_recipe(options.recipe, options.overrides, options.function)
    home, reporter = home_of(options.folder, "tuned", TUNED_NAMES), reporting(options.progress)
    workers = workers_of(options.executor, options.jobs, resume=options.resume)
    store = default_store()
    with reporter:
        code = own_model(options.function, options.source)
        how = options.budget or {}, store.root.absolute(), options.skip_bad
        search = variants.begin_search(loaded, options.targets, *how, *code)
        job = variants.prepare_search(search, reporter.progress)
        for note in (*job.reference_model.notes, *job.data.notes, *job.data.warnings, *verdict.split_notes(job)):
            reporter.note(note)
        tuner = tuning.Tuner(
            job,
            store,
            options.resume,
            reporter.progress,
            lambda step, reused: tell_finished(reporter, step.name, step, reused),
            options.time_budget,
            workers,
            search,
            reporter.note,
        )
        tuned = tuner.run()
        document = variants.write_tuned(tuned, home)
    gate = tuned.choice.gate
    return Tuned(home, document, gate.status, gate.reasons, str(job.budget))


def _variants(document: TuneDocument) -> Table:
    columns = (
        Column("variant"),
        Column(document.unit, 60, least=10),
        Column("expected agreement", 80),
        Column("ms", 100, least=7),
        Column("size", 40, least=8),
        Column("Pareto front", 90, left=True),
    )
    rows = [
        (
            variant.name,
            f"{variant.distance:.3g}",
            f"{variant.expected.agreement:.2f}" if variant.expected else "",
            f"{variant.latency_ms:.2f}",
            human_bytes(variant.bytes),
            "yes" if variant.finalist else "",
        )
        for variant in sorted(document.variants, key=lambda variant: (variant.distance, variant.latency_ms))
    ]
    return Table(columns, tuple(rows))


def _finalists(document: TuneDocument) -> Table:
    rows = {row.artifact: row for row in document.bench.results}
    first = document.engines[0].verify
    columns = (
        Column("finalist"),
        Column(first.metric or "", 60, least=8),
        Column("agreement", 80),
        Column("p50 ms", 100, least=7),
        Column("latency / original", 70, left=True),
    )
    original = f"{rows['original'].latency_ms.p50:.2f}"
    cells = [("original", _number(first.reference_value), "", original, "")]
    for engine in document.engines:
        name, verify = engine.artifact, engine.verify
        found = document.bench.ratio(name, "original")
        ratio = bench.ratio_text(found) if found else ""
        cells.append(
            (
                name,
                _number(verify.value),
                f"{verify.agreement:.2f}",
                f"{rows[name].latency_ms.p50:.2f}",
                f"{ratio} {' '.join(rows[name].flags)}".rstrip(),
            )
        )
    return Table(columns, tuple(cells))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
