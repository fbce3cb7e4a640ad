"""Merged tokens against the paper's equations, and what must hold exactly whatever is merged."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import (
    CHANNELS,
    FORMS,
    HEADS,
    MERGED,
    WIDTH,
    Builder,
    block,
    difference,
    random_feeds,
    run,
    weights,
    with_outputs,
)
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import merge_points
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize
from vitdeploy.graph.passes.tokens import class_token_only, merge_tokens

PATCHES, BLOCKS = 13, 4


class Named(Builder):
    """Names of nodes and constants begin with `stage`, so that a graph can have several blocks."""

    stage = ""

    def op(self, operator, *inputs, name=None, **options):
        return super().op(operator, *inputs, name=name and f"{self.stage}{name}", **options)

    def constant(self, array, name=None):
        return super().constant(array, name and f"{self.stage}{name}")


def vit(form="slices", seed=0, *, prefix=1, by="Pad", positions=True, blocks=BLOCKS, read=None, outputs=(), **options):
    """Patches "x" [batch, PATCHES, WIDTH] behind `prefix` learned tokens, blocks, a norm, and a class token."""
    b, tokens = Named(seed), prefix + PATCHES
    x = "x"
    if by == "Pad" and prefix:
        x = b.op("Pad", x, b.ints(0, prefix, 0, 0, 0, 0))
    elif prefix:
        size = b.op("Concat", b.op("Shape", x, start=0, end=1), b.ints(prefix, WIDTH), axis=0)
        learned = b.constant(b.random(1, prefix, WIDTH), "prefix")
        x = b.op("Concat", b.op("Expand", learned, size), x, axis=1)
    table = b.random(1, tokens, WIDTH)
    if not positions:
        table[:, prefix:] = 0
    x = b.op("Add", x, b.constant(table, "positions"), name="embedded")
    for i in range(blocks):
        b.stage = f"blocks.{i}."
        x = block(b, x, tokens, form, **options)
    b.stage = ""
    x = (read or by_gather)(b, b.norm(x, "norm"))
    model = b.model({"x": ["batch", PATCHES, WIDTH]}, b.op("Tanh", x, name="result"), *outputs)
    for name in list(model.graph.initializers):  # keys that differ, and attention that is not uniform
        if name.endswith(("norm1.weight", "norm1.bias")):
            value = model.graph.initializers[name]
            value.const_value = ir.tensor(value.const_value.numpy() * np.float32(4), name=name)
    return model


def by_gather(b, x):
    return b.op("Gather", x, b.constant(np.array(0, np.int64)), axis=1)


def merged(model, schedule):
    """The proto of the merged graph, which the checker accepts and whose shapes are right."""
    merge_tokens(model, schedule)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    return proto


# --- the paper, image by image and token by token ---------------------------------------------------------------------


def paper(constants, image, schedule, *, prefix, form):
    """arXiv 2210.09461, section 3.2 and equation 1, for one image [PATCHES, WIDTH] -> (result [WIDTH], sizes)."""
    table = constants["positions"][0]
    first = constants["prefix"][0] if "prefix" in constants else np.zeros((prefix, WIDTH))
    tokens = [row.astype(np.float64) for row in np.concatenate([first, image]) + table]
    sizes = [1] * len(tokens)
    for number in range(BLOCKS):
        of = {name.removeprefix(f"blocks.{number}."): c for name, c in constants.items()}
        x = np.stack(tokens)
        q, k, v = projected(normed(x, of, "norm1"), of, form)
        heads = []
        for head in range(HEADS):
            own = slice(head * CHANNELS, (head + 1) * CHANNELS)
            weights_ = np.exp(0.5 * q[:, own] @ k[:, own].T + np.log(sizes))  # equation 1
            heads.append(weights_ / weights_.sum(1, keepdims=True) @ v[:, own])
        x = x + np.concatenate(heads, 1) @ of["attn.proj.weight_t"] + of["attn.proj.bias"]
        tokens = list(x)
        if number in schedule:
            tokens, sizes = reduced(tokens, sizes, len(x) - schedule[number], prefix)
        x = np.stack(tokens)
        hidden = normed(x, of, "norm2") @ of["mlp.fc1.weight_t"] + of["mlp.fc1.bias"]
        hidden = hidden * np.vectorize(phi)(hidden)
        x = x + hidden @ of["mlp.fc2.weight_t"] + of["mlp.fc2.bias"]
        tokens = list(x)
    return np.tanh(normed(np.stack(tokens), constants, "norm")[0]), sizes


def phi(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def normed(x, of, name):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * of[f"{name}.weight"] + of[f"{name}.bias"]


def projected(x, of, form):
    if form in MERGED:
        weight, bias = of["attn.qkv.weight_t"], of.get("attn.qkv.bias", 0)
        return np.split(x @ weight + bias, 3, axis=1)
    return [x @ of[f"attn.{name}.weight_t"] + of.get(f"attn.{name}.bias", 0) for name in "qkv"]


def reduced(tokens, sizes, count, prefix):
    """Bipartite soft matching: A and B alternately, an edge from each of A to its best in B, the best `count` edges."""
    patches = range(prefix, len(tokens))
    set_a, set_b = list(patches)[::2], list(patches)[1::2]
    edges = [min((float(np.linalg.norm(tokens[a] - tokens[b])), b, a) for b in set_b) for a in set_a]
    groups = {b: [b] for b in set_b}
    for _, b, a in sorted(edges)[:count]:
        groups[b].append(a)
    gone = {a for group in groups.values() for a in group[1:]}
    new = [groups.get(token, [token]) for token in range(len(tokens)) if token not in gone]
    totals = [sum(sizes[i] for i in group) for group in new]
    means = [sum(sizes[i] * tokens[i] for i in group) / total for group, total in zip(new, totals, strict=True)]
    return means, totals


SCHEDULES = [{0: 13}, {1: 8}, {2: 9}, {0: 12, 1: 11}, {0: 10, 2: 6}, {0: 8, 1: 5, 2: 3}]


@given(
    form=st.sampled_from(FORMS),
    schedule=st.sampled_from(SCHEDULES),
    prefix=st.integers(1, 3),
    by=st.sampled_from(["Pad", "Concat"]),
    batch=st.sampled_from([1, 2, 5]),
    bias=st.booleans(),
    class_only=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_the_merged_graph_computes_what_the_paper_says(form, schedule, prefix, by, batch, bias, class_only, seed):
    schedule = {i: count + prefix - 1 for i, count in schedule.items()}
    model = vit(form, seed, prefix=prefix, by=by, bias=bias)
    constants = weights(model)
    if class_only:
        assert class_token_only(model) == 1
    feeds = random_feeds(ir.to_proto(model), batch, seed)
    [ours] = run(merged(model, schedule), feeds)
    theirs = [paper(constants, image, schedule, prefix=prefix, form=form)[0] for image in feeds["x"]]
    assert difference(ours, np.stack(theirs)) <= 1e-5


def test_every_image_of_a_batch_is_merged_by_itself():
    proto = merged(vit(), {0: 10, 2: 7})
    images = random_feeds(proto, 5, 3)["x"]
    [whole] = run(proto, {"x": images})
    for batch in (1, 2):
        for start in range(0, 4, batch):
            [part] = run(proto, {"x": images[start : start + batch]})
            assert difference(part, whole[start : start + batch]) <= 1e-6


# --- what holds exactly -----------------------------------------------------------------------------------------------


@given(pairs=st.permutations(range(6)), count=st.integers(1, 6), prefix=st.integers(1, 2), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_merging_tokens_that_are_equal_changes_nothing(pairs, count, prefix, seed):
    """`count` patches of A equal one of B each: the same patch twice is one that counts twice."""
    model = vit(seed=seed, prefix=prefix, positions=False)
    images = random_feeds(ir.to_proto(model), 2, seed)["x"]
    for a, b in list(enumerate(pairs))[:count]:
        images[:, 2 * a] = images[:, 2 * b + 1]
    [before] = run(ir.to_proto(model), {"x": images})
    [after] = run(merged(model, {0: prefix + PATCHES - count}), {"x": images})
    assert difference(after, before) <= 1e-5


def test_equal_tokens_that_are_merged_step_by_step_change_nothing():
    model = vit(positions=False)
    images = random_feeds(ir.to_proto(model), 2, 1)["x"]
    images[:, 1:9] = images[:, :1]
    [before] = run(ir.to_proto(model), {"x": images})
    proto = merged(model, {0: 12, 1: 9, 2: 8})
    [after] = run(proto, {"x": images})
    assert difference(after, before) <= 1e-5
    sizes = paper(weights(model), images[0], {0: 12, 1: 9, 2: 8}, prefix=1, form="slices")[1]
    assert max(sizes) > 2


@given(of_a=st.permutations(range(0, PATCHES, 2)), of_b=st.permutations(range(1, PATCHES, 2)), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_the_order_of_patches_within_each_set_does_not_matter(of_a, of_b, seed):
    """Which set a patch is in depends on its place; nothing else does."""
    order = np.zeros(PATCHES, int)
    order[::2], order[1::2] = of_a, of_b
    proto = merged(vit(seed=seed, positions=False), {0: 10})
    images = random_feeds(proto, 2, seed)["x"]
    [one], [other] = run(proto, {"x": images}), run(proto, {"x": images[:, order]})
    assert difference(one, other) <= 1e-5


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_sizes_sum_to_the_number_of_tokens_and_the_class_token_stays_alone(schedule):
    model = vit()
    constants = weights(model)
    proto = merged(model, schedule)
    logarithms = list(dict.fromkeys(node.input[1] for node in proto.graph.node if node.name.endswith("attn.sizes/Add")))
    assert len(logarithms) == len(schedule)
    images = random_feeds(proto, 2, 4)["x"]
    _, *found = run(with_outputs(model, logarithms), {"x": images})
    for each, remaining in zip(found, schedule.values(), strict=True):
        sizes = np.exp(each)
        assert sizes.shape == (2, 1, 1, remaining)
        np.testing.assert_allclose(sizes.sum(axis=-1), 1 + PATCHES, rtol=1e-5)
        np.testing.assert_allclose(sizes[..., 0], 1)
    expected = [paper(constants, image, schedule, prefix=1, form="slices")[1] for image in images]
    np.testing.assert_allclose(np.exp(found[-1][:, 0, 0]), expected, rtol=1e-5)


def test_images_whose_tokens_are_all_equal_give_numbers():
    proto = merged(vit(positions=False), {0: 9, 2: 7})
    [result] = run(proto, {"x": np.ones((2, PATCHES, WIDTH), np.float32)})
    assert np.isfinite(result).all()


# --- where tokens can be merged ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["Pad", "Concat"])
@pytest.mark.parametrize("prefix", [1, 2, 5])
def test_points_blocks_and_tokens_before_the_patches_are_found(by, prefix):
    model = vit(prefix=prefix, by=by)
    found = merge_points(model)
    assert (found.count, found.prefix, list(found.points)) == (prefix + PATCHES, prefix, [0, 1, 2, 3])
    class_token_only(model)
    found = merge_points(model)
    assert (found.count, found.prefix, list(found.points)) == (prefix + PATCHES, prefix, [0, 1, 2])


@pytest.mark.parametrize("qkv", ["merged", "separate"])
def test_merging_is_the_last_rewrite_and_finds_every_form_of_the_others(qkv):
    plain, model = vit("separate"), vit("separate")
    counts = optimize(model, OptimizeOptions(qkv=qkv, token_merging=((0, 10), (2, 8))))
    assert (counts["merge_tokens"], counts["class_token_only"], list(counts)[-1]) == (2, 1, "merge_tokens")
    feeds = random_feeds(ir.to_proto(plain), 2, 2)
    [ours], [theirs] = run(ir.to_proto(model), feeds), run(merged(plain, {0: 10, 2: 8}), feeds)
    assert difference(ours, theirs) <= 1e-5


def average(b, x):
    return b.op("ReduceMean", x, b.ints(1), keepdims=0)


def last_token(b, x):
    return b.op("Gather", x, b.constant(np.array(-1, np.int64)), axis=1)


REFUSED = {
    "an output of every token": (lambda: vit(outputs=["blocks.3.mlp.fc2/Add"]), "the output blocks.3.mlp.fc2/Add"),
    "average pooling": (lambda: vit(read=average), "(ReduceMean), which depends on every token"),
    "a patch that is read": (lambda: vit(read=last_token), "(Gather), which depends on every token"),
    "a class token that is none": (lambda: vit(prefix=0), "(Gather), which depends on every token"),
    "position biases": (
        lambda: vit(mask=np.ones((1, 1 + PATCHES, 1 + PATCHES), np.float32)),
        "has a value for every token",
    ),
    "no attention": (lambda: vit(blocks=0), "no attention"),
    "tokens merged already": (lambda: _once(vit()), "attention to 14 and 9 tokens"),
}


def _once(model):
    merge_tokens(model, {0: 9})
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_graphs_whose_tokens_cannot_be_merged_are_refused_with_the_reason_and_left_alone(kind):
    make, reason = REFUSED[kind]
    model = make()
    before = ir.to_proto(model)
    with pytest.raises(GraphError, match="the tokens of this graph cannot be merged") as caught:
        merge_tokens(model, {1: 8})
    assert reason in caught.value.found
    assert ir.to_proto(model).graph.node == before.graph.node


@pytest.mark.parametrize(
    ("schedule", "message", "found"),
    [
        ({4: 9}, "tokens cannot be merged in block 4", "14 tokens, which can be merged in the blocks 0, 1, 2, 3"),
        ({0: 14}, "14 tokens cannot remain in block 0", "14 tokens before the merge, 1 of them not patches"),
        ({0: 7}, "7 tokens cannot remain in block 0", "14 tokens before the merge"),
        ({0: 9, 2: 9}, "9 tokens cannot remain in block 2", "9 tokens before the merge"),
        ({0: 9, 1: 4}, "4 tokens cannot remain in block 1", "9 tokens before the merge"),
    ],
)
def test_schedules_that_do_not_fit_are_refused_with_the_number_of_tokens(schedule, message, found):
    model = vit()
    before = ir.to_proto(model)
    with pytest.raises(GraphError, match=message) as caught:
        merge_tokens(model, schedule)
    assert found in caught.value.found
    assert ir.to_proto(model).graph.node == before.graph.node
