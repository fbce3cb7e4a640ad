"""The outcome of a job: gates, verdict and report of its engines."""

import datetime
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from vitdeploy.benchmark.summary import machine_remarks
from vitdeploy.document.bench import Bench
from vitdeploy.document.engine import EngineFacts, PlacementFacts, Quantization
from vitdeploy.document.report import (
    FORMAT,
    CalibrationFacts,
    DataDigests,
    DataFacts,
    ExportFacts,
    ModelFacts,
    OptimizeFacts,
    Provenance,
    Report,
    RunVerdict,
    SourceDigests,
)
from vitdeploy.document.verified import Verified, decode_verified
from vitdeploy.exporter.parity import unproven_told
from vitdeploy.known_bad.find import in_spite
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.plan import candidates, report_answers
from vitdeploy.pipeline.verdict import Judged, Verdict, criterion_of, decide, engine_gate, keeps_answers
from vitdeploy.report.attention import attention_tile
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.values import weight_remarks
from vitdeploy.spec import FileEntry, decode
from vitdeploy.stages import step
from vitdeploy.stages.answers import read_answers
from vitdeploy.stages.attention import read_attention, shared
from vitdeploy.stages.place import FLOAT_REST, FLOAT_REST_SEARCH, HIGH_PRECISION_SEARCH, MIXED_SEARCH, read_placement
from vitdeploy.stages.rows import PARTS_SEARCH
from vitdeploy.stages.search import SENSITIVITY_SEARCH
from vitdeploy.store.store import Artifact, list_files
from vitdeploy.tasks.answers import AttentionFacts, ExampleFacts, MapFacts, MappedExample
from vitdeploy.verification.gate import Gate, accuracy_gate, guards

# --- The attention maps of a run, for its report ----------------------------------------------------------------------


def render_attention(
    artifacts: Mapping[str, Artifact], examples: Sequence[ExampleFacts], images: Mapping[str, bytes]
) -> tuple[AttentionFacts | None, dict[str, bytes]]:
    """The `attention` part of report.json and its PNG files by name; None if the original has no maps.

    Args:
        examples, images: those of the report, which include all images with maps.
    """
    if step.ATTENTION not in artifacts:
        return None, {}
    facts, maps = read_attention(artifacts[step.ATTENTION].path)
    if step.ORIGINAL not in maps:
        return None, {}
    pictures: dict[str, bytes] = {}
    rows = []
    places = {each.number: place for place, each in enumerate(examples)}
    for index, number in enumerate(facts["images"]):
        name = str(examples[places[number]].image)
        pixels = np.asarray(Image.open(io.BytesIO(images[name])).convert("RGB"))
        found = {artifact: each[index].astype(np.float64) for artifact, each in maps.items()}
        # One scale for all maps of an image, so that they can be compared.
        largest = max(float(each.max()) for each in found.values())
        tiles = []
        for artifact, values in found.items():
            file = f"{number}-{artifact}.png"
            pictures[file] = attention_tile(pixels, values, largest)
            share = None if artifact == step.ORIGINAL else shared(values, found[step.ORIGINAL])
            tiles.append(MapFacts(artifact, file, float(values.sum()), share))
        rows.append(MappedExample(places[number], tuple(tiles)))
    grid = tuple(facts["grid"])
    return AttentionFacts(grid, facts["reader"], facts["blocks"], facts["left_out"], tuple(rows)), pictures


# --- The results of a run: from stored artifacts and measured times to gates, a verdict and report.json ---------------


TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy", "pillow")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job. `gates`: those of all engines, by artifact; `images`: the pictures that the report's
    examples name."""

    job: Job
    artifacts: Mapping[str, Artifact]
    verdict: Verdict
    report: Report
    images: Mapping[str, bytes]
    gates: Mapping[str, Gate]


def conclude(job: Job, artifacts: Mapping[str, Artifact], measure: Callable[[Sequence[str]], Bench]) -> Outcome:
    """Judge every engine of a job by its budget, and recommend one. `measure` runs the bench; its argument is the names
    of the engines that keep the answers."""
    accuracy, guarded = _accuracy_gates(job, artifacts), guards(job.recipe.to_budget())
    kept = [c for c in candidates(job) if keeps_answers(accuracy[c.artifact], verified(artifacts, c), guarded=guarded)]
    bench = measure([c.artifact for c in kept])
    gates = {
        c.artifact: engine_gate(accuracy[c.artifact], job.budget, engine_bytes(artifacts, c), bench.row(c.artifact))
        for c in candidates(job)
    }
    judged = [Judged(c, gates[c.artifact], verified(artifacts, c), guarded) for c in candidates(job)]
    verdict = decide(judged, bench, include_failed=job.recipe.bundle.include_failed)
    of_weights = [text for candidate in verdict.ships for text in said_of_weights(artifacts, candidate)]
    of_engines = [
        text
        for said_of in (said_of_placement, said_of_layers, said_of_runtime, said_of_rest, said_of_rows)
        for candidate in candidates(job)
        for text in said_of(artifacts, candidate)
    ]
    calibration = _calibration(job, artifacts)
    of_images = calibration.warnings if calibration is not None else ()
    of_rest = (*job.data.remarks, *of_images, *said_of_heat(bench))
    verdict = replace(verdict, remarks=(*verdict.remarks, *of_weights, *of_engines, *of_rest))
    examples, answers, images = report_answers(job, artifacts)
    attention, maps = render_attention(artifacts, examples, images)
    model, export = _exported(job, artifacts)
    report = Report(
        format=FORMAT,
        name=job.recipe.name,
        task=job.reference_model.task,
        created=now(),
        verdict=_verdict_facts(job, gates, verdict),
        warnings=warnings_of(job, artifacts, judged[0].candidate),
        model=model,
        export=export,
        optimize=decode(OptimizeFacts, step.read_json(artifacts[step.OPTIMIZE].path / "optimize.json")),
        calibration=calibration,
        data=data_facts(job),
        engines=tuple(engine_facts(artifacts, candidate, gates[candidate.artifact]) for candidate in candidates(job)),
        bench=bench,
        environment={**describe_host(), **tool_versions(TOOLS)},
        provenance=_provenance(job, artifacts),
        examples=examples,
        answers=answers,
        attention=attention,
    )
    return Outcome(job, artifacts, verdict, report, images | maps, gates)


def now() -> str:
    """The current date and time in UTC as ISO text, for documents."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def warnings_of(job: Job, artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> tuple[str, ...]:
    """Warnings that question all numbers, shown before the verdict. `candidate`: any verified candidate."""
    reference = read_answers(artifacts[step.REFERENCE].path)
    doubt = job.adapter.doubt(reference, job.data, verified(artifacts, candidate))
    unproven = unproven_told(step.read_json(artifacts[step.EXPORT].path / "export.json")["parity"])
    return (*job.data.warnings, *([doubt] if doubt is not None else []), *unproven)


def said_of_heat(bench: Bench) -> list[str]:
    """Remarks on blocks in which the machine or a quota throttled."""
    by_machine = [f"{text}." for text in machine_remarks(bench.results)]
    return by_machine + [
        f"{row.artifact}: {name}: {found.throttled}."
        for row in bench.results
        for name, found in row.scenarios.items()
        if found.throttled is not None
    ]


