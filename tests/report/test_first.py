"""The first screen of every page: what a reader needs to decide, whatever the outcome."""

import copy
import dataclasses
import itertools
import re

import pytest

from tests.documents import as_report, page_of
from tests.history.made import history_of_everything
from tests.report.pages import compare_document, pages, run_report, sweep_document
from tests.report.test_html import REPORT, without_bench, without_labels
from tests.report.test_tuning import DOCUMENT, tuned
from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.report.html import render_history, render_regression, render_sweep, render_tuning
from vitdeploy.report.planes import accuracy_plot, pareto_plot
from vitdeploy.spec import decode
from vitdeploy.workflows.regression import SENTENCES

[NAME] = [engine["artifact"] for engine in REPORT["engines"]]


def runs():
    """Reports with every gate and grade, with and without labels and a bench."""
    kinds = itertools.product(("pass", "fail", "undecided", "none"), (None, "recommended", "leading", "no ranking"))
    for make, (gate, grade) in itertools.product((lambda: REPORT, without_labels, without_bench), kinds):
        report = copy.deepcopy(make())
        recommended = "original" if gate == "fail" else NAME if grade == "recommended" else None
        report["verdict"] |= {"gate": gate, "grade": grade, "recommended": recommended, "leading": None}
        report["engines"][0]["gate"]["status"] = gate
        yield f"run {make.__name__} {gate} {grade}", page_of(report, {})


def others():
    yield "tune", render_tuning(tuned(DOCUMENT), "")
    compared = compare_document()
    for status, sentence in SENTENCES.items():
        for checks in (compared["engines"][0]["checks"], []):
            engines = [{**each, "checks": checks} for each in compared["engines"]]
            found = {**compared, "gate": {"status": status, "reasons": []}, "sentence": sentence, "engines": engines}
            yield f"compare {status}", render_regression(decode(ComparisonDocument, found))
    bare = [{**each, "accuracy": None, "ratios": []} for each in compared["engines"]]
    found = {**compared, "engines": bare, "bench": None, "remarks": [], "digests": []}
    yield "compare of nothing", render_regression(decode(ComparisonDocument, found))
    swept = sweep_document()
    yield "sweep", render_sweep(decode(SweepDocument, swept))
    failed = [each for each in swept["recipes"] if each["error"]]
    yield "sweep of errors", render_sweep(decode(SweepDocument, {**swept, "recipes": failed}))
    history = history_of_everything()
    yield "history", render_history(history)
    for series in (history.series, history.series[1:], ()):
        changed = dataclasses.replace(history, canaries=(), series=series)
        yield f"history of {len(series)}", render_history(changed)


@pytest.mark.parametrize("make", [runs, others])
def test_the_first_screen_has_a_short_headline_two_badges_four_numbers_and_what_would_change_it(make):
    for name, html in make():
        header = html.partition("<header>")[2].partition("</header>")[0]
        [headline] = re.findall(r"<h1>(.*?)</h1>", header)
        assert 2 < len(headline.split()) <= 12, (name, headline)
        badges = re.findall(r'class="badge (?:pass|fail|undecided|none)"><span[^>]*>.</span>(.*?)</span>', header)
        assert [badge.partition(":")[0] for badge in badges] == ["Answers", "Speed"], name
        numbers = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", header, re.DOTALL)
        assert len(numbers) == 4 and all(note and re.search(r"\d|not decided", value) for note, value in numbers), name
        # Numbers of an engine that is not recommended, as below "Keep the original", say so.
        if " fail " in name:
            assert badges[1] == "Speed: not judged"
            assert f"Numbers of {NAME} (not recommended)" in header and "; recommended; " not in html, name
        change = re.search(r"What would change this:</strong> (.*?)</p>", header, re.DOTALL)[1]
        assert len(change.split()) > 1 and "None" not in change, (name, change)


def change(html):
    return re.search(r"What would change this:</strong> (.*?)</p>", html, re.DOTALL)[1]


@pytest.mark.parametrize(
    ("limits", "keys"),
    [
        ("max_drop 2, min_agreement 90", "budget.max_drop below 1.50 points or budget.min_agreement above 95.00 %"),
        ("max_drop 2", "budget.max_drop below 1.50 points"),
        ("", "budget.min_agreement above 95.00 %"),
    ],
)
def test_what_would_change_a_clear_win_are_the_bounds_that_it_meets_and_their_keys(limits, keys):
    report = copy.deepcopy(REPORT)
    report["verdict"] |= {"grade": "recommended", "recommended": NAME, "remarks": [], "budget": limits}
    assert change(page_of(report, {})).startswith(f"A stricter bound: {keys} (now {limits or 'no bound'}). ")
    # Top-1 cannot drop by more than the share of changed answers, which a drop may be judged by.
    report["engines"][0]["verify"] |= {"drop_ci95": [-9.0, 9.0], "agreement_ci95": [98.5, 100.0]}
    assert ("max_drop below 1.50" in change(page_of(report, {}))) == ("max_drop" in limits)


def test_what_would_change_an_undecided_verdict_is_more_of_what_it_lacks():
    report = copy.deepcopy(REPORT)
    images = "More evaluation images (data.evaluation.images)"
    bench = "A longer bench (bench.duration) on a quiet machine"
    for reason, words in (
        ("drop 1 points", f"{images}, or another budget.max_drop. "),
        ("p50 latency 3 ms", f"{bench}, or another budget.max_latency. "),
    ):
        report["verdict"] |= {"gate": "undecided", "reasons": [f"{NAME}: {reason}, budget 2"]}
        assert change(page_of(report, {})).startswith(words)


def test_an_original_that_is_kept_is_no_speed_to_recommend():
    report = copy.deepcopy(REPORT)
    report["verdict"] |= {"grade": "recommended", "recommended": "original", "remarks": []}
    page = page_of(report, {})
    assert "Speed: original kept" in page and "an engine is provably faster" in change(page)


def test_details_are_collapsed_and_print_opens_them():
    for name, html in pages().items():
        assert not re.search(r"<details[^>]* open", html), name
        assert "::details-content { content-visibility: visible" in html
    folded = re.findall(r'<details class="folded"><summary><h2 [^>]*>(.*?)</h2>', pages()["run"])
    assert {"Timeline", "Where the time goes", "How it was made and measured"} <= set(folded)


def test_no_paragraph_or_section_is_a_lone_dash():
    for name, html in itertools.chain(pages().items(), runs()):
        assert not re.search(r"<(p|li|h\d|dd)[^>]*>\s*[-–—]?\s*</\1>", html), name


def test_a_run_whose_artifacts_do_not_provably_differ_has_no_front():
    report = run_report()
    same = accuracy_plot(as_report(report))
    assert "No Pareto front is drawn: " in same.caption
    report["engines"][0]["verify"] |= {"drop_ci95": [0.25, 0.75]}
    clear = accuracy_plot(as_report(report))
    assert "The grey steps are the Pareto front" in clear.caption


def test_a_search_that_measured_noise_draws_no_front():
    clear = pareto_plot(tuned(DOCUMENT))
    assert "The line is the Pareto front" in clear.caption
    undecided = {each["name"]: "busy" for each in DOCUMENT["variants"] if each["finalist"]}
    bench = {**DOCUMENT["bench"], "undecided": undecided}
    for noise in ({"disturbed": "other processes used the CPUs"}, {"bench": bench}):
        plot = pareto_plot(tuned({**DOCUMENT, **noise}))
        assert "No Pareto front is drawn: " in plot.caption and "The line" not in plot.caption
        assert plot.wide.count("<path") < clear.wide.count("<path")
