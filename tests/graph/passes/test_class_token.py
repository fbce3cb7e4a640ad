"""The last block is computed for the tokens that are read, and the function stays the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import (
    FORMS,
    MERGED,
    WIDTH,
    Builder,
    assert_rewritten,
    attention,
    block,
    node_named,
    operators,
    query_key_value,
    weights,
)
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.passes.tokens import class_token_only

TOKENS = 6


def by_gather(*rows):
    return lambda b, x: b.op("Gather", x, b.constant(np.array(rows[0] if len(rows) == 1 else rows, np.int64)), axis=1)


def by_slice(start, end, step=1):
    return lambda b, x: b.op("Slice", x, b.ints(start), b.ints(end), b.ints(1), b.ints(step))


def by_split(b, x):
    return b.op("Split", x, b.ints(1, TOKENS - 1), outputs=2, axis=1)[0]


def two_heads(b, x):
    """DeiT's distilled heads: the mean of two classifiers of two tokens."""
    heads = [b.linear(by_gather(row)(b, x), WIDTH, WIDTH, f"head{row}") for row in (0, 1)]
    return b.op("Add", *heads)


def late_choice(b, x):
    """Both tokens first, and one after the other from there."""
    both = by_slice(0, 2)(b, x)
    return b.op("Sub", *(b.op("Gather", both, b.constant(np.array(i, np.int64)), axis=1) for i in (0, 1)))


SELECTIONS = {
    "gather": (by_gather(0), [0]),
    "gather the last": (by_gather(-1), [TOKENS - 1]),
    "gather two": (by_gather(3, 1), [1, 3]),
    "slice": (by_slice(0, 1), [0]),
    "slice two": (by_slice(0, 2), [0, 1]),
    "slice backwards": (by_slice(2, 0, -1), [1, 2]),
    "slice every third": (by_slice(0, TOKENS, 3), [0, 3]),
    "split": (by_split, [0]),
    "two heads": (two_heads, [0, 1]),
    "late choice": (late_choice, [0, 1]),
}


def classifier(select, form="slices", *, norm_first=True, seed=0, blocks=1, outputs=(), **options):
    """Blocks, a norm, the selection and a head; the selection before the norm as CLIP has it, where asked."""
    b = Builder(seed)
    x = "x"
    for i in range(blocks):
        x = block(b, x, TOKENS, form, **options) if i == blocks - 1 else earlier_layer(b, x)
    x = select(b, b.norm(x, "norm")) if norm_first else b.norm(select(b, x), "norm")
    result = b.op("Tanh", x, name="result")
    return b.model({"x": ["batch", TOKENS, WIDTH]}, result, *outputs)


def earlier_layer(b, x):
    """So that the last block's input is computed."""
    return b.op("Add", x, b.op("Gelu", b.linear(x, WIDTH, WIDTH, "earlier")))


def tokens_of(model, name):
    return node_named(model, name).outputs[0].shape[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "selection first"])
def test_the_class_token_alone_goes_through_the_last_block(form, norm_first):
    model = classifier(by_gather(0), form, norm_first=norm_first, blocks=2)
    assert_rewritten(model, class_token_only, 1)
    for name in ("attn.proj/MatMul", "mlp.fc1/MatMul", "mlp.fc2/MatMul", "norm2/LayerNormalization"):
        assert tokens_of(model, name) == 1
    assert list(node_named(model, "attn/Softmax").outputs[0].shape)[2:] == [1, TOKENS]
    assert tokens_of(model, "norm1/LayerNormalization") == TOKENS
    rows = {linear.name: linear.node.outputs[0].shape[1] for linear in find_linears(model) if "attn" in linear.name}
    merged = {"attn.qkv.query": 1, "attn.qkv.key_value": TOKENS, "attn.proj": 1}
    assert rows == (merged if form in MERGED else {"attn.q": 1, "attn.k": TOKENS, "attn.v": TOKENS, "attn.proj": 1})


