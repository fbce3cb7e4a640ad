"""What is counted of some images, and the same of all of them: exact sums, or a record of each image."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TypeAlias

from vitdeploy.verification.agreement import Tally
from vitdeploy.verification.records import Ints, Records

Counts: TypeAlias = Tally | Records


def joined(counts: Sequence[Counts], places: Sequence[Ints]) -> Counts:
    """The counts of all images of some pieces: the same in whatever order the pieces are given.

    Args:
        places: int64, of each image of a piece its place among all images, or any number that orders them so.
    """
    records = [each for each in counts if isinstance(each, Records)]
    if records:
        return Records.joined(records, places)
    return functools.reduce(operator.add, (each for each in counts if isinstance(each, Tally)))
