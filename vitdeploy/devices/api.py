"""Benchmarks, verifications, engines and deployments on registered devices: the Python API."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api import bench, calls, values, verify
from vitdeploy.api.artifacts import ArtifactLike, artifact_name
from vitdeploy.api.images import images
from vitdeploy.api.options import (
    Bench,
    BenchKeywords,
    Compile,
    VerifyOn,
)
from vitdeploy.devices import command, on_devices, registry, rollout, shipment, spread
from vitdeploy.devices.on_devices import DeviceOutcome
from vitdeploy.devices.rollout import RollOut, Standing, ready
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


def _bench_on(on: str, options: Bench) -> list[DeviceOutcome[bench.Benchmark]]:
    accepted = options.accept_known_bad
    check_ids(accepted)
    devices, reporter = registry.find_devices(on), values.reporting(options.progress)
    with reporter, tempfile.TemporaryDirectory(prefix="vitdeploy-") as work:
        found = [
            each
            for artifact in options.artifacts
            for each in shipment.find_device_artifacts(
                artifact_name(artifact) or "",
                target=options.target,
                work=Path(work),
                trust=bench.path_or_none(options.trust),
                golden=not accepted,
            )
        ]
        outcomes = on_devices.bench_on(
            found, bench.bench_protocol(options), options.percentiles, devices, reporter, accepted
        )
    return [outcome.of(partial(bench.Benchmark, device=outcome.device.name)) for outcome in outcomes]


@calls.documented(Bench, many="artifacts", first="on")
def bench_on(
    on: str, *artifacts: ArtifactLike, **options: Unpack[BenchKeywords]
) -> list[DeviceOutcome[bench.Benchmark]]:
    """Like `bench`, on all registered devices in `on` at the same time; each builds and measures the engines itself. A
    device's error is in its outcome. A runtime that is known to compute an artifact wrongly is such an error, unless
    its entry is in `accept_known_bad`."""
    return _bench_on(on, Bench(artifacts, **options))


bench_on.of = _bench_on  # type: ignore[attr-defined]


def spread_of(outcomes: Sequence[DeviceOutcome[bench.Benchmark]]) -> tuple[dict[str, Any], list[values.Line]]:
    """Return the comparison of devices of the same kind for `bench --on`, as a document and as lines."""
    benches: dict[str, DeviceBench] = {}
    for outcome in outcomes:
        if outcome.found is not None and isinstance(outcome.found.document, DeviceBench):
            benches[outcome.device.name] = outcome.found.document
    kinds = spread.kinds_of(benches)
    lines: list[values.Line] = []
    for kind in kinds:
        lines.append(
            f"{len(kind.devices)} of {len(kind.devices) + len(kind.quarantined)} devices of the kind {kind.name}:"
        )
        columns = ("artifact", "p50 ms", "min", "max", "spread", "fastest", "slowest")
        rows = tuple(
            (
                *(each.artifact, f"{each.median_ms:.3g}", f"{each.least_ms:.3g}", f"{each.most_ms:.3g}"),
                *(f"{100 * each.spread:.1f} %", each.fastest, each.slowest),
            )
            for each in kind.artifacts
        )
        lines += (
            [values.Table(tuple(values.Column(name, 9 - index) for index, name in enumerate(columns)), rows)]
            if rows
            else []
        )
        lines += [f"quarantined: {quarantined.device}: {quarantined.reason}" for quarantined in kind.quarantined]
    return {"kinds": [encode(kind) for kind in kinds]}, lines


@calls.takes_after(VerifyOn)
def verify_on(on: str, options: VerifyOn) -> list[DeviceOutcome[verify.Verification]]:
    """Like `verify`, on all registered devices in `on`: the artifact (a path) is built and run there, the original
    here. A device's error is in its outcome. A runtime that is known to compute the artifact wrongly is such an error,
    unless its entry is in `accept_known_bad`."""
    chosen, reporter = images(options.data), values.reporting(options.progress)
    name, target, trust = calls.require_path(options.artifact), options.target, bench.path_or_none(options.trust)
    with (
        reporter,
        opened(target=target, trust=trust, accepted=options.accept_known_bad) as finder,
        tempfile.TemporaryDirectory(prefix="vitdeploy-") as work,
    ):
        theirs = bench.found_by(finder, options.against)[0]
        devices = registry.find_devices(on)
        ours = shipment.find_device_artifacts(name, target=target, work=Path(work), trust=trust)[0]
        assert ours.setting is not None
        choice = verify.data_choice(chosen, ours.setting, options)
        outcomes = on_devices.verify_on(ours, theirs, choice, devices, options, reporter)
    return [outcome.of(lambda found: verify.Verification(found, verify.noun_of(chosen))) for outcome in outcomes]


def compile_on(
    on: str, options: Compile, file: Path, out: Path, reporter: values.Reporter
) -> tuple[Manifest, AnswersTold]:
    """Compile the engine of a graph on one device, into `out`."""
    target, batch, accepted = options.target, options.batch, options.accept_known_bad
    devices = registry.find_devices(on)
    if len(devices) != 1:
        raise UnknownDeviceError(
            "compile needs exactly one device", found=", ".join(d.name for d in devices), expected="--on with one name"
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
            lambda: on_devices.row_parts_there(graphs, size, devices[0], reporter),
        )
        seeded = seeded_answers(placed / f"{next(iter(graphs.graphs))}.onnx", target)
        golden = {} if seeded.why or accepted else golden_folder(seeded, target, Path(folder) / "golden")
        engine = on_devices.compile_on(
            str(file), graphs, devices[0], made, options, golden=golden, reporter=reporter, parts=parts
        )
        return bundle_of(graphs, engine, made, out), compared_there(seeded, devices[0].name, bool(golden))


# --- A bundle on many devices: roll-out in stages, status, rollback ---------------------------------------------------


def roll_out(options: command.DeployOptions, reporter: values.Reporter) -> RollOut:
    """Deploy a bundle to registered devices, stage by stage.

    Raises:
        UnknownDeviceError: an unknown device or label. InputError: an invalid stage or name. Errors of reading the
            bundle propagate.
    """
    stages, devices, trust = rollout.parse_stages(options.stages), registry.find_devices(options.on), options.trust
    limits = {"duration": options.duration, "worse": options.worse / 100}
    with reporter:
        release = ready(options.bundle, options.name, trust=trust, target=options.target, **limits)
        return rollout.roll_out(release, devices, stages, reporter)


def roll_back(name: str, on: str, target: str, reporter: values.Reporter) -> RollOut:
    """Return the devices in `on` to their previous release; errors as `roll_out`."""
    devices = registry.find_devices(on)
    with reporter:
        return rollout.roll_back(registry.check_deployment(name), devices, target, reporter)


def standing(name: str | None, on: str | None, reporter: values.Reporter) -> Standing:
    """Return the present deployments on all registered devices, or on those in `on`."""
    devices = list(registry.read_devices().values()) if on is None else registry.find_devices(on)
    with reporter:
        chosen = None if name is None else registry.check_deployment(name)
        return rollout.standing(devices, chosen, reporter)
