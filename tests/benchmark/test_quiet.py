"""Which blocks count where others use the machine, what is decided of the rest, and whether what is decided is true."""

import dataclasses
import math

import numpy as np
import pytest

from tests.documents import ratio_of
from vitdeploy.benchmark.evidence import beyond_noise, quiet, quiet_together, unrest
from vitdeploy.benchmark.load import Others, Patience, watched
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun, BlockMachine, Measurements, Round
from vitdeploy.benchmark.run import BenchCandidate, expected, spelt
from vitdeploy.benchmark.summary import NOT_DECIDED, block_medians, judged, rows
from vitdeploy.pipeline.measure import ratios, summarise, undecided

CPUS = (0, 1)
PROTOCOL = Protocol(("single",))
# CPU seconds of a block of half a second on two CPUs.
OWN, ALL = 0.95, 1.0


def machine(own=OWN, others=0.0, stolen=0.0, waited=0.0, slept=0.0):
    return BlockMachine(own, others, stolen, None, None, None, None, slept, waited)


def block(ms=10.0, process=0, seconds=0.5, queries=30, **load):
    return Round(1, np.full(queries, ms), seconds, process, machine=machine(**load))


def entry(name, blocks, **fields):
    return Measurements(name, "openvino-cpu", "fp32", "CPU", 1.0, 1.0, {"single": blocks}, affinity=CPUS, **fields)


def bench_run(*entries, protocol=PROTOCOL):
    return BenchRun(protocol, entries, 0.5, 2)


# --- one block --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "disturbs"),
    [
        ({}, False),
        ({"others": 0.06}, False),  # 6 %, of which two may be rounding
        ({"others": 0.09}, True),
        ({"own": 0.4, "others": 0.09}, False),  # a core for each
        ({"own": 0.4, "others": 0.09, "waited": 0.04}, True),  # and yet on the same one
        ({"waited": 0.25}, False),  # for threads of its own: nobody else ran
        ({"stolen": 0.06}, True),
        ({"slept": 1.0}, True),
    ],
)
def test_what_disturbs_a_block(load, disturbs):
    assert unrest(machine(**load), 0.5, 2).disturbs == disturbs
    assert quiet([block(**load)], 2) == [not disturbs]


def test_what_others_take_is_a_share_of_all_cpus():
    taken = unrest(dataclasses.replace(machine(), own_seconds=6.0, other_seconds=0.8, stolen_seconds=0.4), 2.0, 4)
    assert (taken.others, taken.stolen) == pytest.approx((beyond_noise(0.8, 4) / 8, 0.05))
    assert taken.others == pytest.approx(0.1, abs=0.005)


def test_latency_decides_nothing():
    """To drop slow blocks would make an artifact faster than it is."""
    generator = np.random.default_rng(0)
    fast = [block(ms, others=others) for ms, others in zip([10.0] * 40, generator.choice([0.0, 0.5], 40), strict=True)]
    slow = [Round(1, 50 * each.latencies_ms, each.seconds, machine=each.machine) for each in fast]
    assert quiet(fast, 2) == quiet(slow, 2)


def test_a_system_that_tells_of_nobody_else_shows_it_in_the_cpu_time():
    unknown = [BlockMachine(own, None, None, None, None, None, None, 0.0) for own in (0.95, 0.96, 0.94, 0.6)]
    blocks = [Round(1, np.ones(9), 0.5, machine=each) for each in unknown]
    assert quiet(blocks, 2) == [True, True, True, False]
    assert quiet([Round(1, np.ones(9), 0.5)], 2) == [True]


# --- a benchmark run --------------------------------------------------------------------------------------------------


def test_rounds_count_where_both_are_quiet():
    a = [block(10.0, others=0.5 * (number in (1, 2))) for number in range(12)]
    b = [block(20.0, others=0.5 * (number == 5)) for number in range(12)]
    found = bench_run(entry("a", a), entry("b", b))
    assert quiet_together(found.entries, "single") == [0, 3, 4, 6, 7, 8, 9, 10, 11]
    assert {name: len(values) for name, values in block_medians(found).items()} == {"a": 9, "b": 9}
    (row, _) = rows(found)
    assert (row.samples, row.flags) == (300, ("short",))
    assert row.scenarios["single"].blocks.quiet == tuple(number not in (1, 2) for number in range(12))


