"""A process that measures the context of a benchmark run; it never benchmarks a candidate.

Like `worker`, it answers one JSON command per line:

    {"do": "rate", "target": ..., "precision": ..., "threads": 0, "seconds": 2}   a `context.RateFacts`
    {"do": "memory", "threads": 2, "seconds": 1}                                  a `context.Memory`
    {"do": "profile", "request": {...}, "name", "batch", "threads", "seconds"}    a `context.Profile`
    {"do": "close"}                                                               {"closed": true}
"""

import sys
from pathlib import Path
from typing import Any

from vitdeploy.benchmark import context, worker
from vitdeploy.benchmark.gemm import best_rate, copy_rate, profile
from vitdeploy.spec import EngineSpec, decode, encode


def measure(command: dict[str, Any]) -> dict[str, Any]:
    """The result of one command, encoded."""
    if command["do"] == "close":
        return {"closed": True}
    found: dict[str, Any] = encode(_measure(command))
    return found


def _measure(command: dict[str, Any]) -> context.RateFacts | context.Memory | context.Profile:
    threads, seconds = command["threads"], command["seconds"]
    if command["do"] == "memory":
        return copy_rate(threads, seconds)
    if command["do"] == "rate":
        return best_rate(command["target"], command["precision"], threads, seconds)
    if command["do"] == "profile":
        request = command["request"]
        engine = decode(EngineSpec, request["engine"])
        return profile(Path(request["folder"]), engine, command["name"], command["batch"], threads, seconds)
    raise ValueError(f"unknown command {command['do']!r}")


if __name__ == "__main__":
    sys.exit(worker.answer_lines(measure))
