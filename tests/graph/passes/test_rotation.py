"""A rotated residual stream: the same function, every norm on the stream without scale and shift, others left alone."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.passes.test_token_merging import Named, average, by_gather
from tests.graph.small_graphs import (
    FORMS,
    WIDTH,
    Builder,
    assert_rewritten,
    attention_model,
    block,
    difference,
    operators,
    random_feeds,
    run_in_double,
    weights,
    with_outputs,
)
from vitdeploy.graph.passes import folds as rotation
from vitdeploy.graph.passes.folds import orthogonal, rotate_residual
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize

PATCHES, BLOCKS = 4, 2
NORMS = 2 * BLOCKS + 1
# Orthogonal, keeps the vector of ones, and all its elements are powers of two: rotated weights are exact in float32.
SIGNS = np.resize([1.0, -1.0], WIDTH)
SHORT = np.eye(WIDTH) - np.outer(SIGNS, SIGNS) / 4


def by_convolution(b):
    """ "image" [batch, 3, 8, 8] -> [batch, PATCHES, WIDTH]."""
    kernels, bias = b.constant(b.random(WIDTH, 3, 4, 4)), b.constant(b.random(WIDTH))
    grid = b.op("Conv", "image", kernels, bias, name="patch_embed/Conv", strides=[4, 4], kernel_shape=[4, 4])
    return b.op("Transpose", b.op("Reshape", grid, b.ints(-1, WIDTH, PATCHES)), perm=[0, 2, 1])


def by_linear(b):
    """The same of 48 numbers a patch."""
    patches = b.op("Reshape", b.op("Slice", "image", b.ints(0), b.ints(3), b.ints(1)), b.ints(-1, PATCHES, 48))
    return b.linear(patches, 48, WIDTH, "patch_embed")


def gathered(b, x):
    return b.linear(by_gather(b, b.norm(x, "norm")), WIDTH, 3, "head")


def averaged(b, x):
    return b.linear(average(b, b.norm(x, "norm")), WIDTH, 3, "head")


def averaged_first(b, x):
    return b.linear(b.norm(b.op("ReduceMean", x, b.ints(1), keepdims=0), "norm"), WIDTH, 3, "head", bias=False)


def two_heads(b, x):
    """DeiT's class and distillation token; "result" would be the name of a bias' Add that is not there."""
    x = b.norm(x, "norm")
    tokens = [b.op("Gather", x, b.constant(np.array(i, np.int64)), axis=1) for i in range(2)]
    return b.op("Add", *(b.linear(token, WIDTH, 3, f"head{i}") for i, token in enumerate(tokens)))


def without_norm(b, x):
    return b.linear(by_gather(b, x), WIDTH, 3, "head")


READS = {"class": gathered, "average": averaged, "average first": averaged_first, "two": two_heads}


def vit(form="slices", seed=0, *, prefix=1, by="Pad", embed=by_linear, read=gathered, inside=None, outputs=()):
    """An image "image" [batch, 3, 8, 8], patches behind `prefix` learned tokens, BLOCKS blocks, and what `read` makes
    of them; `inside(b, x)` is put between the blocks."""
    b, tokens = Named(seed), prefix + PATCHES
    x = embed(b)
    if by == "Pad":
        x = b.op("Pad", x, b.ints(0, prefix, 0, 0, 0, 0))
    else:
        size = b.op("Concat", b.op("Shape", x, start=0, end=1), b.ints(prefix, WIDTH), axis=0)
        x = b.op("Concat", b.op("Expand", b.constant(b.random(1, prefix, WIDTH)), size), x, axis=1)
    x = b.op("Add", x, b.constant(b.random(1, tokens, WIDTH), "positions"), name="embedded")
    for i in range(BLOCKS):
        b.stage = f"blocks.{i}."
        x = block(b, x, tokens, form)
        x = inside(b, x) if inside is not None and not i else x
    b.stage = ""
    return b.model({"image": ["batch", 3, 8, 8]}, b.op("Tanh", read(b, x), name="result"), *outputs)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(rotation, "orthogonal", lambda width, seed: SHORT)


@given(width=st.integers(2, 40), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_the_matrix_is_orthogonal_and_keeps_the_mean(width, seed):
    found = orthogonal(width, seed)
    np.testing.assert_allclose(found @ found.T, np.eye(width), atol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)
    assert (found == orthogonal(width, seed)).all()
    assert width == 2 or not np.allclose(found, orthogonal(width, seed + 1))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("form", FORMS)
def test_the_function_is_the_same(short, form, read):
    assert_rewritten(vit(form, prefix=2, read=READS[read]), rotate_residual, NORMS)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("by", ["Pad", "Concat"])
@pytest.mark.parametrize("embed", [by_linear, by_convolution])
def test_tokens_positions_and_the_embedding_are_rotated_however_they_are_written(short, embed, by, prefix):
    assert_rewritten(vit(embed=embed, by=by, prefix=prefix, read=averaged), rotate_residual, NORMS)


def test_a_linear_may_read_the_stream_itself(short):
    assert_rewritten(vit(read=without_norm), rotate_residual, NORMS - 1)


@given(
    form=st.sampled_from(FORMS),
    read=st.sampled_from(list(READS)),
    embed=st.sampled_from([by_linear, by_convolution]),
    class_only=st.booleans(),
    qkv=st.sampled_from(["keep", "merged", "separate"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_with_the_other_rewrites_and_any_rotation_it_is_the_same_function(form, read, embed, class_only, qkv, seed):
    model = vit(form, seed, prefix=2, embed=embed, read=READS[read])
    before = ir.to_proto(model)
    options = OptimizeOptions(rotate_residual=True, class_token_only=class_only, qkv=qkv)
    counts = optimize(model, options)
    assert (counts["rotate_residual"], counts["class_token_only"] if class_only else 0) == (
        NORMS,
        int(class_only and read in ("class", "two")),
    )
    assert not any(optimize(model, options).values())
    feeds = random_feeds(before, 3, seed)
    [ours], [theirs] = run_in_double(ir.to_proto(model), feeds), run_in_double(before, feeds)
    assert difference(ours, theirs) <= 1e-5


def test_the_stream_is_rotated_and_nothing_between_the_blocks_linears_is():
    plain, model = vit(), vit()
    rotate_residual(model, seed=5)
    assert operators(model) == operators(plain)
    names = ["embedded", "blocks.0.attn/Softmax", "blocks.1.mlp.fc1/Add"]
    feeds = random_feeds(ir.to_proto(plain), 2, 1)
    before, after = (
        run_in_double(with_outputs(each, names), feeds)[1:] for each in (plain, model)
    )
    np.testing.assert_allclose(after[0], before[0] @ orthogonal(WIDTH, 5), atol=1e-5)
    assert np.abs(after[0] - before[0]).max() > 0.1
    for ours, theirs in zip(after[1:], before[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    norms = {name: array for name, array in weights(model).items() if ".norm" in name or name.startswith("norm")}
    assert len(norms) == 2 * NORMS
    assert all((array == name.endswith("weight")).all() for name, array in norms.items())


def test_layer_scale_is_folded_first():
    def scaled(b, x):
        update = b.op("Mul", b.linear(b.norm(x, "extra"), WIDTH, WIDTH, "extra"), b.constant(b.random(WIDTH)))
        return b.op("Add", x, update)

    assert_rewritten(vit(inside=scaled), rotate_residual, 0)
    counts = optimize(vit(inside=scaled), OptimizeOptions(rotate_residual=True))
    assert (counts["fold_layer_scale"], counts["rotate_residual"]) == (1, NORMS + 1)


def of_the_input():
    """Nothing writes the tokens: they are an input of the graph."""
    b = Builder()
    return b.model({"x": ["batch", 5, WIDTH]}, gathered(b, block(b, "x", 5)))


def with_norm_of_tokens(b, x):
    norm = b.norm(x, "other")
    return b.op("Add", x, b.op("Mul", norm, norm))


def joined(b, x):
    """DINOv2's class token beside the average, as twice the channels."""
    x = b.norm(x, "norm")
    return b.linear(b.op("Concat", by_gather(b, x), average(b, x), axis=-1), 2 * WIDTH, 3, "head")


