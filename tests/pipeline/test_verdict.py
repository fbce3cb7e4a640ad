"""What ships: outcomes made up for every combination of gates, labels, flags, losses and ties, each with the verdict,
the engines of the bundle, and what an app gets of it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.documents import bench_of, ratio_of, row
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import write_bundle
from vitdeploy.errors import GateError, TargetError
from vitdeploy.pipeline.verdict import Judged, decide, engine_gate, still_open
from vitdeploy.runtime import load
from vitdeploy.spec import Budget
from vitdeploy.stages.step import ORIGINAL, Candidate
from vitdeploy.tasks.registry import TASKS
from vitdeploy.verification.comparison import Comparison, Control
from vitdeploy.verification.gate import Gate, accuracy_gate, kinds_of, with_guard

OV8, OV32 = Candidate("openvino-cpu", "int8", True), Candidate("openvino-cpu", "fp32", False)
ORT8, ORT32 = Candidate("onnxruntime-cpu", "int8", True), Candidate("onnxruntime-cpu", "fp32", False)
STATUSES = ("pass", "fail", "undecided")
BUSY = "another process took 40 % of the CPUs' time"


def facts(agreement=99.8, drop=(-0.5, 0.5), n=1000):
    """What `verify` says; `drop` is its interval, None without labels."""
    return Comparison(
        n=n,
        agreement=agreement,
        agreement_ci95=(agreement - 0.3, min(100.0, agreement + 0.1)),
        agreement_of="images with the same top-1 answer",
        metric="top-1" if drop else None,
        value=97.0 if drop else None,
        reference_value=97.0 if drop else None,
        drop=sum(drop) / 2 if drop else None,
        drop_ci95=drop,
        max_difference=0.01,
        control=Control(10.0, 9.7 if drop else None, 1.0),
    )


def judged(candidate, status="pass", *, guarded=False, reasons=None, **verified):
    reasons = (f"why {candidate.artifact} is {status}",) if reasons is None and status != "pass" else reasons or ()
    return Judged(candidate, Gate(status, reasons), facts(**verified), guarded)


def bench(latency, undecided=(), spread=0.02, metric="latency"):
    """Times of all artifacts, and the ratio of every two of them: of throughputs, where a bench asked for these alone,
    turned over."""
    ratios = [
        ratio_of(a, b, latency[a] / latency[b], spread, BUSY if {a, b}.intersection(undecided) else "")
        for a, b in itertools.permutations(latency, 2)
    ]
    if metric == "throughput":
        ratios = [
            dataclasses.replace(each, metric=metric, ratio=1 / each.ratio, ci95=(1 / each.ci95[1], 1 / each.ci95[0]))
            for each in ratios
        ]
    return bench_of([row(name, p50) for name, p50 in latency.items()], ratios)


# INT8 is faster than FP32, and every engine than the original; OpenVINO is faster than ONNX Runtime.
TIMES = {"original": 10.0, OV8.artifact: 2.0, ORT8.artifact: 3.0, OV32.artifact: 4.0, ORT32.artifact: 5.0}


CUDA16 = Candidate("onnxruntime-cuda", "fp16", True)


def ships(verdict):
    return [candidate.artifact for candidate in verdict.ships]


@pytest.mark.parametrize("status", [*itertools.product(STATUSES, repeat=4)], ids="-".join)
def test_every_combination_of_gates(status):
    """Whatever the gates: what is recommended has passed, nothing that failed is in the bundle, the order is by proof
    and then by speed, and the gate of the run is that of the best engine that was asked for."""
    engines = [judged(c, s) for c, s in zip((OV8, ORT8, OV32, ORT32), status, strict=True)]
    gates = {each.name: each.gate.status for each in engines}
    verdict = decide(engines, bench(TIMES))
    passed = [name for name in sorted(gates, key=TIMES.__getitem__) if gates[name] == "pass"]
    if passed:
        assert verdict.recommended == ships(verdict)[0] == passed[0]
        assert verdict.sentence.startswith(f"Ship {passed[0]}: {10 / TIMES[passed[0]]:.2f} times as fast")
    elif "undecided" in status:
        assert verdict.recommended is None and verdict.sentence.startswith("Undecided: no engine provably meets")
    else:
        assert verdict.recommended == ORIGINAL
        assert verdict.sentence == "Keep the original: every engine fails its budget."
    assert "fail" not in {gates[name] for name in ships(verdict)}
    proof = [gates[name] for name in ships(verdict)]
    assert proof == sorted(proof, key=("pass", "undecided").index)
    for group in ("pass", "undecided"):
        times = [TIMES[name] for name in ships(verdict) if gates[name] == group]
        assert times == sorted(times)
    # What was asked for and does not fail is there, and each target has a proven engine wherever there is one.
    assert {c.artifact for c in (OV8, ORT8) if gates[c.artifact] != "fail"} <= set(ships(verdict))
    for pair in ((OV8, OV32), (ORT8, ORT32)):
        proven = {c.artifact for c in pair if gates[c.artifact] == "pass"}
        usable = {c.artifact for c in pair if gates[c.artifact] != "fail"}
        assert bool(proven & set(ships(verdict))) == bool(proven)
        assert bool(usable & set(ships(verdict))) == bool(usable)
    expected = next(
        each for each in ("pass", "undecided", "fail") if each in (gates[OV8.artifact], gates[ORT8.artifact])
    )
    assert verdict.gate.status == expected
    # Asked for, those that fail come last, and the rest stays as it was.
    more = ships(decide(engines, bench(TIMES), include_failed=True))
    failed = [c.artifact for c in (OV8, ORT8) if gates[c.artifact] == "fail"]
    assert more == [*ships(verdict), *failed]


@pytest.mark.parametrize(
    ("int8", "expected", "engines", "gate"),
    [
        # A sabotaged INT8 engine is the fastest of all; FP32 ships, and is first in the bundle.
        (judged(OV8, "fail", agreement=11.0, drop=(81.7, 91.3)), "openvino-cpu-fp32", ["openvino-cpu-fp32"], "fail"),
        # Without labels agreement alone says that it is wrong.
        (judged(OV8, "fail", agreement=11.0, drop=None), "openvino-cpu-fp32", ["openvino-cpu-fp32"], "fail"),
        (judged(OV8), "openvino-cpu-int8", ["openvino-cpu-int8"], "pass"),
        # Not proven: it is there, behind what is.
        (judged(OV8, "undecided"), "openvino-cpu-fp32", ["openvino-cpu-fp32", "openvino-cpu-int8"], "undecided"),
        # Nobody said how much may be lost, and something is: the guard passes, and yet it is not recommended.
        (
            judged(OV8, guarded=True, drop=(0.25, 1.0)),
            "openvino-cpu-fp32",
            ["openvino-cpu-fp32", "openvino-cpu-int8"],
            "pass",
        ),
        # Somebody said so.
        (judged(OV8, drop=(0.25, 1.0)), "openvino-cpu-int8", ["openvino-cpu-int8"], "pass"),
        (judged(OV8, guarded=True, drop=None), "openvino-cpu-int8", ["openvino-cpu-int8"], "pass"),
    ],
)
def test_one_target(int8, expected, engines, gate):
    verdict = decide([int8, judged(OV32)], bench({k: v for k, v in TIMES.items() if "onnx" not in k}))
    assert (verdict.recommended, ships(verdict), verdict.gate.status) == (expected, engines, gate)
    assert verdict.leading == expected


def test_what_is_said_to_be_faster_is_what_is_chosen():
    """The medians of all queries may be in another order than the paired rounds, which the claim is made of."""
    found = bench({"original": 10.0, OV8.artifact: 9.5, OV32.artifact: 12.0})
    slower = [row(each.artifact, p50) for each, p50 in zip(found.results, (10.0, 10.1, 12.0), strict=True)]
    found = dataclasses.replace(found, results=tuple(slower))
    verdict = decide([judged(OV8), judged(OV32)], found)
    assert (verdict.recommended, ships(verdict)) == (OV8.artifact, [OV8.artifact])
    assert verdict.sentence.startswith("Ship openvino-cpu-int8: 1.05 times as fast")


@pytest.mark.parametrize(("times", "surely"), [((12.0, 11.0), True), ((10.1, 12.0), False)])
def test_the_original_stays_as_surely_as_the_intervals_carry_it(times, surely):
    found = bench(dict(zip((ORIGINAL, OV8.artifact, OV32.artifact), (10.0, *times), strict=True)))
    verdict = decide([judged(OV8), judged(OV32)], found)
    word = "" if surely else "provably "
    assert verdict.sentence == f"Keep the original: no engine that keeps its answers is {word}faster."
    assert verdict.recommended == ORIGINAL


@pytest.mark.parametrize("undecided", [(), (OV8.artifact,)])
def test_throughput_decides_where_a_bench_asked_for_nothing_else(undecided):
    verdict = decide([judged(OV8), judged(OV32)], bench(TIMES, undecided, metric="throughput"))
    if undecided:
        assert verdict.sentence == "Ship openvino-cpu-fp32: 2.50 times as fast as the original [2.45, 2.55]."
        assert verdict.remarks[0] == "Undecided: whether it or openvino-cpu-int8 is faster."
    else:
        assert verdict.recommended == OV8.artifact
        assert verdict.sentence == "Ship openvino-cpu-int8: 5.00 times as fast as the original [4.90, 5.10]."


@pytest.mark.parametrize("status", ["fail", "undecided"])
def test_what_meets_the_budget_and_provably_loses_is_not_said_to_fail(status):
    """A budget of latency, so that the guard holds: INT8 meets both and loses a point, FP32 is too slow."""
    verdict = decide([judged(OV8, guarded=True, drop=(0.5, 1.5)), judged(OV32, status)], bench(TIMES))
    assert verdict.sentence == "Keep the original: every engine within the budget provably loses accuracy."
    assert (verdict.recommended, verdict.gate.status) == (ORIGINAL, "pass")


def test_the_remark_is_of_an_engine_that_the_bundle_holds():
    verdict = decide([judged(OV8, "fail", agreement=40.0), judged(OV32, "undecided")], bench(TIMES))
    assert ships(verdict) == [OV32.artifact]
    assert verdict.remarks[0].startswith("openvino-cpu-fp32 gives 99.80 %")


def test_what_an_engine_loses_is_told():
    verdict = decide([judged(OV8, guarded=True, drop=(0.25, 1.0)), judged(OV32)], bench(TIMES))
    assert "openvino-cpu-int8 loses 0.62 points of top-1 [0.25, 1.00]." in verdict.remarks
    verdict = decide([judged(OV8, "fail"), judged(OV32)], bench(TIMES))
    assert "openvino-cpu-int8 misses the budget: why openvino-cpu-int8 is fail." in verdict.remarks
    verdict = decide([judged(OV8, "undecided"), judged(OV32)], bench(TIMES))
    assert "openvino-cpu-int8 is not proven to meet the budget: why openvino-cpu-int8 is undecided." in verdict.remarks


def test_where_the_original_is_fastest_it_is_kept_and_the_bundle_has_engines_all_the_same():
    verdict = decide([judged(OV8), judged(OV32)], bench({**TIMES, "original": 1.0}))
    assert verdict.recommended == ORIGINAL
    assert verdict.sentence == "Keep the original: no engine that keeps its answers is faster."
    assert ships(verdict) == ["openvino-cpu-int8"]


def test_of_a_tie_the_engine_that_was_asked_for():
    verdict = decide([judged(OV8), judged(OV32)], bench({**TIMES, OV32.artifact: 2.0}))
    assert verdict.recommended == "openvino-cpu-int8"
    assert "INT8 is not provably faster than FP32 on openvino-cpu." in verdict.remarks


def test_an_interval_that_has_one_in_it_claims_no_speed():
    verdict = decide([judged(OV8)], bench({"original": 2.01, OV8.artifact: 2.0}))
    assert verdict.sentence == "Ship openvino-cpu-int8: about as fast as the original [0.99, 1.03]."


OV16 = Candidate("openvino-cpu", "bf16", False)


@pytest.mark.parametrize(("bf16", "recommended"), [(1.5, OV16), (2.01, OV8), (3.0, OV8)])
def test_bf16_that_is_faster_than_int8_ships_and_the_remark_says_why(bf16, recommended):
    times = {"original": 10.0, OV8.artifact: 2.0, OV16.artifact: bf16, OV32.artifact: 4.0}
    verdict = decide([judged(OV8), judged(OV16), judged(OV32)], bench(times))
    assert verdict.recommended == recommended.artifact
    assert ships(verdict) == [OV16.artifact, OV8.artifact] if bf16 < 2 else [OV8.artifact]
    remark = "INT8 is slower than BF16 on openvino-cpu (latency ratio 1.33)."
    assert (remark in verdict.remarks) is (bf16 == 1.5)
    assert sum("BF16" in each for each in verdict.remarks) == (bf16 == 1.5)


def test_int8_that_is_slower_is_not_recommended():
    verdict = decide([judged(OV8), judged(OV32)], bench({**TIMES, OV8.artifact: 4.8}))
    assert verdict.recommended == "openvino-cpu-fp32"
    assert ships(verdict) == ["openvino-cpu-fp32", "openvino-cpu-int8"]
    assert "INT8 is slower than FP32 on openvino-cpu (latency ratio 1.20): ship FP32 there." in verdict.remarks


@pytest.mark.parametrize("noisy", [["original"], ["original", OV8.artifact, OV32.artifact]])
def test_times_that_decide_nothing_recommend_nothing_and_claim_no_ratio(noisy):
    verdict = decide([judged(OV8), judged(OV32)], bench(TIMES, noisy))
    assert (verdict.recommended, verdict.grade) == (None, "no ranking")
    assert verdict.sentence == "No ranking: the measurements do not show which engine is faster."
    assert verdict.remarks[0] == (
        "The engines are listed in a fixed order. To settle it, run the same command on a quiet machine: only the "
        "bench is measured again."
    )
    assert "times as fast" not in " ".join([verdict.sentence, *verdict.remarks])
    assert BUSY not in " ".join([verdict.sentence, *verdict.remarks])  # the page has the reasons, folded
    # The bundle is usable: engines that keep the answers.
    assert ships(verdict) == ["openvino-cpu-int8"] and verdict.leading == "openvino-cpu-int8"
    assert verdict.gate.status == "pass"


# --- Decide what the evidence decides ---


def noisy_bench(latency, bounds, seems=()):
    """Times of a busy machine, of which nothing is decided. By pair, `bounds` of a / b, and what `seems` faster."""
    ratios = []
    for a, b in itertools.permutations(latency, 2):
        found = bounds.get((a, b)) or tuple(each and 1 / each for each in bounds.get((b, a), (None, None))[::-1])
        words = "seems faster" if (a, b) in seems else "seems slower" if (b, a) in seems else "not decided"
        ratios.append(ratio_of(a, b, latency[a] / latency[b], reason=BUSY, bounds=found, verdict=words))
    return bench_of([row(name, p50) for name, p50 in latency.items()], ratios)


ALL = [judged(each) for each in (OV8, ORT8, OV32, ORT32)]


def test_one_noisy_loser_does_not_veto_a_clear_winner():
    """FP32 of ONNX Runtime is not decided, and nothing else is in doubt."""
    verdict = decide(ALL, bench(TIMES, [ORT32.artifact]))
    assert (verdict.recommended, verdict.grade) == (OV8.artifact, "recommended")
    assert verdict.sentence == "Ship openvino-cpu-int8: 5.00 times as fast as the original [4.90, 5.10]."
    # Where its bounds do not reach the best, it is no rival either.
    bounds = {(OV8.artifact, each.artifact): (None, 0.9) for each in (ORT8, OV32, ORT32)}
    verdict = decide(ALL, noisy_bench(TIMES, {**bounds, (OV8.artifact, ORIGINAL): (None, 0.24)}))
    assert verdict.sentence == "Ship openvino-cpu-int8: at least 4.1 times the original's speed under load."
    assert verdict.rivals == ()


def test_a_partial_order_is_enough_and_what_is_open_is_said():
    bounds = {(OV8.artifact, ORIGINAL): (None, 0.24), (ORT8.artifact, ORIGINAL): (None, 0.3)}
    bounds |= {(OV8.artifact, each.artifact): (None, 0.8) for each in (OV32, ORT32)}
    verdict = decide(ALL, noisy_bench(TIMES, bounds))
    assert (verdict.recommended, verdict.grade, verdict.rivals) == (OV8.artifact, "recommended", (ORT8.artifact,))
    assert verdict.sentence == "Ship openvino-cpu-int8: at least 4.1 times the original's speed under load."
    assert verdict.remarks[0] == "Undecided: whether it or onnxruntime-cpu-int8 is faster."
    assert ships(verdict)[0] == OV8.artifact
    # Of those that are proven to be faster than the original: a better estimate alone recommends nothing.
    verdict = decide(ALL, noisy_bench(TIMES, {(ORT8.artifact, ORIGINAL): (None, 0.3)}))
    assert verdict.recommended == ORT8.artifact and OV8.artifact in verdict.rivals
    # What is faster than an engine that is faster than the original is so too; by how much, nobody knows.
    bounds = {(ORT8.artifact, ORIGINAL): (None, 0.3), (OV8.artifact, ORT8.artifact): (None, 0.8)}
    verdict = decide(ALL, noisy_bench(TIMES, bounds))
    assert verdict.sentence == "Ship openvino-cpu-int8: how much faster than the original is not decided."
    # Three pairs of rounds that contradict each other end in a verdict all the same.
    circle = itertools.pairwise([OV8.artifact, ORT8.artifact, OV32.artifact, OV8.artifact])
    assert decide(ALL[:3], noisy_bench(TIMES, dict.fromkeys(circle, (None, 0.8)))).grade == "no ranking"


def test_what_leads_is_named_with_its_rivals():
    verdict = decide(ALL, noisy_bench(TIMES, {}, seems=[(OV8.artifact, ORIGINAL)]))
    assert (verdict.recommended, verdict.grade, ships(verdict)[0]) == (None, "leading", OV8.artifact)
    assert verdict.rivals == (ORT8.artifact, OV32.artifact, ORT32.artifact, ORIGINAL)
    assert verdict.sentence == "openvino-cpu-int8 leads, but is not provably the fastest."
    assert (
        "onnxruntime-cpu-fp32 or the original may be faster. To settle it, run the same command" in verdict.remarks[0]
    )


def test_without_a_ranking_noise_sets_no_order():
    """Whatever was measured: the engines are in the order of the recipe's targets."""
    for times in itertools.permutations((2.0, 3.0, 4.0, 5.0)):
        latency = dict(zip((OV8.artifact, ORT8.artifact, OV32.artifact, ORT32.artifact), times, strict=True))
        verdict = decide(ALL, noisy_bench({ORIGINAL: 10.0, **latency}, {}))
        assert (verdict.grade, ships(verdict)) == ("no ranking", [OV8.artifact, ORT8.artifact])


