"""What the tables and the plots all look up in the report."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from vitdeploy.report import figures, text

# The name of the original among the artifacts; a report may not ask the pipeline for it.
ORIGINAL = "original"


def artifact_order(report: Mapping[str, Any]) -> list[str]:
    """All artifacts, the original first, then the engines in the report's order, then what was only benched."""
    names = [ORIGINAL, *(engine["artifact"] for engine in report["engines"]), *bench_results(report)]
    return list(dict.fromkeys(names))


def bench_results(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The bench results by artifact; empty if there was no bench."""
    bench = report["bench"]
    return {result["artifact"]: result for result in bench["results"]} if bench else {}


def reference_value(report: Mapping[str, Any]) -> float | None:
    """The original's value of the task's metric, measured beside each engine on the same samples; None unlabelled."""
    values = (engine["verify"]["reference_value"] for engine in report["engines"])
    return next((value for value in values if text.known(value)), None)


def data_uri(png: bytes | None) -> str | None:
    """A PNG as what an image of a page is loaded from."""
    return None if png is None else f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def series(report: Mapping[str, Any], artifact: str) -> int:
    """The colour and marker number of an artifact: 0 for the original, the others share the rest."""
    index = artifact_order(report).index(artifact)
    return 0 if index == 0 else 1 + (index - 1) % (len(figures.SERIES) - 1)
