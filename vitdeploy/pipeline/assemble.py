"""The complete run of a recipe: its stages, the bench, the bundle and the report."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import BenchCandidate, ExpectedTime, engine_candidate, expected
from vitdeploy.bundle import read, write
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.document.bench import Bench
from vitdeploy.document.report import Report, SizeRow
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.pipeline import bom, run, schedule
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.measure import measure, original_candidate
from vitdeploy.pipeline.outcome import Outcome, conclude
from vitdeploy.pipeline.plan import candidates, make_plan
from vitdeploy.pipeline.verdict import foresee, still_open
from vitdeploy.progress import Progress
from vitdeploy.publish import replacing
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.report.html import render_html
from vitdeploy.runtime import monitor_reference
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs, largest_difference
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.registry import bound, count_same
from vitdeploy.spec import EngineSpec, GateStatus, PreprocessSpec, Task, encode
from vitdeploy.stages.answers import read_answers
from vitdeploy.stages.reference_model import reference_runner
from vitdeploy.stages.step import (
    CALIBRATE,
    OPTIMIZE,
    ORIGINAL,
    OUTPUT_NAMES,
    REFERENCE,
    TOKENIZER_FILE,
    Step,
    graphs_in,
    read_engine,
)
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Artifact, Store
from vitdeploy.tasks.adapter import Data, ImageAdapter, TaskAdapter
from vitdeploy.verification.records import Answers

# --- The golden set of a bundle ---------------------------------------------------------------------------------------
# A few inputs with the outputs of the original and of every engine, to check an engine wherever it is loaded.


GOLDEN_SAMPLES = 8
# The tolerance max|a - b| / max|b| between the outputs of one engine on two machines: measured over instruction sets,
# threads and batches (docs/bundle.md), with some margin. A wrong engine is off by about 1.
TOLERANCE = {
    "fp32": 1e-3,
    "fp16": 2e-2,
    "bf16": 1e-1,
    "fp8": 1e-1,
    "int8": 1e-1,
    "mixed": 1e-1,
    "int4": 1e-1,
}
# The least share of a tolerance to which it may be lowered if outputs hardly change from sample to sample.
LEAST_PART = 0.1
# The probability that an engine with the required agreement fails the golden check by chance.
FALSE_ALARM = 0.01


def golden_set(
    adapter: TaskAdapter,
    data: Data,
    reference: Answers,
    original: Runner,
    engines: Sequence[tuple[EngineSpec, Path]],
    gates: Mapping[str, GateStatus],
    agreement: float,
) -> write.Golden:
    """Evaluation samples with different answers, and the answers of the loaded original and of every engine to them.
    `agreement`: the required agreement with the original, in percent."""
    task, preprocess, postprocess = adapter.setting.task, adapter.setting.preprocess, adapter.setting.postprocess
    name, shared = original.inputs[0].name, adapter.shared_golden(data)
    chosen = adapter.unlike(reference, data, GOLDEN_SAMPLES)
    fed = {name: adapter.golden_inputs(data, chosen), **shared, **adapter.brought(data, chosen)}
    runner, samples, brought = bound(task, original, fed, postprocess)
    outputs = engine_outputs(runner, preprocess, samples[:1], _first(brought, 1))
    count = max(1, min(len(samples), write.GOLDEN_BYTES // max(1, sum(array.nbytes for array in outputs.values()))))
    seen = samples[: max(count, 2)]  # one sample alone cannot show how unrelated answers compare
    brought = _first(brought, len(seen))
    if len(seen) > 1:
        outputs = engine_outputs(runner, preprocess, seen, brought)
    least = least_same(count, agreement)
    kept, others = _first(outputs, count), _first(_rolled(outputs), count)
    by_chance = count_same(task, preprocess, postprocess, others, kept)
    answers = {}
    for engine, folder in engines:
        with make_runner(folder, engine) as whole:
            found = engine_outputs(bound(task, whole, fed, postprocess)[0], preprocess, seen, brought)
        names = list(found) if postprocess is None else postprocess.comparable(found)
        names = [each for each in names if found[each].dtype.kind not in "iu"]
        varies, own = largest_difference(_rolled(found), found, names), _first(found, count)
        same = count_same(task, preprocess, postprocess, own, kept)
        # An engine that passed on all evaluation samples may have more of its differences among the golden samples.
        expected = min(least, same) if gates[engine.artifact] == "pass" else least
        tolerance = _tolerance(engine.precision, varies)
        nothing = None if tolerance is not None or 2 * by_chance <= expected else _nothing(varies, by_chance, count)
        answers[engine.artifact] = write.GoldenAnswers(own, tolerance or TOLERANCE[engine.precision], expected, nothing)
    return write.Golden({name: samples[:count], **shared, **_first(brought, count)}, kept, answers)


def _first(outputs: Mapping[str, Array], count: int) -> dict[str, Array]:
    return {name: array[:count] for name, array in outputs.items()}


def _rolled(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs with each sample's replaced by those of another."""
    return {name: np.roll(array, 1, axis=0) for name, array in outputs.items()}


