"""One job in a process of its own: a request in, lines of progress out, then the answer or the error.

The child reads one JSON document from standard input and answers with JSON lines on what was its standard output:

    {"progress": ["text", done, total]}    any number of times
    {"done": {...}}                        or {"error": {"code", "message", "exit_code", "found", "wanted", "fix"}}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import IO, Any

from vitdeploy.errors import StorageError, VitdeployError, WorkerError, error_with_code

TAIL_BYTES, TAIL_LINES = 4096, 8

Progress = Callable[[str, int, int], None]
Job = Callable[[Any, Callable[[str, int, int], bool]], Any]


def run_child(argv: tuple[str, ...], request: Any, what: str, progress: Progress) -> Any:
    """Start a process with `argv`, send it `request` and return its answer; `what` names it in errors.

    However this call ends, the process is gone.

    Raises:
        VitdeployError: the error that it reports, as the class with its code.
        WorkerError: it cannot be started, died, or gave another answer.
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
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it may be dead already, which is reported below
                process.stdin.write(json.dumps(request))
            for line in process.stdout:
                answer = _parse(line, what)
                if "progress" in answer:
                    progress(*answer["progress"])
                elif "error" in answer:
                    raise _reported(answer["error"], stderr)
                else:
                    return answer["done"]
            raise _death(process.wait(), what, stderr)
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
        raise WorkerError(f"{what} answered something that is no answer", found=repr(line[:200]))
    return answer


def _reported(data: dict[str, str], stderr: IO[bytes]) -> VitdeployError:
    found = data["found"]
    if data["code"] == VitdeployError.code:  # unexpected, so its traceback is wanted
        found = "\n".join([found, *_last_words(stderr)]).strip()
    return error_with_code(data["code"], data["message"], found=found, wanted=data["wanted"], fix=data["fix"])


def _death(status: int, what: str, stderr: IO[bytes]) -> WorkerError:
    how = f"exit status {status}" if status >= 0 else f"ended by signal {-status} ({signal.strsignal(-status)})"
    fix = "often too little memory: free some, or take a smaller batch" if status == -signal.SIGKILL else ""
    return WorkerError(f"{what} died", found="\n".join([how, *_last_words(stderr)]), fix=fix)


def _last_words(stderr: IO[bytes]) -> list[str]:
    """The last lines of its standard error, indented for the `found` field of an error."""
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - TAIL_BYTES))
    text = stderr.read().decode("utf-8", errors="replace")
    return [f"{'':16}| {line}" for line in text.splitlines()[-TAIL_LINES:]]


def answer_parent(job: Job) -> int:
    """The child's side: do `job` on the request and answer; returns the exit status.

    `job` gets the request and a function that reports progress, which returns False once nobody listens any more.
    """
    # Ctrl-C reaches the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # From now on, output of native code goes to standard error.
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
