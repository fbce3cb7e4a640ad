"""Prints how far devices of one kind are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitdeploy.api.tables import Column, Line, Table
from vitdeploy.spec import encode

if TYPE_CHECKING:
    from vitdeploy.api.bench import Benchmark
    from vitdeploy.document.bench import DeviceBench
    from vitdeploy.workflows.on_devices import Outcome


def spread_of(outcomes: Sequence[Outcome[Benchmark]]) -> tuple[dict[str, Any], list[Line]]:
    """What a document of `bench --on` has besides the devices, and its lines: nothing where no two are of one kind."""
    from vitdeploy.document.bench import DeviceBench
    from vitdeploy.workflows.spread import kinds_of

    found: dict[str, DeviceBench] = {}
    for outcome in outcomes:
        if outcome.found is not None and isinstance(outcome.found.document, DeviceBench):
            found[outcome.device.name] = outcome.found.document
    kinds = kinds_of(found)
    lines: list[Line] = []
    for kind in kinds:
        lines.append(
            f"{len(kind.devices)} of {len(kind.devices) + len(kind.quarantined)} devices of one kind, {kind.name}:"
        )
        columns = ("artifact", "p50 ms", "least", "most", "spread", "fastest", "slowest")
        rows = tuple(
            (
                *(each.artifact, f"{each.median_ms:.3g}", f"{each.least_ms:.3g}", f"{each.most_ms:.3g}"),
                *(f"{100 * each.spread:.1f} %", each.fastest, each.slowest),
            )
            for each in kind.artifacts
        )
        lines += [Table(tuple(Column(name, 9 - index) for index, name in enumerate(columns)), rows)] if rows else []
        lines += [f"quarantined: {each.device}: {each.reason}" for each in kind.quarantined]
    return {"kinds": [encode(kind) for kind in kinds]}, lines
