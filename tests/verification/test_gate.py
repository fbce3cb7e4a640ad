"""A gate passes or fails only when the whole interval says so."""

import copy
import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vitdeploy.cli.options import unmet_fix
from vitdeploy.spec import Budget, encode
from vitdeploy.verification.agreement import Agreement, compare
from vitdeploy.verification.gate import Gate, accuracy_gate, bound_gate, combine, join, kinds_of


def agreement_of(same: int, n: int) -> Agreement:
    """An artifact that gives the original's answer for `same` of n images, of twenty classes and without labels."""
    reference = np.eye(20, dtype=np.float32)[np.arange(n) % 20]
    ours = reference.copy()
    ours[same:] = np.roll(ours[same:], 1, axis=1)
    return compare(ours, reference, None)


def with_drop(drop: float, low: float, high: float, n: int = 1000) -> Agreement:
    return dataclasses.replace(agreement_of(n, n), drop=drop, drop_ci95=(low, high))


def images_needed(gate: Gate) -> int:
    [reason] = gate.reasons
    match = re.search(r"needs about ([\d,]+) images", reason)
    assert match is not None, reason
    return int(match[1].replace(",", ""))


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [(-0.5, 0.9, "pass"), (-0.5, 1.0, "pass"), (0.2, 1.1, "undecided"), (1.0, 2.0, "undecided"), (1.1, 2.0, "fail")],
)
def test_drop_is_judged_by_its_whole_interval(low, high, status):
    gate = accuracy_gate(with_drop((low + high) / 2, low, high), Budget(max_drop=1.0))
    assert gate.status == status
    assert bool(gate.reasons) == (status != "pass")


@pytest.mark.parametrize(
    ("same", "n", "status"),
    [
        (1000, 1000, "pass"),
        (990, 1000, "pass"),
        (975, 1000, "undecided"),
        (965, 1000, "undecided"),
        (940, 1000, "fail"),
    ],
)
def test_agreement_is_judged_by_its_whole_interval(same, n, status):
    found = agreement_of(same, n)
    low, high = found.agreement_ci95
    assert (low >= 97, high < 97) == (status == "pass", status == "fail")
    assert accuracy_gate(found, Budget(min_agreement=97.0)).status == status


def test_a_perfect_score_on_few_images_proves_little():
    gate = accuracy_gate(agreement_of(20, 20), Budget(min_agreement=97.0))
    assert gate.status == "undecided"
    assert images_needed(gate) > 20


def test_reasons_give_the_estimate_its_interval_and_the_budget():
    gate = accuracy_gate(with_drop(2.5, 1.5, 3.5), Budget(max_drop=1.0))
    assert gate == Gate("fail", ("drop 2.50 points [1.50, 3.50], budget 1",))


def test_undecided_names_the_number_of_images_that_would_decide():
    # The interval reaches 0.6 above 0.7, the bound lies 0.3 above: (0.6 / 0.3)^2 = 4 times as many, and a tenth more.
    gate = accuracy_gate(with_drop(0.7, 0.3, 1.3, n=500), Budget(max_drop=1.0))
    assert gate.status == "undecided"
    assert images_needed(gate) == 2200


def test_the_side_of_the_interval_that_counts_is_the_one_towards_the_bound():
    # Below the estimate the interval reaches 0.9, the bound lies 0.3 below: 9 times as many, and a tenth more.
    gate = accuracy_gate(with_drop(1.3, 0.4, 1.5, n=100), Budget(max_drop=1.0))
    assert images_needed(gate) == 990


def test_an_estimate_on_the_bound_cannot_be_decided_by_any_number():
    gate = accuracy_gate(with_drop(1.0, 0.5, 1.5), Budget(max_drop=1.0))
    assert gate.status == "undecided"
    assert "the estimate lies on the bound" in gate.reasons[0]


@given(n=st.integers(20, 3000), error=st.floats(0.0, 0.2), place=st.floats(0.05, 0.95))
@settings(max_examples=200, deadline=None)
def test_the_number_of_images_is_always_more_than_there_were(n, error, place):
    found = agreement_of(round(n * (1 - error)), n)
    low, high = found.agreement_ci95
    bound = low + place * (high - low)
    assume(abs(bound - found.agreement) > 0.01)
    gate = accuracy_gate(found, Budget(min_agreement=bound))
    assert gate.status == "undecided"
    assert images_needed(gate) > n


@pytest.mark.parametrize(
    ("same", "n", "bound"),
    [(100, 100, 97.0), (20, 20, 97.0), (985, 1000, 98.0), (435, 450, 95.5), (96, 100, 97.5), (90, 100, 94.0)],
)
def test_the_same_share_of_that_number_of_images_decides(same, n, bound):
    gate = accuracy_gate(agreement_of(same, n), Budget(min_agreement=bound))
    assert gate.status == "undecided"
    needed = images_needed(gate)
    again = agreement_of(round(needed * same / n), needed)
    assert accuracy_gate(again, Budget(min_agreement=bound)).status in ("pass", "fail")