def test_the_original_stays_where_every_engine_is_slower_by_what_holds():
    bounds = {(each.artifact, ORIGINAL): (1.2, None) for each in (OV8, ORT8, OV32, ORT32)}
    verdict = decide(ALL, noisy_bench(TIMES, bounds))
    assert (verdict.recommended, verdict.grade) == (ORIGINAL, "recommended")
    assert verdict.sentence == "Keep the original: no engine that keeps its answers is faster."
    del bounds[ORT8.artifact, ORIGINAL]
    assert decide(ALL, noisy_bench(TIMES, bounds)).grade == "no ranking"


def test_a_headline_has_twelve_words_at_most():
    noisy = [noisy_bench(TIMES, {}, seems) for seems in ([], [(OV8.artifact, ORIGINAL)])]
    verdicts = [decide(ALL, each) for each in (bench(TIMES), bench({**TIMES, ORIGINAL: 1.0}), *noisy)]
    verdicts += [decide([judged(OV8, status, guarded=True, drop=(0.5, 1.5))], bench(TIMES)) for status in STATUSES]
    assert all(len(each.sentence.split()) <= 12 for each in verdicts)


def test_more_rounds_are_measured_only_while_they_can_change_the_verdict():
    names, near = [each.name for each in ALL], {**TIMES, ORT8.artifact: 2.1}
    assert not still_open(names, bench(TIMES)) and not still_open([], bench(TIMES))
    assert not still_open(names, bench(near, spread=0.02))
    assert not still_open(names, noisy_bench(TIMES, {(OV8.artifact, ORIGINAL): (None, 0.24)}))  # others may stay open
    assert not still_open(names, noisy_bench(TIMES, {}))  # nothing even seems so
    # An interval of this width may become clear, and what is clearly beaten is not measured for it again.
    assert still_open(names, bench(near, spread=0.04)) == {ORIGINAL, OV8.artifact, ORT8.artifact}
    seems = [(OV8.artifact, ORIGINAL)]
    assert still_open(names, noisy_bench(TIMES, {}, seems=seems)) == {ORIGINAL, *names}
    seems.append((OV8.artifact, OV32.artifact))
    assert still_open(names, noisy_bench(TIMES, {}, seems=seems)) == {ORIGINAL, *names} - {OV32.artifact}


