"""The page of a report of every task, with the facts that the task's own comparison gives."""

import copy
import re

import numpy as np
import pytest

from tests.documents import page_of
from tests.report.test_html import PNG, REPORT, Page
from vitdeploy.data.detection import Boxes
from vitdeploy.data.masks import PanopticMap
from vitdeploy.document.verified import diagnosed
from vitdeploy.spec import encode
from vitdeploy.tasks.embedding import compare_embeddings
from vitdeploy.tasks.features import compare_features
from vitdeploy.tasks.panoptic import compare_panoptic
from vitdeploy.tasks.sequence import compare_sequences
from vitdeploy.verification.agreement import compare
from vitdeploy.verification.average_precision import Objects, match_boxes
from vitdeploy.verification.detection import DetectionComparison, object_records

N = 12


def classification(labelled):
    random = np.random.default_rng(0)
    logits = random.normal(size=(N, 8)).astype(np.float32)
    labels = random.integers(0, 8, N) if labelled else None
    return compare(logits + 0.3 * random.normal(size=logits.shape).astype(np.float32), logits, labels)


def features(labelled):
    random = np.random.default_rng(1)
    vectors = random.normal(size=(N, 8)).astype(np.float32)
    return compare_features(vectors + 0.01, vectors, random.integers(0, 3, N) if labelled else None)


def embedding(labelled):
    random = np.random.default_rng(1)
    vectors = random.normal(size=(N, 8)).astype(np.float32)
    return compare_embeddings(vectors + 0.01, vectors, random.integers(0, 3, N) if labelled else None)


def detection(labelled, score=0.9):
    boxes = np.array([[0, 0, 20, 20], [30, 30, 60, 50]], np.float64)
    found = Objects(np.array([1, 2]), np.array([score, score]), boxes)
    moved = Objects(found.classes, found.scores, boxes + np.array([0, 0, 2, 0]))
    truth = [Boxes((64, 64), boxes, found.classes, np.zeros(2, bool), np.ones(2))] * N if labelled else None
    records = object_records([moved] * N, [found] * N, truth, match_boxes, threshold=0.3)
    return DetectionComparison.of(records, threshold=0.3, max_difference=0.01)


def panoptic(labelled):
    cut = PanopticMap(np.repeat([[1, 2]], 6, axis=0).astype(np.int32), {1: 0, 2: 1})
    other = PanopticMap(np.array([[1, 2]] * 5 + [[1, 1]], np.int32), {1: 0, 2: 1})
    return compare_panoptic(
        [other] * N, [cut] * N, [cut] * N if labelled else None, classes=2, things=(0,), max_difference=0.01
    )


def sequence(labelled):
    tokens = [np.array([3, 4, 5, 2], np.int64)] * N
    wrong = [*tokens[1:], np.array([3, 4, 4, 2], np.int64)]
    return compare_sequences(wrong, tokens, tokens if labelled else None, pad=0, max_difference=0.01)


TASKS = {
    "classification": (classification, "Top-1, %", ["Top-5, %", "KL, nats", "Cosine, mean", "Cosine, least"]),
    "features": (features, "1-NN top-1, %", ["Cosine, mean", "Cosine, least"]),
    "embedding": (embedding, "Recall@1, %", ["Recall@5, %", "Cosine, mean", "Cosine, least"]),
    "detection": (
        detection,
        "mAP, %",
        ["AP at IoU 0.50, %", "AP at IoU 0.75, %", "Objects of the original", "IoU of matched pairs, mean"],
    ),
    "panoptic": (panoptic, "PQ, %", ["PQ of things, %", "PQ of stuff, %", "SQ, %", "Pixels equal to the original, %"]),
    "sequence": (
        *(sequence, "Token accuracy, %"),
        ["Fully correct, %", "Identical to the original, %", "Tokens compared"],
    ),
}
# What needs labels: with "original" below it.
JUDGED = {
    "classification": ["Top-5, %"],
    "features": [],
    "embedding": ["Recall@5, %"],
    "detection": ["AP at IoU 0.50, %", "AP at IoU 0.75, %"],
    "panoptic": ["PQ of things, %", "PQ of stuff, %", "SQ, %"],
    "sequence": ["Fully correct, %"],
}


def without_bench():
    """Plots take most of the time of a page."""
    return {**copy.deepcopy(REPORT), "bench": None}


