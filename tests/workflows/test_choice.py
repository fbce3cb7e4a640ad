"""Which finalist is chosen: a test in a fixed order, then speed, then nearness."""

from dataclasses import replace

import pytest

from tests.documents import bench_of, ratio_of, row
from vitdeploy.stages.search import Score
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate
from vitdeploy.workflows.variants import Finalist, MadeVariant, Variant, choose

PASS, FAIL = Gate("pass"), Gate("fail", ("drop 3.00 points [2.00, 4.00], budget 1",))
UNDECIDED = Gate("undecided", ("drop 0.90 points; undecided: needs about 9,000 images",))


def finalist(precision, distance, p50, accuracy=PASS, gate=None, drop=(-0.5, 0.5), merges=(), guarded=False):
    verified = Comparison(
        n=1000,
        agreement=99.0,
        agreement_ci95=(98.0, 99.5),
        agreement_of="images",
        drop=0.0 if drop else None,
        drop_ci95=drop,
        metric="top-1",
        max_difference=p50,  # for `bench`
    )
    variant = Variant("openvino-cpu", precision, merges)
    made = MadeVariant(variant, {}, Score(0, distance, (distance, distance), None))
    return Finalist(made, verified, accuracy, accuracy if gate is None else gate, guarded)


def bench(*finalists, spread=0.01, undecided=()):
    latencies = {"original": 100.0, **{each.name: each.verified.max_difference for each in finalists}}
    ratios = [
        ratio_of(
            *(a, b, latencies[a] / latencies[b], spread),
            reason="somebody else was busy" if {a, b}.intersection(undecided) else "",
        )
        for a in latencies
        for b in latencies
        if a != b
    ]
    return bench_of([row(name, p50) for name, p50 in latencies.items()], ratios)


def test_the_fastest_that_is_confirmed():
    slow, fast = finalist("fp32", 0.0, 20.0), finalist("int8", 0.1, 10.0)
    found = choose([fast, slow], bench(slow, fast))
    assert (found.best, found.gate, found.stopped) == (fast, PASS, None)
    assert found.confirmed == (slow.name, fast.name)
    assert found.sentence == "Ship openvino-cpu-int8: 10.00 times as fast as the original [9.90, 10.10]."
    assert found.remarks[0].startswith(
        "openvino-cpu-int8 gives 99.00 % of the original's answers [98.00, 99.50]; top-1"
    )


@pytest.mark.parametrize("gate", [FAIL, UNDECIDED])
def test_what_comes_after_the_first_that_is_not_confirmed_is_not_considered(gate):
    near, unsure, far = finalist("fp32", 0.0, 20.0), finalist("mixed", 0.1, 15.0, gate), finalist("int8", 0.2, 10.0)
    found = choose([far, near, unsure], bench(near, unsure, far))
    assert (found.best, found.confirmed, found.stopped) == (near, (near.name,), unsure.name)
    assert found.remarks[1] == (
        f"openvino-cpu-mixed is not confirmed: {gate.reasons[0]}. "
        "Not considered, as further from the original: openvino-cpu-int8."
    )


def test_without_a_budget_what_provably_loses_accuracy_is_not_confirmed():
    near, loses = finalist("fp32", 0.0, 20.0), finalist("int8", 0.1, 10.0, drop=(0.25, 1.0), guarded=True)
    found = choose([near, loses], bench(near, loses))
    assert (found.best, found.gate, found.stopped) == (near, PASS, loses.name)
    assert found.remarks[1] == "openvino-cpu-int8 is not confirmed: top-1 drops by 0.00 points [0.25, 1.00]."


def test_without_labels_nothing_is_provably_lost():
    near, fast = finalist("fp32", 0.0, 20.0, drop=None), finalist("int8", 0.1, 10.0, drop=None, guarded=True)
    assert choose([near, fast], bench(near, fast)).best is fast


def test_of_those_that_are_not_provably_slower_the_nearest():
    near, fast = finalist("fp32", 0.0, 10.4), finalist("int8", 0.1, 10.0)
    assert choose([near, fast], bench(near, fast, spread=0.1)).best is near
    assert choose([near, fast], bench(near, fast, spread=0.01)).best is fast


def test_merging_must_be_provably_faster():
    plain, merged = finalist("int8", 0.11, 10.4), finalist("int8", 0.1, 10.0, merges=((1, 192),))
    assert choose([plain, merged], bench(plain, merged, spread=0.1)).best is plain
    assert choose([plain, merged], bench(plain, merged, spread=0.01)).best is merged


def test_one_that_is_too_slow_is_confirmed_but_not_chosen():
    slow = Gate("fail", ("p50 latency 20 ms, budget 15",))
    near, fast = finalist("fp32", 0.0, 20.0, PASS, slow), finalist("int8", 0.1, 10.0)
    found = choose([near, fast], bench(near, fast))
    assert (found.best, found.confirmed) == (fast, (near.name, fast.name))


def test_where_all_are_too_slow_the_best_found_is_the_fastest_of_the_confirmed():
    slow = Gate("fail", ("p50 latency 10 ms, budget 5",))
    near, fast = finalist("fp32", 0.0, 20.0, PASS, slow), finalist("int8", 0.1, 10.0, PASS, slow)
    found = choose([near, fast], bench(near, fast))
    assert (found.best, found.gate) == (fast, slow)
    assert found.sentence == "No variant provably meets the budget; the best is openvino-cpu-int8."


def test_where_none_is_confirmed_the_best_found_is_the_nearest():
    near, far = finalist("fp32", 0.0, 20.0, UNDECIDED), finalist("int8", 0.1, 10.0, FAIL)
    found = choose([far, near], bench(near, far))
    assert (found.best, found.gate, found.confirmed) == (near, UNDECIDED, ())


@pytest.mark.parametrize("noisy", ["original", "openvino-cpu-int8", "openvino-cpu-fp32"])
def test_nothing_is_ruled_out_by_a_time_that_is_not_decided(noisy):
    near, fast = finalist("fp32", 0.0, 20.0), finalist("int8", 0.1, 10.0)
    found = choose([near, fast], bench(near, fast, undecided=[noisy]))
    assert found.best is fast
    assert found.rivals == (() if noisy == "original" else (near,))
    if found.rivals:
        assert found.remarks[0].startswith("Not decided: openvino-cpu-int8 or openvino-cpu-fp32 may be fastest")
    proven = noisy == near.name
    assert (found.grade == "recommended") == proven and found.sentence.endswith("not decided.") != proven


def test_what_is_proven_beside_others_rules_out_what_it_proves():
    near, fast = finalist("fp32", 0.0, 90.0), finalist("int8", 0.1, 10.0)
    measured = bench(near, fast, undecided=["original", fast.name, near.name])
    bounded = [replace(each, bounds=(each.ratio / 2, each.ratio * 2)) for each in measured.ratios]
    found = choose([near, fast], replace(measured, ratios=tuple(bounded)))
    assert (found.best, found.rivals, found.grade) == (fast, (), "recommended")
    assert "at least 5" in found.sentence


def test_the_times_of_what_is_not_allowed_do_not_matter():
    near, wrong = finalist("fp32", 0.0, 20.0), finalist("int8", 0.1, 10.0, FAIL)
    found = choose([near, wrong], bench(near, wrong, undecided=[wrong.name]))
    assert found.sentence == "Ship openvino-cpu-fp32: 5.00 times as fast as the original [4.95, 5.05]."
