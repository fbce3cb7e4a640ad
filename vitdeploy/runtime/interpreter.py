"""Child processes that run a vitdeploy module: their start, their protocol, and the report of a dead one.

They import nothing from the current folder. `python -m` searches every module, even Python's own, in the current folder
first. That may be an untrusted bundle or data set, and a `json.py` in it would run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import vitdeploy
from vitdeploy.errors import StorageError, VitdeployError, WorkerError, error_with_code
from vitdeploy.limits import last_words
from vitdeploy.progress import Progress

Job = Callable[[Any, Callable[[str, int, int], bool]], Any]

HOME = str(Path(vitdeploy.__file__).resolve().parents[1])

# Removes the current folder from the path, also where an empty entry of PYTHONPATH added it. An explicit entry stays.
_OUTSIDE = f"""import os, sys
try:
    here = os.path.realpath(os.getcwd())
except OSError:
    here = None
named = [os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
sys.path[:] = [entry for entry in sys.path if entry and (os.path.realpath(entry) != here or here in named)]
sys.path.append({HOME!r})
import runpy
"""


def module_argv(module: str) -> tuple[str, ...]:
    """Return the arguments of a process that runs a module of this vitdeploy like `python -m`, but without the current
    folder on its path (Python 3.11 has -P for that)."""
    return sys.executable, "-c", f"{_OUTSIDE}runpy.run_module({module!r}, None, '__main__', True)"


# --- Errors of a child process ----------------------------------------------------------------------------------------


def reported_error(data: dict[str, str], message: str, output: IO[bytes]) -> VitdeployError:
    """Return the error that a child reports, as the class with its code. `output` is the file of its standard error."""
    found = data["found"]
    if data["code"] == VitdeployError.code:  # unexpected: show its traceback
        found = "\n".join([found, *last_words(output)]).strip()
    return error_with_code(data["code"], message, found=found, expected=data["expected"], fix=data["fix"])


def ending(status: int) -> tuple[str, str]:
    """Return how a process ended, and the fix, "" without one."""
    if status >= 0:
        return f"exit status {status}", ""
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    fix = "probably out of memory: free some, or use a smaller batch" if name == "SIGKILL" else ""
    return f"killed by {name}", fix


# --- One job in a separate process ------------------------------------------------------------------------------------
# The child reads one JSON document from standard input and answers with JSON lines on its original standard output:
#
#     {"progress": ["text", done, total]}    any number of times
#     {"done": {...}}                        or {"error": {"code", "message", "exit_code", "found", "expected", "fix"}}


def run_child(argv: tuple[str, ...], request: Any, what: str, progress: Progress) -> Any:
    """Start a process with `argv`, send it `request` and return its answer; `what` names it in errors.

    The process has ended when this returns or raises.

    Raises:
        VitdeployError: the error that the child reports, as the class with its code.
        WorkerError: the process cannot be started, died, or sent an invalid answer.
    """
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise WorkerError(f"{what} cannot be started", found=str(error)) from None
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # a dead process is reported below
                process.stdin.write(json.dumps(request))
            for line in process.stdout:
                answer = _parse(line, what)
                if "progress" in answer:
                    progress(*answer["progress"])
                elif "error" in answer:
                    raise reported_error(answer["error"], answer["error"]["message"], stderr)
                else:
                    return answer["done"]
            how, fix = ending(process.wait())
            raise WorkerError(f"{what} died", found="\n".join([how, *last_words(stderr)]), fix=fix)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _parse(line: str, what: str) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not answer.keys() & {"progress", "error", "done"}:
        raise WorkerError(f"{what} sent an invalid answer", found=repr(line[:200]))
    return answer


def answer_parent(job: Job) -> int:
    """Run `job` on the request in the child, send the answer and return the exit status.

    `job` gets the request and a function that reports progress; the function returns False if the parent has closed the
    pipe.
    """
    # Ctrl-C reaches the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # From here on, output of native code goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(document: dict[str, Any]) -> bool:
        try:
            answers.write(json.dumps(document) + "\n")
            answers.flush()
        except OSError:
            return False
        return True

    try:
        done = job(json.load(sys.stdin), lambda text, count, total: say({"progress": [text, count, total]}))
        say({"done": done})
    except VitdeployError as error:
        say({"error": error.to_dict()})
    except OSError as error:
        why = StorageError(
            "a file cannot be read or written", found=str(error), fix="free some space, or choose another -o"
        )
        say({"error": why.to_dict()})
    except Exception as error:
        traceback.print_exc()
        say({"error": VitdeployError(f"{type(error).__name__}: {str(error)[:300]}").to_dict()})
    return 0
