"""Benches, verifications, engines and deployments on registered devices, as users call them from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.artifacts import ArtifactLike, artifact_name
from vitdeploy.api.bench import Benchmark, bench_protocol, found_by, path_or_none
from vitdeploy.api.calls import documented, require_path, takes_after
from vitdeploy.api.images import images
from vitdeploy.api.options import (
    Bench,
    BenchKeywords,
    Compile,
    VerifyOn,
)
from vitdeploy.api.values import Column, Line, Reporter, Table, reporting
from vitdeploy.api.verify import Verification, data_choice, noun_of
from vitdeploy.devices import on_devices, rollout
from vitdeploy.devices.command import DeployOptions
from vitdeploy.devices.on_devices import DeviceOutcome
from vitdeploy.devices.registry import check_deployment, find_devices, read_devices
from vitdeploy.devices.rollout import RollOut, Standing, ready
from vitdeploy.devices.shipment import find_device_artifacts
from vitdeploy.devices.spread import kinds_of
from vitdeploy.document.bench import DeviceBench
from vitdeploy.errors import UnknownDeviceError
from vitdeploy.known_bad.find import check_ids
from vitdeploy.spec import Manifest, encode
from vitdeploy.workflows.placement import bundle_of, chosen_row_parts, place_graphs
from vitdeploy.workflows.seeded import AnswersTold, compared_there, golden_folder, seeded_answers
from vitdeploy.workflows.subjects import opened

if TYPE_CHECKING:
    from typing_extensions import Unpack

# --- `bench`, `verify` and `compile` on devices -----------------------------------------------------------------------


def _bench_on(on: str, options: Bench) -> list[DeviceOutcome[Benchmark]]:
    accepted = options.accept_known_bad
    check_ids(accepted)
    devices, reporter = find_devices(on), reporting(options.progress)
    with reporter, tempfile.TemporaryDirectory(prefix="vitdeploy-") as work:
        found = [
            each
            for artifact in options.artifacts
            for each in find_device_artifacts(
                artifact_name(artifact) or "",
                target=options.target,
                work=Path(work),
                trust=path_or_none(options.trust),
                golden=not accepted,
            )
        ]
        outcomes = on_devices.bench_on(found, bench_protocol(options), options.percentiles, devices, reporter, accepted)
    return [each.of(partial(Benchmark, device=each.device.name)) for each in outcomes]


@documented(Bench, many="artifacts", first="on")
def bench_on(on: str, *artifacts: ArtifactLike, **options: Unpack[BenchKeywords]) -> list[DeviceOutcome[Benchmark]]:
    """Like `bench`, on each of the registered devices that `on` names: they build and measure the engines themselves,
    at the same time. A device's error is in its outcome; so is a runtime there that is known to compute an artifact
    wrongly, unless its entry is in `accept_known_bad`."""
    return _bench_on(on, Bench(artifacts, **options))


bench_on.of = _bench_on  # type: ignore[attr-defined]


def spread_of(outcomes: Sequence[DeviceOutcome[Benchmark]]) -> tuple[dict[str, Any], list[Line]]:
    """What a document of `bench --on` has besides the devices, and its lines: nothing where no two are of one kind."""
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


@takes_after(VerifyOn)
def verify_on(on: str, options: VerifyOn) -> list[DeviceOutcome[Verification]]:
    """Like `verify`, on each of the registered devices that `on` names: an artifact by its path is built and run there,
    the original here. A device's error is in its outcome; so is a runtime there that is known to compute the artifact
    wrongly, unless its entry is in `accept_known_bad`."""
    chosen, reporter = images(options.data), reporting(options.progress)
    name, target, trust = require_path(options.artifact), options.target, path_or_none(options.trust)
    with (
        reporter,
        opened(target=target, trust=trust, accepted=options.accept_known_bad) as finder,
        tempfile.TemporaryDirectory(prefix="vitdeploy-") as work,
    ):
        theirs = found_by(finder, options.against)[0]
        devices = find_devices(on)
        ours = find_device_artifacts(name, target=target, work=Path(work), trust=trust)[0]
        assert ours.setting is not None
        choice = data_choice(chosen, ours.setting, options)
        outcomes = on_devices.verify_on(ours, theirs, choice, devices, options, reporter)
    return [each.of(lambda found: Verification(found, noun_of(chosen))) for each in outcomes]


def compile_on(on: str, options: Compile, file: Path, out: Path, reporter: Reporter) -> tuple[Manifest, AnswersTold]:
    """The engine of a graph, compiled by one device into `out`."""
    target, batch, accepted = options.target, options.batch, options.accept_known_bad
    devices = find_devices(on)
    if len(devices) != 1:
        raise UnknownDeviceError(
            "one engine is made by one device", found=", ".join(d.name for d in devices), wanted="--on with one name"
        )
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        placed, made = Path(folder) / "placed", Path(folder) / "engine"
        placed.mkdir()
        made.mkdir()
        graphs = place_graphs(file, target, options.precision, placed)
        size = batch or graphs.batch
        parts = chosen_row_parts(
            graphs,
            options.split_rows,
            lambda: on_devices.measure_row_parts_there(graphs, size, devices[0], reporter),
        )
        seeded = seeded_answers(placed / f"{next(iter(graphs.graphs))}.onnx", target)
        golden = {} if seeded.why or accepted else golden_folder(seeded, target, Path(folder) / "golden")
        engine = on_devices.compile_on(
            str(file), graphs, devices[0], made, options, golden=golden, reporter=reporter, parts=parts
        )
        return bundle_of(graphs, engine, made, out), compared_there(seeded, devices[0].name, bool(golden))


# --- A bundle on many devices: brought in stages, what runs where, and the way back -----------------------------------


def roll_out(options: DeployOptions, reporter: Reporter) -> RollOut:
    """Bring a bundle to registered devices, stage by stage.

    Raises:
        UnknownDeviceError: no such device or label. InputError: no such stage or name. Errors of reading the bundle.
    """
    stages, devices, trust = rollout.parse_stages(options.stages), find_devices(options.on), options.trust
    limits = {"duration": options.duration, "worse": options.worse / 100}
    with reporter:
        release = ready(options.bundle, options.name, trust=trust, target=options.target, **limits)
        return rollout.roll_out(release, devices, stages, reporter)


def roll_back(name: str, on: str, target: str, reporter: Reporter) -> RollOut:
    """Let the devices that `on` names run the release again that they ran before; errors as `roll_out`."""
    devices = find_devices(on)
    with reporter:
        return rollout.roll_back(check_deployment(name), devices, target, reporter)


def standing(name: str | None, on: str | None, reporter: Reporter) -> Standing:
    """What is deployed on all registered devices, or on those that `on` names, as they say themselves now."""
    devices = list(read_devices().values()) if on is None else find_devices(on)
    with reporter:
        chosen = None if name is None else check_deployment(name)
        return rollout.standing(devices, chosen, reporter)
