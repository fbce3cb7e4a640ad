"""The parent's side of a measuring process: starts, queries and ends it, and reports why it died."""

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from vitdeploy.errors import VitdeployError, WorkerError
from vitdeploy.limits import last_words
from vitdeploy.runtime.interpreter import ending, reported_error

EXIT_SECONDS = 3.0


class WorkerProcess:
    """A running worker. Its standard error goes to `stderr_file`, whose tail becomes part of errors."""

    def __init__(self, artifact: str, argv: tuple[str, ...], stderr_file: Path) -> None:
        """Start the process.

        Raises:
            WorkerError: the operating system cannot start it.
        """
        self.artifact = artifact
        self._stderr_file = stderr_file
        try:
            with stderr_file.open("wb") as stderr:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                )
        except OSError as error:
            raise WorkerError(f"cannot start the measuring process of {artifact}", found=str(error)) from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands: IO[str] = self._process.stdin
        self._lines: queue.Queue[str | None] = queue.Queue()
        # A thread, because a pipe can be waited for with a time limit on POSIX only.
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, answers: IO[str]) -> None:
        with answers:
            for line in answers:
                self._lines.put(line)
        self._lines.put(None)

    def ask(self, command: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The worker's answer to one command, within `timeout` seconds.

        Raises:
            WorkerError: it died, did not answer in time, or its answer is not a JSON object.
            VitdeployError: the error that it reports, in the class of its code.
        """
        try:
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
            line = self._lines.get(timeout=timeout)
        except OSError:  # the worker closed the pipe
            line = None
        except queue.Empty:
            raise self._failure(f"did not answer within {timeout:g} s", "no answer") from None
        if line is None:
            raise self._death()
        return self._parse(line)

    def _parse(self, line: str) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failure("did not answer with a JSON object", repr(line[:200]))
        if "error" in answer:
            raise self._reported(answer["error"])
        return answer

    def _reported(self, data: dict[str, str]) -> VitdeployError:
        message = data["message"] if self.artifact in data["message"] else f"{self.artifact}: {data['message']}"
        with self._stderr_file.open("rb") as stderr:
            return reported_error(data, message, stderr)

    def _death(self) -> WorkerError:
        try:
            status = self._process.wait(timeout=EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return self._failure("closed its output", "still running")
        return self._failure("died", *ending(status))

    def _failure(self, what: str, found: str, fix: str = "") -> WorkerError:
        with self._stderr_file.open("rb") as stderr:
            lines = [found, *last_words(stderr)]
        return WorkerError(f"the measuring process of {self.artifact} {what}", found="\n".join(lines), fix=fix)

    def terminate(self) -> None:
        self._process.terminate()

    def reap(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the process to end, otherwise kill it; close the pipes."""
        try:
            self._process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):  # unflushed data cannot reach a dead process
            self._commands.close()
        self._reader.join(timeout=EXIT_SECONDS)


def end_all(workers: Sequence[WorkerProcess]) -> None:
    """End all workers, even busy ones: terminate them, and kill those that are still alive after a few seconds."""
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + EXIT_SECONDS
    for worker in workers:
        worker.reap(max(0.0, deadline - time.monotonic()))
