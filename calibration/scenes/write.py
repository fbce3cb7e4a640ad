"""Scenes as files: pictures in images/<split>/, labels beside `images`; `calibration/README.md` lists the formats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from calibration.scenes import captions, digits, figures, lines, parts, rooms, shapes
from calibration.scenes.canvas import Bytes, Random
from calibration.scenes.stream import SPLITS, stream

# Sides of the pictures of each kind, height and width, in pixels: those that the models take.
SIZES = {
    **dict.fromkeys(("detection", "keypoints"), (128, 128)),
    **dict.fromkeys(("prompted", "semantic", "depth", "foreground"), (96, 96)),
    **dict.fromkeys(("captions", "zero-shot", "anomaly", "counts"), (64, 64)),
    "text": (32, 96),
    "identities": (48, 48),
    "digits": (48, 48),
}
# Consecutive pictures of one identity.
ALIKE = 4


def save_png(image: Bytes, path: Path) -> None:
    """Write uint8 [height, width(, 3)], making the folder when needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, format="PNG")


def save_json(document: object, path: Path) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def run_lengths(mask: npt.NDArray[np.bool_]) -> dict[str, list[int]]:
    """COCO's uncompressed run lengths: columns from left to right, runs of 0 and 1 in turn, the first of 0."""
    flat = mask.flatten(order="F")
    ends = np.flatnonzero(np.diff(flat)) + 1
    edges = [0, *([0] if flat[0] else []), *ends.tolist(), len(flat)]
    return {"size": list(mask.shape), "counts": np.diff(edges).tolist()}


