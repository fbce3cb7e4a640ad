"""Finds on a device in which parts a placed model computes its rows fastest there (`search.row_parts` does it here)."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from vitdeploy.devices.agent.documents import Result
from vitdeploy.devices.registry import Device
from vitdeploy.devices.results import check_run, reported
from vitdeploy.devices.shipment import make_job
from vitdeploy.errors import CapabilityError
from vitdeploy.pipeline.artifact import new_folder
from vitdeploy.progress import Progress
from vitdeploy.search.alternatives import in_turns, judged
from vitdeploy.search.parts import PartsTable
from vitdeploy.search.row_parts import alternatives_of, table_of
from vitdeploy.spec import encode
from vitdeploy.stages.files import MODEL_FILE
from vitdeploy.workflows.device_artifact import placed_shipment
from vitdeploy.workflows.on_devices import Note, on_all
from vitdeploy.workflows.placement import PlacedGraphs

Parts: TypeAlias = tuple[int, ...]


def measure_row_parts_there(
    placed: PlacedGraphs, batch: int, device: Device, progress: Progress, note: Note
) -> PartsTable:
    """The measurement of `search.row_parts.measure_row_parts`, by a device: one job with the graph in each form, which
    it compiles and measures in alternating blocks.

    A form that does not work there is left out. Without the first one, or where the device cannot time anything, as in
    an emulator, nothing is measured, and the table has the `reason`.

    Raises:
        VitdeployError: the device cannot be reached, or answers what it was not asked for.
    """
    alternatives, reason = alternatives_of(placed.folder / MODEL_FILE)
    if reason:
        return table_of(placed.target, batch, {}, reason=reason)
    protocol = in_turns()
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as work:
        forms, results = Path(work) / "forms", Path(work) / "results"
        forms.mkdir()
        results.mkdir()
        shipments = []
        for done, parts in enumerate(_in_order(alternatives)):
            progress(f"prepare rows in parts for {device.name}", done, len(alternatives))
            form = placed if parts == alternatives[0] else placed.in_parts(parts, new_folder(forms, _name(parts)))
            shipments.append(placed_shipment(_name(parts), form, batch))
        job, files = make_job("bench", shipments, {"protocol": encode(protocol)})
        (outcome,) = on_all([device], lambda client: client.run(job, files, results), progress, note)
    if isinstance(outcome.error, CapabilityError):
        return table_of(placed.target, batch, {}, reason=outcome.error.message)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.found is not None
    return _table(outcome.found, alternatives, placed.target, batch, device.name)


def _in_order(alternatives: Sequence[Parts]) -> list[Parts]:
    """All at once last: a device compares with the last one, and measures again what is not narrow."""
    return [*alternatives[1:], alternatives[0]]


def _name(parts: Parts) -> str:
    return "+".join(map(str, parts))


def _table(result: Result, alternatives: Sequence[Parts], target: str, batch: int, device: str) -> PartsTable:
    for failure in result.left_out:
        if failure.artifact == _name(alternatives[0]):
            return table_of(target, batch, result.host, reason=reported(device, failure).message)
    measured = [parts for parts in _in_order(alternatives) if _name(parts) in result.engines]
    bench_run = check_run(device, result.bench_run, in_turns(), [_name(parts) for parts in measured])
    *others, together = bench_run.entries
    found, disturbed = judged(dataclasses.replace(bench_run, entries=(together, *others)))
    return table_of(
        target, batch, result.host, zip((measured[-1], *measured[:-1]), found, strict=True), disturbed=disturbed
    )
