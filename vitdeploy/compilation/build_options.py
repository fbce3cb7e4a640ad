"""The user's options for building an engine with TensorRT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitdeploy.runtime.profiles import Batches

# Batches that an engine with a dynamic batch supports in addition to the one that it is built for.
FURTHER_BATCHES = 8


@dataclass(frozen=True)
class BuildOptions:
    """How TensorRT builds.

    `batches`: (smallest, best, largest) of each profile of a graph with a dynamic batch; none: one profile for only
    the compiled batch, with kernels chosen for it alone, and one for every batch up to the larger of it and 8. `sizes`:
    the image sizes (height, width) of a graph in which these are dynamic. `workspace`: bytes of device memory for
    kernels' scratch, None for all free memory. `level`: builder optimisation level, 0 to 5; TensorRT's
    default is 3. `hardware`: the GPUs that the plan may run on. `versions`: "newer" also allows later TensorRTs.
    """

    batches: tuple[Batches, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    workspace: int | None = None
    level: int = 3
    hardware: Literal["this", "same-compute-capability", "ampere+"] = "this"
    versions: Literal["this", "newer"] = "this"


def default_batches(batch: int, further: int = FURTHER_BATCHES) -> tuple[Batches, ...]:
    """One profile for only this batch, and one for all batches up to the larger of it and `further`."""
    largest = max(batch, further)
    return (batch, batch, batch), (1, largest, largest)
