"""The engine to ship, of all that can be made here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitdeploy.api.bench import ratio_text
from vitdeploy.api.calls import check_early, takes
from vitdeploy.api.deploy import own_model, recipe_of, tell_finished
from vitdeploy.api.model import model
from vitdeploy.api.options import (
    Tune,
    TuneRecipe,
)
from vitdeploy.api.values import Column, Line, Shown, Table, home_of, human_bytes, reporting
from vitdeploy.api.workers import workers_of
from vitdeploy.document.sweep import TuneDocument
from vitdeploy.pipeline.run import default_store
from vitdeploy.pipeline.verdict import split_notes
from vitdeploy.recipe.load import given_recipe
from vitdeploy.spec import GateStatus
from vitdeploy.stages.step import RECIPE_FILE, TUNED_NAMES
from vitdeploy.workflows.tuning import Tuner
from vitdeploy.workflows.variants import begin_search, prepare_search, write_tuned


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """The result of a search; `document` is its tune.json. `status` says whether the best variant is proven to meet the
    budget, `reasons` why not, and `budget` is the budget."""

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


@takes(Tune)
def tune(options: Tune) -> Tuned:
    """Find the engine to ship: every precision, mixed precision and token merging are tried on this machine.

    Raises:
        RecipeError, InputError: arguments that do not fit. Errors of the model, the images, the targets and the stages.

    >>> import vitdeploy as vd
    >>> how = {"calibration": 32, "duration": 0.1, "time_budget": 1, "progress": False}
    >>> found = vd.tune(MODEL, DIGITS, targets=["onnxruntime-cpu"], **how)
    >>> found.recipe.name
    'recipe.yaml'
    """
    read = model(options.source)
    recipe = recipe_of(read, options, "fp32")
    chosen = options.passed_on(TuneRecipe, recipe=recipe, source=read, targets=())
    check_early(chosen)
    return _tuned(chosen)


@takes(TuneRecipe)
def tune_recipe(options: TuneRecipe) -> Tuned:
    """Like `tune`, for a recipe, as `vitdeploy tune` does it; errors are those of `vitdeploy.run`."""
    return _tuned(options)


def _tuned(options: TuneRecipe) -> Tuned:
    loaded = given_recipe(options.recipe, options.overrides, options.function)
    home, reporter = home_of(options.folder, "tuned", TUNED_NAMES), reporting(options.progress)
    workers = workers_of(options.executor, options.jobs, resume=options.resume)
    store = default_store()
    with reporter:
        code = own_model(options.function, options.source)
        how = options.budget or {}, store.root.absolute(), options.skip_bad
        search = begin_search(loaded, options.targets, *how, *code)
        job = prepare_search(search, reporter.progress)
        for note in (*job.reference_model.notes, *job.data.notes, *job.data.warnings, *split_notes(job)):
            reporter.note(note)
        tuner = Tuner(
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
        document = write_tuned(tuned, home)
    gate = tuned.choice.gate
    return Tuned(home, document, gate.status, gate.reasons, str(job.budget))


def _variants(document: TuneDocument) -> Table:
    columns = (
        Column("variant"),
        Column(document.unit, 60, least=10),
        Column("expected agreement", 80),
        Column("ms", 100, least=7),
        Column("size", 40, least=8),
        Column("on the front", 90, left=True),
    )
    rows = [
        (
            each.name,
            f"{each.distance:.3g}",
            f"{each.expected.agreement:.2f}" if each.expected else "",
            f"{each.latency_ms:.2f}",
            human_bytes(each.bytes),
            "yes" if each.finalist else "",
        )
        for each in sorted(document.variants, key=lambda each: (each.distance, each.latency_ms))
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
    for each in document.engines:
        name, verify = each.artifact, each.verify
        found = document.bench.ratio(name, "original")
        ratio = ratio_text(found) if found else ""
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
