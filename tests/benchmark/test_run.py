"""Benchmark runs between real worker processes, and what happens when workers fail."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import vitdeploy
from vitdeploy.benchmark import evidence, process, summary
from vitdeploy.benchmark import run as run_module
from vitdeploy.benchmark import run as session
from vitdeploy.benchmark.evidence import PairedRatio, in_common
from vitdeploy.benchmark.load import Patience, PoissonLoad
from vitdeploy.benchmark.protocol import Protocol, Scenario, parse_scenario
from vitdeploy.benchmark.run import BenchCandidate, run_benchmark, running_order
from vitdeploy.benchmark.summary import Row, judged
from vitdeploy.benchmark.worker import SEED, random_feeds
from vitdeploy.errors import EngineError, MissingPackageError, TargetError, TensorError, VitdeployError, WorkerError
from vitdeploy.pipeline.measure import summarise
from vitdeploy.spec import EngineSpec, TensorSpec, decode, encode

WORKER = (sys.executable, "-m", "vitdeploy.benchmark.worker")
QUICK = Protocol(batch=(1, 4), duration=0.0, block_seconds=0.01, min_rounds=3, warmup=0.01, processes=1)

# A worker of the tests' own: a real runner around a numpy product, whose `_infer` gets the lines of the test first.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from vitdeploy.benchmark.worker import serve
from vitdeploy.errors import MissingPackageError
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import TensorSpec

class Product(Runner):
    count = 0
    def _load(self):
        self.inputs = (TensorSpec("x", "float32", ("batch", 8)),)
        self.outputs = (TensorSpec("y", "float32", ("batch", 8)),)
        self.provider = "numpy"
    def _infer(self, feeds):
        self.count += 1
        {lines}
        return {{"y": feeds["x"] @ np.eye(8, dtype=np.float32)}}
    def _close(self):
        pass

Path({pid_file!r}).write_text(str(os.getpid()))
status = serve({make_runner})
Path({pid_file!r}).unlink()
sys.exit(status)
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Workers import the package that is under test, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(Path(vitdeploy.__file__).parents[1]))


@pytest.fixture
def quiet_machine(monkeypatch):
    """No round is disturbed, whatever else this machine does: for tests that count rounds."""
    monkeypatch.setattr(evidence, "quiet", lambda rounds, cpus: [True] * len(rounds))


@pytest.fixture
def engine(tmp_path):
    """A candidate that runs a small graph on ONNX Runtime, in the real worker."""

    def make(artifact="onnxruntime-cpu-fp32", file="graph.onnx", dynamic=True):
        if not (tmp_path / file).exists():
            write_graph(tmp_path / file, dynamic)
        spec = EngineSpec("onnxruntime-cpu", "fp32", file, (file,), 1, dynamic, "", (), ())
        return BenchCandidate(artifact, spec.target, "fp32", WORKER, {"folder": str(tmp_path), "engine": encode(spec)})

    return make


@pytest.fixture
def script(tmp_path):
    """A candidate with the worker above; the process id is in `<artifact>.pid` until it ends by itself."""

    def make(artifact, lines="pass", make_runner="lambda request: Product('product')"):
        path = tmp_path / f"{artifact}.py"
        pid_file = str(tmp_path / f"{artifact}.pid")
        path.write_text(SCRIPT.format(lines=lines, make_runner=make_runner, pid_file=pid_file))
        return BenchCandidate(artifact, "numpy", "fp32", (sys.executable, str(path)), {})

    return make


def write_graph(path, dynamic):
    """y = x W, with x: float32 [batch, 16]."""
    batch = "batch" if dynamic else 1
    weight = helper.make_tensor("w", TensorProto.FLOAT, [16, 4], np.ones(64, np.float32))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 4])],
        [weight],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def is_running(pid):
    """Whether the process exists; one that has ended and was not waited for does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_every_contestant_is_measured_in_every_round(engine, script):
    calls = []
    bench_run = run_benchmark([engine(), script("product")], QUICK, lambda *call: calls.append(call))
    assert [entry.provider for entry in bench_run.entries] == ["CPUExecutionProvider", "numpy"]
    for entry in bench_run.entries:
        assert entry.load_seconds > 0
        assert entry.first_inference_ms > 0
        assert list(entry.rounds) == ["single", "offline"]
        for scenario, batch in (("single", 1), ("offline", 4)):
            assert len(entry.rounds[scenario]) == 3
            for block in entry.rounds[scenario]:
                assert block.batch == batch
                assert block.latencies_ms.size >= 3
                assert block.latencies_ms.min() > 0
                assert block.latencies_ms.sum() / 1e3 <= block.seconds
    assert [done for _, done, _ in calls] == [0, 0, *range(1, 13)]
    assert {total for _, _, total in calls} == {12}
    assert calls[2][0] == "onnxruntime-cpu-fp32: single, round 1 of 3"
    rows = summary.rows(bench_run)
    assert [decode(Row, each) for each in json.loads(json.dumps(encode(rows)))] == rows
    assert [row.artifact for row in rows] == ["onnxruntime-cpu-fp32", "product"]


