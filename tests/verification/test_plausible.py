"""A reference accuracy that no trained model has is doubted, and one that a model may have is not."""

import json

import numpy as np
import pytest

from vitdeploy.models.model_folder.model_card import claimed_accuracy
from vitdeploy.verification.comparison import (
    ClaimedAccuracy,
    accuracy_in_best_order,
    doubt_accuracy,
    doubt_value,
    least_accuracy,
)


def answered(classes, n, accuracy, order=None, seed=0):
    """Answers, of which this share is right before they are renamed by `order`, and labels."""
    generator = np.random.RandomState(seed)
    labels = generator.randint(0, classes, n)
    wrong = generator.permutation(n)[: round(n * (1 - accuracy))]
    answers = labels.copy()
    answers[wrong] = (labels[wrong] + generator.randint(1, classes, len(wrong))) % classes
    return (answers if order is None else np.asarray(order)[answers]), labels


@pytest.mark.parametrize(("classes", "least"), [(1, 0), (2, 0.6), (3, 0.5), (6, 0.5), (10, 0.3), (1000, 0.003)])
def test_what_every_trained_classifier_exceeds(classes, least):
    assert least_accuracy(classes) == pytest.approx(least)


@pytest.mark.parametrize(("classes", "accuracy"), [(2, 0.95), (3, 0.8), (10, 0.69), (25, 0.8)])
def test_a_wrong_order_is_told_with_what_another_one_gives(classes, accuracy):
    answers, labels = answered(classes, 640, accuracy, np.roll(np.arange(classes), 1))
    text = doubt_accuracy(answers, labels, classes, None)
    assert f"chance is {100 / classes:.3g} %: the class order may be wrong. In another order" in text
    assert accuracy_in_best_order(answers, labels, classes) == pytest.approx(accuracy, abs=0.02)


@pytest.mark.parametrize(("classes", "n"), [(10, 640), (1000, 2000)])
def test_answers_that_no_order_makes_right_are_asked_about(classes, n):
    answers, labels = answered(classes, n, 1 / classes)
    assert doubt_accuracy(answers, labels, classes, None).endswith(
        ": check the class order, and whether the preprocessing matches the training"
    )


@pytest.mark.parametrize(("classes", "n", "accuracy"), [(10, 640, 0.4), (2, 640, 0.7), (1000, 872, 0.05), (10, 3, 0.0)])
def test_what_a_model_may_have_and_what_few_images_say_is_not_doubted(classes, n, accuracy):
    assert doubt_accuracy(*answered(classes, n, accuracy), classes, None) is None


def test_far_below_what_its_own_files_say_is_doubted():
    answers, labels = answered(10, 640, 0.6)
    assert "and config.json says 92 %: check" in doubt_accuracy(
        answers, labels, 10, ClaimedAccuracy(92.0, "config.json")
    )
    assert doubt_accuracy(answers, labels, 10, ClaimedAccuracy(75.0, "config.json")) is None


@pytest.mark.parametrize(("metric", "value", "doubted"), [("mAP", 0.4, True), ("PQ", 12, False), (None, None, False)])
def test_a_metric_near_zero_is_doubted(metric, value, doubted):
    text = doubt_value(metric, value)
    assert (text is not None) == doubted
    assert text is None or text.startswith("the original's mAP is 0.40 %: check")


CARD = """---
tags: [vision]
model-index:
- name: mine
  results:
  - metrics: [{type: loss, value: 0.3}, {type: accuracy, value: 0.91}]
---
# Mine
"""


@pytest.mark.parametrize(
    ("name", "text", "claim"),
    [
        ("eval_results.json", json.dumps({"eval_loss": 0.2, "eval_accuracy": 0.975}), (97.5, "eval_results.json")),
        (
            "trainer_state.json",
            json.dumps({"log_history": [{"eval_accuracy": 0.5}, {"eval_accuracy": 0.75}, {"loss": 1}]}),
            (75.0, "trainer_state.json"),
        ),
        ("README.md", CARD, (91.0, "README.md")),
        ("README.md", "# no front matter", None),
        ("README.md", "---\n[\n---\n", None),
        ("eval_results.json", "{", None),
        ("eval_results.json", json.dumps({"eval_accuracy": True}), None),
        ("eval_results.json", "[]", None),
    ],
)
def test_what_files_beside_a_checkpoint_say(tmp_path, name, text, claim):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert claimed_accuracy(tmp_path) == claim
