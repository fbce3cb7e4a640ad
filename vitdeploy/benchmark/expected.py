"""Estimates how long a benchmark run will take, before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitdeploy.benchmark.candidate import BenchCandidate
from vitdeploy.benchmark.protocol import (
    BIN_SECONDS,
    SETTLE_SECONDS,
    STAGE_ROUNDS,
    WARMUP_LIMIT,
    Protocol,
    parse_scenario,
)

# Seconds to start a process, import a runtime and load a model of usual size; an original in PyTorch takes longer.
LOAD_SECONDS, ORIGINAL_LOAD_SECONDS = 1.5, 5.0
# Seconds of one process of a survey: one for the memory, each rate and each profile.
SURVEY_SECONDS = 2.0


@dataclass(frozen=True)
class Expected:
    """Seconds: on a quiet machine whose ratios are clear at once, and at most. Slow answers and large models add to
    both."""

    seconds: float
    most: float

    def __str__(self) -> str:
        least, most = spelt(self.seconds), spelt(self.most)
        if least == most:
            return f"about {least}"
        return f"about {least}; up to {most} where others use the machine or a ratio is not clear"


def expected(
    candidates: Sequence[BenchCandidate], protocol: Protocol, *, context: bool = False, looks: bool = False
) -> Expected:
    """How long a bench of these takes; with `context`, including what is measured after it; with `looks`, of one that
    may end with its first process."""
    count = len(candidates)
    rounds = {name: protocol.rounds_in(name, 0) if looks else protocol.blocks(name) for name in protocol.scenarios}
    least = {name: rounds[name] if parse_scenario(name).spread else protocol.blocks(name) for name in rounds}
    blocks = count * sum(_block_seconds(protocol, name, least[name]) for name in protocol.scenarios)
    most = count * sum(
        _block_seconds(protocol, name, protocol.most_rounds if parse_scenario(name).spread else protocol.blocks(name))
        for name in protocol.scenarios
    )
    loads = [LOAD_SECONDS if "engine" in each.request else ORIGINAL_LOAD_SECONDS for each in candidates]
    start = sum(loads) + count * len(protocol.batches(protocol.scenarios)) * 1.5 * protocol.warmup
    slow = sum(loads) + count * len(protocol.batches(protocol.scenarios)) * WARMUP_LIMIT * protocol.warmup
    stages = STAGE_ROUNDS * protocol.block_seconds * sum(each.has_stages for each in candidates)
    survey = SURVEY_SECONDS * (2 + count) if context else 0.0
    return Expected(
        blocks + (1 if looks else protocol.starts) * start + stages + survey,
        most + protocol.most_sessions * protocol.starts * slow + stages + survey + protocol.duration,
    )


def _block_seconds(protocol: Protocol, scenario: str, blocks: int) -> float:
    if parse_scenario(scenario).kind == "sustain":
        return blocks * BIN_SECONDS
    return blocks * (protocol.block_seconds + SETTLE_SECONDS)


def spelt(seconds: float) -> str:
    """Such as "40 s", "3 min" or "1 h 10 min"."""
    if seconds < 100:
        return f"{max(1.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