def test_a_runtime_that_fell_back_is_settled_by_another_engine_and_not_by_quiet():
    why = "it ran on CPU, and was made for GPU: compile it on this machine"
    noisy = noisy_bench(TIMES, {})
    noisy = dataclasses.replace(noisy, ratios=tuple(dataclasses.replace(each, reason=why) for each in noisy.ratios))
    assert decide(ALL, noisy).remarks[0] == f"The engines are listed in a fixed order. {why}."


def test_flags_of_an_engine_that_is_out_of_the_question_do_not_matter():
    verdict = decide([judged(OV8, "fail"), judged(OV32)], bench(TIMES, [OV8.artifact]))
    assert verdict.recommended == "openvino-cpu-fp32" and verdict.sentence.startswith("Ship openvino-cpu-fp32: 2.50")
    # It does not ship, so nobody needs to know whether it is faster.
    assert not any(each.startswith("Whether") for each in verdict.remarks)
    # The same of one that ships for those who have no OpenVINO.
    verdict = decide(ALL, bench(TIMES, [ORT32.artifact]))
    assert "Whether INT8 is faster than FP32 on onnxruntime-cpu is not decided." in verdict.remarks


def test_what_is_undecided_says_what_would_decide_it():
    reason = "agreement 99.80 % [99.50, 99.90], budget 99.6; undecided: needs about 2,000 images"
    verdict = decide([judged(OV8, "undecided", reasons=(reason,))], bench(TIMES))
    assert verdict.sentence == "Undecided: no engine provably meets the budget."
    assert f"openvino-cpu-int8 is not proven to meet the budget: {reason}." in verdict.remarks
    assert verdict.remarks[0].startswith("openvino-cpu-int8 gives 99.80 % of the original's answers")


