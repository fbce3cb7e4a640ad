"""What a page says of the answers, and what it claims of them: nothing that its interval does not carry."""

import copy
import dataclasses
import re

import pytest

from tests.documents import as_report, page_of
from tests.report.answered import answered, example
from tests.report.bench_runs import bench
from tests.report.test_html import ALLOWED, HOSTILE, REPORT, Page
from vitdeploy.document.commands import SelftestDocument, SelftestModel
from vitdeploy.document.comparison import TimeRatio
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.report import context as reliability
from vitdeploy.report import page as notes
from vitdeploy.report import summary, table
from vitdeploy.report.html import render_selftest, render_sweep
from vitdeploy.report.page import notices
from vitdeploy.report.planes import sweep_plots
from vitdeploy.report.summary import examples
from vitdeploy.spec import decode
from vitdeploy.verification.classes import Drops, LostClasses, Reliability

[NAME] = [engine["artifact"] for engine in REPORT["engines"]]
MACHINE = {"cpu": "a CPU", "cores": "2", "system": "Linux", "python": "3.10"}
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"


def report_of(classes=4, bench=None, **changes):
    report = {**copy.deepcopy(REPORT), "bench": bench, "answers": answered([NAME], classes)}
    report["examples"] = [
        example(7, "changed", [NAME], answers=["dog"]),
        example(8, "changed", [NAME], label="dog", answers=["dog"], image="1.jpg"),
        example(9, "changed", [NAME], label="bird", answers=["dog"]),
        example(10, "unsure", [NAME]),
        example(11, "usual", [NAME]),
    ]
    return report | changes


@pytest.fixture(scope="module")
def page():
    return Page(page_of(report_of(), {"0.png": PNG, "1.jpg": JPEG}))


def test_the_contents_lead_to_every_section_that_there_is(page):
    ids = [values["id"] for tag, values in page.elements if tag == "h2"]
    links = [values["href"] for tag, values in page.elements if tag == "a"]
    every = {values["id"] for _, values in page.elements if "id" in values}
    # A link into a collapsed section opens it in the browser.
    assert links[: len(ids)] == [f"#{name}-open" if f"{name}-open" in every else f"#{name}" for name in ids]
    assert {"classes-open", "details-open"} <= every and "comparison-open" not in every
    assert ids[:4] == ["summary", "comparison", "changed", "classes"]
    assert {link[1:] for link in links if link.startswith("#")} <= every
    assert all(ALLOWED.fullmatch(load) or load.startswith("data:image/jpeg") for load in page.loads)


def test_changed_answers_come_first_with_what_became_of_them(page):
    words = ["Right became wrong (1 engine)", "Wrong became right (1 engine)", "Wrong, differently (", "Low confidence"]
    places = [page.text.index(each) for each in words]
    assert places == sorted(places)
    for part in ("evaluation/cat/7.png", "30 of 64", "Below are the 3 worst", "1 image with the lowest confidence of"):
        assert part in page.text
    assert [len(examples(as_report(report_of()), changed)) for changed in (True, False)] == [3, 2]


def test_an_answer_differs_where_it_has_changed_and_not_where_its_words_do():
    """Of numbers within their tolerance other digits may be shown, and of boxes that moved the same words."""
    said = example(1, "usual", [NAME], label=None, reference="31 years", answers=["32 years"]) | {"differing": []}
    text = Page(page_of(report_of(examples=[said]), {}).partition("</head>")[2]).text
    assert "32 years" in text and "≠" not in text and "All engines agree" in text
    said = example(1, "usual", [NAME], label=None, reference="2 boxes") | {"differing": [NAME]}
    assert "≠" in Page(page_of(report_of(examples=[said]), {}).partition("</head>")[2]).text


def test_right_answers_that_stay_right_have_a_column():
    report = report_of()
    assert "Unchanged correctness" not in page_of(report, {})
    report["answers"]["changed"][NAME]["kept"] = 2
    text = Page(page_of(report, {}).partition("</head>")[2]).text
    assert "Unchanged correctness" in text
    assert "4 wrong became right, 2 as right as before, 4 wrong, but differently" in text


def test_a_class_is_said_to_lose_where_its_interval_carries_it(page):
    assert page.text.count("provably loses") == 1 and "Provably lost: class 3" in page.text
    found = decode(Drops, report_of()["answers"]["classes"])
    found.lost[NAME] = LostClasses(0, ())
    assert summary.class_headline(found, NAME) == "No class provably loses accuracy (95 % for 4 classes together)."


