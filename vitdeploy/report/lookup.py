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


def engine_of(report: Mapping[str, Any], artifact: str | None) -> Mapping[str, Any] | None:
    """What the report says of an engine; None for the original, and where it says nothing."""
    return next((engine for engine in report["engines"] if engine["artifact"] == artifact), None)


def undecided(report: Mapping[str, Any]) -> Mapping[str, str]:
    """The artifacts whose speed is not decided, each with the reason."""
    return (report["bench"] or {}).get("undecided") or {}


def is_decided(ratio: Mapping[str, Any]) -> bool:
    """Whether a measured ratio may be claimed; those of earlier versions say nothing of it."""
    return bool(ratio.get("decided", True))


def starred(report: Mapping[str, Any]) -> str | None:
    """What is recommended, where that is decided: its own gate does not fail, and its speed is known."""
    name = report["verdict"].get("recommended")
    engine = engine_of(report, name)
    if (engine is not None and engine["gate"]["status"] in ("fail", "undecided")) or name in undecided(report):
        return None
    return None if name is None else str(name)


def leading(report: Mapping[str, Any]) -> str | None:
    """What is recommended, or else what stands for the run."""
    verdict = report["verdict"]
    name = verdict.get("recommended") or verdict.get("leading")
    return None if name is None else str(name)


def focus(report: Mapping[str, Any]) -> list[str]:
    """The engines that a reader cares for: the leading one, then those that are shipped; else all."""
    names = [engine["artifact"] for engine in report["engines"]]
    shipped = [engine["artifact"] for engine in report["engines"] if engine["shipped"]]
    first = [name for name in names if name == leading(report)]
    return list(dict.fromkeys([*first, *shipped])) or names


def reference_value(report: Mapping[str, Any]) -> float | None:
    """The original's value of the task's metric, measured beside each engine on the same samples; None unlabelled."""
    values = (engine["verify"]["reference_value"] for engine in report["engines"])
    return next((value for value in values if text.known(value)), None)


def data_uri(picture: bytes | None) -> str | None:
    """A PNG or JPEG as what an image of a page is loaded from."""
    if picture is None:
        return None
    kind = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def series(report: Mapping[str, Any], artifact: str) -> int:
    """The colour and marker number of an artifact: 0 for the original, the others share the rest. A page on which
    colours mean something else says so in `colours`."""
    if artifact in report.get("colours", {}):
        return int(report["colours"][artifact])
    index = artifact_order(report).index(artifact)
    return 0 if index == 0 else 1 + (index - 1) % (len(figures.SERIES) - 1)
