"""All rewrites together on whole models: ours, and modules of timm and transformers through both of their exporters."""

import dataclasses
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from tests.graph.small_graphs import (
    assert_rewritten,
    attention_model,
    difference,
    operators,
    random_feeds,
    run,
    run_in_double,
    weights,
)
from tests.references import reference
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import load_graph
from vitdeploy.graph.passes.optimize import REWRITES, OptimizeOptions, exact, optimize
from vitdeploy.spec import PreprocessSpec

DEPTH = 2
SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": DEPTH, "num_heads": 2, "num_classes": 10}
# Factors and shifts of these are powers of two: 255 std = 128, mean / std = 1 / 2.
SWITCHES = [name for name, value in dataclasses.asdict(OptimizeOptions()).items() if value is True]
PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (64 / 255,) * 3, (128 / 255,) * 3)


class Logits(nn.Module):
    """A model of transformers with one tensor in and one out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image):
        return self.model(pixel_values=image).logits


def with_short_weights(model):
    """Every parameter a multiple of 1/64 below 1/2: products and sums of two are exact in float32."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-31, 32, parameter.shape, generator=generator) / 64)
    return model.eval()


def timm(name, **options):
    return with_short_weights(reference("timm").create_model(name, **{**SIZES, **options}))


def swin():
    options = {"window_size": 4, "embed_dim": 32, "depths": (2,), "num_heads": (2,), "patch_size": 4}
    return with_short_weights(
        reference("timm").create_model("swin_tiny_patch4_window7_224", img_size=32, num_classes=10, **options)
    )


