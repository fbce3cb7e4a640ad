"""Small valid files of every kind, made once: what is damaged must be whole first.

The model is no bigger than it must be for each reader to have something to read, as a case costs what its model costs.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.sandbox import Sandbox

SIDE, CLASSES, WIDTH = 8, 4, 8
BUILT_IN = "vit_w32d2h2_patch8_32"
TARGETS = ("onnxruntime-cpu", "openvino-cpu")
LABELS = ["north", "east", "south", "west"]


@dataclass(frozen=True)
class Seeds:
    """Where the valid files are; `make` fills the folder."""

    folder: Path

    @property
    def graph(self) -> Path:
        """A small image model of another exporter."""
        return self.folder / "graph.onnx"

    @property
    def bundle(self) -> Path:
        """The same with engines for ONNX Runtime and OpenVINO, labels and golden answers."""
        return self.folder / "bundle"

    @property
    def packed(self) -> Path:
        return self.folder / "bundle.vitb"

    @property
    def safetensors(self) -> Path:
        """Seeded weights of BUILT_IN."""
        return self.folder / "weights.safetensors"

    @property
    def pt(self) -> Path:
        return self.folder / "weights.pt"

    @property
    def legacy(self) -> Path:
        """The same as `torch.save` wrote it before version 1.6: no archive."""
        return self.folder / "legacy.pt"

    @property
    def npz(self) -> Path:
        """The first of these weights, as JAX's models are kept."""
        return self.folder / "weights.npz"

    @property
    def model_folder(self) -> Path:
        """A ViT as transformers saves it, with its processor."""
        return self.folder / "vit"

    def image(self, name: str) -> bytes:
        """An image file, by its format: "png", "jpeg", "gif", "webp", "bmp", "tiff"."""
        return (self.folder / "images" / name).read_bytes()

    @property
    def images(self) -> Path:
        """A folder of images, one sub-folder a class."""
        return self.folder / "data"

    @property
    def image_file(self) -> Path:
        return self.folder / "images" / "png"