# --- The guard ---


BUDGETS = [Budget(), Budget(max_size=10**9), Budget(max_latency=1e9), Budget(max_latency=1e9, max_size=10**9)]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_size_and_latency_never_switch_the_check_of_answers_off(budget, labels, task):
    """11 % agreement, a proven loss of 87 points: it fails, whatever else is bounded, with labels and without."""
    wrong = facts(agreement=11.0, drop=(81.7, 91.3) if labels else None)
    gate = engine_gate(accuracy_gate(wrong, with_guard(budget, TASKS[task].guard)), budget, 1000, row("engine", 1.0))
    assert gate.status == "fail" and f"budget {TASKS[task].guard:g}" in gate.reasons[0]


def test_memory_is_a_bound_like_the_others():
    right, budget = accuracy_gate(facts(), Budget(min_agreement=0.0)), Budget(min_agreement=0.0, max_memory=200 << 20)
    for peak, status, reason in (
        (150 << 20, "pass", ""),
        (300 << 20, "fail", "peak memory 300 MiB, budget 200"),
        (None, "undecided", "max_memory needs a bench, on Linux"),
    ):
        gate = engine_gate(right, budget, 1000, dataclasses.replace(row("engine", 1.0), peak_memory_bytes=peak))
        assert (gate.status, " ".join(gate.reasons)) == (status, reason)
        assert kinds_of(gate.reasons) == ({"memory"} if reason else set())
    assert engine_gate(right, budget, 1000, None).status == "undecided"


