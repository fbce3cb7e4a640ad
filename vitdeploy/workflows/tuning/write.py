"""Write the results of a search: tune.json, tune.html, and the recipe of what to ship."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitdeploy.document.context import Omission
from vitdeploy.document.report import FORMAT
from vitdeploy.document.tuning import MergingTrial, TuneDocument, TuneVerdict, VariantFacts
from vitdeploy.pipeline.job import tool_versions
from vitdeploy.pipeline.outcome import (
    TOOLS,
    data_facts,
    engine_bytes,
    engine_facts,
    now,
    said_of_weights,
    warnings_of,
)
from vitdeploy.publish import replacing
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.recipe.text import recipe_text
from vitdeploy.report.html import render_tuning
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import encode
from vitdeploy.stages.files import RECIPE_FILE as RECIPE_FILE
from vitdeploy.stages.files import TUNED_NAMES
from vitdeploy.workflows.tuning.remarks import Traits, four_bits_remarks, remarks
from vitdeploy.workflows.tuning.tuned import Made, Tuned

UNITS = {"classification": "KL, nats"}


def write_tuned(tuned: Tuned, out: Path) -> TuneDocument:
    """Publish a search at `out`. Returns tune.json.

    Raises:
        OutputError: `out` holds something that is not such a folder.
    """
    document = _document(tuned)
    recipe = recipe_text(_recipe(tuned), out, _comment(tuned))
    with replacing(out, TUNED_NAMES) as work:
        text = json.dumps(encode(document), indent=1, allow_nan=False)
        (work / "tune.json").write_text(f"{text}\n", encoding="utf-8")
        (work / "tune.html").write_text(render_tuning(document, recipe), encoding="utf-8")
        (work / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    return document


def _recipe(tuned: Tuned) -> Recipe:
    """The recipe of what is chosen, with the targets of all that may be as fast: `run` measures them again."""
    targets = dict.fromkeys(each.variant.target for each in (tuned.choice.best, *tuned.choice.rivals))
    return tuned.chosen.variant.recipe(tuned.job.recipe).model_copy(update={"targets": tuple(targets)})


def _comment(tuned: Tuned) -> str:
    open_names = ", ".join(each.name for each in tuned.choice.rivals)
    return "Chosen by vitdeploy tune." + (f" Not decided: whether {open_names} is as fast." if open_names else "")


def _document(tuned: Tuned) -> TuneDocument:
    """The parts that report.json has too have its names there, for the same tables and plots show them."""
    job, choice = tuned.job, tuned.choice
    finalists = {each.variant: each for each in tuned.front}
    unit = UNITS.get(job.reference_model.task, "relative squared error")
    said = remarks([each.variant for each in tuned.made], tuned.medians_ms, tuned.disturbed)
    traits = [
        Traits(each.variant, each.score.distance, engine_bytes(each.artifacts, each.variant.candidate), kept)
        for each in tuned.made
        for kept in [each.variant in finalists]
    ]
    said += four_bits_remarks(traits, tuned.medians_ms, unit, tuned.disturbed)
    for each in tuned.finals:
        said += [text for text in said_of_weights(each.artifacts, each.variant.candidate) if text not in said]
    return TuneDocument(
        format=FORMAT,
        name=job.recipe.name,
        task=job.reference_model.task,
        created=now(),
        verdict=TuneVerdict(
            sentence=choice.sentence,
            remarks=(*choice.remarks, *job.data.remarks, *said),
            recommended=choice.best.name,
            gate=choice.gate.status,
            reasons=choice.gate.reasons,
            confirmed=choice.confirmed,
            stopped=choice.stopped,
            grade=choice.grade,
            rivals=tuple(each.name for each in choice.rivals),
        ),
        warnings=warnings_of(job, tuned.finals[0].artifacts, tuned.finals[0].variant.candidate),
        budget=job.recipe.to_budget(),
        data=data_facts(job),
        unit=unit,
        variants=tuple(_variant(each, tuned, each.variant in finalists) for each in tuned.made),
        engines=tuple(
            replace(engine_facts(made.artifacts, made.variant.candidate, found.gate), artifact=found.name)
            for made in tuned.finals
            for found in [finalists[made.variant]]
        ),
        bench=tuned.bench,
        rows=dict(tuned.rows),
        merging={target: MergingTrial(found.tokens, found.schedules) for target, found in tuned.schedules.items()},
        left_out=tuple(Omission(what, why) for what, why in tuned.left_out),
        environment={**describe_host(), **tool_versions(TOOLS)},
        recipe=_recipe(tuned).model_dump(mode="json"),
        pruning=tuned.prunings or None,
    )


def _variant(made: Made, tuned: Tuned, finalist: bool) -> VariantFacts:
    variant = made.variant
    return VariantFacts(
        name=variant.name,
        target=variant.target,
        precision=variant.precision,
        merges=variant.merges,
        rows=variant.rows,
        latency_ms=float(np.median(tuned.medians_ms[variant.name])),
        rounds_ms=tuple(tuned.medians_ms[variant.name]),
        bytes=engine_bytes(made.artifacts, variant.candidate),
        finalist=finalist,
        prune=variant.prune,
        **vars(made.score),
    )