def test_few_classes_are_a_heat_map_and_many_a_list():
    few, twenty, many = (page_of(report_of(count), {}).partition("</head>")[2] for count in (4, 20, 30))
    assert "Answers by label" not in many and "Answers by label" in few
    # 20 confusions, and the only class whose accuracy changed: a row of a class without a change shows nothing.
    assert many.count('<th scope="row" class="breaks">') == 21 and "10 more classes not listed." in Page(many).text
    assert "19 classes without a change: images are too few to exclude a drop of up to" in Page(many).text
    *_, last = re.findall(r'<tr><th scope="row">class .*?</tr>', few.partition("Answers by label")[2])
    cells = re.findall(r'<td class="shade-(\d)">(\d*)(?:<small>([^<]*)</small>)?</td>', last)
    assert cells[0][0] == "5" and cells[3][1] == "" and cells[3][2].startswith("−")
    assert "roomy" not in few and "roomy" in twenty


def test_a_calibration_error_that_chance_makes_is_called_that():
    found = Reliability(1.0, 2.0, 90.4, 98.3, ())
    assert "within chance" in reliability.calibration_words("engine", found)
    assert "under-confident (90.4 % confidence, 98.3 % accuracy)" in reliability.calibration_words(
        "engine", dataclasses.replace(found, error=3.0)
    )


def test_without_answers_and_labels_there_are_no_such_sections():
    bare = as_report(report_of(answers=None, examples=[]))
    assert summary.class_engines(bare) == [] and reliability.reliability_plot(bare) is None
    text = Page(page_of(report_of(answers=None, examples=[]), {}).partition("</head>")[2]).text
    assert "with changed answers" not in text and "Class by class" not in text
    unlabelled = report_of()
    unlabelled["answers"] |= {"confusion": None, "classes": None, "reliability": None}
    unlabelled["answers"]["changed"][NAME] |= {"lost": None, "gained": None}
    found = as_report(unlabelled)
    assert ("Changed answers", "30 of 64", "changed") in summary.summary(found) and summary.class_engines(found) == []
    html = page_of(unlabelled, {})
    assert "with changed answers" in html and 'scope="col">Right became wrong' not in html


def test_names_of_classes_and_files_stay_text():
    report = report_of()
    report["answers"] = answered([NAME], 4, names=[HOSTILE, "a", "b", "c"])
    report["examples"][0] |= {"sample": HOSTILE, "label": HOSTILE}
    html = page_of(report, {})
    assert "<script" not in html and "&lt;script&gt;alert(1)" in html


def cards(ratio, low, high, p50=(1.0, 2.0), **rest):
    measured = copy.deepcopy(REPORT["bench"])
    measured["ratios"][0] |= {"ratio": ratio, "ci95": [low, high], **rest}
    for row, value in zip(measured["results"], reversed(p50), strict=True):
        row["latency_ms"] = {**row["latency_ms"], "p50": value}
    return {cell.value: cell.note for cell in table.headline(as_report({**REPORT, "bench": measured}))}


def test_a_card_claims_what_its_interval_carries():
    assert "95 % interval 1.82 to 2.22" in cards(0.5, 0.45, 0.55)["2.00×"]
    assert "so slower" in cards(1.5, 1.4, 1.6)["1.50×"]
    assert "no clear difference" in cards(0.9, 0.8, 1.1)["0.800 to 1.10×"]
    assert "no proven difference" in cards(0.5, 0.45, 0.55)["≤ 1.50 pt"]
    report = copy.deepcopy(REPORT)
    report["engines"][0]["verify"]["drop_ci95"] = [0.1, 0.9]
    assert "0.50 pt" in [cell.value for cell in table.headline(as_report(report))]


def test_what_is_not_decided_is_no_ratio_and_has_no_star():
    assert "not decided" in cards(0.5, 0.45, 0.55, decided=False)
    measured = {**copy.deepcopy(REPORT["bench"]), "undecided": {NAME: "other work was running"}}
    for ratio in measured["ratios"]:
        ratio |= {"decided": False, "reason": "other work was running"}
    report = {**REPORT, "bench": measured}
    found = as_report(report)
    assert as_report(REPORT).starred == NAME and found.starred is None
    assert "not decided" in [cell.value for cell in table.headline(found)]
    text = Page(page_of({**report, "warnings": ["is the class order right?"]}, {})).text
    assert text.index("is the class order right?") < text.index(REPORT["verdict"]["sentence"])
    assert text.index("Remarks and reasons") < text.index(f"{NAME}: other work was running")
    assert "★" not in text and "2.00×" not in text and "0.450 to 0.550" not in text
    ratio = TimeRatio("latency", 0.5, (0.45, 0.55), difference="faster")
    assert table.time_ratio(ratio).value == "0.500"
    assert table.time_ratio(dataclasses.replace(ratio, decided=False, reason="busy")).value == "not decided"
    models = (SelftestModel("model", True, (), found.bench),)
    tested = render_selftest(SelftestDocument(1, "cpu", "", True, True, "", (), (), models, MACHINE))
    ratios = re.findall(r'data-label="Latency ÷ reference’s">([^<]*)<', tested)
    assert ratios == ["–", "not decided"]


