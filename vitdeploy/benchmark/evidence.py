"""Evidence from rounds: quiet blocks, paired ratios, intervals and flags."""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vitdeploy.benchmark import results
from vitdeploy.benchmark.protocol import Protocol, parse_scenario

# --- Quiet blocks: no other process used the machine, and it did not throttle -----------------------------------------
# The kernel's accounting of the load and of the clock decides, never a latency: dropping slow blocks would make every
# artifact look faster, and the one that varies most the fastest. Blocks of two compared artifacts count if both are
# quiet.


# The share of a block that other processes may use: of all its CPUs' time, or of one thread's time that it waits.
TAKEN_SHARE = 0.05
SUSPENDED_SECONDS = 0.05
# The share of the requested rounds that must be quiet.
QUIET_SHARE = 0.5
# If the kernel does not report other processes: the share of an artifact's usual CPU time that a block needs.
STARVED_SHARE = 0.85


@dataclass(frozen=True)
class Unrest:
    """The disturbance of one block, as shares: `others` (other processes) and `stolen` (other virtual machines) of its
    CPUs' time; `waited`: the share of the block in which a thread was ready while another process had its CPU."""

    others: float
    stolen: float
    waited: float
    suspended: bool

    @property
    def disturbs(self) -> bool:
        return self.suspended or max(self.others + self.stolen, self.waited) > TAKEN_SHARE


def unrest(machine: results.BlockMachine, seconds: float, cpus: int) -> Unrest:
    """The disturbance of a block of `seconds`; 0 for what the kernel does not report."""
    others = beyond_noise(machine.other_seconds or 0.0, cpus)
    # More threads than CPUs wait for each other, so a wait counts only up to the time of other processes.
    waited = min(machine.waited_seconds or 0.0, others)
    # If both together use at most half of the CPUs, each has its own core, even if a core has two CPUs.
    if machine.own_seconds + others <= 0.5 * cpus * seconds:
        others = 0.0
    whole = cpus * seconds
    return Unrest(
        others / whole,
        (machine.stolen_seconds or 0.0) / whole,
        waited / seconds,
        machine.suspended_seconds > SUSPENDED_SECONDS,
    )


def left_over(rounds: Sequence[results.Round]) -> float:
    """The mean share of these blocks in which a thread waited while other processes ran. Below the limit it disturbs no
    block, but it may slow one artifact more than another, by up to this share if all threads wait for the slowest."""
    shares = [0.0]
    for block in rounds:
        if block.machine is not None and block.machine.other_seconds is not None:
            others, waited = max(0.0, block.machine.other_seconds), block.machine.waited_seconds
            shares.append((beyond_noise(others, 1) if waited is None else min(waited, others)) / block.seconds)
    return math.fsum(shares) / max(1, len(rounds))


def beyond_noise(seconds: float, cpus: int) -> float:
    """CPU seconds of other processes beyond possible rounding: the kernel counts whole ticks of each CPU."""
    ticks_per_second = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    return max(0.0, seconds - 1.5 * math.sqrt(cpus) / ticks_per_second)


def quiet(rounds: Sequence[results.Round], cpus: int) -> list[bool]:
    """For each block of one artifact and scenario, whether no disturbance by other processes and no throttling is
    known."""
    slowed = results.reasons(rounds)
    return [alone and not slow for alone, slow in zip(undisturbed(rounds, cpus), slowed, strict=True)]


