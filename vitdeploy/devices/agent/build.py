"""The engines of a job, made here of its placements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitdeploy.compilation.build_options import BuildOptions
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.compilation.parts import joined, within
from vitdeploy.devices.agent.documents import Placed
from vitdeploy.runtime.backend import loads_here
from vitdeploy.spec import EngineSpec, decode

Progress = Callable[[str, int, int], None]


def make_engine(
    placed: Placed, job: Path, out: Path, options: Mapping[str, Any], progress: Progress
) -> tuple[EngineSpec, Path]:
    """The engine, and the folder that its files lie in: `out`, which is new, or that of a plan that was built here.

    Raises:
        VitdeployError: as `compile_engine`; a MissingPackageError if the target's runtime is not here.
    """
    plan = placed.plan
    if plan is not None and loads_here(job, plan):
        return plan, job
    build = decode(BuildOptions, options["build"]) if options.get("build") else None
    parts = []
    for graph in placed.graphs:
        folder = out if len(placed.graphs) == 1 else out / graph.part
        folder.mkdir(parents=True)
        engine = compile_engine(
            job / graph.file,
            folder,
            target=placed.target,
            precision=graph.precision or placed.precision,
            batch=placed.batch,
            placed=graph.placed,
            build=build,
            progress=progress,
            float_rest=placed.float_rest or "fp32",
        )
        parts.append(engine if len(placed.graphs) == 1 else within(engine, graph.part))
    whole = parts[0] if len(parts) == 1 else joined(parts, placed.sequence)
    return dataclasses.replace(whole, weight_bits=placed.weight_bits, row_parts=placed.row_parts), out