def report_of(task, labelled=True, facts=None):
    report = without_bench()
    noun = "sequence" if task == "sequence" else "image"
    report["task"] = report["model"]["task"] = task
    report["data"]["noun"] = noun
    found = facts or TASKS[task][0](labelled)
    [engine] = report["engines"]
    engine["verify"] = encode(diagnosed(found, None, "rounding"))
    if task == "sequence":
        report["model"].update(image_size=[0, 0], channels=0, classes=None)
    if task in ("panoptic", "sequence"):
        for example in report["examples"]:
            example["image"] = None if task == "sequence" else example["image"]
            for answer in (example["reference"], *example["engines"].values()):
                answer["score"] = None
    return report


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("task", TASKS)
def test_a_page_shows_the_metric_and_the_numbers_of_its_task(task, labelled):
    report = report_of(task, labelled)
    page = Page(page_of(report, {"0.png": PNG}))
    verify, (_, metric, names) = report["engines"][0]["verify"], TASKS[task]
    assert (metric in page.text) == labelled
    assert ("Without labels" in page.text) != labelled
    assert f"Agreement with the original: {verify['agreement_of']}." in page.text
    assert f"{verify['agreement']:.2f}" in page.text
    for name in names:
        assert (name in page.text) == (labelled or name not in JUDGED[task])
    for other, (_, title, _) in TASKS.items():
        assert other == task or title not in page.text
    if labelled:
        assert f"{verify['value']:.2f}" in page.text
        assert f"{verify['reference_value']:.2f}" in page.text
    assert not re.search(r"\b(None|nan|Undefined)\b", page.text)


def test_qualities_of_things_and_stuff_are_the_engine_s_with_the_original_s_below():
    verify = report_of("panoptic")["engines"][0]["verify"]
    text = Page(page_of(report_of("panoptic"), {})).text
    assert verify["things"]["pq"] < verify["reference_things"]["pq"] == 100
    assert f"{verify['things']['pq']:.2f}original 100.00" in text


def test_a_model_of_sequences_has_sequences_and_no_pictures():
    report = {**report_of("sequence"), "bench": REPORT["bench"]}
    report["data"]["path"] = "tokens.npz"
    page = Page(page_of(report, {}).partition("</head>")[2])
    assert page.text.count("Token accuracy, %") > 1  # the table and the plot
    assert "Verified on 64 sequences" in page.text
    assert "sequences/s" in page.text
    assert "image" not in page.text
    assert "pixels" not in page.text
    assert not [tag for tag, _ in page.elements if tag == "img"]


@pytest.mark.parametrize("task", TASKS)
def test_scores_are_shown_as_bars_where_the_task_has_them(task):
    page = Page(page_of(report_of(task), {}))
    bars = [values for _, values in page.elements if values.get("class") == "bar"]
    assert len(bars) == (0 if task in ("panoptic", "sequence") else 2)
    assert ("Bars show" in page.text) == bool(bars)


@pytest.mark.parametrize("task", TASKS)
def test_a_tick_marks_an_answer_only_where_its_words_are_the_whole_answer(task):
    text = Page(page_of(report_of(task), {})).text
    assert ("A tick ✓" in text) == (task in ("classification", "sequence"))


def test_an_original_that_finds_nothing_leaves_nothing_to_agree_with():
    sentence = "agreement is meaningless here"
    assert sentence in page_of(report_of("detection", facts=detection(labelled=False, score=0.1)), {})
    assert sentence not in page_of(report_of("detection", labelled=False), {})


def test_the_notes_of_the_source_and_the_rewrites_are_shown():
    text = Page(page_of(without_bench(), {})).text
    assert "weights of the EMA" in text
    assert "412 to 371" in text
    assert "key bias removed12 places" in text
    assert "GELU" not in text
    report = without_bench()
    report["optimize"] = {"rewrites": {"a": {}, "b": {"new_one": 1}}, "nodes": {"a": [1, 1], "b": [2, 1]}}
    report["optimize"]["difference"] = {"a": 0.0, "b": 0.0}
    report["optimize"]["token_merging"] = {"a": {"tokens": 197, "remaining": {"1": 192, "6": 128}}}
    text = Page(page_of(report, {})).text
    assert "197 to 192 after block 1, 128 after block 6" in text
    for part in ("Exact rewrites: a", "No rewrite applied.", "Exact rewrites: b", "new one1 place"):
        assert part in text


def test_a_metric_of_another_task_goes_by_its_own_name():
    report = without_bench()
    report["engines"][0]["verify"]["metric"] = "RMSE"
    text = Page(page_of(report, {})).text
    assert "RMSE, %" in text
    assert "drop in RMSE" in text


def test_the_time_of_each_graph_is_on_the_page():
    report = copy.deepcopy(REPORT)
    assert "Graph by graph" not in Page(page_of(report, {})).text
    for result in report["bench"]["results"][1:]:
        result["parts_ms"] = {"image_tower": 1.2345, "text_tower": 0.25}
    text = Page(page_of(report, {})).text
    assert "Graph by graph" in text
    assert "image_tower, ms" in text and "1.23" in text and "0.25" in text