def test_rounds_are_spread_over_fresh_processes_and_long_scenarios_stay_in_one(tmp_path, script, monkeypatch):
    """Each process writes its number when it loads; the second candidate loads first every other time."""
    log = tmp_path / "log.txt"
    make = "lambda request: (print({name!r}, os.getpid(), file=open({log!r}, 'a')), Product('product'))[1]"
    candidates = [script(name, make_runner=make.format(name=name, log=str(log))) for name in ("one", "two")]
    protocol = Protocol(("single", "server:200", "sustain:3"), (1,), 0.0, 0.02, 4, 0.0, processes=2)
    monkeypatch.setattr(session, "BIN_SECONDS", 0.05)
    monkeypatch.setattr(Protocol, "blocks", lambda protocol, scenario: 3)
    bench_run = run_benchmark(candidates, protocol)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["one", "two", "two", "one"]
    assert len({line.split()[1] for line in log.read_text().splitlines()}) == 4
    for entry in bench_run.entries:
        assert [block.process for block in entry.rounds["single"]] == [0, 0, 1, 1]
        assert [block.process for block in entry.rounds["server:200"]] == [0] * 4
        assert [block.process for block in entry.rounds["sustain:3"]] == [0] * 3
        begun = [block.begun_seconds for block in entry.rounds["single"]]
        assert begun == sorted(begun) and begun[0] > 0
        assert entry.rounds["sustain:3"][0].begun_seconds > begun[1]
        assert entry.warm_load_seconds > 0
        assert entry.peak_memory_bytes > 0
        assert entry.affinity
        assert entry.rounds["single"][0].machine.own_seconds >= 0
        # What was offered is what arrives at this rate in the seconds of the blocks, as long as they took.
        blocks = entry.rounds["server:200"]
        served = sum(block.latencies_ms.size for block in blocks) + len(blocks[-1].waiting_ms)
        moment = int(1e9 * sum(block.seconds for block in blocks))
        arrivals = [each for each in PoissonLoad(200.0, SEED).arrivals_until(moment) if each <= moment]
        assert served == pytest.approx(len(arrivals), abs=1)
    rows = summary.rows(bench_run)
    assert [decode(Row, each) for each in json.loads(json.dumps(encode(rows), allow_nan=False))] == rows


