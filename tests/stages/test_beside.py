"""Which rule a detector's scores follow, by the labels beside its graph."""

import json

import pytest

from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import TensorSpec
from vitdeploy.stages.reference_model import SOFTMAX, settled_scores

OUTPUTS = (TensorSpec("logits", "float32", ("batch", 6, 5)), TensorSpec("boxes", "float32", ("batch", 6, 4)))


@pytest.mark.parametrize(
    ("labels", "scores", "told"),
    [
        (5, "sigmoid", "a label for each of 5 logits"),
        (4, "softmax", ""),
        (7, "softmax", SOFTMAX),
        (None, "softmax", SOFTMAX),
    ],
)
@pytest.mark.parametrize("folder", [".", "onnx"])
def test_as_many_labels_as_logits_are_independent(tmp_path, labels, scores, told, folder):
    if labels is not None:
        names = {str(number): f"kind {number}" for number in range(labels)}
        (tmp_path / "config.json").write_text(json.dumps({"id2label": names}), encoding="utf-8")
    found, notes = settled_scores(tmp_path / folder / "model.onnx", PostprocessSpec(), OUTPUTS)
    assert found == PostprocessSpec(scores=scores)
    assert told in " ".join(notes) and bool(notes) == bool(told)


@pytest.mark.parametrize(
    "known", [PostprocessSpec(scores="sigmoid"), PostprocessSpec(scores="given", boxes="xyxy"), None]
)
def test_what_the_graph_shows_is_kept(tmp_path, known):
    assert settled_scores(tmp_path / "model.onnx", known, OUTPUTS) == (known, ())
