"""Engines made of several graphs: an encoder-decoder has two, each compiled in a folder of its own."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from vitdeploy.runtime.sequence import SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
from vitdeploy.spec import EngineSpec, SequenceSpec


def within(engine: EngineSpec, name: str) -> EngineSpec:
    """The engine of one part, whose files lie in the sub-folder `name`."""
    files = tuple(f"{name}/{file}" for file in engine.files)
    return replace(engine, part=name, graph=f"{name}/{engine.graph}", files=files)


def joined(parts: Sequence[EngineSpec], sequence: SequenceSpec | None) -> EngineSpec:
    """One engine of several: it takes source tokens and gives target tokens."""
    first = parts[0]
    kernels: collections.Counter[str] = collections.Counter()
    for part in parts:
        kernels.update(part.kernels)
    return EngineSpec(
        target=first.target,
        precision=first.precision,
        graph=first.graph,
        files=tuple(file for part in parts for file in part.files),
        batch=first.batch,
        dynamic_batch=all(part.dynamic_batch for part in parts),
        provider=first.provider,
        inputs=SEQUENCE_INPUTS,
        outputs=SEQUENCE_OUTPUTS,
        kernels=dict(kernels),
        options=first.options,
        device=first.device,
        parts=tuple(parts),
        sequence=sequence,
    )
