"""The steps of a self-test: each is attempted, and what fails is kept while the rest goes on."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.selftest import StepFacts, StepStatus
from vitdeploy.errors import VitdeployError

DONE: StepStatus = "done"
FAILED: StepStatus = "failed"
NOT_RUN: StepStatus = "not run"
LOGS = "logs"

T = TypeVar("T")


@dataclass
class Steps:
    """`rows` are those of selftest.json; the logs of failures are in `folder`."""

    folder: Path
    rows: list[StepFacts] = field(default_factory=list)

    def attempt(self, model: str, step: str, work: Callable[[], T]) -> T | None:
        """The result of `work`, or None if it fails: only an interruption ends the self-test."""
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            self._fail(model, step, time.perf_counter() - start, error)
            return None
        self._add(StepFacts(model, step, DONE, time.perf_counter() - start))
        return result

    def skip(self, model: str, step: str, why: str) -> None:
        self._add(StepFacts(model, step, NOT_RUN, 0.0, why))

    def count(self, status: StepStatus) -> int:
        return sum(row.status == status for row in self.rows)

    def _fail(self, model: str, step: str, seconds: float, error: Exception) -> None:
        log = f"{LOGS}/{len(self.rows):02d}-{_file_name(model)}-{_file_name(step)}.txt"
        (self.folder / LOGS).mkdir(exist_ok=True)
        trace = "".join(traceback.format_exception(error))
        (self.folder / log).write_text(f"{error}\n\n{trace}", encoding="utf-8")
        known = error if isinstance(error, VitdeployError) else VitdeployError(f"a bug in vitdeploy: {error!r}"[:300])
        found = known.found.splitlines()[0] if known.found else ""
        detail = f"{known.message} ({found})" if found else known.message
        self._add(StepFacts(model, step, FAILED, seconds, detail, log, ErrorFacts.of(known)))

    def _add(self, row: StepFacts) -> None:
        self.rows.append(replace(row, seconds=round(row.seconds, 3)))


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