def test_a_drop_without_labels_is_undecided():
    gate = accuracy_gate(agreement_of(100, 100), Budget(max_drop=1.0))
    assert gate == Gate("undecided", ("max_drop needs labels, and the images have none",))


def test_without_bounds_there_is_nothing_to_judge():
    assert accuracy_gate(agreement_of(1, 2), Budget()) == Gate("none")


def test_a_failure_outweighs_an_undecided_bound_and_both_are_told():
    found = dataclasses.replace(agreement_of(940, 1000), drop=0.9, drop_ci95=(0.2, 1.4))
    gate = accuracy_gate(found, Budget(max_drop=1.0, min_agreement=97.0))
    assert gate.status == "fail"
    assert [reason.split()[0] for reason in gate.reasons] == ["drop", "agreement"]


@pytest.mark.parametrize(
    ("value", "bound", "flags", "status"),
    [
        (4.0, None, (), "none"),
        (4.0, 5.0, (), "pass"),
        (5.0, 5.0, (), "pass"),
        (6.0, 5.0, (), "fail"),
        (4.0, 5.0, ("throttled",), "undecided"),
        (6.0, 5.0, ("throttled",), "undecided"),
    ],
)
def test_a_measured_value_is_judged_against_its_bound(value, bound, flags, status):
    assert bound_gate("latency", value, bound, "ms", flags, kind="latency").status == status


def test_a_measured_value_over_its_bound_is_told_with_its_unit():
    assert bound_gate("latency", 6.25, 5.0, "ms", kind="latency").reasons == ("latency 6.25 ms, budget 5",)
    size = bound_gate("size", 2_312_649, 2_000_000, "bytes", kind="size")
    assert size.reasons == ("size 2,312,649 bytes, budget 2,000,000",)


@pytest.mark.parametrize(
    ("interval", "status"),
    [((3.0, 4.9), "pass"), ((3.0, 5.1), "undecided"), ((5.1, 6.0), "fail"), ((3.0, None), "undecided")],
)
def test_a_measured_value_is_judged_by_its_interval(interval, status):
    gate = bound_gate("p50 latency", 4.0, 5.0, "ms", interval=interval, kind="latency")
    assert gate.status == status
    if status == "undecided":
        high = "?" if interval[1] is None else "5.1"
        told = f"p50 latency 4 [3, {high}] ms, budget 5; undecided: needs a longer benchmark"
        assert gate.reasons == (told,)


def test_a_drop_is_judged_by_agreement_where_that_was_settled():
    """640 images without labels: 0.6 points are proven at full agreement, and nothing of the sort at 630."""
    assert accuracy_gate(agreement_of(640, 640), Budget(max_drop=0.6), "agreement").status == "pass"
    assert accuracy_gate(agreement_of(640, 640), Budget(max_drop=0.6), "labels").status == "undecided"
    gate = accuracy_gate(agreement_of(630, 640), Budget(max_drop=0.6), "agreement")
    assert gate.status == "undecided"
    assert gate.reasons[0].startswith("drop bounded by agreement: 1.56 points [-2.85, 2.85], budget 0.6")
    # However many images: as much as 1.56 % of the answers may be wrong ones.
    assert gate.reasons[0].endswith("undecided: agreement alone cannot prove it; labels may")
    # Those that changed may all have become right: agreement alone never shows a loss.
    assert accuracy_gate(agreement_of(600, 640), Budget(max_drop=0.6), "agreement", 90.0).status == "undecided"


def test_the_number_of_images_at_which_agreement_would_do_does():
    gate = accuracy_gate(agreement_of(997, 1000), Budget(max_drop=0.6), "agreement")  # [-0.88, 0.88]
    number = images_needed(gate)
    again = agreement_of(round(0.997 * number), number)
    assert accuracy_gate(again, Budget(max_drop=0.6), "agreement").status == "pass"
    assert number < 5000


@pytest.mark.parametrize("max_drop", [0.6, 20.0])
def test_a_budget_of_the_drop_that_no_labels_decide_takes_no_guard_away(max_drop):
    """An engine of other answers fails, whatever its few images prove."""
    gate = accuracy_gate(agreement_of(10, 640), Budget(max_drop=max_drop), "agreement", 95.0)
    assert gate.status == "fail"
    least = f"minimum without labels: {min(95, 100 - max_drop):g}"
    assert gate.reasons[-1].endswith(least)
    # Of detections nothing bounds the drop without labels.
    found = dataclasses.replace(agreement_of(10, 640), agreement_of="objects with the same class and IoU 0.5 or more")
    assert accuracy_gate(found, Budget(max_drop=max_drop), "labels", 90.0).status == "fail"


def test_a_loss_that_labels_show_fails_where_agreement_was_to_prove_it():
    shown = dataclasses.replace(with_drop(40.0, 36.0, 44.0), agreement=60.0, agreement_ci95=(56.0, 99.0))
    gate = accuracy_gate(shown, Budget(max_drop=0.8), "agreement", 95.0)
    assert (gate.status, "drop 40.00 points [36.00, 44.00], budget 0.8" in gate.reasons) == ("fail", True)


