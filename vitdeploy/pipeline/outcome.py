"""What a run found: stored artifacts and measured times become gates, a verdict and the content of report.json."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vitdeploy.pipeline.answers import report_answers
from vitdeploy.pipeline.foresight import criterion_of
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.plan import candidates
from vitdeploy.pipeline.rendered import render_attention
from vitdeploy.pipeline.verdict import Judged, Verdict, decide, engine_gate
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.weight_bits import weight_remarks
from vitdeploy.spec import encode
from vitdeploy.stages.answers import read_answers
from vitdeploy.stages.engines import read_engine
from vitdeploy.stages.files import MIXED_FILE, read_json
from vitdeploy.stages.search import LATENCY_FILE, SENSITIVITY_FILE
from vitdeploy.stages.step import CALIBRATE, EXPORT, OPTIMIZE, QUANTIZED, REFERENCE, Candidate
from vitdeploy.store.store import Artifact, list_files
from vitdeploy.verify.comparison import Comparison
from vitdeploy.verify.gate import GUARD, Gate, accuracy_gate, guards

TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy", "pillow")


@dataclass(frozen=True)
class Outcome:
    """One job's end. `gates` are those of all engines by artifact; `images` the pictures that the examples of the
    report name."""

    job: Job
    artifacts: Mapping[str, Artifact]
    verdict: Verdict
    report: dict[str, Any]
    images: Mapping[str, bytes]
    gates: Mapping[str, Gate]


def conclude(job: Job, artifacts: Mapping[str, Artifact], bench: dict[str, Any]) -> Outcome:
    """Judge every engine of a job by its budget, and recommend one."""
    gates = _gates(job, artifacts, bench)
    guarded = guards(job.recipe.to_budget())
    judged = [Judged(c, gates[c.artifact], verified(artifacts, c), guarded) for c in candidates(job)]
    verdict = decide(judged, bench, include_failed=job.recipe.bundle.include_failed)
    of_weights = [text for candidate in verdict.ships for text in said_of_weights(artifacts, candidate)]
    of_images = (_calibration(artifacts) or {}).get("warnings", ())
    verdict = replace(verdict, remarks=(*verdict.remarks, *of_weights, *of_images))
    answers, images = report_answers(job, artifacts)
    attention, maps = render_attention(artifacts, answers["examples"], images)
    report = {**_report(job, artifacts, bench, gates, verdict), **answers, "attention": attention}
    report["warnings"] = warnings_of(job, artifacts, judged[0].candidate)
    images |= maps
    return Outcome(job, artifacts, verdict, report, images, gates)


def warnings_of(job: Job, artifacts: Mapping[str, Artifact], candidate: Candidate) -> list[str]:
    """What makes all numbers doubtful: it stands before the verdict. `candidate` is any that was verified."""
    reference = read_answers(artifacts[REFERENCE].path)
    doubt = job.adapter.doubt(reference, job.data, verified(artifacts, candidate))
    return [doubt] if doubt is not None else []


def said_of_weights(artifacts: Mapping[str, Artifact], candidate: Candidate) -> list[str]:
    """What is to be said of an engine's weights on this machine."""
    return weight_remarks(read_engine(artifacts[candidate.step("compile")].path), describe_host()["isa"])


def _calibration(artifacts: Mapping[str, Artifact]) -> dict[str, Any] | None:
    """What the calibration saw of its images; None where there was none."""
    return read_json(artifacts[CALIBRATE].path / "calibrate.json") if CALIBRATE in artifacts else None


def _gates(job: Job, artifacts: Mapping[str, Artifact], bench: dict[str, Any]) -> dict[str, Gate]:
    budget = job.budget
    criterion = criterion_of(job.adapter, read_answers(artifacts[REFERENCE].path), job.data, budget)
    rows = {row["artifact"]: row for row in bench["results"]}
    gates = {}
    for candidate in candidates(job):
        compared = Comparison.of(verified(artifacts, candidate))
        accuracy = accuracy_gate(compared, budget, criterion, GUARD[job.reference_model.task])
        size, row = engine_bytes(artifacts, candidate), rows[candidate.artifact]
        gates[candidate.artifact] = engine_gate(accuracy, budget, size, row)
    return gates


def verified(artifacts: Mapping[str, Artifact], candidate: Candidate) -> dict[str, Any]:
    return dict(read_json(artifacts[candidate.step("verify")].path / "verify.json"))


def engine_bytes(artifacts: Mapping[str, Artifact], candidate: Candidate) -> int:
    """Bytes of what the runtime loads."""
    folder = artifacts[candidate.step("compile")].path
    return sum((folder / file).stat().st_size for file in read_engine(folder).files)


def _checkpoint(job: Job) -> str | None:
    """The name of the file or files that the weights came from."""
    return next((name for name in job.reference_model.digests if not name.endswith((".json", ".npy"))), None)


