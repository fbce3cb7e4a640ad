"""A run that is killed in the middle of any stage, and started again, ends in the bundle of a run that was left alone.

One store is used for the whole chain: each run resumes where the one before was killed. A last run is left to finish;
what it publishes is compared, byte by byte, with what the same stages make in a store of their own.

Each run is a process of its own (`killing`), forked by a server that has loaded PyTorch already, since loading it a
dozen times would take longer than all the rest.
"""

import json
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults.killing import (
    STAGES,
    UNINTERRUPTED,
    Child,
    digests,
    forked,
    processes_of,
    published,
    scratch,
    unfinished,
    write_recipe,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

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


@pytest.fixture(scope="module")
def home(tmp_path_factory, digits, small_checkpoint):
    """A folder with the recipe, and with its own store, output and temporary files."""
    home = tmp_path_factory.mktemp("killed")
    write_recipe(home, small_checkpoint, digits)
    return home


@pytest.fixture(scope="module")
def chain(home):
    """A run interrupted, then runs killed in stage after stage, then one left to finish, and one never disturbed."""
    statuses, names = {}, []
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
        names += [(stage, name) for name in published(home)]

    child = Child(home, short=True)
    child.wait_for_bundle()
    child.signal(signal.SIGKILL)
    statuses["bundle"] = child.end()
    names += [("bundle", name) for name in published(home)]

    last = Child(home, short=True)
    last_status = last.end()
    calm = forked(UNINTERRUPTED, home=str(home))
    calm.join(timeout=120)
    return SimpleNamespace(
        interrupted=SimpleNamespace(status=status, left=left, lines=interrupted.lines),
        statuses=statuses,
        published=names,
        last=SimpleNamespace(status=last_status, lines=last.lines),
        calm_status=calm.exitcode,
    )


def test_an_interrupt_in_the_export_leaves_nothing_behind(chain):
    assert chain.interrupted.status == 130
    assert "interrupted; run the same command to resume" in chain.interrupted.lines[-1]
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