@pytest.mark.parametrize(
    ("task", "agreement", "status"),
    [
        ("classification", 99.0, "pass"),
        ("classification", 95.2, "undecided"),
        ("classification", 94.0, "fail"),
        ("detection", 90.5, "pass"),
        ("features", 90.5, "pass"),
        ("features", 89.0, "fail"),
    ],
)
def test_the_guard_of_each_task(task, agreement, status):
    found = facts(agreement=agreement)
    assert accuracy_gate(found, with_guard(Budget(), TASKS[task].guard)).status == status


def test_a_budget_of_ones_own_takes_the_place_of_the_guard():
    assert with_guard(Budget(max_drop=1.0), 95.0) == Budget(max_drop=1.0)
    assert with_guard(Budget(min_agreement=0.0), 95.0) == Budget(min_agreement=0.0)
    assert with_guard(Budget(max_size=5), 90.0) == Budget(min_agreement=90.0, max_size=5)


# --- What `load` gives ---


@pytest.fixture(scope="module")
def made(small_export, tmp_path_factory):
    """(EngineSpec, folder) of the small model on both runtimes, in float32; another precision is a name here."""
    from vitdeploy.compilation.engine import compile_engine

    found = {}
    for target in ("openvino-cpu", "onnxruntime-cpu"):
        folder = tmp_path_factory.mktemp("engine")
        graph = small_export / "model.onnx"
        found[target] = (compile_engine(graph, folder, target=target, precision="fp32", batch=1, placed=0), folder)
    return found


