"""A run that is killed in the middle of any stage, and started again, ends in the bundle of a run that was left alone.

One store is used for the whole chain: each run resumes where the one before was killed. A last run is left to finish;
what it publishes is compared, byte by byte, with what the same stages make in a store of their own.

Each run is a process of its own that calls the command line's `main`. It is forked by a server that has loaded PyTorch
already, since loading it a dozen times would take longer than all the rest. It measures in fewer and shorter blocks,
and once where it is not to be killed while it does.
"""

import hashlib
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import vitdeploy
from tests.forked import start

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

ROOT = Path(vitdeploy.__file__).parents[1]
STEPS = [
    "reference",
    "export",
    "optimize",
    "calibrate",
    *(f"{verb} onnxruntime-cpu-int8" for verb in ("high_precision", "place", "compile")),
    *("place onnxruntime-cpu-fp32", "compile onnxruntime-cpu-fp32"),
    *("verify onnxruntime-cpu-int8", "verify onnxruntime-cpu-fp32"),
    "attention",
]
# Each stage with the line that says it has begun (or that the kill before came too late for it), and the longest delay.
STAGES = {
    "export": ("export to ONNX|reused export", 2.0),
    "optimize": ("optimize|reused optimize", 0.05),
    "calibrate": ("calibrate|reused calibrate", 0.05),
    "place": ("place |reused place", 0.01),
    "compile": ("compile |reused compile", 0.05),
    "reference": ("original on the evaluation images|reused reference", 0.1),
    "verify": ("onnxruntime-cpu-.* on the evaluation images|reused verify", 0.05),
    "bench": ("bench$", 0.2),
}
# Run in the forked process, in a session of its own.
COMMAND = """
import contextlib, functools, os, pathlib, signal, sys, tempfile
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests themselves run in the background
os.chdir(home)
os.environ.update(VITDEPLOY_STORE=store, TMPDIR=scratch, PYTHONPATH=root)
tempfile.tempdir = None
os.dup2(os.open(os.devnull, os.O_RDWR), 1)
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
sys.argv = ["vitdeploy", "run", "recipe.yaml", "-o", "out/bundle", "-v"]
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.cli.main import main
from vitdeploy.pipeline import assemble
from tests.command_line import undisturbed
blocks = {"block_seconds": 0.1, "min_rounds": 3, "warmup": 0.1, "processes": 1}
if short:
    blocks |= {"block_seconds": 0.02, "max_extension": 1}
assemble.Protocol = functools.partial(Protocol, **blocks)
with undisturbed(pathlib.Path(home)) if short else contextlib.nullcontext():
    main()
"""
# The same stages without the command line; the measurements, which always differ, are those of another run.
UNINTERRUPTED = """
import json, os
from pathlib import Path
from vitdeploy.document.bench import Bench
from vitdeploy.pipeline.assemble import write_run
from vitdeploy.pipeline.job import prepare
from vitdeploy.pipeline.outcome import conclude
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.recipe.load import load_recipe
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import silent
from vitdeploy.progress import silent
from vitdeploy.spec import decode
from vitdeploy.store.store import Store
os.chdir(home)
recipe = load_recipe(Path("recipe.yaml"))
(job,) = prepare(recipe, skip_bad=False, progress=silent)
artifacts = run_plan(make_plan(job), Store(Path("calm-store")), resume=True, progress=silent)
bench = decode(Bench, json.loads(Path("out/bundle/report.json").read_text())["bench"])
write_run([conclude(job, artifacts, bench)], recipe, Path("calm"))
"""


def forked(code, **names):
    """A new process that runs these lines with these names, and a torch that is loaded already."""
    return start(exec, code, names)