def undisturbed(rounds: Sequence[results.Round], cpus: int) -> list[bool]:
    """For each block of one artifact and scenario, whether no disturbance by other processes is known."""
    shares = [None if block.machine is None else block.machine.own_seconds / block.seconds for block in rounds]
    usual = sorted(share for share in shares if share is not None)
    least = STARVED_SHARE * usual[(3 * len(usual)) // 4] if usual else 0.0
    return [_is_quiet(block, cpus, share, least) for block, share in zip(rounds, shares, strict=True)]


def _is_quiet(block: results.Round, cpus: int, share: float | None, least: float) -> bool:
    machine = block.machine
    if machine is None:
        return True
    if unrest(machine, block.seconds, max(1, cpus)).disturbs:
        return False
    # A process with a steady load uses the same CPU time in every block, unless another process takes it.
    return machine.other_seconds is not None or share is None or share >= least


def awake(every: Sequence[Sequence[results.Round]]) -> list[int]:
    """The rounds, by number, in which the machine never slept; all rounds if it slept in each."""
    slept = [
        any(block.machine is not None and block.machine.suspended_seconds > SUSPENDED_SECONDS for block in each)
        for each in zip(*every, strict=True)
    ]
    return [number for number, each in enumerate(slept) if not each or all(slept)]


def undelayed(block: results.Round, cpus: int) -> float:
    """A lower bound of the seconds of a block in which no ready thread lacked a CPU, so that all ran undisturbed."""
    machine = block.machine
    if machine is None:
        return block.seconds
    others, stolen = max(0.0, machine.other_seconds or 0.0), machine.stolen_seconds or 0.0
    waited = others if machine.waited_seconds is None else min(others, cpus * machine.waited_seconds)
    return max(0.0, block.seconds - waited - stolen)


def quiet_together(entries: Sequence[results.Measurements], scenario: str) -> list[int]:
    """The rounds of a scenario, by number, that were quiet for all these artifacts."""
    found = [quiet(entry.rounds[scenario], len(entry.affinity)) for entry in entries]
    return [number for number, each in enumerate(zip(*found, strict=True)) if all(each)]


def in_common(entries: Sequence[results.Measurements]) -> list[results.Measurements]:
    """These artifacts, limited to the rounds that all of them have: slower ones may leave a run early."""
    counts = {name: min(len(entry.rounds[name]) for entry in entries) for name in entries[0].rounds}
    return [
        dataclasses.replace(entry, rounds={name: entry.rounds[name][:count] for name, count in counts.items()})
        for entry in entries
    ]


def enough(protocol: Protocol, numbers: Sequence[int], rounds: Sequence[results.Round]) -> bool:
    """Whether these rounds are representative: at least half of the requested rounds, and from at least two processes
    if there were several."""
    expected = QUIET_SHARE * min(protocol.rounds, len(rounds))
    processes = {rounds[number].process for number in numbers}
    several = min(2, len({block.process for block in rounds}))
    return len(numbers) >= max(1.0, expected) and len(processes) >= several


def usable(protocol: Protocol, entry: results.Measurements, scenario: str) -> list[results.Round]:
    """The blocks for an artifact's own numbers: the quiet ones, or all if these are too few. A scenario with one long
    run is kept whole: its queue, or its heat, depends on everything before."""
    return together(protocol, [entry], scenario)[0]


def together(protocol: Protocol, entries: Sequence[results.Measurements], scenario: str) -> list[list[results.Round]]:
    """As `usable`, for several artifacts: the blocks of the same rounds of each."""
    every = [entry.rounds[scenario] for entry in entries]
    if not parse_scenario(scenario).spread:
        return [list(rounds) for rounds in every]
    numbers = quiet_together(entries, scenario)
    if not all(enough(protocol, numbers, rounds) for rounds in every):
        numbers = awake(every)
    return [[rounds[number] for number in numbers] for rounds in every]


# --- The ratio of two artifacts ---------------------------------------------------------------------------------------
# From the rounds that both were measured in; numpy only, so that it also runs on devices.


# The share of paired values that is trimmed on either side of the mean.
TRIMMED = 0.2
# Processes of one artifact differ because of their memory layout: the log of their latency ratio has a standard
# deviation that a few processes estimate poorly. The estimate is shrunk towards this spread, which counts as this many
# additional processes. It was 0.8 % on the machine where it was measured; with 2 %, intervals still cover if it is
# 2.5 % (docs/results/performance.md, "The protocol").
PROCESS_SPREAD, PROCESS_FREEDOM = 0.02, 3
# The upper bound of the autocorrelation of neighbouring blocks: a few rounds cannot show more.
MOST_ALIKE = 0.8
# The largest reach of a narrow ratio's interval to either side: with 3 %, a ratio of 1.05 is found 9 times in 10. A
# ratio far from 1 may have a wider interval, an eighth of its logarithm.
NARROW_REACH, FAR_SHARE = 0.03, 1 / 8
# Student's t for 95 %, two-sided, by its degrees of freedom from 1 on.
QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class PairedRatio:
    """A ratio's natural logarithm, its standard error, and the degrees of freedom of Student's t for its interval.

    `spread` is the standard deviation of the paired values' log ratios, with outliers clipped. `between`: the part of
    the error that is due to differences between processes. `bias`: a possible systematic error of the logarithm, which
    more measurements do not reduce.
    """

    log: float
    error: float
    freedom: int
    spread: float
    between: float = 0.0
    bias: float = 0.0

    @property
    def reach(self) -> float:
        """The reach of the logarithm's 95 % interval to either side."""
        return quantile(self.freedom) * self.error + self.bias

    @property
    def interval(self) -> tuple[float, float, float]:
        """The ratio, and the lower and upper end of its 95 % interval."""
        ratio, wider = math.exp(self.log), math.exp(self.reach)
        return ratio, ratio / wider, ratio * wider

    @property
    def narrow(self) -> bool:
        """Whether the ratio is precise enough to stop measuring.

        This rule depends on the error and hardly on the ratio, so the interval keeps its coverage (Chow and Robbins
        1965, "On the asymptotic theory of fixed-width sequential confidence intervals for the mean", Annals of
        Mathematical Statistics 36:457-462). Measuring until a ratio differs from 1 would find differences that do not
        exist.
        """
        return self.reach <= max(NARROW_REACH, FAR_SHARE * abs(self.log))


def quantile(freedom: int) -> float:
    """Student's t for a two-sided interval of 95 %."""
    return QUANTILES[freedom - 1] if freedom <= len(QUANTILES) else 1.96 + 2.4 / freedom


def ratio_of_rounds(a: Sequence[results.Round], b: Sequence[results.Round]) -> PairedRatio:
    """The latency of `a` over that of `b`, from the median queries of paired rounds: the mean and error of `clustered`,
    with a bias for the activity of other processes during these rounds.

    Raises:
        ValueError: as `log_quotients`.
    """
    ratio = clustered(log_quotients(medians_of(a), medians_of(b)), [block.process for block in a])
    return dataclasses.replace(ratio, bias=max(left_over(a), left_over(b)))


def ratio_of_medians(a: Sequence[float], b: Sequence[float]) -> PairedRatio:
    """As `ratio_of_rounds`, from median latencies of rounds that were all measured in one process per artifact.

    Raises:
        ValueError: as `log_quotients`.
    """
    return clustered(log_quotients(a, b), [0] * len(a))


def medians_of(rounds: Sequence[results.Round]) -> list[float]:
    return [float(np.median(block.latencies_ms)) for block in rounds]


def clustered(logs: results.Values, processes: Sequence[int]) -> PairedRatio:
    """The 20 % trimmed mean of values from several processes, with an error that accounts for the processes.

    Rounds of one process share its deviation, and neighbours may be correlated: treated as independent, the rounds
    understate the error. So it is a cluster-robust error (Liang and Zeger 1986, "Longitudinal data analysis using
    generalized linear models", Biometrika 73:13-22): each round's influence on the trimmed mean, summed per process.
    With three processes it has two degrees of freedom, so it is shrunk towards what the rounds and `PROCESS_SPREAD`
    predict (Smyth 2004, "Linear models and empirical Bayes methods for assessing differential expression in microarray
    experiments", Statistical Applications in Genetics and Molecular Biology 3:3).
    """
    kept, influence = _trimmed(logs)
    of = np.asarray(processes)
    groups = [influence[of == process] for process in dict.fromkeys(processes)]
    count, each = len(groups), logs.size / len(groups)
    centred = [group - group.mean() for group in groups]
    freedom_within = logs.size - count
    squares = sum(float(group @ group) for group in centred)
    within = squares / freedom_within if freedom_within else float(influence @ influence) / max(1, logs.size - 1)
    alike = _alike(centred, each)
    noise = within / each * (1 + alike) / (1 - alike)
    sums = sum(float(group.sum()) ** 2 for group in groups)
    found = count**2 / (count - 1) / logs.size**2 * sums if count > 1 else 0.0
    freedom = PROCESS_FREEDOM + count - 1

    def drawn(expected: float, seen: float) -> float:
        return math.sqrt((PROCESS_FREEDOM * expected + (count - 1) * seen) / freedom / count)

    error = drawn(PROCESS_SPREAD**2 + noise, found)
    between = drawn(PROCESS_SPREAD**2, max(0.0, found - noise))
    spread = float(np.clip(logs, kept[0], kept[-1]).std(ddof=1)) if logs.size > 1 else 0.0
    return PairedRatio(float(kept.mean()), error, freedom, spread, between)


def _trimmed(logs: results.Values) -> tuple[results.Values, results.Values]:
    """The sorted values after trimming, and each value's influence on their mean (times the number of values)."""
    ordered = np.sort(logs)
    cut = int(TRIMMED * logs.size)
    kept = ordered[cut : logs.size - cut]
    clipped = np.clip(logs, kept[0], kept[-1])
    influence: results.Values = (clipped - clipped.mean()) * logs.size / kept.size
    return kept, influence


def _alike(centred: Sequence[results.Values], each: float) -> float:
    """The autocorrelation of neighbouring rounds of a process, corrected for the bias of few rounds (Marriott and Pope
    1954, "Bias in the estimation of autocorrelations", Biometrika 41:390-402)."""
    squares = sum(float(group @ group) for group in centred)
    if squares <= 0 or each <= 1:
        return 0.0
    found = sum(float(group[1:] @ group[:-1]) for group in centred) / squares * each / (each - 1)
    return min(max(0.0, found + (1 + 3 * max(0.0, found)) / each), MOST_ALIKE)


def log_quotients(a: Sequence[float], b: Sequence[float]) -> results.Values:
    """log(a_i / b_i) of pairs of values.

    Raises:
        ValueError: fewer than two pairs, different lengths, or a value that is not positive and finite.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"expected at least two pairs of values, found {len(a)} and {len(b)} values")
    values = np.asarray([a, b], np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("expected positive and finite values")
    return np.asarray(np.log(values[0]) - np.log(values[1]))


# --- The precision of a latency and a throughput: 95 % intervals that account for blocks and processes ----------------


# (lower, upper); None if the measurement does not bound it.
Interval = tuple[float | None, float | None]


def percentile_interval(rounds: Sequence[results.Round], percent: float) -> Interval:
    """The interval of one percentile of latency, in ms.

    Its ends are two of the latencies, by rank, from the error of the share of queries below the percentile, with blocks
    as clusters (Woodruff 1952, "Confidence intervals for medians and other position measures", Journal of the American
    Statistical Association 47:635-646). It is widened by the differences between processes, which all blocks of a
    process share.
    """
    filled = [block for block in rounds if block.latencies_ms.size]
    blocks = [block.latencies_ms for block in filled]
    count = sum(values.size for values in blocks)
    if len(blocks) < 2:
        return None, None
    every = np.sort(np.concatenate(blocks))
    found, share = results.nearest_rank(every, percent), percent / 100
    residuals = np.array([np.count_nonzero(values <= found) - share * values.size for values in blocks])
    clusters = math.sqrt(len(blocks) / (len(blocks) - 1) * float(residuals @ residuals)) / count
    reach = quantile(len(blocks) - 1) * max(clusters, math.sqrt(share * (1 - share) / count))
    low, high = math.floor(count * (share - reach)), math.ceil(count * (share + reach))
    between = clustered(np.log(medians_of(filled)), [block.process for block in filled])
    wider = math.exp(quantile(between.freedom) * between.between)
    return (
        float(every[low - 1]) / wider if low >= 1 else None,
        float(every[high - 1]) * wider if high <= count else None,
    )


def throughput_interval(rounds: Sequence[results.Round], throughput: float) -> Interval:
    """The interval around `throughput`, in images per second; computed like that of a ratio."""
    filled = [block for block in rounds if block.latencies_ms.size]
    if len(filled) < 2:
        return None, None
    ratio = clustered(np.log([block.images_per_second for block in filled]), [block.process for block in filled])
    wider = math.exp(ratio.reach)
    return throughput / wider, throughput * wider


# --- Flags: why a latency or a throughput is unreliable; a flagged one passes no gate ---------------------------------
# An imprecise number has a wide interval and gets no flag. A flag marks a number whose interval may not contain the
# true value, or that measures something other than its name says. Ratios are judged separately (`decided`): most
# effects on both artifacts cancel out in them.


# The largest reach to either side of the interval of a block's median query.
UNSTABLE = 0.1
# The allowed slowdown of a clock, or of the throughput.
THROTTLED = 0.05
# A server that is busy for this share of the time has no steady latency: its queue grows.
OVERLOADED = 0.98
# The least number of rounds with a first and a last quarter.
QUARTERS = 4


def flags(
    bench_run: results.BenchRun, entry: results.Measurements, scenario: str, percents: Sequence[float]
) -> list[str]:
    """The flags of one candidate with the latency of `scenario`; docs/measuring.md explains each flag."""
    rounds = usable(bench_run.protocol, entry, scenario)
    used = [block for name in entry.rounds for block in usable(bench_run.protocol, entry, name)]
    every = [block for blocks in entry.rounds.values() for block in blocks]
    machines = [block.machine for block in every if block.machine is not None]
    found = {
        "throttled": any(_slows_down(blocks) for blocks in entry.rounds.values())
        or _throttles(machines)
        or any(_mostly_throttled(bench_run, name, blocks) for name, blocks in entry.rounds.items())
        or any(_tires(blocks) for name, blocks in entry.rounds.items() if name.startswith("sustain")),
        "unstable": _unstable(rounds),
        "contended": _contended(bench_run, entry),
        "fallback": falls_back(entry),
        "short": sum(block.latencies_ms.size for block in rounds) < max(map(results.queries_needed, percents)),
        "overloaded": any(_overloaded(blocks) for name, blocks in entry.rounds.items() if name.startswith("server")),
        "suspended": any(_slept(block) for block in used),
        "unwatched": any(machine.other_seconds is None for machine in machines),
    }
    return [name for name, holds in found.items() if holds]


def falls_back(entry: results.Measurements) -> bool:
    """Whether an artifact ran on a different provider from the one it was built for."""
    return bool(entry.made_for) and entry.provider != entry.made_for


def _slept(block: results.Round) -> bool:
    return block.machine is not None and block.machine.suspended_seconds > SUSPENDED_SECONDS


def taken_by_others(entry: results.Measurements, rounds: Sequence[results.Round]) -> float | None:
    """The share of the CPUs' time that other processes and virtual machines used; None if unknown."""
    seconds, taken = 0.0, 0.0
    for block in rounds:
        machine = block.machine
        if machine is None or machine.other_seconds is None or machine.stolen_seconds is None:
            return None
        seconds += block.seconds
        taken += machine.other_seconds + machine.stolen_seconds
    return max(0.0, taken) / (seconds * len(entry.affinity)) if seconds and entry.affinity else None


def first_and_last(rounds: Sequence[results.Round], seconds: float = 60.0) -> tuple[float, float]:
    """Images per second in the first and in the last minute of a sustained run, or in its first and last third if it is
    short."""
    count = max(1, min(round(seconds), len(rounds) // 3))
    return images_per_second(rounds[:count]), images_per_second(rounds[-count:])


def images_per_second(rounds: Sequence[results.Round]) -> float:
    images = sum(block.batch * block.latencies_ms.size for block in rounds)
    return float(images / sum(block.seconds for block in rounds))


def _unstable(rounds: Sequence[results.Round]) -> bool:
    filled = [block for block in rounds if block.latencies_ms.size]
    if len(filled) < 2:
        return False
    return clustered(np.log(medians_of(filled)), [block.process for block in filled]).reach > UNSTABLE


def _contended(bench_run: results.BenchRun, entry: results.Measurements) -> bool:
    """Whether too few blocks were undisturbed; for a scenario with one long run, whose blocks all count, whether other
    processes used more than the allowed share."""
    for name, rounds in entry.rounds.items():
        if parse_scenario(name).spread:
            if not enough(bench_run.protocol, _numbers(undisturbed(rounds, len(entry.affinity))), rounds):
                return True
        elif (taken_by_others(entry, rounds) or 0.0) > TAKEN_SHARE:
            return True
    return load_disturbs(bench_run, entry)


def _mostly_throttled(bench_run: results.BenchRun, name: str, rounds: Sequence[results.Round]) -> bool:
    """Whether too few blocks were free of throttling; for a scenario with one long run, whether any block was
    throttled."""
    spread = parse_scenario(name).spread
    slowed = results.reasons(rounds, loaded=spread)
    if not spread:
        return any(slowed)
    return any(slowed) and not enough(bench_run.protocol, _numbers([not each for each in slowed]), rounds)


def _numbers(holds: Sequence[bool]) -> list[int]:
    return [number for number, each in enumerate(holds) if each]


def load_disturbs(bench_run: results.BenchRun, entry: results.Measurements) -> bool:
    """Whether the load at the start exceeded the number of CPUs, if the system does not report their users."""
    every = [block for blocks in entry.rounds.values() for block in blocks]
    unknown = taken_by_others(entry, every) is None
    return unknown and bench_run.load_average is not None and bench_run.load_average > bench_run.cpus + 0.5


def _slows_down(rounds: Sequence[results.Round]) -> bool:
    """Whether the clock of the last quarter of the rounds is lower than that of the first."""
    clocks = [block.machine.mhz for block in rounds if block.machine is not None and block.machine.mhz is not None]
    quarter = len(clocks) // QUARTERS
    return quarter > 0 and bool(np.median(clocks[-quarter:]) < (1 - THROTTLED) * np.median(clocks[:quarter]))


def _throttles(machines: Sequence[results.BlockMachine]) -> bool:
    counts = [machine.throttles for machine in machines if machine.throttles is not None]
    return any(after > before for before, after in pairwise(counts))


def _tires(rounds: Sequence[results.Round]) -> bool:
    first, last = first_and_last(rounds)
    return last < (1 - THROTTLED) * first


def _overloaded(rounds: Sequence[results.Round]) -> bool:
    return sum(block.busy_seconds for block in rounds) > OVERLOADED * sum(block.seconds for block in rounds)