def _report(
    job: Job,
    artifacts: Mapping[str, Artifact],
    bench: dict[str, Any],
    gates: Mapping[str, Gate],
    verdict: Verdict,
) -> dict[str, Any]:
    exported = read_json(artifacts[EXPORT].path / "export.json")
    digests, checkpoint = job.reference_model.digests, _checkpoint(job)
    return {
        **heading(job),
        "verdict": {
            "sentence": verdict.sentence,
            "remarks": list(verdict.remarks),
            "recommended": verdict.recommended,
            "leading": verdict.leading,
            "ships": [candidate.artifact for candidate in verdict.ships],
            "budget": str(job.budget),
            "gate": verdict.gate.status,
            "reasons": [
                f"{c.artifact}: {reason}" for c in candidates(job) if c.shipped for reason in gates[c.artifact].reasons
            ],
        },
        "model": {**exported["model"], "checkpoint": checkpoint, "checkpoint_sha256": digests.get(checkpoint or "")},
        "export": {key: exported[key] for key in ("opset", "ir_version", "bytes", "parity", "tolerance")},
        "optimize": read_json(artifacts[OPTIMIZE].path / "optimize.json"),
        "calibration": {**found, "digest": job.data.calibration_digest} if (found := _calibration(artifacts)) else None,
        "data": data_facts(job),
        "engines": [engine_facts(artifacts, candidate, gates[candidate.artifact]) for candidate in candidates(job)],
        "bench": bench,
        "environment": {**describe_host(), **tool_versions(TOOLS)},
        "provenance": {
            "recipe": job.recipe.model_dump(mode="json"),
            "source": {
                "model": job.reference_model.source.function or job.recipe.source.model,
                "revision": job.reference_model.revision,
                "sha256": dict(digests),
            },
            "data": {"calibration": job.data.calibration_digest, "evaluation": job.data.evaluation_digest},
            "tools": tool_versions(TOOLS),
            "files": [encode(entry) for entry in _provenance_files(artifacts)],
        },
    }


def heading(job: Job) -> dict[str, Any]:
    """How report.json begins, and tune.json too."""
    return {
        "format": 1,
        "name": job.recipe.name,
        "task": job.reference_model.task,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def data_facts(job: Job) -> dict[str, Any]:
    """The samples in report.json."""
    data = job.recipe.data
    return {
        "path": data.path,
        "labels": data.labels,
        "noun": job.adapter.noun,
        "evaluation_images": len(job.data.evaluation),
        "calibration_images": len(job.data.calibration),
        "skipped": len(job.data.skipped),
        **job.data.facts,
    }


def _provenance_files(artifacts: Mapping[str, Artifact]) -> list[Any]:
    """The exported graph and every placement, by digest; the manifest lists the bundle's own files."""
    found = []
    for name, artifact in artifacts.items():
        if name == EXPORT or name.startswith("compile"):
            found += [
                type(entry)(f"{name.replace(' ', '/')}/{entry.path}", entry.bytes, entry.sha256)
                for entry in list_files(artifact.path)
                if entry.path.endswith((".onnx", ".xml", ".bin"))
            ]
    return found


def engine_facts(artifacts: Mapping[str, Artifact], candidate: Candidate, gate: Gate) -> dict[str, Any]:
    """One engine in report.json."""
    engine = read_engine(artifacts[candidate.step("compile")].path)
    return {
        "artifact": candidate.artifact,
        "target": candidate.target,
        "precision": engine.precision,
        "provider": engine.provider,
        "shipped": candidate.shipped,
        "bytes": engine_bytes(artifacts, candidate),
        "kernels": engine.kernels,
        "weight_bits": engine.weight_bits,
        "verify": verified(artifacts, candidate),
        "quantization": _quantization(artifacts, candidate),
        "half": _placed(artifacts, candidate).get("half"),
        "gate": {"status": gate.status, "reasons": list(gate.reasons)},
    }


def _placed(artifacts: Mapping[str, Artifact], candidate: Candidate) -> dict[str, Any]:
    return dict(read_json(artifacts[candidate.step("place")].path / "placement.json"))


def _quantization(artifacts: Mapping[str, Artifact], candidate: Candidate) -> dict[str, Any] | None:
    """What became of the layers; None for an engine in float. Mixed precision brings what it was chosen by."""
    if candidate.precision not in QUANTIZED:
        return None
    placed = _placed(artifacts, candidate)
    found = {key: placed[key] for key in ("int8", "float", "folds", "hidden")}
    search = artifacts.get(candidate.step("search"))
    if search is not None:
        files = {"sensitivity": SENSITIVITY_FILE, "mixed": MIXED_FILE, "latency": LATENCY_FILE}
        found |= {name: read_json(search.path / file) for name, file in files.items()}
    return found
