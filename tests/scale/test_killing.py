"""Which processes the gate kills: its own alone."""

import os
import subprocess
import sys
import time

from tests.scale.killing import _runs_task, killed_every, processes_below

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def test_processes_below_are_those_that_were_started_here_and_no_others():
    process = subprocess.Popen([sys.executable, "-c", PARENT])
    try:
        deadline = time.monotonic() + 20
        while len(found := processes_below(process.pid)) < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [words for words in found.values() if "time.sleep(60)" in words] and process.pid not in found
        everything = processes_below(os.getpid())
        assert {process.pid, *found} <= everything.keys() and os.getppid() not in everything
    finally:
        for child in processes_below(process.pid):
            os.kill(child, 9)
        process.wait()


def test_one_is_killed_every_so_often():
    sleeping = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    with killed_every(0.05, lambda: [each.pid for each in sleeping if each.poll() is None], seed=1) as killed:
        for each in sleeping:
            assert each.wait(20) == -9
    assert sorted(killed)[:2] == sorted(each.pid for each in sleeping)


def test_idle_processes_and_agents_of_ray_run_no_task():
    assert _runs_task("ray::run_task")
    assert not any(map(_runs_task, ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "raylet")))
