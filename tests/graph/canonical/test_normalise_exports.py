"""Graphs exported by PyTorch from timm's and transformers' own modules come out in the canonical form."""

import contextlib
import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from tests.graph.builder import census, difference, run, values
from tests.references import reference
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.admit import admit
from vitdeploy.graph.io.files import save_graph

DEPTH, IMAGE = 2, 32
VIT = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 32, "depth": DEPTH, "num_heads": 2, "num_classes": 10}
HF_VIT = {"hidden_size": 32, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 64}
HF_VIT |= {"image_size": IMAGE, "patch_size": 8}
SWIN = {"patch_size": 4, "embed_dim": 16, "num_heads": (2, 4), "window_size": 4}


class Field(nn.Module):
    """One tensor of the output object of a transformers model."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, pixels: torch.Tensor) -> Any:
        return getattr(self.model(pixels), self.name)


def timm_model(name, **options):
    return getattr(reference("timm").models, name)(**options)


def hugging_face(model, config, field, **options):
    library = reference("transformers")
    return Field(getattr(library, model)(getattr(library, config)(**options)), field)


MODELS = {
    "timm-vit": lambda: timm_model("VisionTransformer", **VIT),
    "timm-vit-full": lambda: timm_model("VisionTransformer", **VIT, init_values=0.1, qk_norm=True, reg_tokens=2),
    "timm-deit": lambda: timm_model("VisionTransformerDistilled", **VIT),
    "timm-clip": lambda: timm_model("VisionTransformer", **VIT, pre_norm=True, act_layer="quick_gelu"),
    "timm-siglip": lambda: timm_model("VisionTransformer", **VIT, class_token=False, global_pool="map"),
    "timm-swin": lambda: timm_model("SwinTransformer", img_size=IMAGE, **SWIN, depths=(2, 2), num_classes=10),
    "hf-vit": lambda: hugging_face("ViTForImageClassification", "ViTConfig", "logits", **HF_VIT, num_labels=10),
    "hf-clip": lambda: hugging_face("CLIPVisionModel", "CLIPVisionConfig", "last_hidden_state", **HF_VIT),
    "hf-siglip": lambda: hugging_face("SiglipVisionModel", "SiglipVisionConfig", "pooler_output", **HF_VIT),
    "hf-swin": lambda: hugging_face(
        "SwinForImageClassification", "SwinConfig", "logits", image_size=IMAGE, **SWIN, depths=[2, 2], num_labels=10
    ),
}


@dataclass(frozen=True)
class Expected:
    """The census of the canonical form: single nodes, and those of the linears and attentions."""

    layer_norm: int
    gelu: int
    softmax: int
    linears: int
    class_tokens: int = 1


CENSUS = {
    "timm-vit": Expected(5, 2, 2, 9),
    "timm-vit-full": Expected(9, 2, 2, 9, 2),
    "timm-deit": Expected(5, 2, 2, 10, 2),
    "timm-clip": Expected(6, 0, 2, 9),
    "timm-siglip": Expected(6, 3, 3, 14),
    "timm-swin": Expected(11, 4, 4, 18, 0),
    "hf-vit": Expected(5, 2, 2, 13),
    "hf-clip": Expected(5, 0, 2, 12),
    "hf-siglip": Expected(6, 3, 3, 17),
    "hf-swin": Expected(11, 4, 4, 26),
}
# Shape arithmetic, written-out formulas and leftovers, none of which the canonical form has.
ABSENT = {"Erf", "Pow", "Sqrt", "ReduceProd", "Gemm", "Identity", "Constant", "Where", "IsNaN", "Cast", "Tile", "Mod"}
ABSENT |= {"ConstantOfShape", "Equal", "Dropout", "Flatten", "BatchNormalization", "Pad", "Range", "Reciprocal"}

CASES = [
    *[("timm-vit", opset) for opset in (11, 14, 17)],
    *[("timm-vit-full", 14), ("timm-deit", 17), ("timm-clip", 14), ("timm-siglip", 14), ("timm-swin", 11)],
    *[("hf-vit", 14), ("hf-clip", 17), ("hf-siglip", 14), ("hf-swin", 14)],
    ("hf-vit", "dynamo"),
]


def randomised(model):
    """Every parameter and buffer away from 0 and 1, so that nothing can be lost unseen."""
    torch.manual_seed(0)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.add_(0.1 * torch.randn_like(value))
    return model.eval()


@contextlib.contextmanager
def quiet(fused):
    timm = reference("timm")
    before = timm.layers.use_fused_attn()
    logging.disable(logging.WARNING)
    try:
        timm.layers.set_fused_attn(fused)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        timm.layers.set_fused_attn(before)
        logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def exported(request, tmp_path_factory):
    name, opset = request.param
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    example = torch.from_numpy(values(2, 3, IMAGE, IMAGE))
    names = {"input_names": ["x"], "output_names": ["y"]}
    with quiet(fused=opset != 11):
        model = randomised(MODELS[name]())
        if opset == "dynamo":
            shapes = ({0: torch.export.Dim("batch")},)
            torch.onnx.export(
                model, (example,), path, dynamo=True, opset_version=18, dynamic_shapes=shapes, verbose=False,
                external_data=False, **names,
            )  # fmt: skip
        else:
            axes = {"x": {0: "batch"}, "y": {0: "batch"}}
            torch.onnx.export(model, (example,), path, dynamo=False, opset_version=opset, dynamic_axes=axes, **names)
    return name, path


def test_an_export_comes_out_in_the_canonical_form_and_computes_the_same(exported, tmp_path):
    name, path = exported
    model = admit(path)
    normalise(model, opset=20)
    save_graph(model, tmp_path / "model.onnx")
    proto, original = onnx.load(tmp_path / "model.onnx"), onnx.load(path)
    found, expected = census(proto), CENSUS[name]

    counted = Expected(
        found["LayerNormalization"], found["Gelu"], found["Softmax"],
        sum(linear.kind == "matmul" for linear in find_linears(model)), found["Expand"],
    )  # fmt: skip
    assert counted == expected
    assert not ABSENT & found.keys()
    # One free size, read from the input once, and one Concat for each shape that needs it.
    assert found["Shape"] == min(1, expected.class_tokens)
    assert_attention(proto, expected.softmax)
    for batch in (1, 2, 5):
        x = values(batch, 3, IMAGE, IMAGE, seed=batch)
        assert difference(run(proto, x=x), run(original, x=x)) <= 1e-5


def assert_attention(proto, count):
    """Under each Softmax: MatMul of a scaled query and a transposed key, perhaps with constants added."""
    producers = {output: node for node in proto.graph.node for output in node.output}
    seen = Counter()
    for node in proto.graph.node:
        if node.op_type == "Softmax":
            scores = producers[node.input[0]]
            while scores.op_type in ("Add", "Reshape"):  # bias and mask; Swin's mask is added to a view by image
                scores = producers[scores.input[0]]
            assert scores.op_type == "MatMul"
            seen[tuple(producers[name].op_type for name in scores.input)] += 1
    assert sum(seen.values()) == count
    assert set(seen) <= {("Mul", "Transpose")}, seen
