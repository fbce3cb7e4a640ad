"""The candidates of a benchmark run, and how their processes are started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.spec import EngineSpec, encode

ENGINE_WORKER = module_argv("vitdeploy.benchmark.worker")


@dataclass(frozen=True)
class BenchCandidate:
    """One artifact and how its worker is started.

    `request` is what the worker's runner is made from; "threads" (from the protocol) and "batch" are added to it.
    `provider` is what it ran on when it was built; empty if unknown.
    """

    artifact: str
    target: str
    precision: str
    argv: tuple[str, ...]
    request: dict[str, Any]
    provider: str = ""

    @property
    def has_stages(self) -> bool:
        """Whether one query has stages or parts whose times are measured: of an image, or of several graphs."""
        return "images" in self.request or bool(self.request.get("engine", {}).get("parts"))


def engine_candidate(
    engine: EngineSpec,
    folder: Path,
    name: str | None = None,
    trust: Path | None = None,
    images: dict[str, Any] | None = None,
    golden: Path | None = None,
) -> BenchCandidate:
    """An engine whose files lie under `folder`, in a process that never sees torch; `trust` as for `make_runner`.

    With `images` (see `stages.ImageStages`), the path from an image to its answer is measured too. `golden` is the
    bundle whose golden answers the engine must give first.
    """
    trusted = str(trust.resolve()) if trust else ""
    request = {"folder": str(folder.resolve()), "engine": encode(engine), "trust": trusted}
    if images is not None:
        request["images"] = images
    if golden is not None:
        request["golden"] = str(golden.resolve())
    return BenchCandidate(
        name or engine.artifact, engine.target, engine.precision, ENGINE_WORKER, request, engine.provider
    )
