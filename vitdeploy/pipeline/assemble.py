"""The last step of a run: measured results and stored artifacts become the report and the bundle."""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bench.contest import Protocol
from vitdeploy.bundle.write import Golden, write_bundle
from vitdeploy.graph.io import graph_spec, load_graph
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.measure import ORIGINAL, engine_contestant, measure, original_contestant
from vitdeploy.pipeline.plan import CALIBRATE, EXPORT, REFERENCE, Candidate, candidates
from vitdeploy.pipeline.stages import MODEL_FILE, OUTPUT_NAMES, Progress, read_engine, read_json
from vitdeploy.pipeline.verdict import Verdict, decide, engine_gate
from vitdeploy.report.html import render_html
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.postprocess import classify
from vitdeploy.runtime.preprocess import load_pixels
from vitdeploy.spec import encode
from vitdeploy.store.publish import replacing
from vitdeploy.store.store import Artifact, list_files
from vitdeploy.verify.agreement import Agreement
from vitdeploy.verify.gate import Gate, accuracy_gate

GOLDEN_IMAGES = 8
EXAMPLES = 12
TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy", "pillow")


def bench_job(job: Job, artifacts: Mapping[str, Artifact], progress: Progress) -> dict[str, Any]:
    """Measure the original and every candidate: each against the original, each INT8 against its own FP32."""
    contenders = candidates(job)
    bench = job.recipe.bench
    contestants = [original_contestant(job.recipe.source.model, job.checkpoint)]
    for candidate in contenders:
        folder = artifacts[candidate.step("compile")].path
        contestants.append(engine_contestant(read_engine(folder), folder, candidate.artifact))
    pairs = [(c.artifact, ORIGINAL) for c in contenders]
    pairs += [(c.artifact, f"{c.target}-fp32") for c in contenders if c.precision != "fp32"]
    protocol = Protocol(scenarios=bench.scenarios, batch=bench.batch, duration=bench.duration)
    return measure(contestants, protocol, pairs, progress)


def write_run(
    job: Job, artifacts: Mapping[str, Artifact], bench: dict[str, Any], out: Path
) -> tuple[Verdict, dict[str, Any]]:
    """Publish the bundle at `out`; returns the verdict and report.json's content.

    Raises:
        OutputError: `out` holds something that is not a bundle.
    """
    contenders = candidates(job)
    gates = _gates(job, artifacts, bench)
    verified = {c.artifact: _verified(artifacts, c) for c in contenders}
    verdict = decide(contenders, gates, verified, bench["results"], bench["ratios"])
    examples, images = _examples(job, artifacts)
    report = _report(job, artifacts, bench, gates, verdict, examples)
    shipped = sorted((c for c in contenders if c.shipped), key=lambda c: _p50(bench, c.artifact))
    with replacing(out, OUTPUT_NAMES) as work:
        write_bundle(
            work,
            name=job.recipe.name,
            graph=artifacts[EXPORT].path / MODEL_FILE,
            graph_spec=graph_spec(load_graph(artifacts[EXPORT].path / MODEL_FILE), MODEL_FILE),
            preprocess=job.preprocess,
            engines=[(read_engine(f), f) for f in (artifacts[c.step("compile")].path for c in shipped)],
            labels=job.split.classes,
            golden=_golden(job, artifacts, shipped),
            documents={
                "report.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
                "report.html": render_html(report, images),
                **_calibration(artifacts),
            },
            provenance=report["provenance"],
        )
    return verdict, report


def _gates(job: Job, artifacts: Mapping[str, Artifact], bench: dict[str, Any]) -> dict[str, Gate]:
    budget = job.recipe.to_budget()
    rows = {row["artifact"]: row for row in bench["results"]}
    gates = {}
    for candidate in candidates(job):
        verified = _verified(artifacts, candidate)
        fields = {name: verified[name] for name in Agreement.__dataclass_fields__}
        gates[candidate.artifact] = engine_gate(
            accuracy_gate(Agreement(**fields), budget), budget, _size(artifacts, candidate), rows[candidate.artifact]
        )
    return gates


def _verified(artifacts: Mapping[str, Artifact], candidate: Candidate) -> dict[str, Any]:
    return dict(read_json(artifacts[candidate.step("verify")].path / "verify.json"))


def _size(artifacts: Mapping[str, Artifact], candidate: Candidate) -> int:
    """Bytes of what the runtime loads."""
    folder = artifacts[candidate.step("compile")].path
    return sum((folder / file).stat().st_size for file in read_engine(folder).files)


def _p50(bench: dict[str, Any], artifact: str) -> float:
    return next(float(row["latency_ms"]["p50"]) for row in bench["results"] if row["artifact"] == artifact)


