"""Further rows behind the tokens: the same function, exactly, and linears that compute them."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.passes.test_token_merging import PATCHES, average, by_gather, last_token, vit
from tests.graph.small_graphs import (
    FORMS,
    WIDTH,
    Builder,
    attention_model,
    difference,
    random_feeds,
    run,
    run_in_double,
    with_outputs,
)
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize
from vitdeploy.graph.passes.rows import align_rows
from vitdeploy.graph.passes.tokens import class_token_only, merge_tokens
from vitdeploy.graph.values import dim


def two_tokens(b, x):
    """DeiT's class and distillation token."""
    return b.op("Slice", x, b.ints(0), b.ints(2), b.ints(1))


def patches(b, x):
    """The average of all but the class token, to the end however far that is."""
    return average(b, b.op("Slice", x, b.ints(1), b.ints(np.iinfo(np.int64).max), b.ints(1)))


def dense(b, x):
    return x


READS = {
    "class": by_gather,
    "two": two_tokens,
    "average": average,
    "patches": patches,
    "last": last_token,
    "all": dense,
}


def aligned(model, rows, *, optimized=()):
    """The proto of the graph with `rows` rows, which the checker accepts and whose shapes are right."""
    for rewrite in optimized:
        rewrite(model)
    assert align_rows(model, rows) > 0
    return checked(model)


def checked(model):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    return proto


def rows_of(model):
    """How many rows each linear computes, in graph order."""
    return [dim(linear.input, 1) for linear in find_linears(model)]


@given(
    form=st.sampled_from(FORMS),
    read=st.sampled_from(list(READS)),
    prefix=st.integers(1, 3),
    further=st.sampled_from([1, 3, PATCHES]),
    by=st.sampled_from(["Pad", "Concat"]),
    batch=st.sampled_from([1, 3]),
    bias=st.booleans(),
    class_only=st.booleans(),
    qkv=st.sampled_from(["keep", "merged", "separate"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_the_function_is_the_same(form, read, prefix, further, by, batch, bias, class_only, qkv, seed):
    model = vit(form, seed, prefix=prefix, by=by, bias=bias, blocks=2, read=READS[read])
    before, rows = ir.to_proto(model), prefix + PATCHES + further
    optimize(model, OptimizeOptions(class_token_only=class_only, qkv=qkv))
    assert align_rows(model, rows) > 0
    after, feeds = checked(model), random_feeds(before, batch, seed)
    assert difference(run(after, feeds)[0], run(before, feeds)[0]) <= 1e-5
    assert difference(run_in_double(after, feeds)[0], run_in_double(before, feeds)[0]) <= 1e-10


def test_linears_compute_the_rows_and_attention_has_the_keys_of_the_tokens():
    model = vit("separate")
    class_token_only(model)
    assert align_rows(model, 16) == 6 * 3 + 2  # of the last block key and value alone
    assert rows_of(model) == [16] * 18 + [1, 16, 16, 1, 1, 1]
    shapes = [tuple(dim(each.softmax.outputs[0], axis) for axis in (-2, -1)) for each in find_attentions(model)]
    assert shapes == [(16, 14)] * 3 + [(1, 14)]


@pytest.mark.parametrize("form", FORMS)
def test_further_rows_hold_nothing_that_tokens_do_not(form):
    """Each is a copy of a token, from the first norm to the last: no range of an activation grows."""
    plain, model = vit(form), vit(form)
    names = [f"blocks.{block}.{name}" for block in range(4) for name in ("mlp.fc1/Add", "mlp.fc2/Add", "attn.proj/Add")]
    feeds = random_feeds(ir.to_proto(plain), 2, 5)
    align_rows(model, 18)
    before, after = ([*run(with_outputs(each, names), feeds)][1:] for each in (plain, model))
    for tokens, rows in zip(before, after, strict=True):
        np.testing.assert_allclose(rows[:, :14], tokens, atol=1e-5)
        np.testing.assert_allclose(rows[:, 14:], tokens[:, 12:8:-1], atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_merged_as_without_further_rows_which_end_there(form):
    plain, model = vit(form), vit(form)
    for each in (plain, model):
        class_token_only(each)
        merge_tokens(each, {1: 10})
    before, after = ir.to_proto(plain), aligned(model, 16)
    feeds = random_feeds(before, 3, 2)
    assert difference(run_in_double(after, feeds)[0], run_in_double(before, feeds)[0]) <= 1e-10
    rows = list(dict.fromkeys(rows_of(model)))
    assert rows[0] == 16 and set(rows[1:]) == {10, 1}


def test_constants_of_each_row_get_further_rows():
    """A bias of each query and key, as BEiT has."""
    bias = np.random.default_rng(0).standard_normal((1, 1, 14, 14)).astype(np.float32)
    model = vit(mask=bias)
    before = ir.to_proto(model)
    after, feeds = aligned(model, 20), random_feeds(before, 2, 3)
    assert difference(run_in_double(after, feeds)[0], run_in_double(before, feeds)[0]) <= 1e-10


def of_any_batch():
    """Tokens and batch in one axis: what a row belongs to is not known."""
    b = Builder()
    x = b.op("Reshape", b.op("Tanh", b.op("Reshape", "x", b.ints(-1, WIDTH))), b.ints(-1, 14, WIDTH))
    return b.model({"x": ["batch", 14, WIDTH]}, x)


def aligned_already():
    model = vit()
    align_rows(model, 16)
    return model


REFUSED = {
    "no attention": (of_any_batch, 16, "no self-attention over a fixed number of tokens"),
    "no residual sum": (attention_model, 6, "no self-attention over a fixed number of tokens"),
    "aligned already": (aligned_already, 17, "no self-attention over a fixed number of tokens"),
    "an output in the midst": (
        lambda: vit(outputs=["blocks.1.mlp.fc1/Add"]),
        16,
        "blocks.1.mlp.fc1/Add (Add), which is not known to be row-wise, before blocks.2.attn/Softmax",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_graphs_of_which_it_is_not_known_are_refused_with_the_reason_and_left_alone(kind):
    make, rows, reason = REFUSED[kind]
    model = make()
    before = ir.to_proto(model)
    with pytest.raises(GraphError, match="the rows of this graph cannot be aligned") as caught:
        align_rows(model, rows)
    assert reason in caught.value.found
    assert caught.value.fix == "omit split_rows"
    assert ir.to_proto(model) == before


@pytest.mark.parametrize("rows", [1, 13, 14, 28, 1000])
def test_a_number_of_rows_that_does_not_fit_is_refused(rows):
    with pytest.raises(GraphError, match=f"14 tokens cannot be aligned to {rows} rows") as caught:
        align_rows(vit(), rows)
    assert caught.value.expected == "15 to 27"
