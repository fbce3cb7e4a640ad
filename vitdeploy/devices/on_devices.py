"""Run benchmarks, verifications and compilations on devices."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from vitdeploy.api.options import Compile, VerifyOn
from vitdeploy.api.values import Reporter
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import against_last
from vitdeploy.devices.agent.documents import PlacedArtifact
from vitdeploy.devices.agent.probe import DeviceProbe
from vitdeploy.devices.client import Client
from vitdeploy.devices.registry import Device
from vitdeploy.devices.results import check_named, check_run, product_files, reported
from vitdeploy.devices.runner import RemoteRunner
from vitdeploy.devices.shipment import Shipment, entries, make_job, placed_shipment
from vitdeploy.document import bench, report
from vitdeploy.errors import KnownBadError, VitdeployError
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.known_bad.entries import REFUSED
from vitdeploy.known_bad.find import Match, accepted_of, in_spite, matches, refuse_known_bad
from vitdeploy.known_bad.platform import concerns, for_target, platform_there
from vitdeploy.pipeline import measure
from vitdeploy.runtime.values import weight_remarks
from vitdeploy.search.costs import costs_for
from vitdeploy.search.rows import RowParts, choose_row_parts
from vitdeploy.spec import Budget, EngineSpec, Precision
from vitdeploy.stages.compile import check_batch
from vitdeploy.stages.step import MODEL_FILE
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.verification.records import Answers
from vitdeploy.workflows import comparison, placement, subjects

# --- Check artifacts against the known-bad table before a device builds or measures them ------------------------------
# Patterns are matched here, once for all devices. A device is probed for its releases only if a graph matches.


@dataclass(frozen=True)
class Suspects:
    """The known-bad entries that match an artifact on some release of its runtime. `found`: (precision, matches) of
    each graph. `graphs`: its files by part. `accepted`: entries that are accepted."""

    placed: PlacedArtifact
    graphs: dict[str, Path]
    found: tuple[tuple[Precision, tuple[Match, ...]], ...]
    accepted: frozenset[str]

    def __bool__(self) -> bool:
        return any(each for _, each in self.found)

    def check(self, probe: DeviceProbe) -> None:
        """Raise KnownBadError if the device's release computes it wrongly. Targets that do not work there are skipped,
        since they fail with their own error.

        Raises:
            KnownBadError: with the defect and the fix.
        """
        target = self.placed.target
        state = probe.targets.get(target)
        if state is None or not state.works:
            return
        for precision, found in self.found:
            platform = platform_there(target, {**probe.host, **probe.runtimes.get(target, {})}, precision)
            open_ones = [match for match in found if concerns(match.entry, platform)]
            refuse_known_bad(open_ones, platform, self.placed.name, self.accepted)

    def known_of(self, engine: EngineSpec) -> EngineSpec:
        """Return the engine that the device built, with the accepted entries that match it.

        Raises:
            KnownBadError: an entry that is not accepted matches, by the platform that the engine records.
        """
        taken = accepted_of(engine, self.graphs, self.placed.name, tuple(self.accepted)) if self else ()
        return dataclasses.replace(engine, accepted=taken or None)


def suspects_of(shipment: Shipment, accepted: Sequence[str] = ()) -> Suspects:
    """Return the entries that match an artifact on any release and machine; errors as `entries.table`."""
    placed = shipment.placed
    graphs = {graph.part: shipment.files[graph.file] for graph in placed.graphs}
    found = []
    for graph in placed.graphs:
        precision = graph.precision or placed.precision
        entries = [entry for entry in for_target(placed.target) if entry.action in REFUSED]
        found.append((precision, tuple(matches(load_graph(graphs[graph.part]), entries))))
    return Suspects(placed, graphs, tuple(found), frozenset((*accepted, *shipment.accepted)))


def known_there(client: Client, suspects: Sequence[Suspects]) -> dict[str, KnownBadError]:
    """Return, by name, the errors for artifacts that the device is known to compute wrongly. The device is probed only
    if an artifact is suspect; errors as `Client.probe`."""
    if not any(suspects):
        return {}
    probe = client.probe()
    refused = {}
    for suspect in suspects:
        try:
            suspect.check(probe)
        except KnownBadError as error:
            error.message = f"{client.device.name}: {error.message}"
            refused[suspect.placed.name] = error
    return refused


# --- `bench`, `verify` and `compile` on devices -----------------------------------------------------------------------
# All devices work at the same time; the failure of one does not stop the others.


T = TypeVar("T")
U = TypeVar("U")
REBUILT = "{} was rebuilt there from the bundle's graph, because its plan belongs to another machine or user."
# The worst error, for the exit code of a command that failed in part.
WORST = (1, 3, 2, 4, 5)


@dataclass(frozen=True)
class DeviceOutcome(Generic[T]):
    """The outcome of one device: the result `found`, or an `error`."""

    device: Device
    found: T | None = None
    error: VitdeployError | None = None

    def of(self, made: Callable[[T], U]) -> DeviceOutcome[U]:
        """Return the outcome with `made` applied to its result."""
        return DeviceOutcome(self.device, None if self.found is None else made(self.found), self.error)


def worst(errors: Sequence[VitdeployError]) -> VitdeployError:
    """Return the error that determines a command's exit code."""
    return min(errors, key=lambda error: WORST.index(error.exit_code))


