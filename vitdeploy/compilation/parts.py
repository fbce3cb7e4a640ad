"""Engines made of several graphs, each compiled in a folder of its own."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from vitdeploy.bundle.layout import tensors_of
from vitdeploy.runtime.flows import flow_of_graphs, inputs_of, outputs_of
from vitdeploy.runtime.sequence import SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
from vitdeploy.runtime.text_decoder import text_outputs
from vitdeploy.spec import EngineSpec, SequenceSpec


def within(engine: EngineSpec, name: str) -> EngineSpec:
    """The engine of one part, whose files lie in the sub-folder `name`."""
    files = tuple(f"{name}/{file}" for file in engine.files)
    return replace(engine, part=name, graph=f"{name}/{engine.graph}", files=files)


def joined(parts: Sequence[EngineSpec], sequence: SequenceSpec | None) -> EngineSpec:
    """One engine of several graphs that run together; `sequence` where a part repeats. Its precision is INT8 or
    INT4 where one part's is, else the first part's."""
    first, graphs = parts[0], tensors_of(parts)
    flow = flow_of_graphs(graphs)
    inputs, outputs = inputs_of(flow, graphs), outputs_of(flow, graphs)
    if sequence is not None and sequence.source_vocabulary is not None:
        inputs, outputs = SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
    elif sequence is not None:
        outputs = text_outputs(sequence)
    kernels: collections.Counter[str] = collections.Counter()
    for part in parts:
        kernels.update(part.kernels)
    return EngineSpec(
        target=first.target,
        precision=next((part.precision for part in parts if part.precision in ("int8", "int4")), first.precision),
        graph=first.graph,
        files=tuple(file for part in parts for file in part.files),
        batch=first.batch,
        dynamic_batch=all(part.dynamic_batch for part in parts),
        provider=first.provider,
        inputs=inputs,
        outputs=outputs,
        kernels=dict(kernels),
        options=first.options,
        device=first.device,
        parts=tuple(parts),
        sequence=sequence,
        weight_bits=next((part.weight_bits for part in parts if part.weight_bits is not None), None),
        flow=flow,
    )
