"""The result of `verify` for one engine: the comparison of its task, with why the two differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from vitdeploy.spec import decode
from vitdeploy.tasks.registry import TASKS
from vitdeploy.verification.comparison import Comparison


@dataclass(frozen=True)
class SameTensor:
    """The comparison where both sides were given one tensor, whatever their own preprocessing is."""

    agreement: float
    max_difference: float


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """Why an engine and the original differ, in a sentence. `same_tensor`: None if the original cannot be fed the
    engine's tensors."""

    same_tensor: SameTensor | None
    diagnosis: str


def _diagnosed(comparison: type[Comparison]) -> type[Any]:
    """The class of a task's documents: what its comparison says, and why the two differ."""
    name = f"Verified{comparison.__name__.removesuffix('Comparison')}"
    fields = {"__doc__": comparison.__doc__, "__module__": __name__}
    return dataclass(frozen=True, kw_only=True)(type(name, (Diagnosed, comparison), fields))


VERIFIED = {each: _diagnosed(each) for each in dict.fromkeys(adapter.compared for adapter in TASKS.values())}
globals().update({each.__name__: each for each in VERIFIED.values()})  # pickles name them

if TYPE_CHECKING:

    class Verified(Diagnosed, Comparison):
        """The document of any task."""
else:
    Verified = Union[tuple(VERIFIED.values())]  # noqa: UP007


def diagnosed(found: Comparison, same_tensor: SameTensor | None, diagnosis: str) -> Verified:
    """A task's comparison with why the two differ."""
    made: Verified = VERIFIED[type(found)](**vars(found), same_tensor=same_tensor, diagnosis=diagnosis)
    return made


@dataclass(frozen=True)
class _File:
    verify: Verified


def decode_verified(data: object) -> Verified:
    """Decode the result of `verify` from JSON values.

    Raises:
        DecodeError: the values belong to no task.
    """
    return decode(_File, {"verify": data}).verify