class Child:
    """`vitdeploy run` in a session of its own, and the lines that it wrote. `short`: its bench is over at once."""

    def __init__(self, home, short=False):
        (home / "tmp").mkdir(exist_ok=True)
        self.log = home / "log.txt"
        self.log.unlink(missing_ok=True)
        places = {"store": home / "store", "scratch": home / "tmp", "log": self.log, "root": ROOT}
        named = {name: str(path) for name, path in places.items()}
        self.process = forked(COMMAND, home=str(home), short=short, **named)

    def wait_for(self, pattern):
        """Wait until a line that begins like this has been written."""
        while self.process.is_alive():
            if self.log.exists() and re.search(f"^({pattern})", self.log.read_text(encoding="utf-8"), re.MULTILINE):
                return
            time.sleep(0.002)
        pytest.fail(f"ended without a line like {pattern!r}:\n{self.log.read_text(encoding='utf-8')}")

    def signal(self, number, *, group=True):
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self):
        """Its exit status, when it and all its children are gone."""
        self.process.join(timeout=120)
        self.lines = self.log.read_text(encoding="utf-8").splitlines()
        deadline = time.monotonic() + 20
        while (left := processes_of(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"children outlived their parent: {left}"
        return self.process.exitcode


def processes_of(session):
    """The processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(number) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def digests(bundle):
    """The digest of every file of a bundle that must not depend on how it was made."""
    names = ["model.onnx", "labels.txt", "calibration.json", "monitor.json"]
    names += [path.relative_to(bundle).as_posix() for path in sorted(bundle.glob("engines/*/graph.onnx"))]
    names += [path.relative_to(bundle).as_posix() for path in sorted(bundle.glob("golden/*.npz"))]
    return {name: hashlib.sha256((bundle / name).read_bytes()).hexdigest() for name in names}


def unfinished(home):
    """What is being written, or was: in the store, and beside the output."""
    return [path for place in ("store", "out") for path in (home / place).rglob(".tmp-*")]


def scratch(home):
    """What the system's folder for temporary files holds of ours."""
    return set((home / "tmp").glob("vitdeploy*"))


@pytest.fixture(scope="module")
def home(tmp_path_factory, digits, small_checkpoint):
    """A folder with the recipe, and with its own store, output and temporary files."""
    home = tmp_path_factory.mktemp("killed")
    (home / "recipe.yaml").write_text(
        "vitdeploy: 1\n"
        "name: killed\n"
        f"source: {{model: vit_w32d2h2_patch8_32, checkpoint: {small_checkpoint}}}\n"
        "preprocess: {resize: 32, crop: 32, mean: [0.5], std: [0.5]}\n"
        f"data: {{path: {digits}, calibration: {{images: 32}}, evaluation: {{images: 64}}}}\n"
        "targets: [onnxruntime-cpu]\n"
        "budget: {min_agreement: 80}\n"
        "bench: {scenarios: [single], batch: [1], duration: 0.3}\n",
        encoding="utf-8",
    )
    return home


@pytest.fixture(scope="module")
def chain(home):
    """A run interrupted, then runs killed in stage after stage, then one left to finish, and one never disturbed."""
    statuses, published = {}, []
    interrupted = Child(home)
    interrupted.wait_for("export to ONNX")
    time.sleep(random.uniform(0, 2))
    interrupted.signal(signal.SIGINT)
    status, left = interrupted.end(), [*unfinished(home), *scratch(home)]

    for stage, (line, delay) in STAGES.items():
        child = Child(home)
        child.wait_for(line)
        time.sleep(random.uniform(0, delay))
        child.signal(signal.SIGKILL, group=stage != "bench")  # measuring processes must notice that they are alone
        statuses[stage] = child.end()
        published += [(stage, path.name) for path in (home / "out").glob("[!.]*")]

    child = Child(home, short=True)
    child.wait_for("bench$")
    deadline = time.monotonic() + 60
    while not list((home / "out").glob(".tmp-*/*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    child.signal(signal.SIGKILL)
    statuses["bundle"] = child.end()
    published += [("bundle", path.name) for path in (home / "out").glob("[!.]*")]

    last = Child(home, short=True)
    last_status = last.end()
    calm = forked(UNINTERRUPTED, home=str(home))
    calm.join(timeout=120)
    return SimpleNamespace(
        interrupted=SimpleNamespace(status=status, left=left, lines=interrupted.lines),
        statuses=statuses,
        published=published,
        last=SimpleNamespace(status=last_status, lines=last.lines),
        calm_status=calm.exitcode,
    )


def test_an_interrupt_in_the_export_leaves_nothing_behind(chain):
    assert chain.interrupted.status == 130
    assert "interrupted; the same command goes on" in chain.interrupted.lines[-1]
    assert chain.interrupted.left == []


def test_every_stage_was_killed_while_the_run_was_alive(chain):
    assert chain.statuses == dict.fromkeys([*STAGES, "bundle"], -signal.SIGKILL)


def test_no_killed_run_has_published_anything(chain):
    assert chain.published == []


def test_the_run_after_the_kills_makes_the_bundle_of_an_undisturbed_run(chain, home):
    assert (chain.last.status, chain.calm_status) == (0, 0)
    made = digests(home / "out/bundle")
    assert len(made) in (8, 10)  # with the engine in FP32 where that was faster
    assert made == digests(home / "calm")


def test_the_run_after_the_kills_makes_no_finished_stage_again(chain):
    assert [line for line in chain.last.lines if line.startswith(("made", "reused"))] == [f"reused {s}" for s in STEPS]


def test_what_the_killed_runs_left_behind_is_cleared_away(chain, home):
    assert unfinished(home) == []
    assert not (home / "store" / "quarantine").exists()


def test_an_interrupt_in_the_bench_ends_all_and_keeps_the_old_bundle(chain, home):
    before = digests(home / "out/bundle"), scratch(home)
    child = Child(home)
    child.wait_for("bench$")
    deadline = time.monotonic() + 60
    while len(processes_of(child.process.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(processes_of(child.process.pid)) == 4
    time.sleep(random.uniform(0, 2))
    child.signal(signal.SIGINT)
    assert child.end() == 130
    assert (digests(home / "out/bundle"), scratch(home)) == before
    assert unfinished(home) == []


def test_a_termination_in_the_bench_ends_all_and_keeps_the_old_bundle(chain, home):
    before = digests(home / "out/bundle"), scratch(home)
    child = Child(home)
    child.wait_for("bench$")
    time.sleep(random.uniform(0, 2))
    child.signal(signal.SIGTERM, group=False)
    assert child.end() == 143
    assert (digests(home / "out/bundle"), scratch(home)) == before
    assert unfinished(home) == []


def test_the_report_of_the_last_run_is_whole(chain, home):
    report = json.loads((home / "out/bundle/report.json").read_text(encoding="utf-8"))
    assert [row["artifact"] for row in report["bench"]["results"]] == [
        "original",
        "onnxruntime-cpu-int8",
        "onnxruntime-cpu-fp32",
    ]
