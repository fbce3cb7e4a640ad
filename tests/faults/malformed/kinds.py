"""A kind of malformed files: its classes of damage, each made from a seed, and the commands that read them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.sandbox import MARK, Words
from tests.faults.seeds import Seeds


@dataclass
class Attempt:
    """What a class of damage is given: where to write (`given` of the case's `folder`), what to damage, chance.

    `words` are the command; a class whose files another one reads gives its own.
    """

    folder: Path
    random: random.Random
    seeds: Seeds
    number: int
    words: Words = ()

    @property
    def given(self) -> Path:
        return self.folder / "given"

    @property
    def mark(self) -> Path:
        """A file that is there if something of the case was executed."""
        return self.folder / MARK

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.given / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path


Make = Callable[[Attempt], None]


@dataclass(frozen=True)
class Damage:
    """A class of damage. `must_refuse`: whatever the seed, nothing of it may be taken."""

    name: str
    make: Make
    must_refuse: bool = False


@dataclass(frozen=True)
class Kind:
    """`words` gives the command of a case by its number; `whole` writes a valid case, which each command must take."""

    name: str
    full: int
    damages: Sequence[Damage]
    words: Callable[[int], Words]
    whole: Make
    commands: Sequence[Words]

    def damage(self, number: int) -> Damage:
        """Classes in turns."""
        return self.damages[number % len(self.damages)]

    def numbers(self, full: bool) -> Sequence[int]:
        """Of the cases: in the short form each class once that must be refused, and each fourth other one."""
        if full:
            return range(self.full)
        others = [number for number, damage in enumerate(self.damages) if not damage.must_refuse]
        return [number for number in range(len(self.damages)) if number not in others or number in others[::4]]

    def attempt(self, number: int, folder: Path, seeds: Seeds) -> Attempt:
        """The case with this number, not written yet."""
        (folder / "given").mkdir(parents=True, exist_ok=True)
        return Attempt(folder, random.Random(f"{self.name} {number}"), seeds, number, self.words(number))


class Table(list[Damage]):
    """Classes of damage, added by decorating what makes them."""

    def add(self, name: str, *, must_refuse: bool = False) -> Callable[[Make], Make]:
        def added(make: Make) -> Make:
            self.append(Damage(name, make, must_refuse))
            return make

        return added


def in_turns(*commands: Words) -> Callable[[int], Words]:
    """The commands by a case's number; one that stands several times is taken as often.

    The turn moves on with each round of classes too, so that a class meets all of them.
    """
    return lambda number: commands[(number + number // 7) % len(commands)]
