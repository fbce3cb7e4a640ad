"""A whole run: every stage of a recipe, the bench, and what was found and made becomes the bundle."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from vitdeploy.benchmark.candidate import engine_candidate
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import SIZES_FOLDER
from vitdeploy.bundle.write import write_bundle
from vitdeploy.document.bench import Bench
from vitdeploy.document.report import Report, SizeRow
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.pipeline.foresight import foresee
from vitdeploy.pipeline.golden import golden_of
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.measure import measure, original_candidate
from vitdeploy.pipeline.monitored import monitor_of
from vitdeploy.pipeline.outcome import Outcome, conclude
from vitdeploy.pipeline.plan import candidates, make_plan
from vitdeploy.pipeline.run import run_plan
from vitdeploy.pipeline.verdict import settled
from vitdeploy.progress import Progress
from vitdeploy.publish import replacing
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.report.html import render_html
from vitdeploy.spec import GraphSpec, encode
from vitdeploy.stages.answers import read_answers
from vitdeploy.stages.engines import read_engine
from vitdeploy.stages.files import OUTPUT_NAMES, TOKENIZER_FILE, graphs_in
from vitdeploy.stages.step import CALIBRATE, OPTIMIZE, ORIGINAL, REFERENCE, Step
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Artifact, Store

# Seven in each of three processes, so that all of one process agreeing decides something.
RUN_ROUNDS = 21

MakeAhead = Callable[[Job, list[Step], Mapping[str, Artifact], set[str]], None]


@dataclass(frozen=True)
class Helpers:
    """Who helps with the stages of a run, but with nothing that is measured.

    `workers` do what can be shared out of a step. `ahead` makes of the steps of a job, which need these artifacts, what
    it can, before the run goes through them; it adds the keys of what it has made.
    """

    workers: Workers = HERE
    ahead: MakeAhead = lambda job, plan, artifacts, fresh: None


def run_pipeline(
    jobs: Sequence[Job],
    recipe: Recipe,
    out: Path,
    store: Store,
    *,
    resume: bool,
    progress: Callable[[Job], Progress],
    finished: Callable[[Job, Step, bool], None],
    note: Callable[[Job, str], None] = lambda job, text: None,
    helpers: AbstractContextManager[Helpers] | None = None,
) -> tuple[Report, list[Outcome]]:
    """Run the whole pipeline of a recipe: every stage, the bench, the bundle at `out`. Returns the report, and an
    outcome for each image size.

    Args:
        jobs: the result of `prepare` for the recipe, one for each image size.
        progress, finished: one of each per job; as in `run_plan`.
        resume: as in `run_plan`.
        note: called before the work with the bounds of the budget that the data cannot prove.
        helpers: of the stages; they have ended before the bench begins.

    Raises:
        OutputError: `out` holds something that is not a bundle. Errors of stages and the bench propagate.
    """
    made = []
    with helpers or contextlib.nullcontext(Helpers()) as help_of:
        for job in jobs:
            fresh: set[str] = set()
            make = functools.partial(
                run_plan,
                store=store,
                resume=resume,
                progress=progress(job),
                finished=functools.partial(finished, job),
                fresh=fresh,
            )
            plan = make_plan(job, help_of.workers)
            early = make([step for step in plan if step.name == REFERENCE])
            for text in foresee(job.adapter, read_answers(early[REFERENCE].path), job.data, job.budget):
                note(job, text)
            later = [step for step in plan if step.name != REFERENCE]
            help_of.ahead(job, later, early, fresh)
            made.append(make(later, artifacts=early))
    outcomes = [
        conclude(job, artifacts, functools.partial(bench_job, job, artifacts, progress(job)))
        for job, artifacts in zip(jobs, made, strict=True)
    ]
    return write_run(outcomes, recipe, out), outcomes


def bench_job(job: Job, artifacts: Mapping[str, Artifact], progress: Progress, kept: Sequence[str]) -> Bench:
    """Measure the original and every candidate, each against each other, until no further round would change which of
    those that keep the answers (`kept`) is best."""
    contenders = candidates(job)
    bench = job.recipe.bench
    bench_candidates = [original_candidate(job.reference_model.source)]
    for candidate in contenders:
        folder = artifacts[candidate.step("compile")].path
        bench_candidates.append(engine_candidate(read_engine(folder), folder, candidate.artifact))
    pairs = [(c.artifact, ORIGINAL) for c in contenders]
    pairs += [(c.artifact, f"{c.target}-fp32") for c in contenders if c.precision != "fp32"]
    halves = {c.target for c in contenders if c.precision == "bf16" and not c.shipped}
    pairs += [(c.artifact, f"{c.target}-bf16") for c in contenders if c.shipped and c.target in halves]
    pairs += [(c.artifact, f"{c.target}-int8") for c in contenders if c.precision == "mixed"]
    others = itertools.combinations([c.artifact for c in contenders], 2)
    pairs += [pair for pair in others if not {pair, pair[::-1]}.intersection(pairs)]
    protocol = Protocol(scenarios=bench.scenarios, batch=bench.batch, duration=bench.duration, min_rounds=RUN_ROUNDS)
    return measure(bench_candidates, protocol, pairs, progress, context=True, settled=functools.partial(settled, kept))


def write_run(outcomes: Sequence[Outcome], recipe: Recipe, out: Path) -> Report:
    """Publish the bundle at `out`: of the first outcome, with those of further image sizes inside, each a bundle too.

    Returns the content of the outer report.json.

    Raises:
        OutputError: `out` holds something that is not a bundle.
    """
    first, *others = outcomes
    names = [outcome.job.size for outcome in others]
    provenance = replace(first.report.provenance, recipe=recipe.model_dump(mode="json"))
    report = replace(first.report, provenance=provenance)
    if others:
        paths = ["", *(f"{SIZES_FOLDER}/{name}/" for name in names)]
        report = replace(report, sizes=tuple(map(_size_row, outcomes, paths)))
    with replacing(out, OUTPUT_NAMES) as work:
        for outcome, name in zip(others, names, strict=True):
            inner = work / SIZES_FOLDER / name
            inner.mkdir(parents=True)
            _write(outcome, outcome.report, (), inner)
        _write(first, report, names, work)
    return report


def _write(outcome: Outcome, report: Report, sizes: Sequence[str], work: Path) -> None:
    job, artifacts = outcome.job, outcome.artifacts
    folders = [artifacts[candidate.step("compile")].path for candidate in outcome.verdict.ships]
    engines = [(read_engine(folder), folder) for folder in folders]
    gates = {c.artifact: outcome.gates[c.artifact].status for c in outcome.verdict.ships}
    write_bundle(
        work,
        name=job.recipe.name,
        task=job.reference_model.task,
        graphs=_graphs(artifacts[OPTIMIZE].path),
        preprocess=job.reference_model.preprocess,
        postprocess=job.reference_model.postprocess,
        engines=engines,
        labels=job.labels,
        tokenizer=artifacts[OPTIMIZE].path / TOKENIZER_FILE,
        golden=golden_of(job, read_answers(artifacts[REFERENCE].path), engines, gates),
        monitor=monitor_of(job, engines),
        documents={
            "report.json": json.dumps(encode(report), indent=1, allow_nan=False) + "\n",
            "report.html": render_html(report, outcome.images),
            **_calibration(artifacts),
        },
        provenance=encode(report.provenance),
        sizes=sizes,
        gates=gates,
        recommended=None if outcome.verdict.recommended == ORIGINAL else outcome.verdict.recommended,
        grade=outcome.verdict.grade,
        rivals=outcome.verdict.rivals,
    )


def _size_row(outcome: Outcome, path: str) -> SizeRow:
    """One image size in the outer report: what to ship there, and the recommended artifact in numbers."""
    report, verdict = outcome.report, outcome.verdict
    assert report.bench is not None
    row, engine = report.bench.row(verdict.leading), report.engine(verdict.leading)
    assert row is not None
    return SizeRow(
        size=outcome.job.size,
        path=path,
        sentence=verdict.sentence,
        gate=verdict.gate.status,
        recommended=verdict.recommended,
        leading=verdict.leading,
        value=engine.verify.value if engine else report.engines[0].verify.reference_value,
        agreement=engine.verify.agreement if engine else None,
        latency_ms=row.latency_ms,
        throughput=row.throughput,
        grade=verdict.grade,
    )


def _graphs(folder: Path) -> dict[str, tuple[Path, GraphSpec]]:
    return {name: (file, graph_spec(load_graph(file), file.name)) for name, file in graphs_in(folder).items()}


def _calibration(artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    if CALIBRATE not in artifacts:
        return {}
    return {"calibration.json": (artifacts[CALIBRATE].path / "ranges.json").read_text(encoding="utf-8")}