def test_too_few_quiet_rounds_decide_nothing_and_say_so():
    disturbed = [block(10.0, process=n // 7, others=0.5, waited=0.2, stolen=0.1) for n in range(14)]
    calm = [block(20.0, process=n // 7) for n in range(14)]
    found = bench_run(entry("a", disturbed), entry("b", calm))
    [ratio] = ratios(found, [("a", "b")])
    assert (ratio.decided, ratio.verdict) == (False, NOT_DECIDED)
    reason = undecided(found, [ratio])["a"]
    assert reason.startswith("none of the 14 single rounds was clean (other processes used 48 % of the CPU time, ")
    assert "waited 40 % of the time for a CPU" in reason and "machines used 10 %" in reason and "--duration" in reason
    assert [row.flags for row in rows(found)] == [("contended", "short"), ("short",)]
    no_evidence = bench_run(*(entry(name, [Round(1, np.full(9, 5.0), 0.5)] * 12) for name in "ab"))
    loud = dataclasses.replace(no_evidence, load_average=3.0)
    assert judged(no_evidence, "a", "b", "single").decided
    assert "load average was 3.0 on 2 CPUs" in judged(loud, "a", "b", "single").reason
    only_one_process = [*calm[:7], *disturbed[7:]]
    assert not judged(bench_run(entry("a", only_one_process), entry("b", calm)), "a", "b", "single").decided


def test_an_artifact_is_undecided_by_the_ratio_that_claims_are_made_of():
    """That of its latency to the original; no other pair, and no other scenario, takes it back or makes it up."""

    def found(a, b, decided, metric="latency"):
        return ratio_of(a, b, 1.0, reason="" if decided else f"{metric} {a} {b}", metric=metric)

    run_of = bench_run(entry("original", [block(10.0)] * 12), entry("a", [block(5.0)] * 12))
    clean = [found("a", "b", False), found("a", "original", True), found("a", "original", False, "throughput")]
    assert undecided(run_of, clean) == {}
    loud = [found("a", "b", True), found("a", "original", False)]
    assert undecided(run_of, loud) == {"a": "latency a original"}
    assert undecided(run_of, [found("a", "original", False, "throughput")]) == {"a": "throughput a original"}


def test_what_is_decided_has_no_reason_and_latencies_whose_quotient_it_is():
    generator = np.random.default_rng(0)
    speed = generator.uniform(0.5, 2, 12)  # of the machine: both alike
    a, b = ([block(ms * each, process=n // 4) for n, each in enumerate(speed)] for ms in (3, 12))
    found = bench_run(entry("a", a), entry("b", b))
    document = summarise(found, [("a", "b")], (50,))
    [ratio] = document.ratios
    assert ratio.decided and not ratio.reason and document.undecided == {}
    assert ratio.ratio == pytest.approx(0.25) == pytest.approx(ratio.a_ms / ratio.b_ms)


def test_a_fallback_a_wild_ratio_and_two_that_disagree_are_not_decided():
    calm = [block(20.0, process=n // 4) for n in range(12)]

    def reason(blocks, **fields):
        return judged(bench_run(entry("a", blocks, **fields), entry("b", calm)), "a", "b", "single").reason

    assert "was made for GPU" in reason(calm, made_for="GPU")
    assert "vary by" in reason([block(20.0 * (1 + 2 * (n % 2)), process=n // 4) for n in range(12)])
    # Most queries are of two fast blocks; the rounds side by side tell another ratio.
    moved = [block(20.0, process=n // 4) if n % 6 else block(4.0, process=n // 4, queries=900) for n in range(12)]
    assert "the machine's speed changed" in reason(moved)


# --- simulated benchmark runs -----------------------------------------------------------------------------------------

TRUTH = math.log(0.8)


def load_of(kind, generator):
    """CPUs that others take in one moment after the other, a block each."""
    on = False
    while True:
        on = generator.random() < 0.2 if not on else generator.random() < 0.8
        yield {"none": 0.0, "one loop": 1.0, "two loops": 2.0, "bursts": 2.0 * on, "slight": 0.08}[kind]


def slower(name, taken):
    """By what an artifact is slower where others take so many CPUs: all threads of the first wait for the slowest."""
    return 1 + taken + 6 * taken**2 if name == "a" else 1 + taken / 2


def simulated(kind, generator):
    """A run as `_Meter` makes it: rounds in which others ran are measured again, up to three times the duration."""
    load, rounds = load_of(kind, generator), {"a": [], "b": []}
    noise = generator.uniform(0.005, 0.03)
    for process in range(3):
        offsets = {"a": TRUTH / 2 + generator.normal(0, 0.008), "b": -TRUTH / 2}
        found, count = {"a": [], "b": []}, 0
        while count < 20 and (count < 7 or sum(map(all, zip(*(quiet(f, 2) for f in found.values()), strict=True))) < 7):
            for name, blocks in found.items():
                taken = min(next(load), 1.9) * generator.uniform(0.3, 0.6)  # the scheduler shares
                slow = slower(name, taken) + 0.6 * (generator.random() < 0.05)
                ms = 10 * math.exp(offsets[name] + generator.normal(0, noise)) * slow
                seen = max(0.0, 0.5 * taken + generator.normal(0, 0.01))
                blocks.append(block(ms, process, own=OWN - 0.5 * taken, others=seen, waited=0.5 * taken))
            count += 1
        for name, blocks in found.items():
            rounds[name] += blocks
    return bench_run(entry("a", rounds["a"]), entry("b", rounds["b"]))


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("none", 0.99, 1), ("slight", 0.99, 1), ("bursts", 0.5, 1), ("one loop", 0, 0.01), ("two loops", 0, 0.01)],
)
def test_what_is_claimed_beside_others_holds(kind, least, most):
    """Of 60 benchmark runs each. Without a look at the load, the intervals of the same rounds do not hold the truth."""
    generator = np.random.default_rng(0)
    found = [judged(simulated(kind, generator), "a", "b", "single") for _ in range(60)]
    holds = [ratio.ci95[0] <= math.exp(TRUTH) <= ratio.ci95[1] for ratio in found]
    claims = [holding for holding, ratio in zip(holds, found, strict=True) if ratio.decided]
    assert least <= len(claims) / len(found) <= most
    assert not claims or np.mean(claims) >= 0.93
    if kind.endswith("loops"):
        assert np.mean(holds) < 0.5


# --- what holds beside others -----------------------------------------------------------------------------------------


def contended(kind, generator, truth, wait, slow_ms=4.0, rounds=7, processes=1):
    """A run of `slow` and `fast`, of which the first takes `truth` times as long alone. Two threads of each share two
    CPUs with busy loops, in turns of 4 ms: while one waits, the others spin, compute for it, or sleep (`wait`)."""
    loops = {"one loop": 1, "two loops": 2, "bursts": 2, "stolen": 0}[kind]
    found = {"slow": [], "fast": []}
    for process in range(processes):
        # A process keeps its place: some share a CPU with the loop for as long as they live.
        place = {name: generator.uniform(0.8, 1.2) for name in found}
        for _ in range(rounds):
            on = kind != "bursts" or generator.random() < 0.6
            for name, alone in (("slow", slow_ms), ("fast", slow_ms / truth)):
                share = min(0.8, place[name] * loops / (loops + 2) * generator.uniform(0.8, 1.2)) if on else 0.0
                found[name].append(crowded(alone, share, wait[name], kind, process, generator))
    return bench_run(*(entry(name, blocks) for name, blocks in found.items()), protocol=LOOKS)


LOOKS = Protocol(("single",), min_rounds=21, duration=3.0)
SPIN, STEAL, SLEEP = "spin", "steal", "sleep"


def crowded(alone, share, wait, kind, process, generator, turn=4.0, threads=2):
    """Half a second of queries. `share`: of the time that a CPU is another's; each thread has turns of its own."""
    latencies, cpu, waited, clock = [], 0.0, 0.0, 0.0
    stolen = generator.uniform(0, 0.3) if kind == "stolen" else 0.0
    while clock < 500 and len(latencies) < 50:
        left, took = alone * generator.lognormal(0, 0.01), 0.0
        while left > 1e-9:
            running = threads - int((generator.random(threads) < share).sum())
            frozen = generator.random() < stolen
            step = (
                min(turn * generator.random(), left) if running == threads and not frozen else turn * generator.random()
            )
            speed = (
                0.0 if frozen else {SPIN: running == threads, STEAL: running / threads, SLEEP: running == threads}[wait]
            )
            done = min(left, step * speed)
            step = done / speed if speed else step
            left, took = left - done, took + step
            busy = threads if speed == 1 else running if wait != SLEEP else 0
            cpu += step * busy
            waited += step * (running < threads) / threads
        latencies.append(took)
        clock += took
    others = 0.0 if kind == "stolen" else 2 * waited
    load = {"own": cpu / 1e3, "others": others / 1e3, "waited": waited / 1e3}
    return Round(1, np.array(latencies), clock / 1e3, process, machine=machine(**load))


KINDS = ("one loop", "two loops", "bursts", "stolen")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_claimed_at_least_is_true_and_equal_engines_are_never_called_faster(kind):
    """Whatever their threads do while they wait, for queries that fit between two turns of others and longer ones."""
    generator, claims, calls = np.random.default_rng(1), [], []
    for number in range(27):
        wait = {name: (SPIN, STEAL, SLEEP)[generator.integers(3)] for name in ("slow", "fast")}
        truth, slow_ms = (1.0, 2.0, 5.0)[number % 3], (1.0, 4.0, 30.0)[number // 3 % 3]
        [ratio] = ratios(contended(kind, generator, truth, wait, slow_ms), [("slow", "fast")])
        low, high = ratio.sure
        claims += [low <= truth <= high] if (low, high) != (0, math.inf) else []
        calls += [low > 1 or high < 1] if truth == 1 else []
    assert np.mean(claims) >= 0.97 if claims else kind == "two loops"
    assert not any(calls)


@pytest.mark.parametrize("kind", KINDS)
def test_twice_as_fast_is_found_beside_others(kind):
    """Of short queries of one runtime, 9 of 10 at least, within three processes; most after the first."""
    generator, looks = np.random.default_rng(2), []
    for number in range(20):
        same = dict.fromkeys(("slow", "fast"), (SPIN, STEAL)[number % 2])
        run_of = contended(kind, generator, 2.0, same, slow_ms=2.0, processes=3)
        first = [
            dataclasses.replace(each, rounds={"single": each.rounds["single"][:count]})
            for count in (7, 14, 21)
            for each in run_of.entries
        ]
        verdicts = [
            ratios(bench_run(*first[i : i + 2], protocol=LOOKS), [("slow", "fast")])[0].verdict for i in (0, 2, 4)
        ]
        looks.append(verdicts.index("slower") if "slower" in verdicts else 3)
        assert not any("faster" in each for each in verdicts)
    assert np.mean([each < 3 for each in looks]) >= 0.9 and np.mean([each == 0 for each in looks]) >= 0.5


def test_bounds_are_the_smallest_of_three():
    """By order, by the fastest queries and by CPU time; none of the three alone is enough."""

    def bounds(ms=20.0, least=20.0, own=0.95, rounds=7, wild=0, fast=0.8):
        slow = [block(ms, others=0.5, own=own, waited=0.25, queries=10) for _ in range(rounds)]
        slow = [dataclasses.replace(each, latencies_ms=np.array([least, *each.latencies_ms[1:]])) for each in slow]
        slow[:wild] = [block(0.8, others=0.5, own=0.1, queries=10)] * wild
        quick = [block(fast, others=0.5, own=0.95, queries=100) for _ in range(rounds)]
        return judged(bench_run(entry("a", slow), entry("b", quick), protocol=LOOKS), "a", "b", "single").bounds

    assert bounds(ms=2.8, least=2.4) == (
        pytest.approx(0.85 * 3),
        None,
    )  # 3 by the fastest, 3.5 by order, 10 by CPU time
    assert bounds(ms=2.8, least=2.4, own=0.19) == (pytest.approx(0.85 * 2), None)  # 2 by CPU time
    assert bounds(ms=2.8, least=0.84) == (None, None)  # the fastest of both are alike
    assert bounds(ms=2.8, least=2.4, rounds=6) == (None, None)  # too few rounds for a sign test of the first look
    assert bounds(ms=2.8, least=2.4, wild=1) == (None, None)  # one of seven says otherwise
    # Long queries, in each of which a thread may have waited; 70 that take 2 ms alone would not all have met others.
    assert bounds() == (pytest.approx(0.85 * 2.08 / 0.8, rel=0.01), None)
    assert bounds(fast=1.9) == (None, None)
    both = bench_run(*(entry(name, [block(5.0, others=0.5)] * 7, made_for="GPU") for name in "ab"), protocol=LOOKS)
    assert judged(both, "a", "b", "single").bounds == (None, None)  # it ran elsewhere


def test_a_machine_that_slept_meanwhile_decides_by_the_other_rounds():
    def rounds(ms, slept):
        return [block(ms * (50 if n in slept else 1), n // 7, slept=3600.0 * (n in slept)) for n in range(14)]

    awake = bench_run(entry("a", rounds(10.0, (3,))), entry("b", rounds(20.0, (3, 9))))
    [ratio] = ratios(awake, [("a", "b")])
    assert ratio.decided and ratio.ratio == pytest.approx(0.5)
    assert all("suspended" not in row.flags for row in rows(awake))
    # In most of them: no interval, and yet no block of a sleeping machine says anything.
    asleep = bench_run(entry("a", rounds(10.0, range(9))), entry("b", rounds(20.0, ())))
    [ratio] = ratios(asleep, [("a", "b")])
    assert not ratio.decided and "the machine slept" in ratio.reason and ratio.verdict != "slower"
    assert rows(asleep)[0].latency_ms.p50 == 10.0


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_ends_with_the_load_or_the_patience(monkeypatch):
    loads, told = [1.9, 1.9, 0.0, 1.9], []
    monkeypatch.setattr(
        "vitdeploy.benchmark.load.watched",
        lambda root: Others(loads.pop(0) if loads else 1.9, 2, ("make 7: 95 %",)),
    )
    patience = Patience(1.0, told.append)
    assert patience.wait() and len(loads) == 1
    assert told == ["other processes use 1.9 of 2 CPUs (make 7: 95 %); waiting up to 1 s for a quiet machine"]
    assert not patience.wait() and len(told) == 1
    assert not Patience(0.5, told.append).wait() and told[1].endswith("waiting up to 1 s for a quiet machine")
    assert Patience(0.1, told.append).wait()  # too short to look


def test_this_machine_is_watched():
    found = watched(seconds=0.05)
    assert found is None or (found.of >= 1 and 0 <= found.cpus <= 2 * found.of)


# --- what is said before ----------------------------------------------------------------------------------------------


def test_how_long_a_bench_takes():
    candidates = [BenchCandidate(name, "openvino-cpu", "fp32", (), {"engine": {}}) for name in "ab"]
    found = expected(candidates, Protocol(duration=10.0))
    assert found.seconds == pytest.approx(2 * 2 * 20 * 0.6 + 3 * (2 * 1.5 + 2 * 2 * 0.75))
    assert found.most > 3 * 2 * 2 * 20 * 0.6
    assert str(found).startswith("about 66 s; up to 4 min")
    assert expected(candidates, Protocol(("sustain:10m",))).seconds > 1200
    assert [spelt(each) for each in (0.2, 99, 100, 3600, 4200)] == ["1 s", "99 s", "2 min", "1 h 0 min", "1 h 10 min"]
