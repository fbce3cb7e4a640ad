"""The protocol of a benchmark run: its scenarios, rounds, blocks and processes, as plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["single", "offline", "server", "sustain"]

EXPECTED = "single, offline, server:QPS such as server:50, or sustain:TIME such as sustain:10m"
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_SECONDS, MOST_QPS = 24 * 3600.0, 1e6
# The block of "sustain".
BIN_SECONDS = 1.0
# ONNX Runtime's idle threads spin for about 30 ms after their last query, even while another process measures.
SETTLE_SECONDS = 0.1
# A warm-up may take this many times `warmup`.
WARMUP_LIMIT = 3
STAGE_ROUNDS = 4
# Disturbed rounds are repeated, up to this many times the duration.
SPARE = 2.0
DESCRIBING_ROUNDS = 4


@dataclass(frozen=True)
class Scenario:
    """A scenario, as named by MLPerf. `value`: queries per second ("server"), seconds ("sustain"), otherwise 0."""

    kind: Kind
    value: float = 0.0

    @property
    def spread(self) -> bool:
        """Whether its rounds may be spread over processes; other scenarios are one long run."""
        return self.kind in ("single", "offline")


def parse_scenario(text: str) -> Scenario:
    """The scenario of a text such as "single", "server:50" or "sustain:10m" (s, m, h; seconds without a unit).

    Raises:
        ValueError: an unknown scenario, or a number out of range.
    """
    if text == "single":
        return Scenario("single")
    if text == "offline":
        return Scenario("offline")
    match = re.fullmatch(r"(server|sustain):(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or (match[1] == "server" and match[3]):
        raise ValueError(f"scenario {text!r}: expected {EXPECTED}")
    number = float(match[2])
    if match[1] == "server":
        if not 0 < number <= MOST_QPS:
            raise ValueError(f"scenario {text!r}: expected 0 to {MOST_QPS:,.0f} queries per second")
        return Scenario("server", number)
    seconds = number * UNITS[match[3] or "s"]
    if not 3 <= seconds <= LONGEST_SECONDS:
        raise ValueError(f"scenario {text!r}: expected 3 seconds to 24 hours")
    return Scenario("sustain", seconds)


@dataclass(frozen=True)
class Protocol:
    """The protocol of a benchmark run. All durations are in seconds.

    `scenarios`: see `parse_scenario`. `batch`: the last size is for "offline", the first for all other scenarios.
    `duration` is per artifact and scenario, measured in blocks of `block_seconds`, in at least `min_rounds` rounds, in
    `processes` consecutive processes of each artifact. `warmup` is the minimum per process and batch; it continues
    until block medians are steady within 2 %, at most three times as long. `threads` 0 is each runtime's own choice.
    `timeout` is the longest time that a worker may take for one answer. If a requested ratio is not narrow after all
    rounds (see `PairedRatio.narrow`), its scenario is measured again in new processes, for at most `max_extension`
    times the duration. Disturbed rounds are repeated within the same limit, or within twice the duration if
    `max_extension` is less.
    """

    scenarios: tuple[str, ...] = ("single", "offline")
    batch: tuple[int, ...] = (1, 8)
    duration: float = 10.0
    block_seconds: float = 0.5
    min_rounds: int = 12
    warmup: float = 0.5
    threads: int = 0
    timeout: float = 600.0
    processes: int = 3
    max_extension: float = 3.0

    def __post_init__(self) -> None:
        if not self.scenarios or len(set(self.scenarios)) < len(self.scenarios):
            raise ValueError(f"scenarios {self.scenarios}: expected one or more distinct scenarios")
        if not self.batch or min(self.batch) < 1:
            raise ValueError(f"batch {self.batch}: expected one or more sizes, each at least 1")
        if self.processes < 1:
            raise ValueError(f"processes {self.processes}: expected at least 1")
        for text in self.scenarios:
            parse_scenario(text)

    @classmethod
    def of_singles(cls, block_seconds: float, warmup: float, rounds: int = min_rounds, batch: int = 1) -> Protocol:
        """A protocol for searches over many engines: latency only, in rounds of short blocks, in one process per
        artifact."""
        duration = rounds * block_seconds
        return cls(("single",), (batch,), duration, block_seconds, rounds, warmup, processes=1, max_extension=1)

    @property
    def rounds(self) -> int:
        # Rounded, because 0.45 s / 0.05 s is 9.000000000000002.
        return max(self.min_rounds, math.ceil(round(self.duration / self.block_seconds, 6)))

    def blocks(self, scenario: str) -> int:
        """The number of blocks per artifact in a scenario: the rounds, or the bins of "sustain"."""
        parsed = parse_scenario(scenario)
        return round(parsed.value / BIN_SECONDS) if parsed.kind == "sustain" else self.rounds

    @property
    def most_sessions(self) -> int:
        """How often all rounds may be measured; once if the minimum number of rounds exceeds the duration."""
        return max(1, int(self.max_extension * self.duration / (self.rounds * self.block_seconds)))

    @property
    def most_rounds(self) -> int:
        """The limit on the rounds of a scenario, including disturbed ones and those added to narrow a ratio."""
        return max(self.rounds, int(max(self.max_extension, SPARE) * self.duration / self.block_seconds))

    @property
    def starts(self) -> int:
        """The number of processes of each artifact for all rounds; two if no rounds are spread, for the second load."""
        spread = any(parse_scenario(text).spread for text in self.scenarios)
        return min(self.processes, self.rounds if spread else 2)

    def rounds_of(self, process: int) -> int:
        """The number of rounds in a process (counted from 0); it may be 0 if there are few rounds. Every `starts`
        processes measure all rounds once."""
        place = process % self.starts
        return self.rounds // self.processes + (place < self.rounds % self.processes)

    def rounds_in(self, scenario: str, process: int) -> int:
        """As `rounds_of`, for a run that ends when its times decide: scenarios other than the deciding one get only a
        few rounds, which describe an artifact but compare nothing."""
        return min(self.rounds_of(process), self.rounds if scenario == self.deciding_scenario else DESCRIBING_ROUNDS)

    def spare_of(self, process: int) -> int:
        """The limit on the rounds up to the end of a process: each of the first processes may take its share of the
        maximum."""
        return self.most_rounds * min(self.starts, process + 1) // self.starts

    def batch_of(self, scenario: str) -> int:
        return self.batch[-1] if scenario == "offline" else self.batch[0]

    @property
    def latency_scenario(self) -> str:
        """The scenario that gives an artifact's latency: "single", or else the first one."""
        return "single" if "single" in self.scenarios else self.scenarios[0]

    @property
    def deciding_scenario(self) -> str:
        """The scenario whose times are compared first: "single" or, without it, "offline"."""
        return next((name for name in ("single", "offline") if name in self.scenarios), self.scenarios[0])

    def batches(self, scenarios: Sequence[str]) -> list[int]:
        """The distinct batch sizes of the scenarios."""
        return list(dict.fromkeys(map(self.batch_of, scenarios)))
