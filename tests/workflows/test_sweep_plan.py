"""The plan of a sweep: keys of what is not made yet, costs by what was seen, and what is finished."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitdeploy.api.sweep import SweepPlan
from vitdeploy.document.sweep import Estimate, PlannedRecipe, PlannedStage, PlanTotal, SweepPlanDocument
from vitdeploy.pipeline.run import MOST_BY_RULE, RULES, StepTimes, by_rule, expected_stages
from vitdeploy.stages.step import Step
from vitdeploy.store.key import Record
from vitdeploy.store.store import LOG_FILE, Line, append, made_now, read_log
from vitdeploy.workflows.sweep import added, planned_keys

ABOUT = {"parameters": 1000, "pixels": 1024, "samples": 100}


def step(name, *inputs, config=None, about=None):
    return Step(name, name.split()[0], None, config or {}, inputs, about=about or ABOUT)


def line(name="verify", seconds=2.0, size=1000, about=None, **changes):
    made = dataclasses.replace(made_now(name, seconds, about or ABOUT), **changes)
    return Line("made", "00" * 32, name.split()[0], size, made)


def test_two_plans_share_the_keys_of_what_is_equal_up_to_there():
    one = planned_keys([step("export"), step("optimize", "export"), step("place a", "optimize")])
    other = planned_keys(
        [step("export"), step("optimize", "export", config={"qkv": "merged"}), step("place a", "optimize")]
    )
    assert one["export"] == other["export"]
    assert one["optimize"] != other["optimize"] and one["place a"] != other["place a"]


def test_a_stage_is_estimated_by_those_that_were_as_large():
    log = [line(seconds=seconds, size=size) for seconds, size in ((2.0, 100), (8.0, 300), (3.0, 200))]
    log += [line(seconds=99.0, about={**ABOUT, "samples": 126}), line("verify other", 99.0), line(cpu="another")]
    seconds, size, seen = StepTimes(log, anywhere=False).of(step("verify"))
    assert (seconds, size, seen) == (Estimate(2.0, 3.0, 8.0), Estimate(100, 200, 300), 3)
    assert StepTimes(log, anywhere=True).of(step("verify"))[2] == 4
    assert StepTimes(log, anywhere=False).of(step("verify", about={**ABOUT, "samples": 125}))[2] == 4


@pytest.mark.parametrize("about", [{**ABOUT, "parameters": 2000}, {"parameters": 1000, "pixels": 1024}])
def test_of_what_was_never_seen_nothing_is_known(about):
    assert StepTimes([line()], anywhere=True).of(step("verify", about=about)) == (None, None, 0)
    assert added([]) is None


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_an_estimate_lies_in_what_was_seen(seen):
    seconds, _, count = StepTimes([line(seconds=value) for value in seen], anywhere=True).of(step("verify"))
    assert count == min(len(seen), 20) and min(seen) <= seconds.least <= seconds.median <= seconds.most <= max(seen)


def test_a_log_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    record = Record(1, "ab" * 32, "export", {}, {}, {}, (), made_now("export", 1.5, {"parameters": 7}))
    append(tmp_path, "made", record)
    append(tmp_path, "brought", record)
    with (tmp_path / LOG_FILE).open("ab") as file:
        file.write(b'{"event": "made", "key"')
    assert [(found.event, found.made) for found in read_log(tmp_path)] == [
        ("made", record.made),
        ("brought", record.made),
    ]
    assert list(read_log(tmp_path / "nothing")) == []
    assert len(list(read_log(tmp_path, most=len(json.dumps({}))))) == 0


def test_the_plan_says_what_is_unknown_and_does_not_count_it():
    stages = (
        PlannedStage("export", ("a", "b"), False, Estimate(1.0, 2.0, 5.0), Estimate(4e6, 4e6, 4e6), 3),
        PlannedStage("verify x", ("a",), False, None, None, 0),
        PlannedStage("reference", ("a", "b"), True, None, None, 0),
    )
    recipes = (
        PlannedRecipe("a", "g.yaml", False, None, 30.0, 90.0),
        PlannedRecipe("b", "g.yaml", True, None, None, None),
    )
    total = PlanTotal(5, 3, 1, 2, 1, Estimate(1.0, 2.0, 5.0), Estimate(4e6, 4e6, 4e6), 30.0, 90.0)
    text = str(SweepPlan(SweepPlanDocument(1, "", recipes, stages, total, {}), cost_per_hour=360.0))
    assert "5 in total, 3 distinct, 1 stored, 2 to run: about 2 s (1 s to 5 s) and 4.0 MB; unknown for 1 more" in text
    assert "at least 32 s, cost at least 3.20" in text and "2, 1 already finished, 1 to measure, about 30 s" in text


class Stored:
    """A store whose log has some lines, and which has the artifacts of some kinds."""

    def __init__(self, root, lines=(), kinds=()):
        self.root, self.kinds = root, kinds
        (root / LOG_FILE).write_text("")
        for each in lines:
            append(root, "made", Record(1, each.key, each.kind, {}, {}, {}, (), each.made))

    def find(self, key):
        return SimpleNamespace(path=self.root, digest="00" * 32) if key in self.kinds else None


def test_stages_take_what_they_took_here_or_what_a_rule_says(tmp_path):
    export, verify = step("export"), step("verify")
    nothing = expected_stages([export, verify], Stored(tmp_path), resume=True)
    assert nothing.seconds == pytest.approx(by_rule("export", ABOUT) + by_rule("verify", ABOUT))
    assert nothing.most == pytest.approx(MOST_BY_RULE * nothing.seconds)
    known = expected_stages([export, verify], Stored(tmp_path, [line("verify", 80.0)]), resume=True)
    assert known.seconds == pytest.approx(by_rule("export", ABOUT) + 80)
    there = Stored(tmp_path, kinds={export.key({})})
    assert expected_stages([export, verify], there, resume=True).seconds == by_rule("verify", ABOUT)
    assert expected_stages([export, verify], there, resume=False).seconds == nothing.seconds


def test_a_larger_model_and_more_images_take_longer():
    base = {"parameters": 5_700_000, "pixels": 224 * 224, "images": 128}
    for kind in RULES:
        assert by_rule(kind, base) <= by_rule(kind, {**base, "parameters": 86_000_000})
    assert by_rule("calibrate", base) < by_rule("calibrate", {**base, "images": 256})
    assert by_rule("unheard of", base) > 0
