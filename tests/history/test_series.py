"""Series of rows: what belongs together, where it changed, and what changed with it."""

import dataclasses
import json
import re

from tests.history.made import (
    MEASURED,
    START,
    bench_rows,
    history_of_everything,
    latencies,
    machine,
    report,
    stamped,
)
from vitdeploy.document.history import HistoryDocument
from vitdeploy.errors import AnswersError
from vitdeploy.history.of_documents import row_of_canary, rows_of_report
from vitdeploy.history.series import history_document
from vitdeploy.spec import decode, encode

SIZE, AT = 320, 200


def series_of(values, where=lambda number: machine(), **of_number):
    """The one series of a bench a result; `of_number` gives flags and reasons by the index."""
    rows = []
    for number, p50 in enumerate(values):
        given = {name: each(number) for name, each in of_number.items()}
        rows += stamped(bench_rows(float(p50), number, where(number), **given), number + 1)
    (found,) = history_document(rows, [], "here").series
    return found


def test_a_slowdown_with_an_upgrade_is_told_with_it():
    upgraded = lambda number: machine(openvino="2026.3.0" if number < AT else "2026.4.0")  # noqa: E731
    found = series_of(latencies(0, SIZE, 0.02, 0.3, 0.3, at=AT, factor=1.05), upgraded)
    (change,) = found.changes
    assert change.direction == "slower" and abs(change.number - (AT + 1)) <= 1
    assert [(each.what, each.before, each.after) for each in change.differences] == [
        ("runtime", "openvino 2026.3.0", "openvino 2026.4.0")
    ]
    assert {"vitdeploy", "model digest", "host", "system", "Python", "command"} == set(change.same)
    assert change.unclear == () and found.points[change.number - 1].time == change.time
    assert found.noise is not None and found.too_few == ""


def test_an_improvement_with_another_vitdeploy_is_told_too():
    released = lambda number: machine(vitdeploy="0.1.0" if number < AT else "0.2.0")  # noqa: E731
    (change,) = series_of(latencies(1, SIZE, 0.02, 0.3, 0.3, at=AT, factor=1 / 1.08), released).changes
    assert change.direction == "faster" and change.ratio < 1
    assert [(each.what, each.before, each.after) for each in change.differences] == [("vitdeploy", "0.1.0", "0.2.0")]


def test_what_changed_long_before_is_not_blamed():
    earlier = lambda number: machine(openvino="2026.3.0" if number < 100 else "2026.4.0")  # noqa: E731
    (change,) = series_of(latencies(0, SIZE, 0.02, 0.3, 0.3, at=AT, factor=1.1), earlier).changes
    assert change.differences == change.shares == () and change.unclear == ("runtime",)
    assert change.sentence.endswith(", and no recorded fact changed with it.")


def with_hosts(values, host):
    """The one series of benches on hosts by their index, which have the same kind of machine."""
    rows = []
    for number, p50 in enumerate(values):
        given = stamped(bench_rows(float(p50), number), number + 1)
        rows += [dataclasses.replace(row, host=host(number)) for row in given]
    (found,) = history_document(rows, [], "here").series
    return found


def test_a_slower_host_that_came_in_among_others_is_told_with_its_share():
    slow = lambda number: number >= 70 and number * 7919 % 10 < 7  # noqa: E731
    values = [each * (1.09 if slow(number) else 1) for number, each in enumerate(latencies(21, 160, 0.012, 0.3, 0.3))]
    (change,) = with_hosts(values, lambda number: "new" if slow(number) else "old").changes
    assert change.differences == () and change.unclear == ("host",)
    (share,) = change.shares
    assert (share.what, share.value, share.of_before, share.of_after) == ("host", "new", 30, 30)
    assert share.before <= 3 and share.after >= 18 and 1.07 < share.ratio < 1.11
    assert re.search(
        r", with host new in \d\d of 30 results after it, in \d of 30 before "
        r"\(\d\.\d % slower than the others\)\.$",
        change.sentence,
    )


def test_hosts_that_take_turns_all_the_time_are_not_blamed():
    values = latencies(0, SIZE, 0.02, 0.3, 0.3, at=AT, factor=1.1)
    (change,) = with_hosts(values, lambda number: f"host-{number * 7919 % 3}").changes
    assert change.unclear == ("host",) and change.shares == ()