@given(
    selection=st.sampled_from(sorted(SELECTIONS)),
    form=st.sampled_from(FORMS),
    norm_first=st.booleans(),
    scale=st.sampled_from(["query", "key", "scores", None]),
    mask=st.sampled_from([None, (TOKENS,), (1, TOKENS, TOKENS), (2, 1, TOKENS), (TOKENS, 1)]),
    qk_norm=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_any_selection_moves_up_and_the_function_stays(selection, form, norm_first, mask, seed, **options):
    select, rows = SELECTIONS[selection]
    mask = None if mask is None else np.random.default_rng(seed).standard_normal(mask).astype(np.float32)
    model = classifier(select, form, norm_first=norm_first, seed=seed, mask=mask, **options)
    assert_rewritten(model, class_token_only, 1)
    assert tokens_of(model, "mlp.fc1/MatMul") == len(rows)


@pytest.mark.parametrize("selection", sorted(SELECTIONS))
def test_every_selection_is_understood(selection):
    select, rows = SELECTIONS[selection]
    model = classifier(select)
    assert_rewritten(model, class_token_only, 1)
    assert tokens_of(model, "attn.proj/MatMul") == len(rows)


def test_a_mask_of_truth_values_is_cut_to_the_rows():
    assert_rewritten(classifier(by_gather(-1), mask=np.tril(np.ones((TOKENS, TOKENS), bool))), class_token_only, 1)


def test_an_attention_bias_of_every_query_is_cut_to_the_rows():
    mask = np.random.default_rng(0).standard_normal((2, TOKENS, TOKENS)).astype(np.float32)
    model = classifier(by_gather(0), mask=mask)
    class_token_only(model)
    [cut] = [array for name, array in weights(model).items() if name.endswith(".rows")]
    np.testing.assert_array_equal(cut, mask[:, :1])


def test_the_order_of_the_columns_does_not_matter():
    model = classifier(by_gather(0), "columns")
    before = weights(model)
    class_token_only(model)
    after = weights(model)
    for name, columns in (("query", slice(0, WIDTH)), ("key_value", slice(WIDTH, 3 * WIDTH))):
        np.testing.assert_array_equal(after[f"attn.qkv.{name}.weight_t"], before["attn.qkv.weight_t"][:, columns])


def gated(b, x):
    """SwiGLU: the halves of one linear, one of them through an activation."""
    left, right = b.op("Split", b.linear(x, WIDTH, 2 * WIDTH, "w12"), outputs=2, axis=-1, num_outputs=2)
    return b.linear(b.op("Mul", b.op("Mul", left, b.op("Sigmoid", left)), right), WIDTH, WIDTH, "w3")


def erf_gelu(b, x):
    hidden = b.linear(x, WIDTH, WIDTH, "fc1")
    error = b.op("Erf", b.op("Div", hidden, b.constant(np.float32(2**0.5))))
    hidden = b.op(
        "Mul", b.op("Mul", hidden, b.op("Add", error, b.constant(np.float32(1)))), b.constant(np.float32(0.5))
    )
    return b.linear(hidden, WIDTH, WIDTH, "fc2")


def rms_norm(b, x):
    square = b.op("ReduceMean", b.op("Pow", x, b.constant(np.float32(2))), b.ints(-1), keepdims=1)
    return b.op("Div", x, b.op("Sqrt", b.op("Add", square, b.constant(np.float32(0.5)))))


def layout(b, x):
    x = b.op("Reshape", x, b.ints(-1, TOKENS, 2, WIDTH // 2))
    x = b.op("Squeeze", b.op("Unsqueeze", b.op("Transpose", x, perm=[0, 2, 1, 3]), b.ints(0)), b.ints(0))
    x = b.op("Concat", *(b.op("Gather", x, b.constant(np.array(i, np.int64)), axis=1) for i in (1, 0)), axis=2)
    return b.op("Slice", x, b.ints(0), b.ints(WIDTH), b.ints(2))


@pytest.mark.parametrize("after", [gated, erf_gelu, rms_norm, layout])
def test_every_row_wise_layer_is_passed(after):
    b = Builder()
    x = b.op("Add", "x", attention(b, "x", TOKENS))
    x = b.op("Add", x, after(b, x))
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, by_gather(0)(b, x))
    assert_rewritten(model, class_token_only, 1)
    assert tokens_of(model, "attn.proj/MatMul") == 1


def mean(b, x):
    return b.op("ReduceMean", x, b.ints(1), keepdims=0)


def class_and_mean(b, x):
    return b.op("Add", by_gather(0)(b, x), mean(b, by_slice(1, TOKENS)(b, x)))


@pytest.mark.parametrize(
    "select",
    [
        mean,
        class_and_mean,
        by_slice(1, TOKENS),
        by_slice(0, TOKENS),
        lambda b, x: b.op("Gather", x, b.constant(np.array(0, np.int64)), axis=2),
    ],
    ids=["mean", "class token and mean", "all but one", "all", "a channel"],
)
def test_a_model_that_reads_most_tokens_is_left_alone(select):
    assert_rewritten(classifier(select), class_token_only, 0)


@pytest.mark.parametrize("name", ["norm/LayerNormalization", "mlp.fc2/Add", "attn.proj/Add"])
def test_tokens_that_leave_the_graph_stop_the_selection(name):
    assert_rewritten(classifier(by_gather(0), outputs=[name]), class_token_only, 0)


def test_an_attention_map_that_leaves_the_graph_is_left_whole():
    assert_rewritten(classifier(by_gather(0), outputs=["attn/Softmax"]), class_token_only, 0)


def test_a_softmax_over_the_tokens_of_the_queries_stops_the_selection():
    assert_rewritten(classifier(by_gather(0), axis=-2), class_token_only, 0)


def test_a_layer_that_mixes_tokens_stops_the_selection():
    b = Builder()
    x = b.op("Transpose", attention(b, "x", TOKENS), perm=[0, 2, 1])
    x = b.op("Transpose", b.linear(x, TOKENS, TOKENS, "mixer"), perm=[0, 2, 1])
    assert_rewritten(b.model({"x": ["batch", TOKENS, WIDTH]}, by_gather(0)(b, x)), class_token_only, 0)


def test_a_norm_over_tokens_stops_the_selection():
    b = Builder()
    x = attention(b, "x", TOKENS)
    gain = b.constant(b.random(TOKENS, WIDTH))
    x = b.op("LayerNormalization", x, gain, axis=1)
    assert_rewritten(b.model({"x": ["batch", TOKENS, WIDTH]}, by_gather(0)(b, x)), class_token_only, 0)


def test_rotary_positions_of_the_other_tokens_go():
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    half = [b.op("Slice", query, b.ints(i), b.ints(i + 2), b.ints(3)) for i in (0, 2)]
    turned = b.op("Concat", b.op("Neg", half[1]), half[0], axis=3)
    cosine, sine = (b.constant(b.random(TOKENS, 4), name) for name in ("cosine", "sine"))
    query = b.op("Add", b.op("Mul", query, cosine), b.op("Mul", turned, sine), name="query")
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    mixed = b.op("Transpose", b.op("MatMul", b.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, by_gather(0)(b, b.op("Reshape", mixed, b.ints(-1, TOKENS, WIDTH))))
    assert_rewritten(model, class_token_only, 1)
    assert node_named(model, "query").outputs[0].shape[2] == 1
    assert weights(model)["cosine.rows"].shape == (1, 4)


def test_a_mask_of_unknown_size_stops_the_selection_at_the_scores():
    b = Builder()
    scores = b.op("MatMul", "x", b.op("Transpose", "x", perm=[0, 2, 1]))
    softmax = b.op("Softmax", b.op("Add", scores, "mask", name="masked"), axis=-1)
    inputs = {"x": [2, TOKENS, WIDTH], "mask": ["rows", TOKENS]}
    model = b.model(inputs, by_gather(0)(b, b.op("MatMul", softmax, "x")))
    assert_rewritten(model, class_token_only, 1, batch=TOKENS)
    assert tokens_of(model, "masked") == TOKENS


def test_a_selection_of_heads_is_left_alone():
    b = Builder()
    query, key, value = query_key_value(b, "x", TOKENS, "slices")
    softmax = b.op("Softmax", b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2])), axis=-1)
    model = b.model({"x": ["batch", TOKENS, WIDTH]}, by_gather(0)(b, b.op("MatMul", softmax, value)))
    assert_rewritten(model, class_token_only, 0)


def test_a_computed_selection_is_left_alone():
    b = Builder()
    x = attention(b, "x", TOKENS)
    x = b.op("Gather", x, b.op("Cast", "index", to=7), axis=1)
    model = b.model({"x": ["batch", TOKENS, WIDTH], "index": [1]}, x)
    before = [node.op_type for node in model.graph]
    assert class_token_only(model) == 0
    assert [node.op_type for node in model.graph] == before


def test_without_attention_nothing_changes():
    b = Builder()
    x = b.op("Gelu", b.linear("x", WIDTH, WIDTH, "fc"))
    assert_rewritten(b.model({"x": ["batch", TOKENS, WIDTH]}, by_gather(0)(b, x)), class_token_only, 0)


def test_a_fixed_batch_is_as_good():
    b = Builder()
    model = b.model({"x": [3, TOKENS, WIDTH]}, by_gather(0)(b, block(b, "x", TOKENS)))
    assert_rewritten(model, class_token_only, 1, batch=3)
    assert operators(model)["Slice"] == 2  # the query's rows and the residual's
