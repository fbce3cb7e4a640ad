"""The result of `verify` for one engine: the comparison of its task, and the likely cause of differences."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Union

from vitdeploy.spec import Extensible, decode
from vitdeploy.tasks.adapter import TaskAdapter
from vitdeploy.tasks.registry import TASKS
from vitdeploy.verification.comparison import Comparison


@dataclass(frozen=True)
class SameTensor:
    """The comparison with the same input tensor on both sides, independent of their preprocessing."""

    agreement: float
    max_difference: float


@dataclass(frozen=True, kw_only=True)
class _Diagnosed:
    """The likely cause of differences between an engine and the original, in a sentence. `same_tensor`: None if the
    original cannot take the engine's tensors."""

    same_tensor: SameTensor | None
    diagnosis: str

    def __reduce__(self) -> Any:
        """Pickles name the class of the comparison, which is importable."""
        _, comparison = type(self).__bases__
        return _make, (comparison, {field.name: getattr(self, field.name) for field in fields(self)})


_CLASSES: dict[type[Comparison], type[Any]] = {}


def verified_class(comparison: type[Comparison]) -> type[Any]:
    """The class of a task's documents: the fields of its comparison, and the diagnosis."""
    if comparison not in _CLASSES:
        name = f"Verified{comparison.__name__.removesuffix('Comparison')}"
        facts = {"__doc__": comparison.__doc__, "__module__": __name__}
        made = type(name, (_Diagnosed, comparison), facts)
        _CLASSES[comparison] = dataclass(frozen=True, kw_only=True)(made)
    return _CLASSES[comparison]


def _make(comparison: type[Comparison], values: dict[str, Any]) -> Any:
    return verified_class(comparison)(**values)


def _classes(adapters: Iterable[type[TaskAdapter]]) -> Any:
    """The class of the documents of any of these tasks."""
    return operator.getitem(Union, tuple(verified_class(adapter.compared) for adapter in adapters))


if TYPE_CHECKING:

    class Verified(_Diagnosed, Comparison):
        """The document of any task."""
else:
    Verified = Annotated[_classes(TASKS.ours.values()), Extensible(lambda: _classes(TASKS.values()))]


def diagnosed(comparison: Comparison, same_tensor: SameTensor | None, diagnosis: str) -> Verified:
    """A task's comparison with its diagnosis."""
    made: Verified = _make(type(comparison), {**vars(comparison), "same_tensor": same_tensor, "diagnosis": diagnosis})
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
