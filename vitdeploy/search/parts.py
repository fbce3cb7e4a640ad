"""What was measured of rows in parts, or of more rows than tokens, and the placed graph that computes them so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.linears import count_int8
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.row_alignment import align_rows
from vitdeploy.graph.passes.row_split import complete_shapes, split_rows


@dataclass(frozen=True)
class PartsTiming:
    """The model with its rows in `parts`; one number is all rows in one part, of as many tokens or more. `rounds_ms`:
    its median latency in each round.
    `ratio`, `low`, `high`: its latency over that in one part, with the interval; 1 for that itself."""

    parts: tuple[int, ...]
    rounds_ms: tuple[float, ...]
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class PartsTable:
    """The measurements of one placed model; the first of `timings` is that of all rows in one part.

    Without an alternative there is none, and `reason` says why. The intervals hold jointly at 95 % (Bonferroni).
    `measured`: ISO date; `device`: as in a latency table. `disturbed`: why the times are unreliable, in which case the
    rows stay in one part.
    """

    target: str
    batch: int
    measured: str
    device: dict[str, str]
    timings: tuple[PartsTiming, ...] = ()
    reason: str = ""
    disturbed: str = ""

    @property
    def best(self) -> tuple[int, ...] | None:
        """The parts of the fastest of those that are surely faster than one; None without any."""
        surely = [each for each in self.timings[1:] if each.high < 1 and not self.disturbed]
        return min(surely, key=lambda each: each.ratio).parts if surely else None


def in_parts(graph: Path, parts: Sequence[int] | None, out: Path) -> int:
    """Write a placed graph with its rows in parts, None for all at once; give its linears and convolutions in INT8.

    Args:
        parts: as `split_rows` takes; or one number, for so many rows in place of one a token (`align_rows`).

    Raises:
        GraphError: the rows cannot be split so, or not be so many.
    """
    model = load_graph(graph)
    if parts is not None and len(parts) == 1:
        complete_shapes(model)
        if not align_rows(model, parts[0]):
            raise GraphError(
                "there are as many rows as tokens already",
                found=str(parts[0]),
                wanted="more rows, or two or more parts of them",
            )
    elif parts is not None:
        split_rows(model, parts)
    save_graph(model, out)
    return count_int8(model)
