"""Pictures of answers, and runs of an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from vitdeploy.runtime.runner import Runner

# --- A few numbers of large outputs: of a thousand images all of them would not fit into memory -----------------------


SEED = 0


def drawn(output: np.ndarray, count: int) -> np.ndarray:
    """`count` elements in a seeded choice that depends on the size alone, so that it is the same of every image and
    artifact; the output as it is where it has no more."""
    if output.size <= count:
        return output
    chosen = np.random.RandomState(SEED).choice(output.size, count, replace=False)
    return np.asarray(output.reshape(-1)[np.sort(chosen)])


# --- What runs the graphs of a model on its calibration samples, as they run in use -----------------------------------


Count = Callable[[int], None]


class Drive(Protocol):
    """Runs a model's float graphs on its calibration samples: whatever flows into each graph is what it is calibrated
    on."""

    @property
    def noun(self) -> str:
        """What a sample is called, in the plural."""

    @property
    def total(self) -> int:
        """How many samples there are."""

    @property
    def distinct(self) -> int:
        """How many of them differ."""

    def __call__(self, runners: Mapping[str, Runner], progress: Count) -> None:
        """Run all samples through loaded runners of all graphs, by name; `progress` is called with how many are
        done since its last call."""

    def warnings(self) -> list[str]:
        """What may be wrong with the samples, a sentence each; to be asked after the run."""