def test_what_is_not_narrow_is_measured_again_in_other_processes(script, monkeypatch, quiet_machine):
    """Twice at most here; throughput is narrow at once, latency never."""
    asked, totals = [], []

    def ratio(a, b):
        asked.append((a[0].batch, len(a), len(b)))
        return PairedRatio(0.0, 0.0 if a[0].batch == 4 else 1.0, 1, 0.0)

    monkeypatch.setattr(run_module, "ratio_of_rounds", ratio)
    pair = [script("one"), script("two")]
    protocol = Protocol(("single", "offline", "server:200"), (1, 4), 0.06, 0.02, 3, 0.0, processes=2, max_extension=2.5)
    bench_run = run_benchmark(pair, protocol, lambda text, done, total: totals.append(total), pairs=[("two", "one")])
    assert asked == [(1, 3, 3), (4, 3, 3)]
    for entry in bench_run.entries:
        assert [block.process for block in entry.rounds["single"]] == [0, 0, 1, 2, 2, 3]
        assert [block.process for block in entry.rounds["offline"]] == [0, 0, 1]
        assert [block.process for block in entry.rounds["server:200"]] == [0, 0, 0]
    assert (totals[0], totals[-1]) == (18, 24)
    measured = summarise(bench_run, [("two", "one")], (50,))
    assert measured.protocol.rounds == {"single": 6, "offline": 3, "server:200": 3}
    alone = run_benchmark(pair, dataclasses.replace(protocol, scenarios=("single",)))  # no pair: nothing to be narrow
    assert [len(entry.rounds["single"]) for entry in alone.entries] == [3, 3]


def test_a_run_ends_with_the_process_after_which_nothing_is_open(script, quiet_machine):
    """What describes an artifact is measured once; what decides, until nothing can change."""
    seen, totals = [], []

    def still_open(bench_run):
        seen.append([len(entry.rounds["single"]) for entry in bench_run.entries])
        return () if len(seen) == 2 else ("one", "two")

    protocol = Protocol(("single", "offline", "server:200"), (1, 4), 0.06, 0.02, 21, 0.0)
    pair, tell = [script("one"), script("two")], lambda text, done, total: totals.append((done, total))
    bench_run = run_benchmark(pair, protocol, tell, pairs=[("two", "one")], still_open=still_open)
    assert seen == [[7, 7], [14, 14]]
    for entry in bench_run.entries:
        assert {name: len(blocks) for name, blocks in entry.rounds.items()} == {
            "single": 14,
            "offline": 4,
            "server:200": 21,
        }
    assert totals[-1][0] == totals[-1][1] == 2 * (14 + 4 + 21)
    measured = summarise(bench_run, [("two", "one")], (50,))
    assert measured.protocol.processes == 2 and measured.results[0].warm_load_seconds is not None
    served = dataclasses.replace(protocol, scenarios=("server:200",), min_rounds=3)
    bench_run = run_benchmark(
        pair, served, still_open=lambda so_far: ["one", "two"]
    )  # nothing that rounds could decide
    assert [len(entry.rounds["server:200"]) for entry in bench_run.entries] == [3, 3]


def test_an_artifact_of_which_nothing_is_open_leaves_the_run(script, quiet_machine):
    """It keeps the rounds that it has, and its ratios are of the rounds that both have."""
    left = iter([("one", "three"), ("one", "two", "three")])
    protocol = Protocol(("single", "offline"), (1, 4), 0.06, 0.02, 21, 0.0)
    names, totals = ["one", "two", "three"], []
    pairs, tell = [("two", "one"), ("three", "one")], lambda text, done, total: totals.append((done, total))
    candidates = [script(name) for name in names]
    bench_run = run_benchmark(candidates, protocol, tell, pairs=pairs, still_open=lambda so_far: next(left, ()))
    assert [len(entry.rounds["single"]) for entry in bench_run.entries] == [21, 7, 21]  # gone for good
    assert totals[-1][0] == totals[-1][1] == 3 * (7 + 4) + 2 * (7 + 7)
    measured = summarise(bench_run, pairs, (50,))
    assert measured.protocol.rounds == {"single": 21, "offline": 4}
    assert {len(medians) for medians in measured.block_medians_ms.values()} == {7}
    short = dataclasses.replace(bench_run, entries=tuple(in_common(bench_run.entries)))
    assert judged(bench_run, "two", "one", "single").ratio == judged(short, "two", "one", "single").ratio
    assert judged(bench_run, "three", "one", "single") != judged(short, "three", "one", "single")


