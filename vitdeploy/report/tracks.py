"""What each artifact of a bench did over time, out of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitdeploy.bench.row import ScenarioResult
from vitdeploy.report.lookup import Measured

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Track:
    """What one artifact did in one scenario over time.

    seconds, moves: float64 [blocks]; a move is the percents that a block differs from the median of them all.
    process: int64 [blocks]. level: that median, in `unit`, NaN of no block.
    """

    scenario: str
    seconds: Values
    moves: Values
    process: NDArray[np.int64]
    level: float
    unit: str


def bench_run(measured: Measured) -> dict[str, list[Track]]:
    """Of every artifact the scenarios that it took turns in; an artifact or scenario of which no times are known is
    left out."""
    found = {
        name: [_track(scenario, each) for scenario, each in row.scenarios.items() if each.bins is None]
        for name, row in measured.rows.items()
    }
    known = {name: [track for track in each if track.moves.size] for name, each in found.items()}
    return {name: each for name, each in known.items() if each}


def long_runs(measured: Measured) -> dict[str, dict[str, list[Track]]]:
    """The same of runs without turns, by scenario."""
    found: dict[str, dict[str, list[Track]]] = {}
    for name, row in measured.rows.items():
        for scenario, each in row.scenarios.items():
            if each.bins:
                found.setdefault(scenario, {})[name] = [_run(scenario, each)]
    return found


def _track(scenario: str, result: ScenarioResult) -> Track:
    """The blocks of a benchmark run; those in which no query was answered are left out."""
    blocks = result.blocks
    medians = np.array([np.nan if each is None else each for each in blocks.median_ms], np.float64)
    seconds, process = np.array(blocks.begun_seconds, np.float64), np.array(blocks.process, np.int64)
    usable = np.isfinite(medians) & (medians > 0)
    level = float(np.median(medians[usable])) if usable.any() else np.nan
    return Track(scenario, seconds[usable], moves(medians[usable]), process[usable], level, " ms")


def _run(scenario: str, result: ScenarioResult) -> Track:
    """Images per second of one long run, from its own beginning."""
    bins, begun = (np.array(each, np.float64) for each in (result.bins, result.blocks.begun_seconds))
    process = np.zeros(bins.size, np.int64)
    return Track(scenario, begun - begun[0], moves(bins), process, float(np.median(bins)), "/s")


def moves(values: Values) -> Values:
    """How far each value is from the median of all, in percent of it. [n] -> [n]."""
    return np.asarray(100 * (values / np.median(values) - 1)) if values.size else values


def together(tracks: Sequence[Track]) -> Iterator[tuple[Values, Values]]:
    """What all artifacts do together, block by block, in each scenario and process: mean times and mean moves."""
    for scenario in dict.fromkeys(track.scenario for track in tracks):
        of = [track for track in tracks if track.scenario == scenario]
        for number in np.unique(of[0].process):
            parts = [(track.seconds[track.process == number], track.moves[track.process == number]) for track in of]
            count = min(seconds.size for seconds, _ in parts)
            if count:
                means = (np.mean([part[column][:count] for part in parts], axis=0) for column in (0, 1))
                yield next(means), next(means)
