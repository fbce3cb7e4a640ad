"""macOS and Windows, as `tests.elsewhere` pretends them: the table of docs/get-started.md, row by row."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elsewhere import environment

pytest.importorskip("torch")
if sys.platform != "linux":
    pytest.skip("pretends on Linux", allow_module_level=True)
pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "calibration" / "digits"
IMAGE = DIGITS / "evaluation" / "7" / "0017.png"
# (arguments, and what to add to the environment) -> the finished process
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=["darwin", "win32"])
def elsewhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Python:
    home = tmp_path_factory.mktemp(request.param)
    (home / "user").mkdir()
    base = {**environment(request.param, home / "site"), "HOME": str(home / "user"), "XDG_CONFIG_HOME": str(home)}

    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, env=base | variables, cwd=home, capture_output=True, text=True, timeout=300, check=False
        )

    run.platform = request.param  # type: ignore[attr-defined]
    return run


def command(elsewhere: Python, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return elsewhere("-m", "vitdeploy.cli.watched", *words, **variables)


def done(process: subprocess.CompletedProcess[str]) -> str:
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def on_windows(elsewhere: Python) -> bool:
    return bool(elsewhere.platform == "win32")  # type: ignore[attr-defined]


WHAT_IT_LACKS = """
import sys, vitdeploy.limits, vitdeploy.benchmark.machine as machine
os, cpus = vitdeploy.limits.os, machine.affinity()
print(vitdeploy.limits.sys.platform, hasattr(os, "sched_getaffinity"), hasattr(os, "fork"), machine.cpu_times(cpus))
"""


def test_the_pretence_holds(elsewhere: Python) -> None:
    expected = "win32 False False None" if on_windows(elsewhere) else "darwin False True None"
    assert done(elsewhere("-c", WHAT_IT_LACKS)).strip() == expected


IMPORT_ALL = """
import importlib, pkgutil, vitdeploy
names = [each.name for each in pkgutil.walk_packages(vitdeploy.__path__, "vitdeploy.") if "tensorrt" not in each.name]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_every_module_can_be_imported(elsewhere: Python) -> None:
    if on_windows(elsewhere):  # which lacks more than macOS
        assert int(done(elsewhere("-c", IMPORT_ALL))) > 300


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["doctor"]])
def test_a_command_that_reads_no_file_needs_nothing_of_linux(elsewhere: Python, words: list[str]) -> None:
    assert done(command(elsewhere, *words))


PREDICT = """
import sys, json, vitdeploy.runtime
with vitdeploy.runtime.load(sys.argv[1]) as predictor:
    print(json.dumps(predictor.predict(sys.argv[2]).to_dict()))
"""


def test_a_bundle_answers_the_same(elsewhere: Python, small_bundle: Path) -> None:
    here = subprocess.run(
        [sys.executable, "-c", PREDICT, small_bundle, IMAGE], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert json.loads(done(elsewhere("-c", PREDICT, small_bundle, IMAGE))) == json.loads(here.stdout)
    [answer] = json.loads(done(command(elsewhere, "predict", small_bundle, IMAGE, "--json")))["predictions"]
    assert answer["label"] == json.loads(here.stdout)["label"]


def test_an_engine_is_made_and_an_output_folder_replaced(elsewhere: Python, small_export: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done(command(elsewhere, "optimize", small_export, "-o", tmp_path / "fast"))
    options = ("--data", DIGITS, "--target", "onnxruntime-cpu", "--num-samples", 8)
    done(command(elsewhere, "quantize", tmp_path / "fast", *options, "-o", tmp_path / "int8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast", "int8"]


def test_what_limits_no_foreign_file_says_so(elsewhere: Python, small_export: Path) -> None:
    free = command(elsewhere, "inspect", small_export)
    assert free.returncode == 0 and free.stderr.count("sets no limit of time and memory") == 1
    kept = command(elsewhere, "inspect", small_export, VITDEPLOY_MAX_GIB="4")
    assert kept.returncode == 4 and "VD4002" in kept.stderr and "unset VITDEPLOY_MAX_GIB" in kept.stderr


def test_a_measurement_that_sees_no_other_process_says_so(elsewhere: Python, small_bundle: Path) -> None:
    words = ("bench", small_bundle, "--scenario", "single", "--duration", 0.2, "--warmup", 0.1, "--json")
    found = json.loads(done(command(elsewhere, *words)))
    assert [row["flags"][-1] for row in found["results"]] == ["unwatched"]
    assert found["results"][0]["machine"]["taken_by_others"] is None


def test_other_machines_are_reached_where_the_system_can(elsewhere: Python) -> None:
    asked = command(elsewhere, "devices", "doctor", "local")
    if on_windows(elsewhere):
        assert asked.returncode == 4
        assert "VD4301" in asked.stderr and "Windows Subsystem for Linux" in asked.stderr
    else:
        assert "works" in done(asked)


SCRATCH = """
import os, subprocess, sys
from vitdeploy.devices.agent.state import home, scratch
ended = subprocess.Popen([sys.executable, "-c", ""])
ended.wait()
for pid in os.getppid(), ended.pid:
    (home() / "scratch" / str(pid)).mkdir(parents=True)
with scratch():
    print([int(path.name) in (os.getppid(), os.getpid()) for path in (home() / "scratch").iterdir()])
"""


def test_the_folder_of_a_living_process_stays(elsewhere: Python) -> None:
    if not on_windows(elsewhere):  # where no agent runs
        assert done(elsewhere("-c", SCRATCH)).strip() == "[True, True]"


def test_the_page_names_every_feature() -> None:
    page = (ROOT / "docs" / "get-started.md").read_text(encoding="utf-8")
    section = page.split("## Other systems than Linux")[1].split("\n## ")[0]
    for word in ("renameat2", "flock", "/proc", "ssh", "unwatched", "VD4301", "VD4002", "predict"):
        assert word in section
    assert len(section.split()) < 260
