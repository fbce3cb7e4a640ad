"""Every field of every document that a device answers with, replaced by each thing that it must not be: refused with a
documented error, or taken where nothing depends on it; never a bug, and never without end."""

from __future__ import annotations

import contextlib
import io
import json
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.changed import MISSING, changed
from tests.faults.devices.board import IMPATIENT, Board
from tests.faults.devices.model import TARGET, Small
from tests.faults.gate import Outcome, Row

if TYPE_CHECKING:
    from vitdeploy.spec import GraphSpec

LIMIT = 10.0
SHORT_SAMPLE = 5
SEED = 21
VALUES: dict[str, Any] = {
    "-1": -1,
    "-0.5": -0.5,
    "0": 0,
    "10^30": 10**30,
    "10^400": 10**400,
    "1e308": 1e308,
    "NaN": float("nan"),
    "true": True,
    "null": None,
    "an empty text": "",
    "a text of 100,000": "x" * 100_000,
    "5,000 digits": "9" * 5000,
    "an escape": "\x1b[2J\u202e\u0000",
    "a path": "../../../../etc/passwd",
    "[]": [],
    "{}": {},
    "a list of lists": [[], [[]]],
    "200,000 numbers": [1] * 200_000,
    "another field": {"more": {"protocol": 10**400}},
}
TENSOR = {"name": "logits", "dtype": "float32", "shape": ["batch", 1000]}
IMAGE = {"name": "image", "dtype": "uint8", "shape": ["batch", 32, 32, 3]}


@dataclass(frozen=True)
class Kind:
    """A kind of document: the right one, and what a command does with the line that it came in; `fails` where that is
    to end in an error."""

    name: str
    right: Any
    take: Callable[[bytes], object]
    fails: bool = False


def documents_row(full: bool, work: Path, small: Small) -> Row:
    row = Row("devices: documents with absurd fields", 0)
    chance = random.Random(SEED)
    with contextlib.ExitStack() as stack:
        for kind in _kinds(work, small, stack):
            _take(
                row, f"{kind.name}: the right document", kind.right, kind.take, ("clean" if kind.fails else "accepted",)
            )
            changes = list(_changes(json.loads(json.dumps(kind.right))))  # no two places share an object
            for name, document in changes if full else chance.sample(changes, min(SHORT_SAMPLE, len(changes))):
                _take(row, f"{kind.name} {name}", document, kind.take)
    row.expected = len(row.cases)
    return row


def _changes(right: Any) -> Iterator[tuple[str, Any]]:
    """The document with one change each."""
    for path in _paths(right, ()):
        spelled = "$" + "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in path)
        for name, value in {**VALUES, "missing": MISSING}.items():
            yield f"{spelled} = {name}", changed(right, path, value)


