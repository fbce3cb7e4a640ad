"""Processes that begin with PyTorch and the runtimes loaded: forked by a server that has loaded them once.

To load PyTorch takes longer than all else that most processes of the tests do. The server has done nothing but imports,
so a forked process does what a fresh one would.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

import vitdeploy
from vitdeploy.runtime.interpreter import module_argv

ROOT = Path(vitdeploy.__file__).parents[1]
SETTLE_SECONDS = 0.01


def start(target: Callable[..., object], *arguments: object) -> BaseProcess:
    """A new process that calls `target(*arguments)`, in this working folder and with this environment. It ends with
    this one, and may start such processes itself, of the same server."""
    context = _server()
    begin = (dict(os.environ), target, arguments, forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
    process = context.Process(target=_begin, args=begin, daemon=True)
    process.start()
    return process


def _server() -> multiprocessing.context.ForkServerContext:
    """The server, which runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.loaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]  # or what `_begin` has put there
    return context


def worker_pool(count: int, context: object, initializer: Callable[[], None]) -> ProcessPoolExecutor:
    """In the place of `ProcessPoolExecutor`, where workers are started: they are forked."""
    return ProcessPoolExecutor(count, _server(), _begin, (dict(os.environ), initializer, ()))


def _begin(
    environment: dict[str, str], target: Callable[..., object], arguments: tuple[object, ...], server: str = ""
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if server:
        multiprocessing.current_process().daemon = False  # a daemon may start none
        forkserver._forkserver._forkserver_address = server  # type: ignore[attr-defined]
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it is another's child
    target(*arguments)


class Worker:
    """A measuring process, with as much of `subprocess.Popen` as `WorkerProcess` uses. It waits less between blocks."""

    def __init__(self, module: str, stderr: IO[bytes]) -> None:
        (commands, self_commands), (self_answers, answers) = os.pipe(), os.pipe()
        self.stdin = os.fdopen(self_commands, "w", encoding="utf-8")
        self.stdout = os.fdopen(self_answers, encoding="utf-8")
        ends = [
            Connection(commands, writable=False),
            *(Connection(end, readable=False) for end in (answers, os.dup(stderr.fileno()))),
        ]
        self._process = start(_work, module, *ends)
        for end in ends:
            end.close()
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        return self._process.exitcode


def popen(argv: Sequence[str], **options: Any) -> Any:
    """`subprocess.Popen`, but a module of ours is forked."""
    module = re.search(r"run_module\('([\w.]+)'", argv[-1])
    if module is not None and tuple(argv) == module_argv(module[1]):
        return Worker(module[1], options["stderr"])
    return subprocess.Popen(argv, **options)


# In the place of the module `subprocess` where measuring processes are started.
SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def _work(module: str, *ends: Connection) -> None:
    """What `python -m MODULE` does, with these as standard input, output and error."""
    from vitdeploy.benchmark import protocol, survey_worker, worker

    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = os.fdopen(0, encoding="utf-8")
    protocol.SETTLE_SECONDS = SETTLE_SECONDS
    if module == survey_worker.__name__:
        sys.exit(worker.answer_lines(survey_worker.measure))
    if module == worker.__name__:
        sys.exit(worker.main())
    sys.exit(worker.serve(importlib.import_module(module).make_runner))
