"""One piece of work in a process of its own, told by one JSON argument and answering with one JSON line.

Standard library only: the makers of peers run under an interpreter that need not have vitdeploy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Payload = dict[str, Any]
HERE = Path(__file__).resolve().parent


def call(script: str, payload: Payload, log: Path, *, python: str = sys.executable, limit: float = 3600) -> Payload:
    """The answer of `script` beside this file; {"error": one line} where it failed, died or took `limit` seconds.

    What the child prints goes to `log`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [python, str(HERE / script), json.dumps(payload)]
    with log.open("wb") as stderr:
        try:
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=stderr, timeout=limit, check=False)
        except OSError as error:
            return {"error": f"{python}: {error.strerror}"}
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {limit:g} s"}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"error": f"ended with status {done.returncode}" + (" (killed: memory?)" * (done.returncode == -9))}
    return dict(answer)


def serve(work: Callable[[Payload], Payload]) -> None:
    """The child's side: answers with what `work` makes of the payload, or with its error and status 1."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    status = 0
    try:
        answer = work(json.loads(sys.argv[1]))
    except ModuleNotFoundError as error:
        answer, status = {"error": f"{error.name} is not installed"}, 1
    except Exception as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        answer, status = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}, 1
    answers.write(json.dumps(answer))
    answers.close()
    sys.exit(status)


def peak_mb() -> float:
    """Peak resident memory of this process in MB.

    Linux's VmHWM: getrusage's ru_maxrss starts at what the parent held when it forked.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def package_versions(names: tuple[str, ...]) -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