def _calibration(artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    if CALIBRATE not in artifacts:
        return {}
    return {"calibration.json": (artifacts[CALIBRATE].path / "ranges.json").read_text(encoding="utf-8")}


def _golden(job: Job, artifacts: Mapping[str, Artifact], shipped: list[Candidate]) -> Golden:
    """The first evaluation images with the original's logits; the tolerance is twice what was measured on all."""
    samples = job.split.evaluation[:GOLDEN_IMAGES]
    return Golden(
        inputs=np.stack([load_pixels(sample.path, job.preprocess) for sample in samples]),
        outputs=np.load(artifacts[REFERENCE].path / "logits.npy")[:GOLDEN_IMAGES],
        tolerance={c.target: 2 * _verified(artifacts, c)["max_difference"] for c in shipped},
    )


def _report(
    job: Job,
    artifacts: Mapping[str, Artifact],
    bench: dict[str, Any],
    gates: Mapping[str, Gate],
    verdict: Verdict,
    examples: list[dict[str, Any]],
) -> dict[str, Any]:
    exported = read_json(artifacts[EXPORT].path / "export.json")
    data = job.recipe.data
    return {
        "format": 1,
        "name": job.recipe.name,
        "task": "classification",
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "verdict": {
            "sentence": verdict.sentence,
            "remarks": list(verdict.remarks),
            "recommended": verdict.recommended,
            "gate": verdict.gate.status,
            "reasons": [f"{name}: {reason}" for name, gate in gates.items() for reason in gate.reasons],
        },
        "model": {
            **exported["model"],
            "checkpoint": job.checkpoint.name if job.checkpoint else None,
            "checkpoint_sha256": job.checkpoint_sha256,
        },
        "export": {key: exported[key] for key in ("opset", "ir_version", "bytes", "parity", "tolerance")},
        "calibration": {"images": len(job.split.calibration), "digest": job.calibration_digest}
        if CALIBRATE in artifacts
        else None,
        "data": {
            "path": data.path,
            "labels": data.labels,
            "evaluation_images": len(job.split.evaluation),
            "calibration_images": len(job.split.calibration),
            "skipped": len(job.skipped),
        },
        "engines": [_engine(artifacts, candidate, gates[candidate.artifact]) for candidate in candidates(job)],
        "bench": bench,
        "examples": examples,
        "environment": {**describe_host(), **tool_versions(TOOLS)},
        "provenance": {
            "recipe": job.recipe.model_dump(mode="json"),
            "source": {"model": job.recipe.source.model, "checkpoint_sha256": job.checkpoint_sha256},
            "data": {"calibration": job.calibration_digest, "evaluation": job.evaluation_digest},
            "tools": tool_versions(TOOLS),
            "files": [encode(entry) for entry in _provenance_files(artifacts)],
        },
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


def _engine(artifacts: Mapping[str, Artifact], candidate: Candidate, gate: Gate) -> dict[str, Any]:
    engine = read_engine(artifacts[candidate.step("compile")].path)
    return {
        "artifact": candidate.artifact,
        "target": candidate.target,
        "precision": engine.precision,
        "provider": engine.provider,
        "shipped": candidate.shipped,
        "bytes": _size(artifacts, candidate),
        "kernels": engine.kernels,
        "verify": _verified(artifacts, candidate),
        "gate": {"status": gate.status, "reasons": list(gate.reasons)},
    }


def _examples(job: Job, artifacts: Mapping[str, Artifact]) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Images where an engine differs from the original first, then evenly spread ones; with every answer."""
    labels = list(job.split.classes) or None
    reference = np.load(artifacts[REFERENCE].path / "logits.npy")
    answers = {c.artifact: np.load(artifacts[c.step("verify")].path / "logits.npy") for c in candidates(job)}
    differs = np.zeros(len(reference), bool)
    for logits in answers.values():
        differs |= logits.argmax(axis=1) != reference.argmax(axis=1)
    chosen = [int(i) for i in np.flatnonzero(differs)[: EXAMPLES // 2]]
    spread = np.linspace(0, len(reference) - 1, EXAMPLES).round().astype(int)
    chosen += [int(i) for i in spread if int(i) not in chosen]
    examples, images = [], {}
    for i in list(dict.fromkeys(chosen))[:EXAMPLES]:
        sample = job.split.evaluation[i]
        name = f"{i}.png"
        images[name] = _png(load_pixels(sample.path, job.preprocess))
        examples.append(
            {
                "image": name,
                "label": job.split.classes[sample.label] if sample.label is not None else None,
                "reference": _answer(reference[i], labels),
                "engines": {artifact: _answer(logits[i], labels) for artifact, logits in answers.items()},
            }
        )
    return examples, images


def _answer(logits: np.ndarray, labels: list[str] | None) -> dict[str, Any]:
    best = classify(logits, labels, 1)
    return {"label": best.label, "score": best.score}


def _png(pixels: np.ndarray) -> bytes:
    """The preprocessed image as the model sees it, at most 224 pixels wide and enlarged where it is tiny."""
    from PIL import Image

    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    short = min(image.size)
    if short < 96:
        factor = -(-96 // short)
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((224, 224))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
