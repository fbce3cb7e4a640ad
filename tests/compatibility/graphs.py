"""Graphs as other exporters write them, of small seeded models: `GRAPHS` says which, and whose code wrote each.

Those of libraries that the tests do not install lie in `exported/`; `make_exported.py` made them.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from tests.references import reference

SIDE, DETECTOR_SIDE, CLASSES, QUERIES = 32, 64, 5, 6
EXPORTED = Path(__file__).parent / "exported"
VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": CLASSES}
HF_VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
HF_VIT |= {"image_size": SIDE, "patch_size": 8, "num_labels": CLASSES}
SWIN = {"img_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
DETR = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
DETR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": QUERIES, "num_labels": CLASSES}
RT_DETR = {"d_model": 16, "encoder_hidden_dim": 16, "encoder_layers": 1, "encoder_ffn_dim": 32}
RT_DETR |= {"encoder_attention_heads": 2, "decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 2}
RT_DETR |= {"num_queries": QUERIES, "num_labels": CLASSES, "hidden_expansion": 0.5, "num_denoising": 0}


class Outputs(nn.Module):
    """A module of transformers with its named outputs as a tuple, as exporters call it."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        found = self.model(pixels)
        return tuple(getattr(found, name) for name in self.names)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


class Ranked(nn.Module):
    """RT-DETR's post-processing in the graph, as `tools/export_onnx.py` of RT-DETR, D-FINE and DEIMv2 has it:
    the best pairs of query and class, boxes as corners in pixels of `orig_target_sizes` (width, height)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = Outputs(model, ("logits", "pred_boxes"))

    def forward(self, images: Tensor, orig_target_sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, boxes = self.model(images)
        x, y, w, h = boxes.unbind(-1)
        corners = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)
        corners = corners * orig_target_sizes.repeat(1, 2).unsqueeze(1)
        scores, index = torch.topk(logits.sigmoid().flatten(1), QUERIES, dim=-1)
        labels = index - index // CLASSES * CLASSES
        index = index // CLASSES
        return labels, corners.gather(1, index.unsqueeze(-1).repeat(1, 1, 4)), scores


class Joined(nn.Module):
    """Boxes and scores in one tensor [batch, queries, 4 + classes], as Ultralytics' RTDETRDecoder gave until 8.3."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = Outputs(model, ("logits", "pred_boxes"))

    def forward(self, images: Tensor) -> Tensor:
        logits, boxes = self.model(images)
        return torch.cat((boxes, logits.sigmoid()), -1)


class JoinedRanked(nn.Module):
    """The best pairs in one tensor [batch, queries, 6]: box, score, class; Ultralytics' RTDETRDecoder from 8.4 on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = Outputs(model, ("logits", "pred_boxes"))

    def forward(self, images: Tensor) -> Tensor:
        logits, boxes = self.model(images)
        scores, index = torch.topk(logits.sigmoid().flatten(1), QUERIES, dim=-1)
        query = torch.div(index, CLASSES, rounding_mode="floor")
        boxes = boxes.gather(1, query.unsqueeze(-1).expand(-1, -1, 4).long())
        return torch.cat([boxes, scores[..., None], (index - query * CLASSES)[..., None].float()], dim=-1)


class Masked(nn.Module):
    """A ViT of `nn.MultiheadAttention` with a mask of truth values that hides the last tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.norm, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, CLASSES)
        mask = torch.zeros(16, 16, dtype=torch.bool)
        mask[:, 13:] = True
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=self.mask)[0]
        return self.head((x + self.mlp(self.norm2(x))).mean(1))


def timm_model(name: str, **options: Any) -> nn.Module:
    return getattr(reference("timm").models, name)(**options)


def transformers_model(name: str, **options: Any) -> nn.Module:
    library = reference("transformers")
    model = getattr(library, name)
    return model(model.config_class(**options))


def timm_vit(**options: Any) -> nn.Module:
    return timm_model("VisionTransformer", **VIT, **options)


def detr() -> nn.Module:
    config = reference("transformers").ResNetConfig(**RESNET, out_features=["stage4"])
    return transformers_model("DetrForObjectDetection", **DETR, backbone_config=config, use_timm_backbone=False)


def rt_detr(levels: int = 1) -> nn.Module:
    """RT-DETR on this many levels of features, from stride 8 on."""
    stages = ["stage2", "stage3", "stage4"][:levels]
    backbone = reference("transformers").RTDetrResNetConfig(**RESNET, out_features=stages)
    return transformers_model(
        "RTDetrForObjectDetection",
        **RT_DETR,
        backbone_config=backbone,
        anchor_image_size=None,
        num_feature_levels=levels,
        encoder_in_channels=[8, 16, 16][:levels],
        feat_strides=[8, 16, 32][:levels],
        encode_proj_layers=[levels - 1],
        decoder_in_channels=[16] * levels,
    )