def _tolerance(precision: str, varies: float) -> float | None:
    """At most half of the difference between samples, so that answers to other samples exceed it; None if that is too
    little for one engine on two machines."""
    most = TOLERANCE[precision]
    return None if varies / 2 < LEAST_PART * most else min(most, varies / 2)


def _nothing(varies: float, by_chance: int, count: int) -> str:
    if not varies and count == 1:
        return "there is only one sample, so unrelated answers cannot be compared"
    same = f"{by_chance} of {count} answers to other samples are the same"
    return f"{same}, and their outputs differ by {varies:.1e} of the largest output"


def least_same(count: int, agreement: float) -> int:
    """The number of equal answers among `count` that an engine with `agreement` percent reaches in 99 of 100 cases
    (binomial)."""
    p = 1 - agreement / 100
    chances = [math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)]
    others = next((k for k in range(count + 1) if sum(chances[k + 1 :]) < FALSE_ALARM), count)
    return count - others


# --- The reference of a bundle's monitor: statistics of calibration images and of each engine's outputs for them ------


AT_ONCE = 8


def monitor_of(job: Job, engines: Sequence[tuple[EngineSpec, Path]]) -> str | None:
    """The text of `monitor.json`, from up to 128 evenly spread calibration images, or from evaluation images if there
    are too few. None for a model that takes no images or further inputs, and with fewer than 32 images.

    Engines with several graphs have no reference for their outputs, which depend on more than the image.
    """
    model, data = job.reference_model, job.data
    if not isinstance(job.adapter, ImageAdapter) or model.preprocess is None or model.inputs:
        return None
    samples = data.calibration if len(data.calibration) >= monitor_reference.LEAST_IMAGES else data.evaluation
    chunks = _chunks(samples, model.preprocess)
    inputs = _numbers(chunks, model.preprocess)
    if inputs is None:
        return None
    outputs = {
        engine.artifact: statistics
        for engine, folder in engines
        if not engine.parts and (statistics := _outputs_of(engine, folder, model.task, model.preprocess, chunks))
    }
    return monitor_reference.reference_text(inputs, model.preprocess.channels, outputs)


def monitor_of_images(samples: Sequence[Sample], preprocess: PreprocessSpec) -> str | None:
    """As `monitor_of`, from the images alone, without the outputs of engines."""
    inputs = _numbers(_chunks(samples, preprocess), preprocess)
    return None if inputs is None else monitor_reference.reference_text(inputs, preprocess.channels, {})


def _chunks(samples: Sequence[Sample], preprocess: PreprocessSpec) -> list[Pixels]:
    """The pixels of evenly spread samples; empty if there are too few."""
    if len(samples) < monitor_reference.LEAST_IMAGES:
        return []
    places = np.linspace(0, len(samples) - 1, min(len(samples), monitor_reference.MOST_IMAGES)).round().astype(int)
    return list(batches([samples[place] for place in places], preprocess, AT_ONCE))