@pytest.mark.parametrize("grade", ["recommended", "leading", "no ranking"])
def test_a_grade_has_a_badge_and_reasons_are_folded_once(grade):
    """Beside others: what holds at least is the number, and the page says one thing of the speed in one place."""
    report, why = copy.deepcopy(REPORT), "none of the 7 single rounds was clean"
    sure = grade == "recommended"
    report["verdict"] |= {"grade": grade, "recommended": NAME if sure else None, "leading": NAME, "gate": "pass"}
    report["bench"]["undecided"] = {NAME: why}
    for ratio in report["bench"]["ratios"]:
        ratio |= {"decided": False, "reason": why, "bounds": [None, 0.52] if sure else [None, None]}
    text = Page(page_of(report, {})).text
    assert "Answers: passed" in text and f"Speed: {grade}" in text
    assert text.count(why) == 1 and text.index("Remarks and reasons") < text.index(why)
    assert "Speed is not decided" not in text and "0.450 to 0.550" not in text
    assert ("★" in text) is sure and ("≥ 1.9×" in text) is sure and ("at most 0.52" in text) is sure
    assert (f"Leading candidate: {NAME}" in text) is (grade == "leading")
    limited = {**report["verdict"], "budget": "min_agreement 97, max_latency 3"}
    assert "Budget: passed" in Page(page_of({**report, "verdict": limited}, {})).text


def test_where_nothing_is_recommended_the_numbers_are_of_what_leads():
    report = copy.deepcopy(REPORT)
    report["verdict"] |= {"recommended": None, "leading": NAME}
    text = Page(page_of(report, {})).text
    assert f"Numbers of {NAME} (not recommended)" in text and "Numbers of None" not in text


def test_reasons_that_artifacts_share_are_said_once():
    found = notices([], {"a": "busy", "b": "busy", "c": "hot"}, {})
    assert [each.lines for each in found] == [["a, b: busy", "c: hot"]]
    assert notices([]) == []


def test_flags_that_are_used_have_a_legend_and_a_new_one_its_name():
    assert notes.legend(["short", "brand-new", "unstable", "short"]) == [
        *((name, notes.MEANINGS[name]) for name in ("unstable", "short")),
        ("brand-new", ""),
    ]


def test_a_sweep_is_one_plane_of_all_recipes_and_one_for_each_metric():
    names = ["openvino-cpu-int8", "openvino-cpu-fp32"]
    engine = REPORT["engines"][0]
    report = {**REPORT, "engines": [{**engine, "artifact": name} for name in names]}
    report["bench"] = bench(["original", *names], ("single",))
    other = copy.deepcopy(report)
    for each in other["engines"]:
        each["verify"]["metric"] = "mAP"
    error = {"code": "VD1", "message": "bad", "exit_code": 1, "found": "", "expected": "", "fix": ""}
    recipes = [("one", report, None), ("bad", None, error), ("two", other, None)]
    rows = [{"name": name, "recipe": "a.yaml", "report": found, "error": error} for name, found, error in recipes]
    found = {"format": 1, "created": REPORT["created"], "recipes": rows, "environment": MACHINE}
    document = decode(SweepDocument, found)
    numbers = re.findall(r'data-label="No.">(\d+)<.*?</span>(\w+)</span>', render_sweep(document), re.DOTALL)
    assert numbers == [(str(number), "one" if number < 4 else "two") for number in range(1, 7)]
    plots = sweep_plots(document)
    assert [plot.title for plot in plots] == [
        "Agreement with the original and latency",
        "Top-1 accuracy and latency",
        "mAP and latency",
    ]
    labels = [re.search(r'aria-label="([^"]*)"', plot.wide)[1] for plot in plots]
    assert "5, two, openvino-cpu-int8: 99.00 %" in labels[0] and "original" not in labels[0].partition(".")[2]
    assert "1, one, original: 98.00 %" in labels[1] and "two" not in labels[1]
    assert "A ring marks the recommendation of a recipe" in plots[0].caption
    assert sweep_plots(dataclasses.replace(document, recipes=document.recipes[1:2])) == []
    report |= {"warnings": ["the class order?"], "bench": {**report["bench"], "undecided": {names[1]: "busy"}}}
    document = decode(SweepDocument, found)
    assert "The latencies of 3 are not decided." in sweep_plots(document)[0].caption
    page = render_sweep(document)
    assert "Agreement with the original and latency" in page
    assert "one: the class order?" in page and f"one: {names[1]}: busy" in page
