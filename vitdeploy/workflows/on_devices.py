"""`bench`, `verify` and `compile` on devices: all at once, and what goes wrong with one does not end the others."""

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

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import against_last
from vitdeploy.compilation.build_options import BuildOptions
from vitdeploy.devices.client import Client
from vitdeploy.devices.registry import Device
from vitdeploy.devices.results import check_named, check_run, product_files, reported
from vitdeploy.devices.runner import RemoteRunner
from vitdeploy.devices.shipment import entries, make_job
from vitdeploy.document.bench import DeviceBench
from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.verification import Verification
from vitdeploy.errors import VitdeployError
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.known_bad.engine import accepted_of
from vitdeploy.known_bad.words import in_spite
from vitdeploy.pipeline.measure import summarise
from vitdeploy.pipeline.workload import work_of
from vitdeploy.progress import Progress
from vitdeploy.runtime.weight_bits import weight_remarks
from vitdeploy.spec import Budget, EngineSpec, encode
from vitdeploy.stages.compile import check_batch
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.verification.collect import Answers
from vitdeploy.workflows.comparison import Trial, unique
from vitdeploy.workflows.device_artifact import DeviceArtifact, placed_shipment
from vitdeploy.workflows.known_there import known_there, suspects_of
from vitdeploy.workflows.placement import PlacedGraphs
from vitdeploy.workflows.subjects import Subject, image_request