def _numbers(chunks: Sequence[Pixels], preprocess: PreprocessSpec) -> list[list[float]] | None:
    rows = [monitor_reference.input_statistics(each, preprocess) for chunk in chunks for each in chunk]
    found = [row for row in rows if row is not None]
    return found if found and len(found) == len(rows) else None  # images with a single column have no statistics


def _outputs_of(
    engine: EngineSpec, folder: Path, task: Task, preprocess: PreprocessSpec, chunks: Sequence[Pixels]
) -> tuple[list[str], list[list[float]]] | None:
    """The names and statistics of an engine's outputs for each image; None without float outputs."""
    rows: list[list[float]] = []
    names: list[str] = []
    with make_runner(folder, engine) as runner:
        for chunk in chunks:
            found = engine_outputs(runner, preprocess, chunk)
            names = names or monitor_reference.watched_outputs(found)
            rows += [
                monitor_reference.output_statistics(task, {name: found[name][i] for name in names}, names)
                for i in range(len(chunk))
            ]
    return (monitor_reference.output_names(task, names), rows) if names and np.isfinite(rows).all() else None


# --- A whole run: every stage of a recipe, the bench, and the bundle --------------------------------------------------


# Seven in each of three processes, so that the rounds of a single process can decide.
RUN_ROUNDS = 21


def run_pipeline(
    source: schedule.LoadedRecipe,
    jobs: Sequence[Job],
    out: Path,
    store: Store,
    *,
    resume: bool,
    progress: Callable[[Job], Progress],
    finished: Callable[[Job, Step, bool], None],
    note: Callable[[Job, str], None] = lambda job, text: None,
    workers: Workers = HERE,
) -> tuple[Report, list[Outcome]]:
    """Run the whole pipeline of a recipe: every stage, the bench, the bundle at `out`. Returns the report, and an
    outcome for each image size.

    Args:
        jobs: the result of `source.prepare`, one job per image size.
        progress, finished: called per job; as in `run_plan`.
        resume: as in `run_plan`.
        note: called before the work with the expected time, and with the bounds of the budget that the data cannot
            prove.
        workers: run shards of steps and whole steps in parallel, but nothing that is measured; they end before the
            bench begins.

    Raises:
        OutputError: `out` holds something that is not a bundle. Errors of stages and the bench propagate.
    """
    made = []
    with schedule.pooled(workers) as (workers, pool):
        for number, job in enumerate(jobs):
            fresh: set[str] = set()
            make = functools.partial(
                run.run_plan,
                store=store,
                resume=resume,
                progress=progress(job),
                finished=functools.partial(finished, job),
                fresh=fresh,
            )
            plan = make_plan(job, workers)
            stages, bench = run.expected_stages(plan, store, resume=resume), expected_bench(job.recipe, plan)
            note(job, f"expected time: {ExpectedTime(stages.seconds + bench.seconds, stages.most + bench.most)}")
            early = make([step for step in plan if step.name == REFERENCE])
            for text in foresee(job.adapter, read_answers(early[REFERENCE].path), job.data, job.budget):
                note(job, text)
            later = [step for step in plan if step.name != REFERENCE]
            if pool is not None:
                scheduler = schedule.Scheduler(
                    pool,
                    store,
                    progress(job),
                    "run stages",
                    functools.partial(note, job),
                    resume=resume,
                    fresh=fresh,
                    finished=functools.partial(finished, job),
                    fatal=lambda owner, error: True,
                )
                scheduler.run(
                    [schedule.PlanProgress(number, schedule.at_size(source, number), job.recipe.name, later, early)]
                )
                for error in scheduler.errors.values():
                    raise error
            made.append(make(later, artifacts=early))
    outcomes = [
        conclude(job, artifacts, functools.partial(bench_job, job, artifacts, progress(job)))
        for job, artifacts in zip(jobs, made, strict=True)
    ]
    return write_run(outcomes, source.recipe, out), outcomes


