"""Print the context of a bench's latencies for people: the machine in a line, then each artifact in a few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitdeploy.api.tables import human_bytes

if TYPE_CHECKING:
    from vitdeploy.document.context import ArtifactContext, ContextFacts, LayerGroup

SHOWN_LAYERS = 5
LONGEST_NAME = 70


def context_lines(context: ContextFacts | None) -> list[str]:
    """The lines of the `context` of a bench; None if it was too short for one."""
    if context is None:
        return ["context: not measured by a bench of less than a second"]
    lines = [f"machine: {context.machine}"] if context.machine else []
    lines += [f"not measured: {each.what}: {each.why}" for each in context.left_out]
    for artifact in context.artifacts:
        lines += [f"{artifact.artifact}: {text}" for text in _artifact(artifact)]
        lines += _groups(artifact.groups)
    return lines


def _artifact(found: ArtifactContext) -> list[str]:
    lines = [] if found.line is None else [found.line]
    work, time = found.work, found.time
    if work is not None:
        images = "an image" if work.batch == 1 else f"{work.batch} images"
        lines.append(
            f"{_giga(sum(work.flops.values()))} GFLOP and at least {human_bytes(work.bytes)} {images} "
            f"(weights {human_bytes(work.weight_bytes)})"
        )
    elif time is not None:
        lines.append(f"work unknown: {found.work_unknown}")
    if time is not None:
        over = 100 * (time.layers_ms / time.latency_ms - 1)
        reason = f" (+{over:.0f} %: the profiler, or another moment)" if over >= 1 else ""
        precisions = ", ".join(f"{name.upper()} {ms:.2f}" for name, ms in time.by_precision_ms.items())
        lines.append(f"layers {time.layers_ms:.2f} of {time.latency_ms:.2f} ms{reason}: {precisions}")
    return lines


def _groups(groups: Sequence[LayerGroup]) -> list[str]:
    """The layers that take most of the time; the same layer of all blocks is one line."""
    return [
        f"  {each.ms:>8.2f} ms {100 * each.share:>3.0f} %  {each.precision.upper():<5}"
        f"{'' if each.count == 1 else str(each.count) + ' x ':>6}{_short(each.name)} ({_short(each.kind)})"
        for each in groups[:SHOWN_LAYERS]
    ]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 3]}..."


def _giga(value: float) -> str:
    return f"{value / 1e9:.3g}"
