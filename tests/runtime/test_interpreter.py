"""Processes of our own take nothing from the folder that the user is in."""

import subprocess

from vitdeploy.benchmark.run import ENGINE_WORKER
from vitdeploy.runtime.interpreter import module_argv


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path):
    for name in ("json", "runpy", "numpy", "vitdeploy"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name} of somebody else')")
    result = subprocess.run(ENGINE_WORKER, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_module_runs_as_the_main_one():
    result = subprocess.run(module_argv("this"), capture_output=True, text=True, check=True)
    assert result.stdout.startswith("The Zen of Python")