def seeded(model: nn.Module, images: Tensor) -> nn.Module:
    """Every parameter away from 0 and 1, so that nothing can be lost unseen. Batch norms are as after training on
    `images`: positions else give nearly equal scores, and it is rounding that ranks a detector's queries."""

    def learn(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norm.running_mean.copy_(inputs[0].mean((0, 2, 3)))
        norm.running_var.copy_(inputs[0].var((0, 2, 3)))

    torch.manual_seed(0)
    model.eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))
        norms = [module for module in model.modules() if hasattr(module, "running_mean")]
        hooks = [norm.register_forward_pre_hook(learn) for norm in norms]
        if hooks:
            model(images, *([torch.full((2, 2), 1)] if isinstance(model, Ranked) else []))
        for hook in hooks:
            hook.remove()
    return model


@contextlib.contextmanager
def quiet(fused: bool) -> Iterator[None]:
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


BATCH = {0: "batch"}


@dataclass(frozen=True)
class TorchScript:
    """torch.onnx's older exporter. `axes`: names of axes by input and output; None gives all a free batch."""

    make: Callable[[], nn.Module]
    opset: int
    outputs: Sequence[str]
    inputs: Sequence[str] = ("images",)
    axes: Mapping[str, Mapping[int, str]] | None = None
    side: int = SIDE
    fused: bool = True
    listed: bool = False

    def __call__(self, path: Path) -> None:
        names = (*self.inputs, *self.outputs)
        axes = dict.fromkeys(names, BATCH) if self.axes is None else self.axes
        inputs = example(self.side, len(self.inputs), 1 if self.axes == {} else 2)
        with quiet(self.fused):
            torch.onnx.export(
                seeded(self.make(), inputs[0]),
                inputs,
                path,
                dynamo=False,
                opset_version=self.opset,
                input_names=list(self.inputs),
                output_names=list(self.outputs),
                dynamic_axes={name: dict(each) for name, each in axes.items()},
                keep_initializers_as_inputs=self.listed,
            )


