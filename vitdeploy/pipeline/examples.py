"""Which evaluation samples a report shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitdeploy.pipeline.tasks.kit import Kit
from vitdeploy.verify.collect import Answers

EXAMPLES = 12
# Of these at most so many on which an engine differs from the original, so that the usual is seen too.
DIFFERING = 9


def choose(kit: Kit, reference: Answers, engines: Sequence[Answers]) -> list[int]:
    """The indices of the samples to show: those on which most engines differ from the original first, the others spread
    evenly."""
    differ = np.zeros(len(reference), np.int64)
    for answers in engines:
        differ += kit.differs(answers, reference)
    order = np.argsort(-differ, kind="stable")
    chosen = [int(i) for i in order[:DIFFERING] if differ[i]]
    spread = np.linspace(0, len(reference) - 1, EXAMPLES).round().astype(int)
    return list(dict.fromkeys([*chosen, *map(int, spread)]))[:EXAMPLES]