def on_all(devices: Sequence[Device], work: Callable[[Client], T], reporter: Reporter) -> list[DeviceOutcome[T]]:
    """Call `work` with a client of each device, in parallel.

    An interrupt stops the started jobs on all reachable devices, reports this, and propagates.
    """
    cancelled = threading.Event()
    clients = [Client(device, cancelled, reporter.progress) for device in devices]

    def attempt(client: Client) -> DeviceOutcome[T]:
        try:
            return DeviceOutcome(client.device, work(client))
        except VitdeployError as error:
            return DeviceOutcome(client.device, error=error)

    with ThreadPoolExecutor(len(clients)) as pool, ThreadPoolExecutor(len(clients)) as stoppers:
        futures = [pool.submit(attempt, client) for client in clients]
        try:
            return [future.result() for future in futures]
        except BaseException:
            cancelled.set()
            for line in stoppers.map(Client.stop, clients):
                reporter.note(line)
            raise


def bench_on(
    artifacts: Sequence[Shipment],
    protocol: Protocol,
    percents: Sequence[float],
    devices: Sequence[Device],
    reporter: Reporter,
    accepted: Sequence[str] = (),
) -> list[DeviceOutcome[bench.DeviceBench]]:
    """Benchmark artifacts on each device; return its results and engines. An artifact that the device's runtime is
    known to compute wrongly is neither sent nor measured, unless the entry is `accepted`."""
    names = comparison.unique([artifact.placed.name for artifact in artifacts])
    shipments = []
    for each, name in zip(artifacts, names, strict=True):
        assert each.setting is not None
        placed = dataclasses.replace(each.placed, name=name, images=subjects.image_request(each.setting))
        shipments.append(dataclasses.replace(each, placed=placed))
    suspects = {shipment.placed.name: suspects_of(shipment, accepted) for shipment in shipments}

    def work(client: Client) -> bench.DeviceBench:
        device = client.device.name
        refused = known_there(client, tuple(suspects.values()))
        sent = [shipment for shipment in shipments if shipment.placed.name not in refused]
        if not sent:
            raise next(iter(refused.values()))
        job, files = make_job("bench", sent, protocol=protocol)
        graphs = {placed.name: files[placed.graphs[0].file] for placed in job.artifacts}
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            result = client.run(job, files, Path(folder))
        measured = [name for name in names if name in result.engines]
        engines = {name: suspects[name].known_of(result.engines[name]) for name in measured}
        bench_run = check_run(device, result.bench_run, protocol, measured)
        batch = protocol.batch_of(protocol.latency_scenario)
        works = {name: measure.work_of(graphs[name], result.engines[name], batch) for name in measured}
        found = measure.summarise(bench_run, against_last(measured), percents, works)
        plans = {placed.name: placed.plan for placed in job.artifacts}
        rebuilt = [REBUILT.format(name) for name in measured if plans[name] not in (None, result.engines[name])]
        errors = [*refused.values(), *(reported(device, failure) for failure in result.left_out)]
        remarks = [text for name in measured for text in _remarks(name, engines[name], result.host)]
        left_out = [f"skipped: {error.message}; {error.fix or error.found}" for error in errors]
        return bench.DeviceBench(
            **vars(found),
            host=result.host,
            engines=engines,
            left_out=tuple(map(bench.ErrorFacts.of, errors)),
            remarks=(*rebuilt, *remarks, *left_out),
        )

    return on_all(devices, work, reporter)