def test_rounds_that_others_disturbed_are_measured_again(script, monkeypatch):
    """The first two of three; but not where nothing is quiet, nor for ever."""
    protocol = Protocol(("single",), (1,), 0.06, 0.02, 3, 0.0, processes=1, max_extension=1)
    told = []

    def rounds(disturbed):
        def found(entries, name):
            return [number for number in range(len(entries[0].rounds[name])) if number not in disturbed]

        monkeypatch.setattr(session, "quiet_together", found)
        bench_run = run_benchmark([script("one")], protocol, lambda *call: told.append(call))
        return len(bench_run.entries[0].rounds["single"])

    assert protocol.most_rounds == 6
    assert rounds((0, 1)) == 5
    assert told[-1] == ("one: single, round 5 of 5", 5, 5)
    assert rounds((0, 1, 2, 3)) == 6
    monkeypatch.setattr(Patience, "wait", lambda self: False)
    assert rounds(range(9)) == 3


def test_a_slow_artifact_still_gets_three_queries_a_block(script):
    protocol = Protocol(("single",), duration=0.0, block_seconds=0.01, min_rounds=2, warmup=0.0, processes=1)
    bench_run = run_benchmark([script("slow", "time.sleep(0.05)")], protocol)
    assert [block.latencies_ms.size for block in bench_run.entries[0].rounds["single"]] == [3, 3]


def test_what_a_runtime_prints_does_not_reach_the_protocol(script):
    noisy = script("noisy", "print('hello'); os.write(1, b'{garbage}\\n'); sys.stdout.flush()")
    bench_run = run_benchmark([noisy], QUICK)
    assert len(bench_run.entries[0].rounds["offline"]) == 3


def test_a_worker_that_speaks_no_protocol_is_named(tmp_path, script):
    path = tmp_path / "parrot.py"
    path.write_text("import sys\nprint('polly', flush=True)\nsys.stdin.read()\n")
    parrot = BenchCandidate("parrot", "numpy", "fp32", (sys.executable, str(path)), {})
    with pytest.raises(WorkerError, match=r"of parrot did not answer with a JSON object[\s\S]*polly"):
        run_benchmark([script("good"), parrot], QUICK)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_worker_is_named_with_its_last_words(script):
    lines = "if self.count > 50: print('my last words', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(WorkerError) as caught:
        run_benchmark([script("good"), script("doomed", lines)], QUICK)
    assert caught.value.message == "the measuring process of doomed died"
    assert caught.value.found.splitlines()[0] == "killed by SIGKILL"
    assert caught.value.found.endswith("| my last words")
    assert "memory" in caught.value.fix


def test_a_worker_that_exits_is_named_with_its_status(script):
    with pytest.raises(WorkerError, match=r"of leaver died[\s\S]*exit status 7"):
        run_benchmark([script("leaver", "os._exit(7)")], QUICK)


def test_a_worker_that_does_not_answer_is_given_up(script):
    protocol = dataclasses.replace(QUICK, timeout=0.5)
    with pytest.raises(WorkerError, match=r"of sleeper did not answer within 0\.5 s"):
        run_benchmark([script("sleeper", "time.sleep(60)")], protocol)


def test_a_worker_that_cannot_be_started_is_named():
    missing = BenchCandidate("missing", "numpy", "fp32", ("/no/such/program",), {})
    with pytest.raises(WorkerError, match="cannot start the measuring process of missing"):
        run_benchmark([missing], QUICK)


def test_a_broken_graph_is_an_engine_error(tmp_path, engine):
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match="onnxruntime-cpu-fp32: ONNX Runtime cannot load") as caught:
        run_benchmark([engine(file="broken.onnx")], QUICK)
    assert caught.value.found


def test_a_batch_that_a_static_engine_lacks_is_a_target_error(engine):
    with pytest.raises(TargetError, match="cannot run at batch 4") as caught:
        run_benchmark([engine(dynamic=False)], QUICK)
    assert caught.value.expected == "batch 1, or an engine with a dynamic batch"
    assert "{batch: dynamic}" in caught.value.fix


