"""`verify` and `bench` on subjects: two artifacts on the same images, many artifacts in one contest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bench.contest import Protocol
from vitdeploy.errors import InputError
from vitdeploy.pipeline.images import sample_images
from vitdeploy.pipeline.measure import measure
from vitdeploy.pipeline.plan import check_classes
from vitdeploy.pipeline.stages import Counter, Progress, agreement_of
from vitdeploy.pipeline.subjects import Subject
from vitdeploy.runtime.preprocess import load_pixels
from vitdeploy.spec import Budget, PreprocessSpec
from vitdeploy.verify.agreement import Agreement
from vitdeploy.verify.collect import collect_from_pixels, collect_logits
from vitdeploy.verify.gate import Gate, accuracy_gate


def verify_subjects(
    ours: Subject,
    theirs: Subject,
    data: Path,
    *,
    num_samples: int | None,
    seed: int,
    skip_bad: bool,
    budget: Budget,
    progress: Progress,
) -> tuple[dict[str, Any], Gate]:
    """The facts and the gate of `ours` against `theirs`, one runtime after the other.

    Raises:
        InputError: no side says how images are prepared. Errors of data and engines come through.
    """
    own = ours.preprocess or theirs.preprocess
    other = theirs.preprocess or ours.preprocess
    if own is None or other is None:
        raise InputError(
            "neither side says how images are prepared",
            found="two built-in models",
            wanted="at least one exported graph or bundle",
        )
    chosen = sample_images(data, "evaluation", num_samples, seed, own, skip_bad=skip_bad, progress=progress)
    paths = [sample.path for sample in chosen.samples]
    logits = collect_logits(ours.runner(), paths, own, Counter(progress, ours.name, len(paths)))
    check_classes(chosen.classes, logits.shape[1])
    reference = collect_logits(theirs.runner(), paths, other, Counter(progress, theirs.name, len(paths)))
    if reference.shape != logits.shape:
        raise InputError(
            "the two models have other classes",
            found=f"{logits.shape[1]} against {reference.shape[1]}",
            wanted="the same number of classes",
        )
    same_tensor = None
    if own != other and (own.crop, own.channels) == (other.crop, other.channels):
        same_tensor = _on_our_tensor(theirs, own, other, paths, progress)
    found = agreement_of(logits, reference, chosen.samples, ours.precision, own, other, same_tensor)
    fields = {name: found[name] for name in Agreement.__dataclass_fields__}
    gate = accuracy_gate(Agreement(**fields), budget)
    return {
        "artifact": ours.name,
        "against": theirs.name,
        **found,
        "skipped": list(chosen.skipped),
        "gate": {"status": gate.status, "reasons": list(gate.reasons)},
    }, gate


def _on_our_tensor(
    theirs: Subject, own: PreprocessSpec, other: PreprocessSpec, paths: Sequence[Path], progress: Progress
) -> np.ndarray:
    """The original's answers for our geometry: resized and cropped our way, normalised as the original wants it."""
    count = Counter(progress, f"{theirs.name} on the same tensor", len(paths))
    return collect_from_pixels(theirs.runner(), (load_pixels(path, own) for path in paths), other, count)


def bench_subjects(subjects: Sequence[Subject], protocol: Protocol, progress: Progress) -> dict[str, Any]:
    """All subjects in one contest; each compared with the last. An artifact given twice is measured twice."""
    names = _unique([subject.name for subject in subjects])
    contestants = [subject.contestant(name) for subject, name in zip(subjects, names, strict=True)]
    pairs = [(name, names[-1]) for name in names[:-1]]
    return measure(contestants, protocol, pairs, progress)


def _unique(names: Sequence[str]) -> list[str]:
    return [
        name if names[:i].count(name) == 0 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)
    ]