def make(folder: Path) -> Seeds:
    """Fill the folder; this loads PyTorch and runs the runtimes, so it belongs into a process of its own."""
    seeds = Seeds(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_images(folder)
    import onnx

    onnx.save(tiny_model(), seeds.graph)
    write_bundle_of(seeds.bundle, folder / "work")
    from vitdeploy.bundle.pack import pack_bundle

    pack_bundle(seeds.bundle, seeds.packed)
    write_weights(seeds)
    write_model_folder(seeds.model_folder)
    shutil.rmtree(folder / "work")
    return seeds


def make_apart(work: Path) -> Seeds:
    """The same below `work`, in a forked process: this one must have no threads of a runtime."""
    sandbox = Sandbox(work / "sandbox")
    made = sandbox.call(lambda: make(work / "seeds") and 0, sandbox.work, seconds=300, megabytes=1 << 20)
    if made.status:
        raise RuntimeError(f"the valid files cannot be made: {made.text}")
    return Seeds(work / "seeds")


# --- graphs -----------------------------------------------------------------------------------------------------------


def tiny_model(opset: int = 17) -> Any:
    """An `onnx.ModelProto` with image [batch, 3, 8, 8]: patches, LayerNorm, attention, their average, logits."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    chance = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> Any:
        return numpy_helper.from_array((chance.standard_normal(shape) / 4).astype(np.float32), name)

    def ints(name: str, *values: int) -> Any:
        return numpy_helper.from_array(np.array(values, np.int64), name)

    weights = [
        weight("patch", WIDTH, 3, 4, 4),
        weight("patch_bias", WIDTH),
        numpy_helper.from_array(np.ones(WIDTH, np.float32), "gain"),
        weight("norm_bias", WIDTH),
        weight("query", WIDTH, WIDTH),
        weight("key", WIDTH, WIDTH),
        weight("value", WIDTH, WIDTH),
        weight("head", WIDTH, CLASSES),
        weight("head_bias", CLASSES),
        ints("tokens", 0, WIDTH, 4),
    ]
    nodes = [
        helper.make_node(
            "Conv", ["image", "patch", "patch_bias"], ["grid"], "embed", kernel_shape=[4, 4], strides=[4, 4]
        ),
        helper.make_node("Reshape", ["grid", "tokens"], ["columns"], "flatten"),
        helper.make_node("Transpose", ["columns"], ["x"], "turn", perm=[0, 2, 1]),
        helper.make_node("LayerNormalization", ["x", "gain", "norm_bias"], ["n"], "norm", axis=-1, epsilon=1e-6),
        *(helper.make_node("MatMul", ["n", name], [name[0]], name) for name in ("query", "key", "value")),
        helper.make_node("Transpose", ["k"], ["kt"], "turn_key", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"], "scores"),
        helper.make_node("Softmax", ["scores"], ["shares"], "softmax", axis=-1),
        helper.make_node("MatMul", ["shares", "v"], ["mixed"], "mix"),
        helper.make_node("Add", ["x", "mixed"], ["sum"], "residual"),
        helper.make_node("ReduceMean", ["sum"], ["mean"], "mean", axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "head"], ["h"], "head"),
        helper.make_node("Add", ["h", "head_bias"], ["logits"], "head_bias"),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made)
    return made


def write_bundle_of(out: Path, work: Path) -> None:
    """A bundle of the tiny model with an engine for each of TARGETS."""
    import onnx

    from vitdeploy.bundle.write import Golden, GoldenAnswers, write_bundle
    from vitdeploy.compilation.engine import compile_engine
    from vitdeploy.runtime.engine import make_runner
    from vitdeploy.runtime.preprocess import to_input
    from vitdeploy.spec import GraphSpec, PreprocessSpec, TensorSpec

    work.mkdir(parents=True)
    model = work / "model.onnx"
    onnx.save(tiny_model(), model)
    preprocess = PreprocessSpec(SIDE, (SIDE, SIDE), "bicubic", (0.5,) * 3, (0.5,) * 3)
    pixels = np.random.default_rng(1).integers(0, 256, (4, SIDE, SIDE, 3), np.uint8)
    engines, answers = [], {}
    for target in TARGETS:
        home = work / target
        home.mkdir()
        spec = compile_engine(model, home, target=target, precision="fp32", batch=1, placed=0)
        with make_runner(home, spec) as runner:
            (tensor,) = runner.inputs
            feeds = [{tensor.name: to_input(each[None], preprocess, tensor)} for each in pixels]
            logits = np.concatenate([runner.infer(feed)["logits"] for feed in feeds])
        engines.append((spec, home))
        answers[spec.artifact] = GoldenAnswers({"logits": logits}, 1e-3, len(pixels))
    out.mkdir(parents=True)
    graph = GraphSpec(
        "model.onnx",
        (TensorSpec("image", "float32", ("batch", 3, SIDE, SIDE)),),
        (TensorSpec("logits", "float32", ("batch", CLASSES)),),
    )
    first = next(iter(answers.values()))
    write_bundle(
        out,
        name="tiny",
        task="classification",
        graphs={"model": (model, graph)},
        preprocess=preprocess,
        engines=engines,
        labels=LABELS,
        golden=Golden({"pixels": pixels}, first.outputs, answers),
    )


def relisted(bundle: Path) -> None:
    """Write the true sizes and digests into the manifest: what a stranger would do who made the files so."""
    from vitdeploy.bundle.read import file_sha256

    file = bundle / "manifest.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    for entry in document["files"]:
        path = bundle / entry["path"]
        if path.is_file():
            entry.update(bytes=path.stat().st_size, sha256=file_sha256(path))
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


# --- weights ----------------------------------------------------------------------------------------------------------


def state_of() -> Any:
    """Seeded weights of BUILT_IN with four classes."""
    import torch

    from vitdeploy.models.catalog import find_or_raise

    torch.manual_seed(1)
    family, config = find_or_raise(BUILT_IN)
    model = family.build(dataclasses.replace(config, num_classes=CLASSES))
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def write_weights(seeds: Seeds) -> None:
    import torch
    from safetensors.torch import save_file

    state = state_of()
    save_file(state, seeds.safetensors)
    torch.save(state, seeds.pt)
    torch.save(state, seeds.legacy, _use_new_zipfile_serialization=False)
    np.savez(seeds.npz, **{key: value.numpy() for key, value in state.items()})


def write_model_folder(folder: Path) -> None:
    """As `save_pretrained` of transformers leaves it."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(2)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
        id2label=dict(enumerate(LABELS)),
        label2id={name: number for number, name in enumerate(LABELS)},
    )
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


# --- images -----------------------------------------------------------------------------------------------------------


def picture(side: int = 24, seed: int = 0) -> Any:
    """A PIL image with something in it, of which no format makes a few bytes."""
    from PIL import Image

    chance = np.random.default_rng(seed)
    grid = chance.integers(0, 256, (side // 4, side // 4, 3), np.uint8)
    return Image.fromarray(grid.repeat(4, 0).repeat(4, 1) // 2 + chance.integers(0, 64, (side, side, 3), np.uint8))


FORMATS = ("png", "jpeg", "gif", "webp", "bmp", "tiff")


def encoded(kind: str, image: Any = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    (picture() if image is None else image).save(stream, kind.upper(), **options)
    return stream.getvalue()


def write_images(folder: Path) -> None:
    (folder / "images").mkdir()
    for kind in FORMATS:
        (folder / "images" / kind).write_bytes(encoded(kind))
    for number, label in enumerate(LABELS):
        (folder / "data" / label).mkdir(parents=True)
        for copy in range(2):
            image = picture(seed=10 * number + copy)
            image.save(folder / "data" / label / f"{copy}.png")