def test_what_changed_together_is_named_together_and_nothing_is_chosen():
    where = lambda number: machine(  # noqa: E731
        openvino="2026.3.0" if number < AT else "2026.4.0", driver="", vitdeploy="0.1.0" if number < AT else "0.2.0"
    )
    (change,) = series_of(latencies(0, SIZE, 0.02, 0.3, 0.3, at=AT, factor=1 / 1.1), where).changes
    assert re.fullmatch(
        r"vit openvino-cpu-fp32 got 9\.\d % faster \(\d\.\d to \d+\.\d\) at result 201 of 2026-01-09, when the runtime "
        r"changed from openvino 2026\.3\.0 to openvino 2026\.4\.0 and vitdeploy changed from 0\.1\.0 to 0\.2\.0; "
        r"the series does not show which of these is the cause\.",
        change.sentence,
    )


def test_another_model_is_named_by_its_digest():
    rows = []
    for number, p50 in enumerate(latencies(2, 100, 0.01, 0.0, 0.0, at=60, factor=1.2)):
        digest = ("ab" if number < 60 else "cd") * 32
        given = stamped(bench_rows(float(p50), number), number + 1)
        rows += [dataclasses.replace(row, model_digest=digest) for row in given]
    (change,) = history_document(rows, [], "here").series[0].changes
    assert ", when the model changed from sha256:abababababab to sha256:cdcdcdcdcdcd." in change.sentence


def test_results_that_are_not_decided_are_shown_and_not_judged():
    values = latencies(0, 60, 0.02, 0.0, 0.0)
    values[40:] *= 1.5
    reason = lambda number: "other work" if number >= 40 else ""  # noqa: E731
    found = series_of(values, reason=reason, flags=lambda number: ["unstable"] if number == 3 else [])
    assert found.changes == () and len(found.points) == 60
    assert [point.decided for point in found.points] == [True] * 40 + [False] * 20
    assert found.points[50].undecided == "other work" and found.points[3].flags == ("unstable",)


def test_a_change_behind_undecided_results_has_the_number_of_its_point():
    values = latencies(0, 60, 0.01, 0.0, 0.0, at=30, factor=1.3)
    found = series_of(values, reason=lambda number: "other work" if number < 10 else "")
    assert [change.number for change in found.changes] == [31]


def test_too_few_results_are_said_to_be_too_few():
    found = series_of([1.0] * 9)
    assert found.too_few == "9 decided results (change detection needs 10)" and found.noise is None


def test_other_machines_batches_and_precisions_are_other_series():
    rows = bench_rows(1.0)
    others = [
        bench_rows(1.0, where=machine(cpu="another CPU")),
        bench_rows(1.0, where=machine(cores="8")),
        [dataclasses.replace(rows[0], batch=8)],
        [dataclasses.replace(rows[0], precision="int8")],
        [dataclasses.replace(rows[0], model="other")],
        [dataclasses.replace(rows[0], threads=2)],
    ]
    every = [row for number, each in enumerate([rows, *others, rows], 1) for row in stamped(each, number)]
    found = history_document(every, [], "here")
    assert sorted(len(series.points) for series in found.series) == [1] * 6 + [2] and found.results == 8


def test_a_canary_is_a_point_of_its_engine():
    error = AnswersError("wrong answers here", found="2 of 8")
    rows = [*stamped(bench_rows(1.0), 1), *stamped([row_of_canary(error, MEASURED, machine(), START)], 2)]
    (found,) = history_document(rows, [], "here").series
    assert [point.kind for point in found.points] == ["bench", "canary"]
    assert found.points[1].error == "VD4204: wrong answers here: 2 of 8" and found.points[1].p50_ms is None


def test_a_run_without_a_bench_is_a_series_without_times():
    (found,) = history_document(stamped(rows_of_report(report(bench=None), machine()), 1), [], "here").series
    assert found.points[0].p50_ms is None and found.points[0].agreement == 99.0


def test_the_document_is_read_as_it_was_written():
    document = history_of_everything()
    assert decode(HistoryDocument, json.loads(json.dumps(encode(document), allow_nan=False))) == document
    assert {len(series.changes) for series in document.series} == {0, 1}
