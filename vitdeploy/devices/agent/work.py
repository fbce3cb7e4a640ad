"""A job from its folder to its result, in a process of its own that no connection ends.

Light to import: a missing package must be found while the host can still be told.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from vitdeploy.devices.agent.documents import FORMAT, DeviceJob, JobResult, State, Status, explained, failure, flat
from vitdeploy.devices.agent.state import (
    JOB_FILE,
    RESULT_FILE,
    RESULT_FOLDER,
    Process,
    read_job,
    turn,
    write_status,
)
from vitdeploy.errors import VitdeployError
from vitdeploy.spec import encode

TELL_SECONDS = 0.5
PRODUCTS = "engines"

Progress = Callable[[str, int, int], None]


def run(folder: Path) -> None:
    """Wait for the device, do the job in `folder`, and leave its result there, whatever happens."""
    me = Process.current()

    def tell(state: State, detail: str = "", progress: tuple[str, int, int] | None = None) -> None:
        write_status(folder, Status(state, detail, progress), me)

    tell("queued")
    job = read_job(folder / JOB_FILE)
    try:
        with turn(f"{job.kind} of {job.sender}", lambda other: tell("queued", other)):
            tell("running")
            result = _result(job, folder, _seldom(lambda *progress: tell("running", "", progress)))
            _publish(result, folder)
    except SystemExit:
        tell("stopped")
        raise


def _publish(result: JobResult, folder: Path) -> None:
    """The result's folder appears whole, with all that it lists, or not at all."""
    out = folder / f".{RESULT_FOLDER}"
    out.mkdir()
    for entry in result.files:
        (folder / PRODUCTS / entry.path).rename(out / flat(entry.path))
    with (out / RESULT_FILE).open("w", encoding="utf-8") as file:
        json.dump(encode(result), file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    out.rename(folder / RESULT_FOLDER)


def _seldom(tell: Progress) -> Progress:
    """Report progress only now and then, so as not to disturb what is measured."""
    last = -TELL_SECONDS

    def progress(text: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            tell(text, done, total)

    return progress


def _result(job: DeviceJob, folder: Path, progress: Progress) -> JobResult:
    try:
        with explained():
            from vitdeploy.devices.agent.tasks import perform

            return perform(job, folder, folder / PRODUCTS, progress)
    except VitdeployError as error:
        return JobResult(FORMAT, job.digest, {}, failure=failure("", error))
