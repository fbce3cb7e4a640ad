"""Where the pieces of a stage are worked on, and where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from vitdeploy.errors import VitdeployError

if TYPE_CHECKING:
    from vitdeploy.store.store import Store

T = TypeVar("T")
R = TypeVar("R")


class Executor(Protocol):
    """Does pieces of work that do not depend on each other."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """The index of each item with what `function` returns for it, or the error that it raises, as they are
        finished. `function` is a module's own, and it and its items can be pickled."""
        ...


@dataclass(frozen=True)
class Workers:
    """What a stage that works in pieces is given beside its inputs. Nothing of it changes a byte of the result, and a
    step whose `write` holds this has the same key whatever it is.

    `executor`: None is this process. `store`: keeps pieces for later runs; None: only until the stage is done.
    `resume`: pieces of earlier runs are used.
    """

    executor: Executor | None = None
    store: Store | None = None
    resume: bool = True


HERE = Workers()
