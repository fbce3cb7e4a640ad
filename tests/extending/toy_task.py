"""A task from outside, on the device: one number for an image, such as what people would give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs
from vitdeploy.spec import OutputSpec

# Ratings nearer than this are the same for whoever reads them.
NEAR = 0.5


@dataclass(frozen=True)
class RatingSpec(OutputSpec):
    """From "rating" [1] to a number of at most `best` and at least 0."""

    best: float = 10.0
    tensors: ClassVar[Mapping[str, int]] = {"rating": 2}


@dataclass(frozen=True)
class Rating:
    """The answer for one image."""

    rating: float

    def to_dict(self) -> dict[str, Any]:
        return {"rating": self.rating}

    def __str__(self) -> str:
        return f"{self.rating:.1f}"


def answer(outputs: Outputs, reading: OutputReading) -> Rating:
    return Rating(min(max(float(outputs["rating"][0]), 0.0), reading.head(RatingSpec).best))


def same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    return abs(answer(ours, reading).rating - answer(theirs, reading).rating) <= NEAR


TASK = DeviceTask(answer, same, postprocess=RatingSpec)
