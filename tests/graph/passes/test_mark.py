"""Marked weights are those of the attention, and marking changes nothing else."""

import numpy as np
import onnxruntime
import pytest

from tests.pipeline import planted
from vitdeploy.graph.analysis.attention import find_weights, patch_grid, tokens_read
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import serialised
from vitdeploy.graph.passes.optimize import optimize
from vitdeploy.graph.passes.tokens import mark, mark_mean


def normalised(model):
    normalise(model)
    return model


def run(model, image):
    session = onnxruntime.InferenceSession(serialised(model), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"image": image}), strict=True))


def image(batch=2):
    return np.random.default_rng(0).uniform(size=(batch, 1, planted.SIDE, planted.SIDE)).astype(np.float32)


def softmax_of(image, first=None):
    """The planted weights of a first block, [batch, 2, keys], the same for every query."""
    size = planted.PATCH
    bright = image.reshape(len(image), 4, size, 4, size).mean(axis=(2, 4)).reshape(len(image), 16)
    if first is not None:
        bright = np.concatenate([np.full((len(image), 1), first), bright], axis=1)
    scores = planted.SHARPNESS * np.stack([bright, -bright], axis=1)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def test_marked_weights_are_the_planted_ones_and_other_outputs_stay():
    model = normalised(planted.classifier())
    before = run(model, image())
    first, second = find_weights(model)
    names = mark(model, first), mark_mean(model, first), mark(model, second)
    after = run(model, image())
    heads, mean, others = (after[name] for name in names)
    expected = np.repeat(softmax_of(image(), 0.5)[:, :, None], 17, axis=2)
    np.testing.assert_allclose(heads, expected, atol=1e-5)
    np.testing.assert_allclose(mean, expected.mean(axis=1), atol=1e-5)
    np.testing.assert_allclose(others.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_array_equal(after["logits"], before["logits"])


def test_marking_twice_adds_one_output():
    model = normalised(planted.classifier())
    [*_, last] = find_weights(model)
    assert mark(model, last) == mark(model, last)
    assert len(model.graph.outputs) == 2


@pytest.mark.parametrize(
    ("read", "sizes", "learned", "rows"),
    [
        ("class", [(17, 17), (17, 17)], [False, False], (0,)),
        ("average", [(16, 16), (16, 16)], [False, False], ()),
        ("learned", [(16, 16), (16, 16), (1, 16)], [False, False, True], ()),
    ],
)
def test_sizes_grid_and_what_the_head_reads(read, sizes, learned, rows):
    model = normalised(planted.classifier(read))
    found = find_weights(model)
    assert [(each.queries, each.keys) for each in found] == sizes
    assert [each.learned for each in found] == learned
    assert not any(each.windowed for each in found)
    assert {patch_grid(each) for each in found} == {(4, 4)}
    assert found[0].name == "blocks.0.attn"
    assert tokens_read(model, found[-1], found[-1].keys - 16) == rows


def test_the_class_token_s_row_is_the_same_before_and_after_the_other_rows_went():
    model = normalised(planted.classifier())
    whole = run(model, image())["logits"]
    name = mark(model, find_weights(model)[-1])
    row = run(model, image())[name][:, :, :1]
    narrow = normalised(planted.classifier())
    assert optimize(narrow)["class_token_only"] == 1
    [_, last] = find_weights(narrow)
    assert (last.queries, last.keys, last.learned) == (1, 17, False)
    name = mark(narrow, last)
    after = run(narrow, image())
    np.testing.assert_allclose(after[name], row, atol=1e-5)
    np.testing.assert_allclose(after["logits"], whole, atol=1e-5)


def test_attention_in_windows_is_told_by_its_leading_axis():
    [found] = find_weights(normalised(planted.windowed()))
    assert found.windowed
    assert found.keys == 4
    [fixed] = find_weights(normalised(planted.classifier(blocks=1, batch=3)))
    assert not fixed.windowed


def test_without_a_convolution_there_is_no_grid():
    [found] = find_weights(normalised(planted.classifier("average", blocks=1, convolution=False)))
    assert patch_grid(found) is None