def _paths(document: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The place of every value; of a list only its first item, as the others are like it."""
    if path:
        yield path
    items = document.items() if isinstance(document, dict) else enumerate(document[:1]) if _is_list(document) else ()
    for key, value in items:
        yield from _paths(value, (*path, key))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _take(
    row: Row,
    name: str,
    document: Any,
    take: Callable[[bytes], object],
    expected: Sequence[Outcome] = ("clean", "accepted"),
) -> None:
    from vitdeploy.errors import VitdeployError

    line, began = json.dumps(document).encode(), time.monotonic()
    outcome: Outcome = "accepted"
    note = ""
    previous = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        take(line)
    except TimeoutError:
        outcome, note = "hang", traceback.format_exc().strip().splitlines()[-3]
    except VitdeployError as error:
        outcome, note = "clean" if error.exit_code in (2, 3, 4) else "wrong", str(error).splitlines()[0]
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome, note = "crash", f"{error!r} in {place.filename}:{place.lineno}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if outcome not in (*expected, "crash", "hang"):
        outcome, note = "wrong", f"{outcome}: {note}"
    row.add(name, outcome, time.monotonic() - began, note=note)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


# --- what each is of, and what is done with it ------------------------------------------------------------------------


def _kinds(work: Path, small: Small, stack: contextlib.ExitStack) -> list[Kind]:
    from vitdeploy.devices.registry import Device

    device = Device("board", "board")
    graph = small.graph / "model.onnx"
    board = Board(work / "documents", {"verb": "serve"})
    said: dict[str, bytes] = {}
    _answering(stack, said)
    return [
        _probe(device),
        _status(),
        _compiled(device, graph, work, said),
        *_measured(device, graph, work, said),
        *_served(board, graph, work),
        *_deployed(device, small, said),
    ]


def _probe(device: Any) -> Kind:
    from vitdeploy.backends import TARGETS
    from vitdeploy.devices.advice import advice_lines, diagnose
    from vitdeploy.devices.agent.probe import DeviceProbe, probe
    from vitdeploy.devices.results import clean, parse
    from vitdeploy.known_bad.entries import table
    from vitdeploy.known_bad.platform import concerns, platform_there
    from vitdeploy.spec import encode

    def take(line: bytes) -> None:
        found = clean(parse("board", line, DeviceProbe))
        _, lines, advice = diagnose(device, found)
        json.dumps({**encode(found), "advice": encode(advice)}, allow_nan=False)
        "\n".join([*lines, *advice_lines(advice)]).encode()
        for target in TARGETS:
            platform = platform_there(target, {**found.host, **found.runtimes.get(target, {})}, "int8")
            [concerns(entry, platform) for entry in table()]

    right = encode(probe())
    right["board"] |= {
        **{"power_mode": "15W", "power_modes": {"15W": 0, "MAXN": 1}, "governors": {"powersave": 4}, "driver": "x"},
        **{"margin": 3.5, "zone": "cpu", "swap_bytes": 10**9, "swap_free_bytes": 10**8, "tegra_release": "36.4.3"},
        **{"debian": {"nvidia-jetpack": "6.2"}, "system": "Debian"},
        "throttle": {**right["board"]["throttle"], "bits": 0x50005, "cooling": {"cpu": 1}, "counts": {"heat": 3}},
    }
    right["jobs"] = ["bench of ann@desk"]
    right["targets"]["tensorrt"] = {
        **{"works": False, "version": None, "precisions": [], "detail": "no module", "fix": "pip install tensorrt"},
    }
    return Kind("probe", json.loads(json.dumps(right)), take)


def _status() -> Kind:
    from rich.console import Console

    from vitdeploy.api.live import Live
    from vitdeploy.devices.agent.documents import Status
    from vitdeploy.devices.results import clean, parse

    def take(line: bytes) -> None:
        found = clean(parse("board", line, Status))
        live = Live(Console(file=io.StringIO(), width=100, force_terminal=True))
        live.start()
        _, done, total = found.progress or ("", 0, 1)
        for each in (done, total):
            live.update(f"board: {found.detail}", min(each, total), max(1, total))
        live.stop()

    return Kind("status", {"state": "running", "detail": "", "progress": ["measure", 3, 10]}, take)


def _engine() -> dict[str, Any]:
    return {
        **{"target": TARGET, "precision": "fp32", "graph": "graph.onnx", "files": ["graph.onnx"], "batch": 1},
        **{"dynamic_batch": True, "provider": "CPUExecutionProvider", "inputs": [IMAGE], "outputs": [TENSOR]},
        **{"kernels": {"fp32": 9}, "options": {}, "device": {"onnxruntime": "1.20.1", "cpu": "a CPU", "isa": "avx2"}},
        **{"part": "model", "parts": [], "sequence": None, "weight_bits": None},
    }


def _answering(stack: contextlib.ExitStack, said: dict[str, bytes]) -> None:
    """Clients get what was `said` as the result of any job."""
    from vitdeploy.devices.agent.documents import JobResult
    from vitdeploy.devices.client import Client
    from vitdeploy.devices.results import check_result, parse

    def run(self: Client, job: Any, files: Any, folder: Path) -> JobResult:
        line = said["line"].replace(b"JOB", job.digest.encode())
        return check_result(self.device.name, parse(self.device.name, line, JobResult), job)

    stack.enter_context(mock.patch.object(Client, "run", run))


def _compiled(device: Any, graph: Path, work: Path, said: dict[str, bytes]) -> Kind:
    from vitdeploy.api.options import Compile
    from vitdeploy.api.values import Reporter
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.devices.on_devices import compile_on
    from vitdeploy.workflows.placement import bundle_of, place_graphs

    placed = work / "placed"
    placed.mkdir()
    graphs = place_graphs(graph, TARGET, None, placed)
    numbers = iter(range(10**9))

    def take(line: bytes) -> None:
        said["line"] = line
        made, out = (work / f"{name}-{next(numbers)}" for name in ("made", "bundle"))
        made.mkdir()
        out.mkdir()
        engine = compile_on(
            "small", graphs, device, made, Compile(graph, TARGET), golden={}, reporter=Reporter(quiet=True)
        )
        bundle_of(graphs, engine, made, out)
        read_bundle(out)

    return Kind("compile", {**_result(), "engines": {"small": _engine()}}, take)


def _result() -> dict[str, Any]:
    host = {"cpu": "a CPU", "isa": "avx2", "cores": "4", "machine": "x86_64", "system": "Linux", "python": "3.12.1"}
    return {"format": 1, "job": "JOB", "host": host, "files": [], "left_out": [], "failure": None}


def _measured(device: Any, graph: Path, work: Path, said: dict[str, bytes]) -> list[Kind]:
    from vitdeploy.api.bench import bench_lines
    from vitdeploy.api.values import Reporter, printed
    from vitdeploy.benchmark.protocol import Protocol
    from vitdeploy.devices.on_devices import bench_on
    from vitdeploy.devices.shipment import find_device_artifacts
    from vitdeploy.spec import encode

    (work / "measured").mkdir()
    [artifact] = find_device_artifacts(str(graph), target=TARGET, work=work / "measured")
    protocol = Protocol(("single", "offline"), (1, 8), 0.06, 0.02, 3, 0.0, processes=1, max_extension=1)

    def take(line: bytes) -> None:
        said["line"] = line
        [outcome] = bench_on([artifact], protocol, (50.0, 99.0), [device], Reporter(quiet=True))
        if outcome.error is not None:
            raise outcome.error
        assert outcome.found is not None
        json.dumps(encode(outcome.found), allow_nan=False)
        "\n".join(printed(bench_lines(outcome.found), 100)).encode()

    name = str(graph)
    run = _bench_run(name, protocol)
    failure = {"artifact": name, "code": "VD4002", "message": "no", "found": "", "expected": "", "fix": "mend it"}
    return [
        Kind("bench", {**_result(), "engines": {name: _engine()}, "bench_run": run}, take),
        Kind("bench, failed", {**_result(), "failure": failure}, take, fails=True),
    ]


def _bench_run(name: str, protocol: Any) -> dict[str, Any]:
    from vitdeploy.spec import encode

    machine = {
        **{"own_seconds": 0.004, "other_seconds": 0.0, "stolen_seconds": 0.0, "joules": 0.1, "mhz": 2000.0},
        **{"celsius": 50.5, "throttles": 0, "suspended_seconds": 0.0, "waited_seconds": 0.0, "throttled": []},
        "limit_mhz": 3000.0,
    }
    rounds = {
        scenario: [
            {
                **{"batch": protocol.batch_of(scenario), "latencies_ms": [1.0, 2.0], "seconds": 0.0031, "process": 0},
                **{"busy_seconds": 0.003, "waiting_ms": [], "machine": machine, "begun_seconds": 0.02 * number},
            }
            for number in range(protocol.rounds)
        ]
        for scenario in protocol.scenarios
    }
    entry = {
        **{"artifact": name, "target": TARGET, "precision": "fp32", "provider": "CPU", "rounds": rounds},
        **{"load_seconds": 0.5, "first_inference_ms": 3.0, "warm_load_seconds": 0.4, "peak_memory_bytes": 10**8},
        **{"process_threads": 4, "affinity": [0, 1], "energy": "none", "parts_ms": {"model": [1.0]}, "made_for": ""},
        "stages_ms": {each: [1.0, 2.0] for each in ("decode", "preprocess", "infer", "postprocess", "end_to_end")},
    }
    layer = {"name": "fc1", "kind": "MatMul", "precision": "fp32", "milliseconds": 0.5, "product": True, "fuses": ["a"]}
    profile = {"artifact": name, "batch": 1, "runs": 30, "layers": [layer], "latency_ms": 1.0, "per_layer_ms": 0.0}
    context = {
        "rates": [
            {"target": TARGET, "precision": "fp32", "flops_per_second": 5e11, "rows": 192, "width": 768, "kernel": "k"}
        ],
        "memory": {"bytes_per_second": 2e10, "array_bytes": 1 << 27, "cache_bytes": 1 << 20, "threads": 2},
        "profiles": [profile],
        "left_out": [{"what": "rate", "name": "x", "why": "y"}],
    }
    return {"protocol": encode(protocol), "entries": [entry], "load_average": 0.5, "cpus": 4, "context": context}


def _served(board: Board, graph: Path, work: Path) -> list[Kind]:
    """The answers of a session, from a process that says them whatever it is asked."""
    import numpy as np

    from vitdeploy.devices.call import DevicePatience
    from vitdeploy.devices.client import Client
    from vitdeploy.devices.registry import Device
    from vitdeploy.devices.runner import RemoteRunner
    from vitdeploy.devices.shipment import entries, find_device_artifacts
    from vitdeploy.graph.io.files import graph_spec, load_graph
    from vitdeploy.runtime.predictor import Predictor

    (work / "served").mkdir()
    [artifact] = find_device_artifacts(str(graph), target=TARGET, work=work / "served")
    preprocess = artifact.setting.preprocess
    sent = {"model": graph_spec(load_graph(graph), "graph.onnx")}
    assert preprocess is not None
    pixels = np.zeros((32, 32, 3), np.uint8)
    device, logits = Device("board", python=str(board.folder / "python")), np.zeros((1, 1000), np.float32).tobytes()

    def asked(said: bytes, graphs: dict[str, GraphSpec]) -> None:
        (board.folder / "answer").write_bytes(said)
        board.behave({"verb": "serve", "answer": True})
        client = Client(device, patience=DevicePatience(**IMPATIENT))
        runner = RemoteRunner(client, artifact.placed, entries(artifact.files), name="small on board", graphs=graphs)
        with Predictor(runner, preprocess) as predictor:
            predictor.outputs([pixels])

    loaded = {"engine": _engine(), "host": _result()["host"], "inputs": [IMAGE], "outputs": [TENSOR]}
    loaded = {**loaded, "provider": "CPU", "waits_for": "", "begun": False}
    outputs = [{**TENSOR, "shape": [1, 1000]}]
    whole = json.dumps(loaded).encode() + b"\n"
    answered = b"\n" + json.dumps(outputs).encode() + b"\n" + logits
    return [
        Kind("verify, loaded", loaded, lambda line: asked(line + answered, sent)),
        # As of several graphs, where the host does not know the tensors of the whole.
        Kind("verify, loaded of several", loaded, lambda line: asked(line + answered, {})),
        Kind("verify, outputs", outputs, lambda line: asked(whole + line + b"\n" + logits, sent)),
    ]


def _deployed(device: Any, small: Small, said: dict[str, bytes]) -> list[Kind]:
    """What a device says of deployments, and of a release that it tries."""
    from vitdeploy.api.values import printed
    from vitdeploy.devices.agent.documents import Deployed, ReleaseOptions
    from vitdeploy.devices.client import Client
    from vitdeploy.devices.registry import Fleet, FleetMember
    from vitdeploy.devices.results import check_deployments, check_missing, parse
    from vitdeploy.devices.rollout import Standing, _job, ready, seen
    from vitdeploy.spec import encode

    release = ready(small.bundle, None, trust=None, target="auto", duration=0.03, worse=0.1)
    old, paths = "a" * 64, [entry.path for entry in release.files]
    facts = ("small", release.digest, old, 3, "auto", 0.1)
    stage, switch = ReleaseOptions(*facts, tuple(release.files)), ReleaseOptions(*facts)

    def stands(line: bytes) -> None:
        for name, found in check_deployments("board", parse("board", line, tuple[Deployed, ...])).items():
            standing = Standing([Fleet(name, members=(seen(FleetMember("board"), found),))], ())
            json.dumps(standing.document, allow_nan=False)
            "\n".join(printed(standing.lines(), 100)).encode()

    def tried(kind: Any, options: Any) -> Callable[[bytes], None]:
        def take(line: bytes) -> None:
            said["line"] = line
            trial = _job(Client(device), kind, options, release)
            json.dumps(encode(trial), allow_nan=False)
            f"{trial.failed} {trial.undecided} {trial.alone}".encode()

        return take

    [engine] = release.manifest.engines
    golden = {"inputs": 5, "difference": 1e-7, "tolerance": 1e-3, "same": 5, "least_same": 5}
    run = _bench_run("new", release.protocol)
    run["entries"] += [{**json.loads(json.dumps(run["entries"][0])), "artifact": "current"}]
    run["context"] = None
    answer = {**_result(), "engines": {}, "bench_run": run}
    facts = {"engine": engine.artifact, "golden": golden, "kept": False, "alone": ""}
    one = {"name": "small", "current": old, "previous": "b" * 64, "counter": 3, "moving": ""}
    return [
        Kind("deployed", [one], stands),
        Kind("missing", paths[:2], lambda line: check_missing("board", parse("board", line, tuple[str, ...]), paths)),
        Kind("stage", {**answer, "tried": facts}, tried("stage", stage)),
        Kind("switch", {**answer, "tried": {**facts, "kept": True}}, tried("switch", switch)),
    ]
