"""Regression: numbers with names and units, from a model's output."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.postprocess import label_of
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs
from vitdeploy.spec import OutputSpec, TensorSpec, within

NUMBERS = "numbers"
# Without a tolerance, two numbers agree if they differ by at most this share of the larger one.
SAME_SHARE = 0.1

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RegressionSpec(OutputSpec):
    """How "numbers" [k], or a number without an axis, become k numbers named by labels.

    `units`: one per number, () without. `tolerance`: the largest deviation from the original that counts as the same
    answer, in the number's unit: one for all numbers, or one per number; None for the default.
    """

    units: tuple[str, ...] = ()
    tolerance: float | tuple[float, ...] | None = field(default=None, metadata=within(gt=0))
    tensors: ClassVar[Mapping[str, int | tuple[int, ...]]] = {NUMBERS: (1, 2)}
    about_images: ClassVar[bool] = True
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def __post_init__(self) -> None:
        if self.tolerance is not None and not np.all(np.array(self.tolerance) > 0):
            raise ValueError(f"tolerance {self.tolerance}: expected numbers above 0")
        if not all(unit.isprintable() for unit in self.units):
            raise ValueError(f"units {self.units}: expected texts without line breaks")

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """Return the number of numbers, which labels name; None if the outputs do not tell."""
        shape = next((tensor.shape for tensor in outputs if tensor.name == NUMBERS), ())
        count = 1 if len(shape) == 1 else shape[-1] if shape else None
        return count if isinstance(count, int) else None

    def misfit(self, outputs: Iterable[TensorSpec]) -> str:
        """Return the fields whose length differs from the number of numbers; "" if all fit."""
        count = self.number_of_classes(outputs)
        fields = {"units": self.units, "tolerance": self.tolerance if isinstance(self.tolerance, tuple) else ()}
        wrong = {name: values for name, values in fields.items() if values and len(values) != count}
        return ", ".join(f"{len(values)} {name} for {count} numbers" for name, values in wrong.items())

    def tolerances(self, count: int) -> Floats | None:
        """Return the tolerance of each number, float64 [count]; None without any."""
        return None if self.tolerance is None else np.broadcast_to(np.array(self.tolerance, np.float64), count)

    def unit(self, index: int) -> str:
        """Return the unit of a number; "" without one."""
        return self.units[index] if self.units else ""


@dataclass(frozen=True)
class Number:
    """One number with its index, name and unit; a single number without a label is called "number"."""

    index: int
    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.6g}{' ' if self.unit else ''}{self.unit}"


@dataclass(frozen=True, repr=False)
class Regression:
    """The answer for one image: all numbers, in the model's order."""

    numbers: tuple[Number, ...]

    @property
    def value(self) -> float:
        """The first number, the only one for most models."""
        return self.numbers[0].value

    def to_dict(self) -> dict[str, Any]:
        return {"numbers": [dict(vars(number)) for number in self.numbers]}

    def __str__(self) -> str:
        return ", ".join(map(str, self.numbers))

    def __repr__(self) -> str:
        return f"<Regression: {self}>"


def numbers_of(values: npt.NDArray[Any], spec: RegressionSpec, labels: Sequence[str] | None) -> Regression:
    """Return the answer for one image. values: float [k], or a number without an axis; labels: a name for each, or
    None."""
    flat = np.atleast_1d(values).tolist()
    labels = labels or (["number"] if len(flat) == 1 else None)
    named = (Number(k, label_of(k, labels), float(value), spec.unit(k)) for k, value in enumerate(flat))
    return Regression(tuple(named))


def _answer(outputs: Outputs, reading: OutputReading) -> Regression:
    return numbers_of(outputs[NUMBERS], reading.head(RegressionSpec), reading.labels)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """Whether all numbers are within their tolerances of each other."""
    a, b = (np.atleast_1d(outputs[NUMBERS]).astype(np.float64) for outputs in (ours, theirs))
    allowed = reading.head(RegressionSpec).tolerances(len(b))
    if allowed is None:
        allowed = SAME_SHARE * np.maximum(np.abs(a), np.abs(b))
    return bool((np.abs(a - b) <= allowed).all())


def _form(outputs: Collection[str], spec: RegressionSpec) -> forms.NumbersForm:
    return forms.NumbersForm(NUMBERS, spec.units)


REGRESSION = DeviceTask(_answer, _same, postprocess=RegressionSpec, form=_form)