def verify_on(
    artifact: Shipment,
    theirs: subjects.Subject,
    choice: DataChoice,
    devices: Sequence[Device],
    options: VerifyOn,
    reporter: Reporter,
) -> list[DeviceOutcome[report.VerifyDocument]]:
    """Compare the artifact, run on each device, with `theirs`, which runs once, here."""
    budget = Budget(max_drop=options.max_drop, min_agreement=options.min_agreement)
    assert artifact.setting is not None
    placed, files = artifact.placed, entries(artifact.files)
    ours = subjects.Subject(placed.name, placed.precision, artifact.setting, True, _not_here, _not_here)
    trial = comparison.Trial(ours, theirs, choice, skip_bad=options.skip_bad, progress=reporter.progress)
    for text in trial.foresee(budget):
        reporter.note(text)
    sent = {graph.part: artifact.files[graph.file] for graph in placed.graphs}
    graphs = {part: graph_spec(load_graph(file), file.name) for part, file in sent.items()}
    suspects = suspects_of(artifact, options.accept_known_bad)

    def work(client: Client) -> tuple[subjects.Subject, Answers]:
        for error in known_there(client, [suspects]).values():
            raise error
        name = f"{placed.name} on {client.device.name}"
        runner = RemoteRunner(client, placed, files, name=name, graphs=graphs)
        there = dataclasses.replace(ours, name=name, runner=lambda: runner)
        answers = trial.answers(there)
        assert runner.engine is not None
        remarks = _remarks(name, suspects.known_of(runner.engine), runner.host)
        return dataclasses.replace(there, remarks=tuple(remarks)), answers

    return [outcome.of(lambda found: trial.judge(*found, budget)) for outcome in on_all(devices, work, reporter)]


def _remarks(name: str, engine: EngineSpec, host: Mapping[str, str]) -> list[str]:
    """Return the remarks on an engine that a device built."""
    return [*weight_remarks(engine, host.get("isa", "")), *in_spite(name, engine.accepted or ())]


def _not_here(*arguments: object) -> NoReturn:
    raise AssertionError("the engine of a device does not run here")


def compile_on(
    name: str,
    graphs: placement.PlacedGraphs,
    device: Device,
    folder: Path,
    options: Compile,
    *,
    golden: Mapping[str, Path],
    reporter: Reporter,
    parts: Sequence[int] | None = None,
) -> EngineSpec:
    """Compile placed graphs on a device; return the engine, with its files in the new, empty `folder`. `golden`: the
    files of `seeded.golden_folder`, which the engine must reproduce; {} if nothing can be compared. `parts`: the parts
    in which it computes its rows; None for all at once.

    Raises:
        AnswersError: the engine gives other answers on the device.
        GraphError: the rows cannot be split into these parts.
        KnownBadError: the device's runtime release is known to compute the graph wrongly.
        TargetError: the graph has another fixed batch.
        VitdeployError: the device cannot be reached, or cannot compile it.
    """
    graphs.check_build(options.build)
    batch = options.batch or graphs.batch
    for graph, spec in graphs.graphs.values():
        check_batch(graph, spec, batch)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as split:
        sent = graphs if parts is None else graphs.in_parts(parts, Path(split))
        shipment = placed_shipment(name, sent, batch, golden)
        job, files = make_job("compile", [shipment], build=options.build)
        (outcome,) = on_all([device], lambda client: client.run(job, files, folder), reporter)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.found is not None
    engine = outcome.found.engines[name]
    for part in engine.parts or (engine,):
        spec = graph_spec(load_graph(graphs.folder / f"{part.part}.onnx"), part.graph)
        check_named(device.name, part.inputs, spec.inputs)
        check_named(device.name, part.outputs, spec.outputs)
    taken = accepted_of(
        engine, {part: graphs.folder / f"{part}.onnx" for part in graphs.graphs}, name, options.accept_known_bad
    )
    for part in engine.parts or (engine,):
        _bring_graph(graphs, part, folder)
    assert all((folder / file).is_file() for file in product_files(engine))
    return dataclasses.replace(engine, accepted=taken or None)


def _bring_graph(graphs: placement.PlacedGraphs, part: EngineSpec, folder: Path) -> None:
    """Copy the placement from here, since a device's copy is not trusted."""
    source = graphs.folder / f"{part.part}.onnx"
    (folder / part.graph).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / part.graph)
    for weights in graphs.folder.glob(f"{source.name}.data"):
        shutil.copyfile(weights, (folder / part.graph).with_name(weights.name))


# --- Choose the row parts of a placed model for a device, by the layer costs on its class of CPUs ---------------------


def row_parts_there(placed: placement.PlacedGraphs, batch: int, device: Device, reporter: Reporter) -> RowParts:
    """Return the choice of `search.rows.choose_row_parts` for a device.

    Raises:
        VitdeployError: the device cannot be reached.
    """
    (outcome,) = on_all([device], lambda client: client.probe(), reporter)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.found is not None
    return choose_row_parts(placed.folder / MODEL_FILE, batch, costs_for(placed.target, outcome.found.host))
