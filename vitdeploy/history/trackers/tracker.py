"""What takes results, and how its answers are waited for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vitdeploy.document.context import Omission
from vitdeploy.errors import HostError, MissingPackageError, VitdeployError
from vitdeploy.history.trackers.outcome import Outcome
from vitdeploy.progress import Progress
from vitdeploy.remote import within

T = TypeVar("T")
# How long one answer is waited for, and what has to go of a file in a second.
PATIENCE_SECONDS, SLOWEST_BYTES = 60.0, 256 << 10


@dataclass(frozen=True)
class Sent:
    """What became of results at a tracker called `where`: how many are `new` there, and how many were there `already`.
    `left_out`: what it has no place for, with the reason."""

    where: str
    new: int
    already: int
    left_out: tuple[Omission, ...] = ()

    @property
    def sentence(self) -> str:
        already = f", {self.already} there already" if self.already else ""
        return f"{self.where}: {self.new} result{'' if self.new == 1 else 's'} sent{already}"


class Tracker(ABC):
    """`name` is what messages call it; no credentials are in it."""

    name: str

    @abstractmethod
    def prepare(self) -> None:
        """Raise if nothing can be sent there: so it is told before anything is measured."""

    @abstractmethod
    def send(self, outcomes: Sequence[Outcome], progress: Progress) -> Sent:
        """Send what is not there yet; a result that was sent in part goes on.

        Raises:
            HostError: no answer in time, a refusal, or no credentials. OutputError, StorageError: of a file.
        """


def asked(name: str, question: Callable[[], T], told: Callable[[Exception], VitdeployError], size: int = 0) -> T:
    """What a service answers, in the time that so many bytes may take; its errors as `told` says them.

    Raises:
        HostError: no answer in time.
    """
    seconds = PATIENCE_SECONDS + size / SLOWEST_BYTES
    try:
        return within(seconds, question)
    except (VitdeployError, KeyboardInterrupt):
        raise
    except concurrent.futures.TimeoutError:
        raise HostError(
            f"{name} does not answer",
            found=f"no answer for {seconds:.0f} s",
            wanted="an answer",
            fix="look at the network and the address; sending again goes on where this ended",
        ) from None
    except ImportError as error:
        raise MissingPackageError(error.name or "that its client asks for", "", name) from None
    except Exception as error:  # each client has its own
        raise told(error) from None


@contextlib.contextmanager
def set_where_unset(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment with these, where they are not set; as it was behind the block."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def folder_bytes(folder: Path) -> int:
    """The size of all its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