def one(b):
    return b.constant(np.float32(1))


LEFT_ALONE = {
    "no residual sum": attention_model,
    "an input": of_the_input,
    "norms behind the sum": lambda: vit(inside=lambda b, x: b.norm(x, "post")),
    "a factor for each channel": lambda: vit(inside=lambda b, x: b.op("Mul", x, b.constant(b.random(WIDTH)))),
    "one number for all channels": lambda: vit(inside=lambda b, x: b.op("Add", x, b.constant(b.random(1)))),
    "an activation": lambda: vit(inside=lambda b, x: b.op("Relu", x)),
    "fewer channels": lambda: vit(
        inside=lambda b, x: b.op("Pad", b.op("Slice", x, b.ints(0), b.ints(6), b.ints(2)), b.ints(0, 0, 0, 0, 0, 2))
    ),
    "pads that are no zeros": lambda: vit(
        inside=lambda b, x: b.op(
            "Slice", b.op("Pad", x, b.ints(0, 1, 0, 0, 0, 0), one(b)), b.ints(1), b.ints(6), b.ints(1)
        )
    ),
    "a norm that is read otherwise": lambda: vit(inside=with_norm_of_tokens),
    "an output of the stream": lambda: vit(outputs=["embedded"]),
    "an output of a norm": lambda: vit(outputs=["norm/LayerNormalization"]),
    "a norm with its linear joined": lambda: vit(read=joined),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_is_not_known_to_commute_is_left_alone(kind):
    assert_rewritten(LEFT_ALONE[kind](), rotate_residual, 0)


def test_a_shift_needs_a_place_for_its_bias():
    """An output keeps its name, so no Add can come behind it; without a shift there is nothing to add."""

    def model(shift):
        b = Named()
        x = b.op("Add", by_linear(b), b.constant(b.random(1, PATCHES, WIDTH)))
        head = b.linear(b.norm(block(b, x, PATCHES), "norm"), WIDTH, 3, "head", bias=False)
        made = b.model({"image": ["batch", 3, 8, 8]}, head)
        if not shift:
            made.graph.initializers["norm.bias"].const_value = ir.tensor(np.zeros(WIDTH, np.float32), name="norm.bias")
        return made

    assert_rewritten(model(True), rotate_residual, 0)
    assert_rewritten(model(False), rotate_residual, 3, tolerance=1e-5)