def test_a_flagged_measurement_names_its_flags():
    [reason] = bound_gate("latency", 4.0, 5.0, "ms", ("throttled", "noisy"), kind="latency").reasons
    assert reason == "latency 4 ms, budget 5; the measurement is flagged throttled, noisy"


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([], "none"),
        (["none", "none"], "none"),
        (["none", "pass"], "pass"),
        (["pass", "undecided"], "undecided"),
        (["undecided", "fail", "pass"], "fail"),
    ],
)
def test_the_worst_of_several_decides(statuses, status):
    assert combine([(each, f"because of {each}") for each in statuses]).status == status
    assert join([Gate(each) for each in statuses]).status == status


def test_joining_gates_keeps_the_reasons_of_those_that_are_not_met():
    joined = join([Gate("pass", ("fine",)), Gate("fail", ("a", "b")), Gate("undecided", ("c",)), Gate("none")])
    assert joined == Gate("fail", ("a", "b", "c"))


def test_reasons_say_what_they_bound_whatever_is_written_before_them():
    accuracy = accuracy_gate(agreement_of(50, 100), Budget(min_agreement=99))
    found = join([accuracy, bound_gate("size", 9, 5, "bytes", kind="size")]).named("low-latency-drop")
    assert kinds_of(found.reasons) == {"answers", "size"} and kinds_of(["latency 9 ms, budget 5"]) == frozenset()
    assert kinds_of(copy.deepcopy(found).reasons) == {"answers", "size"}
    assert json.dumps(encode(found)) == json.dumps({"status": "fail", "reasons": [str(each) for each in found.reasons]})
    assert unmet_fix(found.reasons).count("set another bound") == 2 and "latency" not in unmet_fix(found.reasons)


def classifiers(*answers, labels=None):
    """Classifiers of ten classes with these answers [n], sure of each, the second against the first."""
    ours, reference = (np.eye(10, dtype=np.float32)[np.array(each)] for each in answers)
    return compare(ours, reference, None if labels is None else np.array(labels))


CONSTANT, TURNS = [3] * 400, [*range(10)] * 40
# All but a few of one class, as of a detector of rare defects.
RARE = [0] * 390 + [1] * 10


@pytest.mark.parametrize(
    ("ours", "reference", "status", "control"),
    [
        (CONSTANT, CONSTANT, "undecided", 100),
        (RARE, RARE, "undecided", 95.1),
        ([0] * 400, RARE, "undecided", 97.5),
        (TURNS, TURNS, "pass", 9.8),
        (TURNS[:1], TURNS[:1], "undecided", None),
        (TURNS[1:] + TURNS[:1], TURNS, "fail", 10),
    ],
)
def test_what_unrelated_answers_meet_too_proves_nothing(ours, reference, status, control):
    """A bound of 95 % of equal answers, of which the control is exactly what a random other image gives."""
    found = classifiers(ours, reference)
    gate = accuracy_gate(found, Budget(min_agreement=95))
    assert gate.status == status
    assert ("proves nothing" in " ".join(gate.reasons)) == (status == "undecided")
    assert (found.control and round(found.control.agreement, 1)) == control
    by_agreement = accuracy_gate(found, Budget(max_drop=5), "agreement")
    assert (by_agreement.status == "pass") == (status == "pass")


def test_a_rare_class_is_proven_by_the_guard_or_a_bound_above_the_control():
    found = classifiers(RARE * 10, RARE * 10)
    assert accuracy_gate(found, Budget(min_agreement=95), guard=95).status == "pass"
    assert accuracy_gate(found, Budget(min_agreement=98)).status == "pass"
    [reason] = accuracy_gate(found, Budget(min_agreement=95)).reasons
    assert "a bound of 97.56 would prove it" in reason
    alike = classifiers([0] * 4000, RARE * 10)  # equal to 97.5 % without telling anything apart
    assert accuracy_gate(alike, Budget(min_agreement=95), guard=95).status == "undecided"


@pytest.mark.parametrize(
    ("ours", "reference", "status"),
    [
        (TURNS, TURNS, "pass"),
        (CONSTANT, CONSTANT, "undecided"),
        (TURNS[3:] + TURNS[:3], TURNS[7:] + TURNS[:7], "undecided"),  # both at chance, on the other side of it
    ],
)
def test_a_drop_of_a_model_at_chance_proves_nothing(ours, reference, status):
    found = classifiers(ours, reference, labels=TURNS)
    gate = accuracy_gate(found, Budget(max_drop=3))
    assert gate.status == status
    assert ("proves nothing: answers to other images would lose" in " ".join(gate.reasons)) == (status == "undecided")


def test_any_answer_passes_where_a_user_says_so():
    assert accuracy_gate(classifiers(CONSTANT, CONSTANT), Budget(min_agreement=0)).status == "pass"