def inside(random: Random, mask: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Column and row of a pixel that a person might click: any of the mask without its rim, if that leaves any."""
    padded = np.pad(mask, 1)
    core = mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    rows, columns = np.nonzero(core if core.any() else mask)
    chosen = random.randint(len(rows))
    return float(columns[chosen]), float(rows[chosen])


class Writer:
    """Writes pictures one by one and collects the entries of label files. A kind's function below drives it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []
        self.prompts: list[dict[str, Any]] = []

    def picture(self, image: Bytes, name: str) -> int:
        """Write a picture; returns its id in COCO's files, from 1."""
        save_png(image, self.root / "images" / name)
        height, width = image.shape[:2]
        self.images.append({"id": len(self.images) + 1, "file_name": name, "width": width, "height": height})
        return len(self.images)

    def add(self, **entry: object) -> int:
        """Note an annotation; returns its id, from 1."""
        self.entries.append({"id": len(self.entries) + 1, **entry})
        return len(self.entries)

    def coco(self, name: str, categories: list[dict[str, Any]] | None = None) -> None:
        """Write COCO's JSON of all pictures and annotations."""
        more = {} if categories is None else {"categories": categories}
        save_json({"images": self.images, "annotations": self.entries, **more}, self.root / name)


Draws = list[tuple[str, int, str]]  # split, index, name below images/
SHAPE_CATEGORIES = [{"id": k, "name": name} for k, name in enumerate(shapes.NAMES, 1)]


def add_shapes(writer: Writer, scene: shapes.Scene, name: str) -> list[int]:
    """The picture and an instance for each shape; returns the ids of the instances."""
    image_id, ids = writer.picture(scene.image, name), []
    for k, shape in enumerate(scene.shapes):
        x0, y0, x1, y1 = scene.box(k)
        mask = scene.owner == k + 1
        common = {"image_id": image_id, "category_id": shapes.NAMES.index(shape.name) + 1, "iscrowd": 0}
        outline = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": int(mask.sum()), "segmentation": run_lengths(mask)}
        ids.append(writer.add(**common, **outline, colour=shape.colour))
    return ids


def write_detection(writer: Writer, draws: Draws) -> None:
    """annotations.json: COCO instances."""
    for split, index, name in draws:
        add_shapes(writer, shapes.scattered(stream("detection", split, index), SIZES["detection"][0]), name)
    writer.coco("annotations.json", SHAPE_CATEGORIES)


def write_prompted(writer: Writer, draws: Draws) -> None:
    """annotations.json and masks/ of instances, prompts.json with a point and a box for each."""
    for split, index, name in draws:
        random = stream("prompted", split, index)
        scene = shapes.scattered(random, SIZES["prompted"][0])
        for k, annotation in enumerate(add_shapes(writer, scene, name)):
            prompt = {"file_name": name, "annotation_id": annotation, "instance": k + 1}
            point = inside(random, scene.owner == k + 1)
            writer.prompts.append({**prompt, "point": list(point), "box": list(scene.box(k))})
        save_png(scene.owner.astype(np.uint8), writer.root / "masks" / name)
    writer.coco("annotations.json", SHAPE_CATEGORIES)
    save_json(writer.prompts, writer.root / "prompts.json")


def semantic_map(scene: shapes.Scene) -> Bytes:
    """0 for the ground, else 1 + the place of the shape's name in `shapes.NAMES`; uint8 [height, width]."""
    classes = np.array([0, *(shapes.NAMES.index(shape.name) + 1 for shape in scene.shapes)], np.uint8)
    return classes[scene.owner]


def write_semantic(writer: Writer, draws: Draws) -> None:
    """semantic/: a class for each pixel; classes.json names them in order."""
    for split, index, name in draws:
        scene = shapes.scattered(stream("semantic", split, index), SIZES["semantic"][0])
        writer.picture(scene.image, name)
        save_png(semantic_map(scene), writer.root / "semantic" / name)
    save_json(["ground", *shapes.NAMES], writer.root / "classes.json")


def write_captions(writer: Writer, draws: Draws) -> None:
    """captions.json: COCO captions, one for each picture."""
    for split, index, name in draws:
        scene, caption = captions.captioned(stream("captions", split, index), SIZES["captions"][0], split)
        writer.add(image_id=writer.picture(scene.image, name), caption=caption)
    writer.coco("captions.json")


def write_zero_shot(writer: Writer, draws: Draws) -> None:
    """images/<split>/<colour> <shape>/: folders are classes; labels.json lists all 48 and those that training lacks."""
    for split, index, name in draws:
        scene, label = zero_shot(split, index)
        writer.picture(scene.image, str(Path(name).parent / label / Path(name).name))
    lacking = [label for label in captions.LABELS if captions.held_out(*label.split())]
    save_json({"labels": captions.LABELS, "held_out": lacking}, writer.root / "labels.json")


def zero_shot(split: str, index: int) -> tuple[shapes.Scene, str]:
    """A scene of one shape and its label; the labels take turns."""
    if split == "training":
        raise ValueError("zero-shot scenes have no training split: the model is trained on captions")
    label = captions.LABELS[index % len(captions.LABELS)]
    return captions.alone(stream("zero-shot", split, index), SIZES["zero-shot"][0], *label.split()), label


def write_depth(writer: Writer, draws: Draws) -> None:
    """depth/<split>/<index>.npy: float32 [height, width], metres along the optical axis; camera.json."""
    side = SIZES["depth"][0]
    for split, index, name in draws:
        view = rooms.room(stream("depth", split, index), side)
        writer.picture(view.image, name)
        path = (writer.root / "depth" / name).with_suffix(".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, view.depth)
    focal = rooms.FOCAL * side
    lens = {"fx": focal, "fy": focal, "cx": side / 2, "cy": side / 2}
    save_json({**lens, "unit": "metre", "farthest": rooms.FARTHEST}, writer.root / "camera.json")


def write_keypoints(writer: Writer, draws: Draws) -> None:
    """annotations.json: COCO person key points; all points are visible (2), the centre of the first pixel is 0.

    `area` is 0.53 of the box, the usual value for data without outlines of people: OKS is then as strict as on COCO.
    """
    for split, index, name in draws:
        picture = figures.figures(stream("keypoints", split, index), SIZES["keypoints"][0])
        image_id = writer.picture(picture.image, name)
        for figure in picture.figures:
            x0, y0, x1, y1 = figure.box
            flat = [value for x, y in (figure.points - 0.5).round(2).tolist() for value in (x, y, 2)]
            shape = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": 0.53 * (x1 - x0) * (y1 - y0), "iscrowd": 0}
            writer.add(image_id=image_id, category_id=1, num_keypoints=17, keypoints=flat, **shape)
    person = {"id": 1, "name": "person", "keypoints": figures.NAMES, "skeleton": figures.SKELETON}
    writer.coco("annotations.json", [person])


def write_text(writer: Writer, draws: Draws) -> None:
    """texts.json: a list of file_name and text."""
    for split, index, name in draws:
        drawn = lines.line(stream("text", split, index), *SIZES["text"], split)
        writer.picture(drawn.image, name)
        writer.entries.append({"file_name": name, "text": drawn.text})
    save_json(writer.entries, writer.root / "texts.json")


def write_identities(writer: Writer, draws: Draws) -> None:
    """images/<split>/<number>/: folders are identities; pairs.csv: neighbours in the drawing order, half of them of one
    identity; labels.csv: the first digit, the sum of the digits, and the number."""
    labels = ["image,first,sum,number"]
    names: dict[str, list[tuple[str, str]]] = {}
    for split, index, name in draws:
        drawn = lines.numbered(stream("identities", split, index), SIZES["identities"][0], split, index, ALIKE)
        placed = str(Path(name).parent / drawn.text / Path(name).name)
        writer.picture(drawn.image, placed)
        names.setdefault(split, []).append((placed, drawn.text))
        labels.append(f"{placed},{drawn.text[0]},{sum(map(int, drawn.text))},{drawn.text}")
    rows = ["image_a,image_b,same"]
    for known in names.values():
        near = [pair for pair in itertools.pairwise(known) if pair[0][1] == pair[1][1]]
        far = zip(known, known[ALIKE:], strict=False)
        rows += [f"{a},{b},{int(first == second)}" for (a, first), (b, second) in (*near, *far)]
    (writer.root / "pairs.csv").write_text("\n".join(rows) + "\n", "utf-8")
    (writer.root / "labels.csv").write_text("\n".join(labels) + "\n", "utf-8")


def write_anomaly(writer: Writer, draws: Draws) -> None:
    """MVTec AD's layout: train/good, test/good, test/DEFECT, ground_truth/DEFECT. Every other test picture is good."""
    for split, index, name in draws:
        if split == "training":
            raise ValueError("anomaly scenes have no training split: the normal ones are those of calibration")
        defect, file = parts.GOOD, Path(name)
        if split == "evaluation" and index % 2:
            defect = tuple(parts.DEFECTS)[index // 2 % len(parts.DEFECTS)]
        image, mask = parts.part(stream("anomaly", split, index), SIZES["anomaly"][0], defect)
        save_png(image, writer.root / ("test" if split == "evaluation" else "train") / defect / file.name)
        if defect != parts.GOOD:
            save_png(255 * mask.astype(np.uint8), writer.root / "ground_truth" / defect / f"{file.stem}_mask.png")


def write_foreground(writer: Writer, draws: Draws) -> None:
    """mattes/: the share of each pixel that figures cover, 0 to 255."""
    for split, index, name in draws:
        picture = figures.before_shapes(stream("foreground", split, index), SIZES["foreground"][0])
        writer.picture(picture.image, name)
        save_png(np.rint(255 * picture.matte).astype(np.uint8), writer.root / "mattes" / name)


def write_digits(writer: Writer, draws: Draws) -> None:
    """labels.csv: a row for each picture, a column of 0 and 1 for each digit."""
    rows = [",".join(("image", *digits.NAMES))]
    for split, index, name in draws:
        scene = digits.digits(stream("digits", split, index), SIZES["digits"][0])
        writer.picture(scene.image, name)
        rows.append(",".join((name, *map(str, scene.labels.astype(int).tolist()))))
    (writer.root / "labels.csv").write_text("\n".join(rows) + "\n", "utf-8")


def write_counts(writer: Writer, draws: Draws) -> None:
    """labels.csv: image, and shapes, how many of them are in it."""
    rows = ["image,shapes"]
    for split, index, name in draws:
        scene = shapes.scattered(stream("counts", split, index), SIZES["counts"][0])
        writer.picture(scene.image, name)
        rows.append(f"{name},{len(scene.shapes)}")
    (writer.root / "labels.csv").write_text("\n".join(rows) + "\n", "utf-8")


WRITERS: dict[str, Callable[[Writer, Draws], None]] = {
    "detection": write_detection,
    "prompted": write_prompted,
    "semantic": write_semantic,
    "captions": write_captions,
    "zero-shot": write_zero_shot,
    "depth": write_depth,
    "keypoints": write_keypoints,
    "text": write_text,
    "anomaly": write_anomaly,
    "foreground": write_foreground,
    "identities": write_identities,
    "digits": write_digits,
    "counts": write_counts,
}


def render(kind: str, root: Path, counts: Mapping[str, int]) -> None:
    """Write the first `counts[split]` scenes of each split to the folder `root`, which must be new or empty."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise FileExistsError(f"{root} holds files already: name a new or an empty folder")
    root.mkdir(parents=True, exist_ok=True)
    draws = [(s, i, f"{s}/{i:06d}.png") for s in SPLITS for i in range(counts.get(s, 0))]
    WRITERS[kind](Writer(root), draws)