def expected_bench(recipe: Recipe, plan: Sequence[Step]) -> ExpectedTime:
    """The expected time of a recipe's bench with the engines of a plan."""
    protocol = Protocol(scenarios=recipe.bench.scenarios, batch=recipe.bench.batch, duration=recipe.bench.duration)
    engines = [step.name for step in plan if step.kind == "compile"]
    requests: dict[str, dict[str, dict[str, str]]] = {ORIGINAL: {}, **{name: {"engine": {}} for name in engines}}
    contenders = [BenchCandidate(name, "", "", (), request) for name, request in requests.items()]
    return expected(contenders, protocol, context=True)


def bench_job(job: Job, artifacts: Mapping[str, Artifact], progress: Progress, kept: Sequence[str]) -> Bench:
    """Measure the original and all candidates pairwise, until no further round would change which of the engines that
    keep the answers (`kept`) is best."""
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
    looks = functools.partial(still_open, kept)
    return measure(bench_candidates, protocol, pairs, progress, context=True, still_open=looks)


def write_run(outcomes: Sequence[Outcome], recipe: Recipe, out: Path) -> Report:
    """Publish the bundle of the first outcome at `out`, with the bundles of further image sizes inside it.

    Returns the content of the outer report.json.

    Raises:
        OutputError: `out` holds something that is not a bundle.
    """
    first, *others = outcomes
    names = [outcome.job.size for outcome in others]
    provenance = replace(first.report.provenance, recipe=recipe.model_dump(mode="json"))
    report = replace(first.report, provenance=provenance)
    if others:
        paths = ["", *(f"{read.SIZES_FOLDER}/{name}/" for name in names)]
        report = replace(report, sizes=tuple(map(_size_row, outcomes, paths)))
    with replacing(out, OUTPUT_NAMES) as work:
        for outcome, name in zip(others, names, strict=True):
            inner = work / read.SIZES_FOLDER / name
            inner.mkdir(parents=True)
            _write(outcome, outcome.report, (), inner)
        _write(first, report, names, work)
    return report


def _write(outcome: Outcome, report: Report, sizes: Sequence[str], work: Path) -> None:
    job, artifacts = outcome.job, outcome.artifacts
    folders = [artifacts[candidate.step("compile")].path for candidate in outcome.verdict.ships]
    engines = [(read_engine(folder), folder) for folder in folders]
    gates = {c.artifact: outcome.gates[c.artifact].status for c in outcome.verdict.ships}
    agreement = job.adapter.guard if job.budget.min_agreement is None else job.budget.min_agreement
    reference = read_answers(artifacts[REFERENCE].path)
    graphs = graphs_in(artifacts[OPTIMIZE].path)
    with reference_runner(job.reference_model.source) as original:
        golden = golden_set(job.adapter, job.data, reference, original, engines, gates, agreement)
    write.write_bundle(
        work,
        name=job.recipe.name,
        task=job.reference_model.task,
        graphs={name: (file, graph_spec(load_graph(file), file.name)) for name, file in graphs.items()},
        preprocess=job.reference_model.preprocess,
        postprocess=job.reference_model.postprocess,
        engines=engines,
        labels=job.labels,
        tokenizer=artifacts[OPTIMIZE].path / TOKENIZER_FILE,
        golden=golden,
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
        bom=functools.partial(bom.bom_text, license=job.reference_model.license, metrics=_metrics(report)),
    )


def _metrics(report: Report) -> dict[str, tuple[str, float]]:
    """By shipped engine, the task's metric and its value, or without labels the agreement with the original."""
    verified = {facts.artifact: facts.verify for facts in report.engines if facts.artifact in report.verdict.ships}
    return {
        name: (own.metric, own.value)
        if own.metric is not None and own.value is not None
        else (f"agreement of {own.agreement_of}, %", own.agreement)
        for name, own in verified.items()
    }


def _size_row(outcome: Outcome, path: str) -> SizeRow:
    """One image size in the outer report: its verdict, and the numbers of its leading artifact."""
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


def _calibration(artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    if CALIBRATE not in artifacts:
        return {}
    return {"calibration.json": (artifacts[CALIBRATE].path / "ranges.json").read_text(encoding="utf-8")}