def said_of_weights(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> list[str]:
    """Remarks on an engine's weights on this machine."""
    return weight_remarks(step.read_engine(artifacts[candidate.step("compile")].path), describe_host()["isa"])


def said_of_placement(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> list[str]:
    """A remark on an INT8 or INT4 engine without any quantized layer."""
    if candidate.precision not in ("int8", "int4"):
        return []
    placed = read_placement(artifacts[candidate.step("place")].path)
    if placed.quantized:
        return []
    reasons = Counter(placed.float.values()).most_common(1)
    why = reasons[0][0] if reasons else "the graph has no linear or convolution"
    return [f"{candidate.artifact} has no {candidate.precision.upper()} layers: {why}."]


def said_of_layers(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> list[str]:
    """A remark on layers that are kept in higher precision."""
    searched = artifacts.get(candidate.step(step.HIGH_PRECISION))
    found = HIGH_PRECISION_SEARCH.read(searched.path) if searched is not None else None
    if found is None or not found.layers:
        return []
    precisions, one = found.precisions, found.precisions[0]
    form = {"dynamic": "with dynamic quantization", "float": "in float"}[one.precision]
    layers = f"{len(precisions)} {'layer' if len(precisions) == 1 else 'layers'} {form}"
    return [f"{candidate.artifact} has {layers}: on the calibration images {one.evidence}, by {found.table}."]


def said_of_runtime(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> list[str]:
    """Remarks on an engine whose runtime is known to compute such a graph wrongly, if the recipe accepts that."""
    return in_spite(candidate.artifact, step.read_engine(artifacts[candidate.step("compile")].path).accepted or ())


def said_of_rest(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> list[str]:
    """A remark on an INT8 engine whose float operators are computed in bf16."""
    engine = step.read_engine(artifacts[candidate.step("compile")].path)
    if engine.float_rest is None:
        return []
    text = f"{candidate.artifact} computes its float operators in {engine.float_rest}"
    chosen = artifacts.get(candidate.step(FLOAT_REST))
    if chosen is None:
        return [f"{text}, as set in the recipe."]
    found = FLOAT_REST_SEARCH.read(chosen.path)
    plain, half = found.distances
    return [
        f"{text}: {found.ratio:.2f} times the latency of fp32, by {found.table}, with a distance of {half:.2g} from "
        f"the float graph on the calibration images (fp32: {plain:.2g})."
    ]


def said_of_rows(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> list[str]:
    """A remark on an engine that computes the rows of its tokens in parts, or padded to more rows."""
    engine = step.read_engine(artifacts[candidate.step("compile")].path)
    rows = engine.row_parts
    if rows is None:
        return []
    text = f"{candidate.artifact} computes {engine.rows_told}"
    chosen = artifacts.get(candidate.step("parts"))
    if chosen is None:
        return [f"{text}, as set in the recipe."]
    found = PARTS_SEARCH.read(chosen.path)
    return [f"{text}: its layers take {found.ratio:.2f} times the time of one row per token, by {found.table}."]


def _calibration(job: Job, artifacts: Mapping[str, Artifact]) -> CalibrationFacts | None:
    """Facts about the calibration images; None without calibration."""
    if step.CALIBRATE not in artifacts:
        return None
    found = step.read_json(artifacts[step.CALIBRATE].path / "calibrate.json")
    return decode(CalibrationFacts, {**found, "digest": job.data.calibration_digest})


def _accuracy_gates(job: Job, artifacts: Mapping[str, Artifact]) -> dict[str, Gate]:
    criterion = criterion_of(job.adapter, read_answers(artifacts[step.REFERENCE].path), job.data, job.budget)
    guard = job.adapter.guard
    return {c.artifact: accuracy_gate(verified(artifacts, c), job.budget, criterion, guard) for c in candidates(job)}


def verified(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> Verified:
    """The result of `verify` for an engine."""
    return decode_verified(step.read_json(artifacts[candidate.step("verify")].path / "verify.json"))


def engine_bytes(artifacts: Mapping[str, Artifact], candidate: step.Candidate) -> int:
    """The size in bytes of the files that the runtime loads."""
    folder = artifacts[candidate.step("compile")].path
    return sum((folder / file).stat().st_size for file in step.read_engine(folder).files)


def _verdict_facts(job: Job, gates: Mapping[str, Gate], verdict: Verdict) -> RunVerdict:
    asked = [candidate.artifact for candidate in candidates(job) if candidate.shipped]
    return RunVerdict(
        sentence=verdict.sentence,
        remarks=verdict.remarks,
        recommended=verdict.recommended,
        grade=verdict.grade,
        rivals=verdict.rivals,
        leading=verdict.leading,
        ships=tuple(candidate.artifact for candidate in verdict.ships),
        budget=str(job.budget),
        gate=verdict.gate.status,
        reasons=tuple(f"{name}: {reason}" for name in asked for reason in gates[name].reasons),
    )


def _exported(job: Job, artifacts: Mapping[str, Artifact]) -> tuple[ModelFacts, ExportFacts]:
    found = step.read_json(artifacts[step.EXPORT].path / "export.json")
    # The name of the file that the weights came from.
    checkpoint = next((each for each in job.reference_model.digests if not each.endswith((".json", ".npy"))), None)
    digest = job.reference_model.digests.get(checkpoint or "")
    model = {**found.pop("model"), "checkpoint": checkpoint, "checkpoint_sha256": digest}
    return decode(ModelFacts, model), decode(ExportFacts, found)


def _provenance(job: Job, artifacts: Mapping[str, Artifact]) -> Provenance:
    model = job.reference_model.source.function or job.recipe.source.model
    return Provenance(
        recipe=job.recipe.model_dump(mode="json"),
        source=SourceDigests(model, job.reference_model.revision, dict(job.reference_model.digests)),
        data=DataDigests(job.data.calibration_digest, job.data.evaluation_digest),
        tools=tool_versions(TOOLS),
        files=tuple(_provenance_files(artifacts)),
    )


def data_facts(job: Job) -> DataFacts:
    """The samples in report.json."""
    data = job.recipe.data
    return DataFacts(
        path=data.path,
        labels=data.labels,
        noun=job.adapter.noun,
        evaluation_images=len(job.data.evaluation),
        calibration_images=len(job.data.calibration),
        skipped=len(job.data.skipped),
        unannotated=job.data.unannotated,
        mapping=job.data.mapping_facts,
        copies=job.data.copies,
        remarks=job.data.remarks,
    )


def _provenance_files(artifacts: Mapping[str, Artifact]) -> list[FileEntry]:
    """The exported graph and every placement, by digest; the manifest lists the bundle's own files."""
    return [
        replace(entry, path=f"{name.replace(' ', '/')}/{entry.path}")
        for name, artifact in artifacts.items()
        if name == step.EXPORT or name.startswith("compile")
        for entry in list_files(artifact.path)
        if entry.path.endswith((".onnx", ".xml", ".bin"))
    ]


def engine_facts(artifacts: Mapping[str, Artifact], candidate: step.Candidate, gate: Gate) -> EngineFacts:
    """The facts about one engine in report.json."""
    engine = step.read_engine(artifacts[candidate.step("compile")].path)
    placed = read_placement(artifacts[candidate.step("place")].path)
    return EngineFacts(
        artifact=candidate.artifact,
        target=candidate.target,
        precision=engine.precision,
        provider=engine.provider,
        shipped=candidate.shipped,
        bytes=engine_bytes(artifacts, candidate),
        kernels=engine.kernels,
        weight_bits=engine.weight_bits,
        verify=verified(artifacts, candidate),
        quantization=_quantization(artifacts, candidate, placed),
        half=placed.half,
        gate=gate,
        accepted=engine.accepted,
    )


def _quantization(
    artifacts: Mapping[str, Artifact], candidate: step.Candidate, placed: PlacementFacts
) -> Quantization | None:
    """The quantized layers; None for a float engine. Mixed precision adds the measurements behind its choice."""
    if candidate.precision not in step.QUANTIZED:
        return None
    layers = Quantization(placed.int8, placed.float, placed.folds, placed.hidden, placed.int4)
    search = artifacts.get(candidate.step("search"))
    if search is None:
        return layers
    return replace(
        layers,
        sensitivity=SENSITIVITY_SEARCH.read(search.path),
        mixed=MIXED_SEARCH.read(search.path),
    )