@dataclass(frozen=True)
class Dynamo:
    """torch.onnx's exporter by torch.export."""

    make: Callable[[], nn.Module]
    opset: int
    external: bool = False

    def __call__(self, path: Path) -> None:
        inputs = example(SIDE, 1, 2)
        with quiet(fused=True):
            torch.onnx.export(
                seeded(self.make(), inputs[0]),
                inputs,
                path,
                dynamo=True,
                opset_version=self.opset,
                input_names=["x"],
                output_names=["y"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
                external_data=self.external,
            )


def example(side: int, count: int, batch: int) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return (torch.rand(batch, 3, side, side), torch.full((batch, 2), side))[:count]


def committed(name: str) -> Callable[[Path], None]:
    return lambda path: shutil.copyfile(EXPORTED / name, path) and None


def in_half(path: Path, *, keep: bool) -> None:
    """By ONNX Runtime's converter to float16, which leaves nodes out of order where it keeps the outer types."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    TorchScript(lambda: timm_vit(), 17, ["logits"])(path)
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=keep), path)


def apart(path: Path) -> None:
    """Weights in a file beside it, as `onnx.save` puts them."""
    TorchScript(lambda: timm_vit(qkv_bias=False), 17, ["logits"])(path)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)


@dataclass(frozen=True)
class Graph:
    """A row of the page: whose graph, the opset of the file, the task that it is to be, and what writes it.

    `size`: (height, width) where the file leaves it open. `remark` is for the page. `attentions`: that its canonical
    form has; `scores`: the rule that a detector's are to be read by. `alike`: much like another row.
    """

    name: str
    opset: int
    write: Callable[[Path], None]
    task: str = "classification"
    attentions: int = 1
    scores: str | None = None
    size: tuple[int, int] | None = None
    remark: str = ""
    alike: bool = False


PIXELS = {0: "batch_size", 1: "num_channels", 2: "height", 3: "width"}
OBJECTS = {0: "batch_size", 1: "num_queries"}
RAW, FREE = ("logits", "pred_boxes"), {"pixel_values": PIXELS}
SIZED = {"pixel_values": {0: "batch_size", 2: "height", 3: "width"}, "logits": OBJECTS, "pred_boxes": OBJECTS}
TORCHSCRIPT, DYNAMO = "TorchScript", "dynamo"
D = DETECTOR_SIDE
GRAPHS = (
    Graph(f"{TORCHSCRIPT}: timm ViT, attention written out", 13, TorchScript(timm_vit, 13, ["logits"], fused=False)),
    Graph(
        f"{TORCHSCRIPT}: timm ViT, registers, query norms, LayerScale",
        14,
        TorchScript(
            lambda: timm_vit(init_values=0.1, qk_norm=True, reg_tokens=2),
            14,
            ["output"],
            axes={"images": {0: "N"}, "output": {0: "N"}},
        ),
    ),
    Graph(f"{TORCHSCRIPT}: `nn.MultiheadAttention` with a mask", 13, TorchScript(Masked, 13, ["logits"])),
    Graph(
        f"{TORCHSCRIPT}: timm Swin, shifted windows",
        16,
        TorchScript(lambda: timm_model("SwinTransformer", **SWIN, num_classes=CLASSES), 16, ["logits"]),
        attentions=2,
    ),
    Graph(
        f"{TORCHSCRIPT}: timm ViT, attention pooling",
        17,
        TorchScript(lambda: timm_vit(class_token=False, global_pool="map"), 17, ["logits"]),
        attentions=2,
    ),
    Graph(
        f"{TORCHSCRIPT}: timm ViT, fixed batch, weights as inputs",
        14,
        TorchScript(timm_vit, 14, ["logits"], axes={}, listed=True),
        remark="the file's batch",
    ),
    Graph(f"{DYNAMO}: timm ViT", 18, Dynamo(timm_vit, 18), alike=True),
    Graph(
        f"{DYNAMO}: transformers ViT",
        19,
        Dynamo(lambda: Logits(transformers_model("ViTForImageClassification", **HF_VIT)), 19),
        alike=True,
    ),
    Graph(f"{DYNAMO}: timm ViT, external data", 20, Dynamo(timm_vit, 20, external=True)),
    Graph(
        "optimum: transformers ViT, all axes free",
        14,
        TorchScript(
            lambda: transformers_model("ViTForImageClassification", **HF_VIT),
            14,
            ["logits"],
            ["pixel_values"],
            {**FREE, "logits": {0: "batch_size"}},
            fused=False,
        ),
        size=(SIDE, SIDE),
    ),
    Graph(
        "optimum: transformers DETR, all axes free",
        14,
        TorchScript(
            lambda: Outputs(detr(), RAW),
            14,
            RAW,
            ["pixel_values"],
            {**FREE, "logits": OBJECTS, "pred_boxes": OBJECTS},
            side=D,
        ),
        "detection",
        3,
        "softmax",
        (D, D),
        "softmax is assumed without a config.json",
    ),
    Graph(
        "optimum: transformers RT-DETR, free sizes",
        16,
        TorchScript(lambda: Outputs(rt_detr(3), RAW), 16, RAW, ["pixel_values"], SIZED, side=D),
        "detection",
        2,
        "sigmoid",
        (D, D),
        alike=True,
    ),
    Graph(
        "RT-DETR names: `pred_logits`, `pred_boxes`",
        17,
        TorchScript(lambda: Outputs(rt_detr(), RAW), 17, ["pred_logits", "pred_boxes"], side=D),
        "detection",
        2,
        "sigmoid",
    ),
    Graph(
        "RT-DETR, D-FINE, DEIMv2 names, with post-processing and `orig_target_sizes`",
        16,
        TorchScript(
            lambda: Ranked(rt_detr()), 16, ["labels", "boxes", "scores"], ["images", "orig_target_sizes"], side=D
        ),
        "detection",
        2,
        "given",
        remark="boxes relative to the image",
    ),
    Graph(
        "RF-DETR names: `dets`, `labels` (logits)",
        17,
        TorchScript(lambda: Outputs(rt_detr(), RAW[::-1]), 17, ["dets", "labels"], ["input"], side=D),
        "detection",
        2,
        "sigmoid",
        alike=True,
    ),
    Graph(
        "Ultralytics RT-DETR to 8.3: one output [b,q,4+classes]",
        17,
        TorchScript(lambda: Joined(rt_detr()), 17, ["output0"], side=D),
        "detection",
        2,
        "sigmoid",
        remark="cut before the score sigmoid",
    ),
    Graph(
        "Ultralytics RT-DETR from 8.4: one output [b,q,6]",
        17,
        TorchScript(lambda: JoinedRanked(rt_detr()), 17, ["output0"], side=D),
        "detection",
        2,
        "given",
    ),
    Graph(
        "tf2onnx 1.17: Keras 3 ViT, NHWC, tanh GELU",
        13,
        committed("tf2onnx_vit_opset13.onnx"),
        remark="image becomes NCHW",
    ),
    Graph(
        "tf2onnx 1.17: Keras 3 ViT on convolutions, NHWC, erf GELU",
        17,
        committed("tf2onnx_conv_opset17.onnx"),
        remark="image becomes NCHW",
    ),
    Graph("paddle2onnx 2.1: ViT on convolutions", 16, committed("paddle_vit_opset16.onnx")),
    Graph(
        "onnxsim 0.8: timm ViT from TorchScript",
        14,
        committed("onnxsim_vit_opset14.onnx"),
        remark="linears keep onnxsim's two Reshapes",
    ),
    Graph(
        "ONNX Runtime's float16 converter: timm ViT, outer types kept",
        17,
        lambda path: in_half(path, keep=True),
        remark="computed in float32",
    ),
    Graph(
        "ONNX Runtime's float16 converter: timm ViT",
        17,
        lambda path: in_half(path, keep=False),
        remark="computed in float32",
        alike=True,
    ),
    Graph("`onnx.save`, external weights: timm ViT without q, k, v biases", 17, apart, alike=True),
)
