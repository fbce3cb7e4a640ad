"""Processes of our own take nothing from the folder that the user is in; what they say, and every way they can end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from vitdeploy.benchmark.run import ENGINE_WORKER
from vitdeploy.errors import CapabilityError, StorageError, VitdeployError, WorkerError
from vitdeploy.runtime.interpreter import module_argv, run_child

SERVE = """
import os, sys, time
from vitdeploy.runtime.interpreter import answer_parent
from vitdeploy.errors import CapabilityError
def job(request, tell):
{body}
sys.exit(answer_parent(job))
"""


def test_a_worker_imports_nothing_from_the_current_folder(tmp_path):
    for name in ("json", "runpy", "numpy", "vitdeploy"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name} of somebody else')")
    result = subprocess.run(ENGINE_WORKER, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_module_runs_as_the_main_one():
    result = subprocess.run(module_argv("this"), capture_output=True, text=True, check=True)
    assert result.stdout.startswith("The Zen of Python")


def run(body, request=None, progress=lambda *step: None):
    code = SERVE.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    return run_child((sys.executable, "-c", code), request, "the job", progress)


def test_the_answer_comes_back_and_progress_before_it():
    steps = []
    answer = run(
        "tell('half', 1, 2)\nprint('noise')\nos.system('echo native noise')\ntell('all', 2, 2)\nreturn [request, 1]",
        {"a": "ü"},
        lambda *step: steps.append(step),
    )
    assert answer == [{"a": "ü"}, 1]
    assert steps == [("half", 1, 2), ("all", 2, 2)]


def test_its_errors_are_raised_as_what_they_are():
    with pytest.raises(CapabilityError, match="no GPU") as caught:
        run("raise CapabilityError('no GPU', found='a', expected='b', fix='c')")
    assert (caught.value.found, caught.value.expected, caught.value.fix) == ("a", "b", "c")


def test_a_full_disk_is_told_as_one():
    with pytest.raises(StorageError) as caught:
        run("raise OSError(28, 'No space left on device', 'engine.plan')")
    assert caught.value.found == "[Errno 28] No space left on device: 'engine.plan'"


def test_a_bug_is_told_with_its_traceback():
    with pytest.raises(VitdeployError, match="ZeroDivisionError") as caught:
        run("1 / 0")
    assert caught.value.exit_code == 1
    assert "in job" in caught.value.found


@pytest.mark.parametrize(("number", "word"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGKILL, "SIGKILL")])
def test_a_crash_of_native_code_is_an_error_that_says_so(number, word):
    with pytest.raises(WorkerError, match="the job died") as caught:
        run(f"print('last words', file=sys.stderr, flush=True)\nos.kill(os.getpid(), {int(number)})")
    assert f"killed by {word}" in caught.value.found
    assert "last words" in caught.value.found
    assert ("memory" in caught.value.fix) == (number == signal.SIGKILL)


def test_an_end_without_an_answer_is_an_error():
    with pytest.raises(WorkerError, match="the job died") as caught:
        run("os._exit(3)")
    assert caught.value.found == "exit status 3"


def test_an_answer_that_is_none_is_an_error():
    with pytest.raises(WorkerError, match="invalid answer") as caught:
        run_child((sys.executable, "-c", "print('hello')"), None, "the job", lambda *step: None)
    assert "hello" in caught.value.found


def test_what_cannot_be_started_is_an_error():
    with pytest.raises(WorkerError, match="cannot be started"):
        run_child(("/nowhere/at/all",), None, "the job", lambda *step: None)


def test_the_process_is_gone_when_the_caller_gives_up():
    pids = []

    def stop(text, done, total):
        pids.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("tell('pid', os.getpid(), 0)\ntime.sleep(3600)", progress=stop)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_job_hears_that_nobody_listens_any_more(tmp_path):
    heard = tmp_path / "heard"
    body = f"time.sleep(0.5)\nopen({str(heard)!r}, 'w').write(str(tell('x', 1, 2)))"
    code = SERVE.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(b"null")
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=30)
    for _ in range(50):
        if heard.is_file():
            break
        time.sleep(0.1)
    assert heard.read_text() == "False"