def test_an_error_with_a_constructor_of_its_own_keeps_its_class(script):
    make_runner = "lambda request: (_ for _ in ()).throw(MissingPackageError('nothing', 'all', 'this test'))"
    with pytest.raises(MissingPackageError, match="this test needs the package nothing") as caught:
        run_benchmark([script("bare", make_runner=make_runner)], QUICK)
    assert caught.value.exit_code == 4
    assert "pip install 'vitdeploy[all]'" in caught.value.fix


def test_an_unexpected_exception_shows_its_traceback(script):
    with pytest.raises(VitdeployError, match="buggy: ZeroDivisionError") as caught:
        run_benchmark([script("buggy", "1 / 0")], QUICK)
    assert type(caught.value) is VitdeployError
    assert "in _infer" in caught.value.found


@pytest.mark.skipif(os.name != "posix", reason="looks at processes by their number")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_worker_outlives_an_exception(tmp_path, script, monkeypatch, error):
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.3)
    pids = []

    def interrupt(text, done, total):
        if done == 2:
            pids.extend(int(file.read_text()) for file in tmp_path.glob("*.pid"))
            raise error

    stubborn = script("stubborn", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with pytest.raises(error):
        run_benchmark([script("good"), stubborn], QUICK, interrupt)
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_workers_end_when_their_parent_is_killed(tmp_path, script):
    candidate = script("orphan")
    parent = tmp_path / "parent.py"
    parent.write_text(
        "from vitdeploy.benchmark.run import run_benchmark\n"
        "from vitdeploy.benchmark.run import BenchCandidate\n"
        "from vitdeploy.benchmark.protocol import Protocol\n"
        f"one = BenchCandidate('orphan', 'numpy', 'fp32', {candidate.argv!r}, {{}})\n"
        "run_benchmark([one], Protocol(duration=0, min_rounds=1200))\n"
    )
    pid_file = tmp_path / "orphan.pid"
    # The folder that a killed parent leaves behind goes with the test's own.
    running = subprocess.Popen([sys.executable, str(parent)], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert wait_until(lambda: pid_file.exists() and pid_file.read_text())
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert wait_until(lambda: not pid_file.exists())


def test_the_worker_ends_with_its_input():
    done = subprocess.run(WORKER, check=False, input="", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_contestants_need_distinct_names(script):
    with pytest.raises(ValueError, match="distinct names"):
        run_benchmark([script("twin"), script("twin")], QUICK)
    with pytest.raises(ValueError, match="distinct names"):
        run_benchmark([], QUICK)


@pytest.mark.parametrize(
    "fields",
    [
        *({"scenarios": (text,)} for text in ("server", "server:0", "server:10m", "sustain:1s", "sustain:25h", "all")),
        *({"scenarios": ()}, {"scenarios": ("single", "single")}, {"batch": ()}, {"batch": (0,)}, {"processes": 0}),
    ],
)
def test_impossible_protocols_are_refused(fields):
    with pytest.raises(ValueError, match="expected"):
        Protocol(**fields)


def test_rounds_and_batches_of_a_protocol():
    protocol = Protocol(batch=(1, 2, 16), duration=10.0, block_seconds=0.3)
    assert protocol.rounds == 34
    assert protocol.batches(protocol.scenarios) == [1, 16]
    assert Protocol(duration=1.0).rounds == 12
    assert protocol.batches(["offline"]) == [16]
    assert Protocol(batch=(4,)).batches(["single", "offline"]) == [4]
    assert protocol.batches(["single", "server:5", "sustain:1m"]) == [1]


def test_every_round_is_some_processes():
    protocol = Protocol(duration=10.0, processes=3)
    assert [protocol.rounds_of(process) for process in range(4)] == [7, 7, 6, 7]
    assert sum(map(protocol.rounds_of, range(3))) == protocol.rounds == 20
    assert protocol.starts == 3
    assert Protocol(duration=0.0, min_rounds=2).starts == 2
    assert Protocol(("server:5", "sustain:1m")).starts == 2
    assert Protocol(("server:5",), processes=1).starts == 1


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_each_sitting_has_every_round_once(rounds, processes, sessions):
    protocol = Protocol(duration=0.0, min_rounds=rounds, processes=processes)
    assert sum(map(protocol.rounds_of, range(sessions * protocol.starts))) == sessions * rounds


@pytest.mark.parametrize(("duration", "sessions"), [(0.0, 1), (2.0, 1), (4.0, 2), (6.0, 3), (10.0, 3), (3600.0, 3)])
def test_a_short_bench_stays_short(duration, sessions):
    """The least rounds take 6 seconds."""
    assert Protocol(duration=duration).most_sessions == sessions
    assert Protocol(duration=duration, max_extension=1).most_sessions == 1


def test_a_sustained_run_has_a_block_for_each_second():
    protocol = Protocol(("single", "sustain:10m"), duration=10.0)
    assert [protocol.blocks(scenario) for scenario in protocol.scenarios] == [20, 600]


@pytest.mark.parametrize(
    ("text", "scenario"),
    [
        ("single", Scenario("single")),
        ("server:50", Scenario("server", 50.0)),
        ("server:0.5", Scenario("server", 0.5)),
        ("sustain:30s", Scenario("sustain", 30.0)),
        ("sustain:10m", Scenario("sustain", 600.0)),
        ("sustain:90", Scenario("sustain", 90.0)),
    ],
)
def test_scenarios_are_read(text, scenario):
    assert parse_scenario(text) == scenario


@settings(deadline=None)
@given(st.integers(1, 12))
def test_running_order_is_balanced(count):
    orders = [running_order(count, number) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in range(count):
        assert sorted(order[place] for order in orders) == sorted([*range(count)] * 2)
    followers = [pair for order in orders for pair in itertools.pairwise(order)]
    assert all(followers.count((a, b)) == 2 for a in range(count) for b in range(count) if a != b)


def test_random_feeds_are_pixels_or_normal_values_and_always_the_same():
    inputs = (TensorSpec("image", "uint8", ("batch", 32, 32, 3)), TensorSpec("x", "float32", (2, 1000)))
    feeds = random_feeds(inputs, 4)
    assert (feeds["image"].shape, feeds["image"].dtype) == ((4, 32, 32, 3), np.uint8)
    assert (feeds["image"].min(), feeds["image"].max()) == (0, 255)
    assert (feeds["x"].shape, feeds["x"].dtype) == ((2, 1000), np.float32)
    assert abs(float(feeds["x"].mean())) < 0.1
    assert all(np.array_equal(feeds[name], again) for name, again in random_feeds(inputs, 4).items())
    steps = random_feeds((TensorSpec("step", "int64", ("batch",)),), 64)["step"]
    assert steps.dtype == np.int64 and set(steps) == {1, 2}


@pytest.mark.parametrize("spec", [TensorSpec("x", "float64", (1,)), TensorSpec("x", "float32", ("batch", "width"))])
def test_random_feeds_say_which_input_they_cannot_make(spec):
    with pytest.raises(TensorError, match="'x'"):
        random_feeds((spec,), 1)


def test_measuring_imports_nothing_but_numpy():
    code = (
        "import sys, vitdeploy.benchmark.worker, vitdeploy.benchmark.run, vitdeploy.benchmark.summary\n"
        "heavy = {'torch', 'onnx', 'scipy', 'click', 'vitdeploy.models', 'onnxruntime', 'openvino'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_runner_that_says_what_to_measure_with_is_measured_with_that(tmp_path, script):
    """Token numbers of a length of its own: random arrays of any shape would be no sentences."""
    seen = tmp_path / "seen.txt"
    example = "setattr(Product, 'example', lambda self, batch: {'x': np.full((batch, 8), 7, np.float32)})"
    make = f"lambda request: ({example}, Product('product'))[1]"
    lines = f"x = feeds['x']; print(x.shape, x.min(), x.max(), file=open({str(seen)!r}, 'a'))"
    run_benchmark([script("ours", lines=lines, make_runner=make)], QUICK)
    assert set(seen.read_text().splitlines()) == {"(1, 8) 7.0 7.0", "(4, 8) 7.0 7.0"}