def transformers_vit():
    library = reference("transformers")
    config = library.ViTConfig(
        hidden_size=32,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return Logits(with_short_weights(library.ViTForImageClassification(config)))


def dynamo(model, *, in_graph=False):
    return export_graph(
        model, name="t", preprocess=PREPROCESS, image_size=(32, 32), opset=20, batch=None, in_graph=in_graph
    )


def torchscript(model):
    file = io.BytesIO()
    axes = {"image": {0: "batch"}, "logits": {0: "batch"}}
    names = {"input_names": ["image"], "output_names": ["logits"], "dynamic_axes": axes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of every size that it takes for a constant
        torch.onnx.export(model, (torch.zeros(2, 3, 32, 32),), file, dynamo=False, opset_version=17, **names)
    graph = ir.from_proto(onnx.load_from_string(file.getvalue()))
    normalise(graph)
    return graph


@dataclass(frozen=True)
class Case:
    """A model, how many places each rewrite must find in it (unnamed: none), and how many norms on its residual stream
    (0: it cannot be rotated)."""

    export: Callable[[], ir.Model]
    counts: dict[str, int]
    norms: int = 2 * DEPTH + 1


FOLDS = {"fold_attention_scale": DEPTH, "drop_key_bias": DEPTH, "fold_value_bias": DEPTH}
CLASS_TOKEN = {**FOLDS, "class_token_only": 1}
CASES = {
    "timm DeiT-III, pixels": Case(
        lambda: dynamo(timm("deit3_small_patch16_224"), in_graph=True),
        {**CLASS_TOKEN, "fold_layer_scale": 2 * DEPTH, "fold_image_normalisation": 1, "split_qkv": DEPTH},
    ),
    "timm DeiT distilled, TorchScript": Case(
        lambda: torchscript(timm("deit_tiny_distilled_patch16_224")), {**CLASS_TOKEN, "split_qkv": DEPTH}
    ),
    "timm ViT of average pooling and qk-norm, TorchScript": Case(
        lambda: torchscript(timm("vit_tiny_patch16_224", qk_norm=True, global_pool="avg")),
        {"fold_attention_scale": DEPTH, "fold_value_bias": DEPTH, "split_qkv": DEPTH},
    ),
    "timm CLIP, TorchScript": Case(
        lambda: torchscript(timm("vit_base_patch16_clip_224")), {**CLASS_TOKEN, "split_qkv": DEPTH}, norms=0
    ),
    "timm Swin, TorchScript": Case(lambda: torchscript(swin()), {**FOLDS, "split_qkv": DEPTH}, norms=0),
    "transformers ViT": Case(lambda: dynamo(transformers_vit()), {**CLASS_TOKEN, "merge_qkv": DEPTH}),
}
EXPORTED: dict[str, onnx.ModelProto] = {}


@pytest.fixture(params=CASES)
def case(request):
    """(case, a fresh copy of its graph); each model is exported once."""
    name = request.param
    if name not in EXPORTED:
        EXPORTED[name] = ir.to_proto(CASES[name].export())
    return CASES[name], ir.from_proto(EXPORTED[name])


@pytest.mark.parametrize("qkv", ["keep", "merged", "separate"])
def test_a_model_stays_the_same_function_and_every_rewrite_finds_its_places(case, qkv):
    expected, model = case
    before = ir.to_proto(model)
    options = OptimizeOptions(qkv=qkv)
    counts = optimize(model, options)
    counted = dict(expected.counts)
    if qkv != "merged":
        counted.pop("merge_qkv", None)
    if qkv != "separate":
        counted.pop("split_qkv", None)
    assert {name: count for name, count in counts.items() if count} == counted
    after = ir.to_proto(model)
    onnx.checker.check_model(after)
    onnx.shape_inference.infer_shapes(after, check_type=True, strict_mode=True)
    assert not any(optimize(model, options).values())
    assert ir.to_proto(model).graph.node == after.graph.node
    for batch in (1, 3):
        feeds = random_feeds(before, batch, seed=batch)
        [ours], [theirs] = run(after, feeds), run(before, feeds)
        assert difference(ours, theirs) <= 1e-5
    if qkv == "keep":
        [ours], [theirs] = run_in_double(after, feeds), run_in_double(before, feeds)
        assert difference(ours, theirs) <= 1e-10


def test_a_rotation_finds_the_norms_and_leaves_to_the_other_rewrites_what_they_find_without_it(case):
    expected, model = case
    before = ir.to_proto(model)
    plain = optimize(ir.from_proto(before))
    options = OptimizeOptions(rotate_residual=True)
    counts = optimize(model, options)
    assert counts.pop("rotate_residual") == expected.norms
    if expected.norms:  # the shifts of norms are biases of key and value now, where there were none too
        assert counts["drop_key_bias"] >= plain["drop_key_bias"]
        assert counts["class_token_only"] == plain["class_token_only"]
    else:
        assert counts == plain
    after = ir.to_proto(model)
    onnx.checker.check_model(after)
    onnx.shape_inference.infer_shapes(after, check_type=True, strict_mode=True)
    assert not any(optimize(model, options).values())
    assert ir.to_proto(model).graph.node == after.graph.node
    feeds = random_feeds(before, 2, seed=3)
    [ours], [theirs] = run_in_double(after, feeds), run_in_double(before, feeds)
    assert difference(ours, theirs) <= 1e-5


def test_our_own_export_is_optimized_with_weights_of_any_length(small_export):
    model = load_graph(small_export / "model.onnx")
    before = ir.to_proto(model)
    counts = optimize(model)
    assert counts == {**dict.fromkeys(counts, 0), **CLASS_TOKEN, "fold_image_normalisation": 1}
    feeds = random_feeds(before, 2, seed=0)
    assert difference(*run(ir.to_proto(model), feeds), *run(before, feeds)) <= 1e-5
    assert operators(model)["Mul"] == 0


def test_names_of_layers_and_weights_stay_but_for_the_block_that_is_divided(small_export):
    model = load_graph(small_export / "model.onnx")
    nodes, tensors = {node.name for node in model.graph}, weights(model).keys()
    optimize(model)
    linears = {f"blocks.0.{part}/MatMul" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    linears |= {f"blocks.1.{part}/MatMul" for part in ("attn.proj", "mlp.fc1", "mlp.fc2")}
    assert linears | {"patch_embed.proj/Conv"} <= nodes & {node.name for node in model.graph}
    assert {name.replace("/MatMul", ".weight_t") for name in linears} <= tensors & weights(model).keys()
    added = {node.name for node in model.graph if node.op_type == "MatMul"} - nodes
    assert added == {"blocks.1.attn.qkv.query/MatMul", "blocks.1.attn.qkv.key_value/MatMul"}


def test_the_same_graph_gives_the_same_bytes(small_export):
    written = []
    for _ in range(2):
        model = load_graph(small_export / "model.onnx")
        optimize(model, OptimizeOptions(qkv="separate"))
        written.append(ir.to_proto(model).SerializeToString(deterministic=True))
    assert written[0] == written[1]


def test_every_switch_turns_one_rewrite_off():
    model = attention_model()
    assert list(optimize(model)) == SWITCHES
    for name in SWITCHES:
        assert name not in optimize(model, OptimizeOptions(**{name: False}))


def test_with_all_switches_off_nothing_happens():
    options = OptimizeOptions(**dict.fromkeys(SWITCHES, False))
    assert_rewritten(attention_model(), lambda model: sum(optimize(model, options).values()), 0)
    assert optimize(attention_model(), options) == {}


@pytest.mark.parametrize("rewrite", REWRITES, ids=[each.name for each in REWRITES])
def test_every_rewrite_keeps_what_its_row_says(rewrite):
    name = "timm DeiT-III, pixels"
    EXPORTED[name] = EXPORTED.get(name) or ir.to_proto(CASES[name].export())
    model = ir.from_proto(EXPORTED[name])
    if rewrite.name in ("merge_qkv", "rotate_residual"):  # these come behind others
        optimize(model, OptimizeOptions(qkv="separate"))
    before = ir.to_proto(model)
    assert rewrite.run(model, OptimizeOptions(token_merging=((0, 13),)))
    feeds = random_feeds(before, 2, seed=0)
    found = difference(*run(ir.to_proto(model), feeds), *run(before, feeds))  # the shapes are equal
    least, most = {"numbers": (0, 1e-6), "function": (0, 1e-4), "shapes": (1e-3, np.inf)}[rewrite.keeps]
    assert least <= found <= most


def test_a_rewrite_without_a_switch_always_runs():
    def unheard_of(model):
        return 7

    row = exact(unheard_of, "numbers")
    assert row.chosen(OptimizeOptions()) and row.run(attention_model(), OptimizeOptions()) == 7


def test_every_switch_has_a_row_of_its_name():
    switches = [name for name, value in dataclasses.asdict(OptimizeOptions()).items() if isinstance(value, bool)]
    assert [each.name for each in REWRITES if each.name in switches] == switches
