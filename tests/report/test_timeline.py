"""The timelines of a bench: what moved, when, and together with what."""

import re

import numpy as np
import pytest

from tests.documents import bench_of
from tests.report.bench_runs import bench
from tests.report.test_html import HOSTILE
from vitdeploy.document.bench import Bench
from vitdeploy.report.latency import bench_plots, moves, timeline_plots
from vitdeploy.report.page import measured_alone
from vitdeploy.spec import decode

NAMES = [f"engine-{letter}" for letter in "abcd"]


def plots_of(found):
    return {plot.title: plot for plot in timeline_plots(measured_alone(decode(Bench, found)))}


def label(plot):
    return re.search(r'aria-label="([^"]*)"', plot.wide)[1]


def test_moves_are_percents_of_the_median():
    np.testing.assert_allclose(moves(np.array([1.0, 2.0, 3.0])), [-50, 0, 50])
    assert moves(np.array([])).size == 0


def test_a_contest_is_one_timeline_with_its_processes_and_scenarios():
    plot = plots_of(bench(NAMES))["Timeline"]
    for variant in (plot.wide, plot.narrow):
        for words in (*NAMES, "process 1", "process 3", "single", "offline", "seconds since the start of the bench"):
            assert f">{words}</text>" in variant
    assert "started again" in plot.caption and "mean of all" in plot.caption


def test_drift_and_a_single_slow_block_are_told_in_words():
    steady, drifting = (label(plots_of(bench(NAMES, drift=drift))["Timeline"]) for drift in (0.0, 0.5))
    slow = label(plots_of(bench(NAMES, slow=("engine-b", 2)))["Timeline"])

    def largest(words, name):
        return int(re.search(rf"{name}: single [\d.]+ ms, [-+]\d+ to \+(\d+) %", words)[1])

    assert all(largest(steady, name) < 5 for name in NAMES)
    assert all(largest(drifting, name) > 5 for name in NAMES)
    assert [largest(slow, name) > 50 for name in NAMES] == [False, True, False, False]


def test_two_artifacts_have_no_common_line_and_one_process_no_mark():
    plot = plots_of(bench(NAMES[:2], ("single",), processes=1))["Timeline"]
    assert "mean of all" not in plot.caption and "started again" not in plot.caption
    assert "process" not in plot.wide


def test_a_sustained_run_has_a_timeline_of_its_own_from_its_beginning():
    found = plots_of(bench(NAMES[:2], ("single", "server:50", "sustain:12s")))
    assert list(found) == ["Timeline", "Timeline of sustain:12s"]
    assert "server:50" in label(found["Timeline"]) and "sustain" not in label(found["Timeline"])
    assert "80.0/s" in label(found["Timeline of sustain:12s"])
    assert "since the start of the artifact’s run" in found["Timeline of sustain:12s"].wide


def test_a_server_that_answered_nothing_for_a_while_has_a_gap_there():
    found = bench(NAMES[:1], ("server:50",))
    found["results"][0]["scenarios"]["server:50"]["blocks"]["median_ms"][2] = None
    assert plots_of(found)["Timeline"]
    found["results"][0]["scenarios"]["server:50"]["blocks"]["median_ms"] = [None] * 6
    assert plots_of(found) == {}


@pytest.mark.parametrize("found", [None, measured_alone(bench_of([]))])
def test_without_a_bench_there_is_nothing(found):
    assert bench_plots(found) == []


def test_names_of_any_kind_are_text():
    wide = plots_of(bench([HOSTILE, "b" * 80]))["Timeline"].wide
    assert "<script" not in wide and "&lt;script" in wide and "…" in wide