T = TypeVar("T")
Note = Callable[[str], None]
REBUILT = "{} was built again there, of the bundle's graph: its plan is not of that user and that machine."
# The worst error, for the exit code of a command that failed in part.
WORST = (1, 3, 2, 4, 5)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of one device: `found`, or an `error`."""

    device: Device
    found: T | None = None
    error: VitdeployError | None = None


def worst(errors: Sequence[VitdeployError]) -> VitdeployError:
    """The error whose exit code a command has."""
    return min(errors, key=lambda error: WORST.index(error.exit_code))


def on_all(devices: Sequence[Device], work: Callable[[Client], T], progress: Progress, note: Note) -> list[Outcome[T]]:
    """Call `work` with a client of each device, at the same time.

    An interrupt stops the started jobs on all devices that can be reached, reports this, and propagates.
    """
    cancelled = threading.Event()
    clients = [Client(device, cancelled, progress) for device in devices]

    def attempt(client: Client) -> Outcome[T]:
        try:
            return Outcome(client.device, work(client))
        except VitdeployError as error:
            return Outcome(client.device, error=error)

    with ThreadPoolExecutor(len(clients)) as pool, ThreadPoolExecutor(len(clients)) as stoppers:
        futures = [pool.submit(attempt, client) for client in clients]
        try:
            return [future.result() for future in futures]
        except BaseException:
            cancelled.set()
            for line in stoppers.map(Client.stop, clients):
                note(line)
            raise


def bench_on(
    device_artifacts: Sequence[DeviceArtifact],
    protocol: Protocol,
    percents: Sequence[float],
    devices: Sequence[Device],
    progress: Progress,
    note: Note,
    accepted: Sequence[str] = (),
) -> list[Outcome[DeviceBench]]:
    """For each device the result of `bench_subjects`, and the engines it made. An artifact that the runtime there is
    known to compute wrongly, by an entry that is not `accepted`, is neither sent nor measured."""
    names = unique([device_artifact.name for device_artifact in device_artifacts])
    shipments = [
        dataclasses.replace(
            each.shipment,
            placed=dataclasses.replace(each.shipment.placed, name=name, images=image_request(each.setting)),
        )
        for each, name in zip(device_artifacts, names, strict=True)
    ]
    suspects = {
        each.placed.name: suspects_of(each, (*accepted, *artifact.accepted))
        for each, artifact in zip(shipments, device_artifacts, strict=True)
    }

    def work(client: Client) -> DeviceBench:
        device = client.device.name
        refused = known_there(client, tuple(suspects.values()))
        sent = [each for each in shipments if each.placed.name not in refused]
        if not sent:
            raise next(iter(refused.values()))
        job, files = make_job("bench", sent, {"protocol": encode(protocol)})
        graphs = {placed.name: files[placed.graphs[0].file] for placed in job.artifacts}
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            result = client.run(job, files, Path(folder))
        measured = [name for name in names if name in result.engines]
        engines = {name: suspects[name].known_of(result.engines[name]) for name in measured}
        bench_run = check_run(device, result.bench_run, protocol, measured)
        batch = protocol.batch_of(protocol.latency_scenario)
        works = {name: work_of(graphs[name], result.engines[name], batch) for name in measured}
        found = summarise(bench_run, against_last(measured), percents, works)
        plans = {placed.name: placed.plan for placed in job.artifacts}
        rebuilt = [REBUILT.format(name) for name in measured if plans[name] not in (None, result.engines[name])]
        errors = [*refused.values(), *(reported(device, failure) for failure in result.left_out)]
        remarks = [text for name in measured for text in _remarks(name, engines[name], result.host)]
        left_out = [f"left out: {error.message}; {error.fix or error.found}" for error in errors]
        return DeviceBench(
            **vars(found),
            host=result.host,
            engines=engines,
            left_out=tuple(map(ErrorFacts.of, errors)),
            remarks=(*rebuilt, *remarks, *left_out),
        )

    return on_all(devices, work, progress, note)


def verify_on(
    device_artifact: DeviceArtifact,
    theirs: Subject,
    choice: DataChoice,
    devices: Sequence[Device],
    *,
    skip_bad: bool,
    budget: Budget,
    progress: Progress,
    note: Note,
    accepted: Sequence[str] = (),
) -> list[Outcome[Verification]]:
    """Compare the artifact, run on each device, with `theirs`, which runs here, once; `accepted` as in `bench_on`."""
    placed, files = device_artifact.shipment.placed, entries(device_artifact.shipment.files)
    ours = Subject(device_artifact.name, placed.precision, device_artifact.setting, True, _not_here, _not_here)
    trial = Trial(ours, theirs, choice, skip_bad=skip_bad, progress=progress)
    for text in trial.foresee(budget):
        note(text)
    sent = {graph.part: device_artifact.shipment.files[graph.file] for graph in placed.graphs}
    graphs = {part: graph_spec(load_graph(file), file.name) for part, file in sent.items()}
    suspects = suspects_of(device_artifact.shipment, (*accepted, *device_artifact.accepted))

    def work(client: Client) -> tuple[Subject, Answers]:
        for error in known_there(client, [suspects]).values():
            raise error
        name = f"{device_artifact.name} on {client.device.name}"
        runner = RemoteRunner(client, placed, files, name=name, graphs=graphs)
        there = dataclasses.replace(ours, name=name, runner=lambda: runner)
        answers = trial.answers(there)
        assert runner.engine is not None
        remarks = _remarks(name, suspects.known_of(runner.engine), runner.host)
        return dataclasses.replace(there, remarks=tuple(remarks)), answers

    return [
        Outcome(each.device, trial.judge(*each.found, budget) if each.found else None, each.error)
        for each in on_all(devices, work, progress, note)
    ]


def _remarks(name: str, engine: EngineSpec, host: Mapping[str, str]) -> list[str]:
    """What is to be said of an engine that a device made."""
    return [*weight_remarks(engine, host.get("isa", "")), *in_spite(name, engine.accepted or ())]


def _not_here(*arguments: object) -> NoReturn:
    raise AssertionError("an engine of a device runs there")


def compile_on(
    name: str,
    graphs: PlacedGraphs,
    batch: int | None,
    device: Device,
    folder: Path,
    *,
    build: BuildOptions | None,
    accepted: Sequence[str],
    golden: Mapping[str, Path],
    progress: Progress,
    note: Note,
    parts: Sequence[int] | None = None,
) -> EngineSpec:
    """The engine of placed graphs, made by a device; its files are in `folder`, which is new and empty. `golden` are
    the files of `seeded.golden_folder`, which the engine must answer like; {} where nothing can be compared. `parts`:
    those in which it computes its rows; None for all at once.

    Raises:
        AnswersError: it answers otherwise there.
        GraphError: the rows cannot be split so.
        KnownBadError: the release of the runtime there is known to compute such a graph wrongly.
        TargetError: a fixed batch that is another one.
        VitdeployError: the device cannot be reached, or cannot make it.
    """
    graphs.check_build(build)
    for graph, spec in graphs.graphs.values():
        check_batch(graph, spec, batch or graphs.batch)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as split:
        sent = graphs if parts is None else graphs.in_parts(parts, Path(split))
        shipment = placed_shipment(name, sent, batch or graphs.batch, golden)
        job, files = make_job("compile", [shipment], {} if build is None else {"build": encode(build)})
        (outcome,) = on_all([device], lambda client: client.run(job, files, folder), progress, note)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.found is not None
    engine = outcome.found.engines[name]
    for part in engine.parts or (engine,):
        spec = graph_spec(load_graph(graphs.folder / f"{part.part}.onnx"), part.graph)
        check_named(device.name, part.inputs, spec.inputs)
        check_named(device.name, part.outputs, spec.outputs)
    taken = accepted_of(engine, {part: graphs.folder / f"{part}.onnx" for part in graphs.graphs}, name, accepted)
    for part in engine.parts or (engine,):
        _bring_graph(graphs, part, folder)
    assert all((folder / file).is_file() for file in product_files(engine))
    return dataclasses.replace(engine, accepted=taken or None)


def _bring_graph(graphs: PlacedGraphs, part: EngineSpec, folder: Path) -> None:
    """The placement, which never was the device's to give."""
    source = graphs.folder / f"{part.part}.onnx"
    (folder / part.graph).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / part.graph)
    for weights in graphs.folder.glob(f"{source.name}.data"):
        shutil.copyfile(weights, (folder / part.graph).with_name(weights.name))
