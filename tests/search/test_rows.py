"""The number of rows that a target is fastest with: what is measured, and what is made of it."""

import math

import numpy as np
import pytest
from scipy import stats

from vitdeploy.benchmark.evidence import ratio_of_rounds
from vitdeploy.benchmark.results import BlockMachine, Round
from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.rows import align_rows
from vitdeploy.search import frame as alternatives
from vitdeploy.search import rows
from vitdeploy.search.frame import fingerprint
from vitdeploy.spec import decode, encode


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(197, (197, 200, 208, 224, 256)), (192, (192,)), (17, (17, 24, 32)), (257, (257, 264, 272, 288, 320)), (3, (3,))],
)
def test_candidates_are_the_next_multiples_below_twice_the_tokens(tokens, wanted):
    assert (tokens, *rows.more_rows(tokens, rows.MULTIPLES)) == wanted


@pytest.mark.parametrize(("target", "precision"), [("openvino-cpu", "int8"), ("onnxruntime-cpu", "fp32")])
def test_every_candidate_is_measured(small_export, quick_rounds, target, precision):
    told = []
    table = rows.measure_rows(
        small_export / "model.onnx", target, precision, progress=lambda *each: told.append(each[0])
    )
    assert (table.target, table.precision, table.tokens) == (target, precision, 17)
    assert table.device == fingerprint(target)
    assert [each.rows for each in table.timings] == [17, 24, 32]
    assert all(len(each.rounds_ms) == 2 and each.low <= each.ratio <= each.high for each in table.timings)
    assert (table.timings[0].ratio, table.timings[0].high) == (1, 1)
    assert decode(rows.RowTable, encode(table)) == table
    assert {f"prepare 24 rows for {target}", "time the rows"} <= set(told)


def measured(times, processes=4, machine=None):
    """Rounds with these medians that vary by 2 %, for each number of rows."""
    noise = np.random.default_rng(0).uniform(0.98, 1.02, (len(times), 16))
    return [
        [Round(1, np.array([ms * each]), 0.25, k * processes // 16, machine=machine) for k, each in enumerate(noise[i])]
        for i, ms in enumerate(times.values())
    ]


def timed(times, processes=4, machine=None):
    found = zip(times, alternatives.timings_of(measured(times, processes, machine)), strict=True)
    return tuple(rows.RowTiming(rows=number, **vars(each)) for number, each in found)


def table(times, processes=4, disturbed=""):
    timings = timed(times, processes)
    return rows.RowTable(
        *("openvino-cpu", "today", {}), precision="int8", tokens=197, timings=timings, disturbed=disturbed
    )


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({197: 30.0, 200: 28.0, 208: 27.0, 224: 29.0}, 208),
        ({197: 30.0, 200: 29.99, 208: 31.0}, 197),
        ({197: 30.0, 200: 33.0}, 197),
        ({192: 30.0}, 192),
    ],
)
def test_the_best_is_the_fastest_that_is_surely_faster(times, best):
    assert table(times).best.rows == best


@pytest.mark.parametrize("others", [1, 2, 4])
def test_each_of_several_intervals_is_wider_so_that_all_hold_at_95_percent(others):
    """Bonferroni: each of k is left out with 5 % / k; what others used of the machine widens each by as much."""
    for machine, bias in ((None, 0.0), (BlockMachine(0.2, 0.1, 0.0, None, None, None, None, 0.0, 0.01), 0.04)):
        plain, *several = found = measured({197 + 8 * i: 30.0 + i for i in range(others + 1)}, machine=machine)
        timings = alternatives.timings_of(found)
        assert timings[0] == alternatives.VariantTiming(tuple(block.latencies_ms[0] for block in plain), 1.0, 1.0, 1.0)
        for timing, each in zip(timings[1:], several, strict=True):
            ratio = ratio_of_rounds(each, plain)
            reach = stats.t.ppf(1 - 0.05 / others / 2, ratio.freedom) * ratio.error + bias
            assert timing.rounds_ms == tuple(block.latencies_ms[0] for block in each)
            ends = (ratio.log - reach, ratio.log, ratio.log + reach)
            assert (timing.low, timing.ratio, timing.high) == pytest.approx([math.exp(end) for end in ends])


def test_what_processes_differ_by_is_in_the_intervals():
    """Some per cent are found of four processes, and not of one; of disturbed times nothing is the best."""
    times = {197: 30.0, 200: 28.5}
    assert (table(times).aligned, table(times, processes=1).aligned) == (200, None)
    assert table(times, disturbed="others had 40 % of the CPUs' time").aligned is None


def test_graphs_whose_rows_cannot_be_aligned_are_refused(small_export, tmp_path):
    model = load_graph(small_export / "model.onnx")
    align_rows(model, 20)
    save_graph(model, tmp_path / "model.onnx")
    with pytest.raises(GraphError, match="the rows of this graph cannot be aligned"):
        rows.measure_rows(tmp_path / "model.onnx", "openvino-cpu")