def bundle_of(verdict, gates, made, small_export, small_bundle, out):
    manifest = read_bundle(small_bundle)
    engines = [
        (dataclasses.replace(made[c.target][0], precision=c.precision), made[c.target][1]) for c in verdict.ships
    ]
    write_bundle(
        out,
        name="small",
        task="classification",
        graphs={"model": (small_export / "model.onnx", manifest.graphs["model"])},
        preprocess=manifest.preprocess,
        engines=engines,
        gates={c.artifact: gates[c.artifact] for c in verdict.ships},
        recommended=None if verdict.recommended == ORIGINAL else verdict.recommended,
        grade=verdict.grade,
        rivals=verdict.rivals,
    )
    return out


@pytest.mark.parametrize(
    ("status", "include_failed", "undecided", "gets"),
    [
        # The four: INT8 on OpenVINO and ONNX Runtime, FP32 on both.
        (("pass",) * 4, False, (), "openvino-cpu-int8: the bundle's recommended engine"),
        (("fail", "pass", "pass", "pass"), False, (), "onnxruntime-cpu-int8: the bundle's recommended engine"),
        (("fail", "fail", "pass", "pass"), False, (), "openvino-cpu-fp32: the bundle's recommended engine"),
        (("fail", "fail", "pass", "pass"), True, (), "openvino-cpu-fp32: the bundle's recommended engine"),
        (("pass",) * 4, False, ("original",), "openvino-cpu-int8: the first in a fixed order that works here"),
        (
            ("pass",) * 4,
            False,
            "all",
            "openvino-cpu-int8: the leading engine, measured on a busy machine; possibly as fast: "
            "onnxruntime-cpu-int8, openvino-cpu-fp32, onnxruntime-cpu-fp32, original",
        ),
        (("undecided", "fail", "undecided", "fail"), False, (), RuntimeWarning),
        (("fail",) * 4, False, (), TargetError),
        (("fail",) * 4, True, (), GateError),
    ],
)
def test_what_an_app_gets(status, include_failed, undecided, gets, made, small_export, small_bundle, tmp_path):
    candidates = (OV8, ORT8, OV32, ORT32)
    engines = [judged(c, s) for c, s in zip(candidates, status, strict=True)]
    gates = {each.name: each.gate.status for each in engines}
    leads = noisy_bench(TIMES, {}, seems=[(OV8.artifact, ORIGINAL)])
    found = leads if undecided == "all" else bench(TIMES, undecided)
    verdict = decide(engines, found, include_failed=include_failed)
    folder = bundle_of(verdict, gates, made, small_export, small_bundle, tmp_path)
    if gets is RuntimeWarning:
        with pytest.warns(RuntimeWarning, match="openvino-cpu-int8 was not shown to meet its budget") as told:
            load(folder).close()
        assert {each.filename for each in told} == {__file__}
    elif isinstance(gets, str):
        with load(folder) as predictor:
            assert predictor.why.startswith(gets)
    else:
        with pytest.raises(gets, match="no engine" if gets is TargetError else "failed its budget"):
            load(folder)


