"""What runs the graphs of a model on its calibration samples, as they run in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from vitdeploy.runtime.runner import Runner

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
