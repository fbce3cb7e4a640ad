"""Small graphs of dense tasks as bundles, and images with labels for them: evaluations of some seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from PIL import Image

from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
from vitdeploy.runtime.tasks.anomaly import AnomalySpec
from vitdeploy.runtime.tasks.binary import BinarySpec
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.embedding import EmbeddingSpec
from vitdeploy.runtime.tasks.foreground import ForegroundSpec
from vitdeploy.runtime.tasks.heads import HeadSpec, HeadsSpec
from vitdeploy.runtime.tasks.image_to_image import ImageSpec
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec
from vitdeploy.runtime.tasks.keypoints import KeypointSpec
from vitdeploy.runtime.tasks.multi_label import MultiLabelSpec
from vitdeploy.runtime.tasks.regression import RegressionSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.runtime.tasks.tensors import TensorsSpec
from vitdeploy.spec import PreprocessSpec

SIDE, QUERIES, CLASSES = 32, 6, 3
PREPROCESS = PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.5,) * 3, (0.5,) * 3)
HEADS = {
    "segmentation": SegmentationSpec(),
    "depth": DepthSpec(),
    "foreground": ForegroundSpec(),
    "detection": PostprocessSpec(threshold=0.4),
    "instance-segmentation": InstanceSpec(threshold=0.3),
    "regression": RegressionSpec(("m", "m", "kg"), 0.3),
    "multi-label": MultiLabelSpec((0.4, 0.5, 0.6)),
    "binary": BinarySpec(0.5, "cat"),
}
# Of tasks that are not evaluated in shards.
OTHERS = {
    "classification": None,
    "features": None,
    "embedding": EmbeddingSpec(),
    "tensors": TensorsSpec(),
    "keypoints": KeypointSpec(threshold=0.0),
    "image-to-image": ImageSpec(),
    "anomaly": AnomalySpec(threshold=0.5, pixel_threshold=0.5, sigma=0.0),
    "panoptic": PostprocessSpec(threshold=0.4, things=(0, 1)),
    "heads": HeadsSpec(
        (
            HeadSpec("kind", "classification", width=QUERIES * (CLASSES + 1)),
            HeadSpec("tags", "multi-label", postprocess=MultiLabelSpec((0.4, 0.5, 0.6)), width=CLASSES),
            HeadSpec("sizes", "regression", "numbers", postprocess=RegressionSpec((), 0.3), width=CLASSES),
            HeadSpec("vector", "embedding", width=QUERIES * 4),
        )
    ),
}
NAMES = ("ant", "bee", "cat")
LABELS = {
    **{"segmentation": "masks", "depth": "depth", "detection": "yolo", "instance-segmentation": "coco"},
    **dict.fromkeys(("regression", "multi-label", "binary"), "columns"),
    **{"foreground": "masks"},
}
# Of the graph's outputs, before the batch: what comes after it.
MAPS, PAIRS = (SIDE // 4, SIDE // 4), (QUERIES, CLASSES + 1)


OF_THEIR_OWN = {"multi-label": ("r", CLASSES), "binary": ("y", 1)}
FLAT = {"classification": "logits", "features": "features", "embedding": "features"}
MAPPED = {"tensors": "numbers", "keypoints": "heatmaps"}


def _nodes(task: str) -> tuple[list[onnx.NodeProto], dict[str, tuple[int, ...]]]:
    """What follows "first", a map of 16 channels, and "pooled", its mean; and the outputs."""
    conv = {"kernel_shape": [1, 1]}
    if task == "segmentation":
        return [helper.make_node("Conv", ["first", "m"], ["logits"], **conv)], {"logits": (CLASSES, *MAPS)}
    if task == "depth":
        nodes = [
            helper.make_node("Conv", ["first", "d"], ["map"], **conv),
            helper.make_node("Abs", ["map"], ["positive"]),
            helper.make_node("Squeeze", ["positive", "one"], ["depth"]),
        ]
        return nodes, {"depth": MAPS}
    if task == "foreground":
        # Less the mean of its map: of weights like these some images would be all foreground.
        nodes = [
            helper.make_node("Conv", ["first", "d"], ["map"], **conv),
            helper.make_node("ReduceMean", ["map"], ["level"], axes=[2, 3], keepdims=1),
            helper.make_node("Sub", ["map", "level"], ["foreground"]),
        ]
        return nodes, {"foreground": (1, *MAPS)}
    if task in FLAT:
        return [helper.make_node("MatMul", ["pooled", "c"], [FLAT[task]])], {FLAT[task]: (PAIRS[0] * PAIRS[1],)}
    if task == "regression":
        return [helper.make_node("MatMul", ["pooled", "r"], ["numbers"])], {"numbers": (CLASSES,)}
    if task == "heads":
        nodes = [
            helper.make_node("MatMul", ["pooled", "c"], ["kind"]),
            helper.make_node("MatMul", ["pooled", "r"], ["numbers"]),
            helper.make_node("Sub", ["numbers", "r middle"], ["tags"]),
            helper.make_node("MatMul", ["pooled", "b"], ["vector"]),
        ]
        return nodes, {head.reads: (head.width or 1,) for head in OTHERS["heads"].heads}
    if task in OF_THEIR_OWN:
        weight, width = OF_THEIR_OWN[task]
        nodes = [
            helper.make_node("MatMul", ["pooled", weight], ["raw"]),
            helper.make_node("Sub", ["raw", f"{weight} middle"], ["logits"]),
        ]
        return nodes, {"logits": (width,)}
    if task in MAPPED:
        return [helper.make_node("Conv", ["first", "q"], [MAPPED[task]], **conv)], {MAPPED[task]: (QUERIES, *MAPS)}
    if task == "image-to-image":
        nodes = [
            helper.make_node("Conv", ["first", "m"], ["map"], **conv),
            helper.make_node("Sigmoid", ["map"], ["reconstruction"]),
        ]
        return nodes, {"reconstruction": (3, *MAPS)}
    if task == "anomaly":
        nodes = [
            helper.make_node("Conv", ["first", "d"], ["map"], **conv),
            helper.make_node("Sigmoid", ["map"], ["anomaly_map"]),
            helper.make_node("ReduceMean", ["anomaly_map"], ["pred_score"], axes=[1, 2, 3], keepdims=0),
        ]
        return nodes, {"anomaly_map": (1, *MAPS), "pred_score": ()}
    if task == "panoptic":
        nodes, outputs = _nodes("detection")
        masks = helper.make_node("Conv", ["first", "q"], ["masks"], **conv)
        return [*nodes, masks], {**outputs, "masks": (QUERIES, *MAPS)}
    names = ("logits", "boxes") if task == "detection" else ("class_logits", "masks")
    nodes = [
        helper.make_node("MatMul", ["pooled", "c"], ["classes"]),
        helper.make_node("Reshape", ["classes", "pairs"], [names[0]]),
    ]
    if task == "detection":
        nodes += [
            helper.make_node("MatMul", ["pooled", "b"], ["sides"]),
            helper.make_node("Sigmoid", ["sides"], ["shares"]),
            helper.make_node("Reshape", ["shares", "four"], ["boxes"]),
        ]
        return nodes, {"logits": PAIRS, "boxes": (QUERIES, 4)}
    return [*nodes, helper.make_node("Conv", ["first", "q"], ["masks"], **conv)], {
        "class_logits": PAIRS,
        "masks": (QUERIES, *MAPS),
    }


def graph(task: str, path: Path, noise: float = 0.0, *, shuffled: int | None = None, constant: bool = False) -> Path:
    """A graph of seeded weights; `noise`: how far they are moved, for an engine that differs; `shuffled`: by which seed
    they are, for one that has nothing to do with it. Of a `constant` one nothing comes from the image."""
    import onnx_ir as ir

    generator, other = np.random.default_rng(1), np.random.default_rng(2)
    shapes = {
        **{"w": (16, 3, 4, 4), "m": (CLASSES, 16, 1, 1), "d": (1, 16, 1, 1), "q": (QUERIES, 16, 1, 1)},
        **{"c": (16, QUERIES * (CLASSES + 1)), "b": (16, QUERIES * 4), "r": (16, CLASSES), "y": (16, 1)},
    }
    weights = {name: generator.normal(0, 0.35, shape) for name, shape in shapes.items()}
    weights["c"] *= 12
    weights["b"] *= 2
    weights["r"] *= 5
    weights["y"] *= 20
    weights = {
        name: (value * (1 + noise * other.normal(size=value.shape))).astype(np.float32)
        for name, value in weights.items()
    }
    if shuffled is not None:
        order = np.random.default_rng(shuffled)
        weights = {name: order.permutation(value.ravel()).reshape(value.shape) for name, value in weights.items()}
    weights["w"] *= not constant
    middle = _pooled(weights["w"]).mean(axis=0)
    weights |= {f"{name} middle": (middle @ weights[name]).astype(np.float32) for name in ("r", "y")}
    numbers = {"one": [1], "pairs": [-1, *PAIRS], "four": [-1, QUERIES, 4]}
    weights |= {name: np.array(value, np.int64) for name, value in numbers.items()}
    nodes, outputs = _nodes(task)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["stem"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Relu", ["stem"], ["first"]),
        helper.make_node("ReduceMean", ["first"], ["pooled"], axes=[2, 3], keepdims=0),
        *nodes,
    ]
    used = {name for node in nodes for name in node.input}
    tensor = TensorProto.FLOAT
    model = helper.make_model(
        helper.make_graph(
            nodes,
            task,
            [helper.make_tensor_value_info("x", tensor, ["batch", 3, SIDE, SIDE])],
            [helper.make_tensor_value_info(name, tensor, ["batch", *shape]) for name, shape in outputs.items()],
            [onnx.numpy_helper.from_array(array, name) for name, array in weights.items() if name in used],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    ours = ir.from_proto(model)
    set_metadata(
        ours,
        GraphMetadata(
            task,
            task,
            PREPROCESS,
            postprocess=(HEADS | OTHERS)[task],
            labels=NAMES if task in {*HEADS} - {"binary"} else (),
        ),
    )
    save_graph(ours, path)
    return path


@dataclass(frozen=True)
class Scenes:
    """A folder of images, and the place of labels for each task."""

    images: Path
    labels: Path

    def annotations(self, task: str) -> Path:
        return self.labels / {
            **{"instance-segmentation": "coco.json", "regression": "numbers.csv"},
            **dict.fromkeys(OF_THEIR_OWN, "flags.csv"),
        }.get(task, task)


def picture(path: Path, seed: int) -> None:
    """A picture of a few colours, 40 pixels wide and 36 high."""
    _drawn(seed).save(path)


def _drawn(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((40, 36), Image.Resampling.BICUBIC)


def _pooled(stem: np.ndarray, count: int = 16) -> np.ndarray:
    """ "pooled" of some pictures, [count, 16]: answers of yes and no lie on both sides of their mean."""
    small = [np.asarray(_drawn(seed).resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for seed in range(count)]
    images = (np.stack(small) / 255 - 0.5) / 0.5
    patches = images.reshape(count, SIDE // 4, 4, SIDE // 4, 4, 3).transpose(0, 1, 3, 5, 2, 4).reshape(count, -1, 48)
    return np.maximum(patches @ stem.reshape(16, 48).T, 0).mean(axis=1)


def scenes(folder: Path, count: int) -> Scenes:
    """Images, and labels for all tasks, which fit them by chance alone."""
    found = Scenes(folder / "images", folder / "labels")
    for task in ("segmentation", "depth", "detection", "foreground"):
        found.annotations(task).mkdir(parents=True)
    found.images.mkdir()
    entries, rows, numbers = [], [], [",".join(("image", *NAMES))]
    flags = [*numbers]
    for i in range(count):
        picture(found.images / f"{i:03}.png", i)
        generator = np.random.default_rng(1000 + i)
        coarse = Image.fromarray(generator.choice([0, 1, 2, 255], (3, 4)).astype(np.uint8))
        coarse.resize((40, 36), Image.Resampling.NEAREST).save(found.annotations("segmentation") / f"{i:03}.png")
        depth = generator.uniform(0.5, 4, (36, 40)).astype(np.float32) * (i % 7 != 3)
        matte = Image.fromarray(generator.choice([0, 255], (3, 4)).astype(np.uint8))
        matte.resize((40, 36), Image.Resampling.BILINEAR).save(found.annotations("foreground") / f"{i:03}.png")
        np.save(found.annotations("depth") / f"{i:03}.npy", depth)
        sides = [generator.uniform((0.4, 0.4, 0.5, 0.5), (0.6, 0.6, 0.8, 0.8)) for _ in range(i % 4)]
        boxes = [(int(generator.integers(0, 3)), *each) for each in sides]
        lines = "".join("{} {:.4f} {:.4f} {:.4f} {:.4f}\n".format(*box) for box in boxes)
        (found.annotations("detection") / f"{i:03}.txt").write_text(lines)
        numbers.append(f"{i:03},{generator.normal():.4f},{generator.normal():.4f},{generator.normal():.4f}")
        flags.append(",".join((f"{i:03}", *map(str, generator.integers(0, 2, CLASSES)))))
        entries.append({"id": i + 1, "file_name": f"{i:03}.png", "width": 40, "height": 36})
        for index, x, y, w, h in boxes:
            left, top, right, bottom = 40 * (x - w / 2), 36 * (y - h / 2), 40 * (x + w / 2), 36 * (y + h / 2)
            corners = [left, top, right, top, right, bottom, left, bottom]
            rows.append({"image_id": i + 1, "category_id": index, "segmentation": [corners]})
    found.annotations("regression").write_text("\n".join(numbers) + "\n")
    found.annotations("binary").write_text("\n".join(flags) + "\n")
    (found.annotations("detection") / "classes.txt").write_text("ant\nbee\ncat\n")
    categories = [{"id": i, "name": name} for i, name in enumerate(NAMES)]
    document = {"images": entries, "annotations": rows, "categories": categories}
    found.annotations("instance-segmentation").write_text(json.dumps(document))
    return found