def test_a_failed_engine_is_given_to_those_who_ask_for_it_and_says_so(made, small_export, small_bundle, tmp_path):
    engines = [judged(OV8, "fail"), judged(ORT8, "pass")]
    verdict = decide(engines, bench(TIMES), include_failed=True)
    gates = {each.name: each.gate.status for each in engines}
    folder = bundle_of(verdict, gates, made, small_export, small_bundle, tmp_path)
    with pytest.raises(GateError, match="openvino-cpu-int8"):
        load(folder, "openvino-cpu")
    with pytest.warns(RuntimeWarning, match="openvino-cpu-int8 failed its budget"):
        predictor = load(folder, "openvino-cpu", allow_failed=True)
    with predictor:
        assert predictor.target == "openvino-cpu-int8"


def test_a_gpu_that_is_compared_with_a_cpu_is_said():
    told = "onnxruntime-cuda-fp16 ran on the GPU and the original on the CPU: part of the speedup is due to the GPU."
    times = {"original": 10.0, CUDA16.artifact: 1.0, OV8.artifact: 2.0}
    assert told in decide([judged(CUDA16), judged(OV8)], bench(times)).remarks
    assert told not in decide([judged(CUDA16), judged(OV8)], bench({**times, CUDA16.artifact: 3.0})).remarks
    assert told not in decide([judged(CUDA16)], bench({"original": 1.0, CUDA16.artifact: 2.0})).remarks
