"""The batch that an original is exported at: an ONNX file may have a fixed one, or be right at some only."""

from __future__ import annotations

import dataclasses
from typing import Literal

from vitdeploy.errors import CapabilityError
from vitdeploy.exporter.batches import one_function
from vitdeploy.graph.io.files import fixed_batch, graph_spec
from vitdeploy.stages.reference_model import ReferenceModel, graph_of, is_onnx, reference_runner

# "auto": open, or as the file has it.
Asked = Literal["auto", "dynamic"] | int


def settle_batch(reference_model: ReferenceModel, asked: Asked = "auto") -> tuple[ReferenceModel, int | None]:
    """The original as it is run and exported, and the batch that it is fixed to, None if it stays open.

    Raises:
        CapabilityError: an ONNX file that is not one function at what is asked. ExportError: at no batch size.
    """
    wanted = asked if isinstance(asked, int) else None
    if not is_onnx(reference_model.source):
        return reference_model, wanted
    graph = graph_of(dataclasses.replace(reference_model.source, only_batch=None))
    fixed = fixed_batch(graph_spec(graph.model, ""))
    if fixed is not None:
        return _at(reference_model, (fixed,), asked, "its batch is fixed")
    if graph.metadata is not None:  # it was compared with its original when it was exported
        return dataclasses.replace(
            reference_model, source=dataclasses.replace(reference_model.source, only_batch=wanted)
        ), wanted
    with reference_runner(reference_model.source) as runner:
        found = one_function(runner, reference_model.images)
    if found.sizes:
        return _at(reference_model, found.sizes, asked, found.why)
    return dataclasses.replace(
        reference_model, source=dataclasses.replace(reference_model.source, only_batch=wanted)
    ), wanted


def _at(reference_model: ReferenceModel, sizes: tuple[int, ...], asked: Asked, why: str) -> tuple[ReferenceModel, int]:
    """The original at one of these batch sizes: what is asked, or the smallest."""
    batch = asked if isinstance(asked, int) else sizes[0]
    shown = ", ".join(map(str, sizes))
    if batch not in sizes or asked == "dynamic":
        raise CapabilityError(
            f"{reference_model.name} cannot be exported at batch {asked}",
            found=f"it is one function at batch {shown} only: {why}",
            wanted=f"batch {sizes[0]}",
            fix=f"--batch {sizes[0]}; in a recipe export.batch: {sizes[0]}, or leave it out; or export the model again "
            "with a dynamic batch",
        )
    note = f"{reference_model.name} is one function at batch {shown} only ({why}): it is taken at batch {batch}"
    source = dataclasses.replace(reference_model.source, only_batch=batch)
    return dataclasses.replace(reference_model, source=source, notes=(*reference_model.notes, note)), batch
