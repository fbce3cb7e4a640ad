"""Reading a report.json that may come from anywhere: nothing in it is trusted."""

from __future__ import annotations

import json
from pathlib import Path

from vitdeploy.document.report import Report
from vitdeploy.errors import InputError, MissingFileError
from vitdeploy.spec import DecodeError, decode

MAX_BYTES = 64 << 20


def read_report(path: Path) -> Report:
    """The report in `path`.

    Raises:
        MissingFileError: there is none.
        InputError: it is no report, or not one of this format.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise MissingFileError(
            f"no report at {path}", found=str(error.strerror), wanted="a bundle, or a report.json of `vitdeploy run`"
        ) from None
    try:
        report = decode(Report, json.loads(content if len(content) <= MAX_BYTES else b""))
        problems = _impossible(report)
    except DecodeError as error:
        problems = error.problems
    except (ValueError, RecursionError) as error:
        problems = [f"the file: {error}"]
    if problems:
        raise InputError(
            f"{path} is no report of vitdeploy",
            found="; ".join(problems)[:300],
            wanted="a report.json of format 1, as `vitdeploy run` writes it",
        )
    return report


def _impossible(report: Report) -> list[str]:
    """Numbers that nothing can be computed with."""
    problems = [
        f"$.engines[{index}].verify: wanted samples, and a value in percent"
        for index, engine in enumerate(report.engines)
        if engine.verify.n < 1 or not 0 <= (engine.verify.value or 0) <= 100
    ]
    medians = report.bench.block_medians_ms if report.bench is not None else {}
    return problems + [
        f"$.bench.block_medians_ms.{name}: wanted latencies above 0"
        for name, found in medians.items()
        if min(found, default=1.0) <= 0
    ]
