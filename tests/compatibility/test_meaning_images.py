"""docs/results/compatibility/images.md: what an image is, by size, orientation, metadata, ending, content and name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.command_line import command_line
from tests.compatibility_page import Page
from tests.workflows.dense_graphs import PREPROCESS, SIDE, graph
from vitdeploy.errors import VitdeployError
from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
from vitdeploy.progress import silent
from vitdeploy.spec import Budget
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.workflows import sharded
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.subjects import Finder

COUNT, WIDTH, HEIGHT = 12, 40, 24
COLOURS = ("red", "green", "blue")
# What makes an upright image lie, and the other way round, for each EXIF orientation.
UPRIGHT = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].swapaxes(0, 1),
    8: lambda image: np.rot90(image, 1),
}
LYING = {**UPRIGHT, 6: UPRIGHT[8], 8: UPRIGHT[6]}
TASKS = ("detection", "segmentation", "depth", "instance-segmentation", "classification")
ORIGINAL, ENGINE = "original", "engine"


def classifier(path: Path, noise: float) -> Path:
    """Images by their strongest colour."""
    import onnx_ir as ir

    weights = np.eye(3, dtype=np.float32) * 4 + np.float32(noise)
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("ReduceMean", ["x"], ["mean"], axes=[2, 3], keepdims=0),
                helper.make_node("MatMul", ["mean", "w"], ["logits"]),
            ],
            "colours",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])],
            [onnx.numpy_helper.from_array(weights, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    ours = ir.from_proto(model)
    set_metadata(ours, GraphMetadata("colours", "classification", PREPROCESS, labels=COLOURS))
    save_graph(ours, path)
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def sides(work):
    """Of each task the original, and an engine that answers a little otherwise."""
    found = {}
    for task in TASKS:
        for name, noise in ((ORIGINAL, 0.0), (ENGINE, 0.05)):
            folder = work / f"{task}-{name}"
            folder.mkdir()
            make = classifier if task == "classification" else lambda path, noise, task=task: graph(task, path, noise)
            compile_bundle(make(work / f"{task}-{name}.onnx", noise), "onnxruntime-cpu", None, None, folder)
            found[task, name] = Finder(work).find(str(folder))[0]
    return {task: (found[task, ENGINE], found[task, ORIGINAL]) for task in TASKS}


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("VITDEPLOY_STORE", str(tmp_path / "store"))


def verified(pair, images, labels="folders", annotations=None, *, skip_bad=False, budget=None) -> dict[str, Any]:
    """The document of `verify`."""
    found = verify_subjects(
        *(*pair, DataChoice(images, labels, annotations, 0, "all", 0)),
        skip_bad=skip_bad,
        budget=budget or Budget(),
        progress=silent,
    )
    return found.document()


def numbers(document: dict[str, Any]) -> dict[str, Any]:
    """What the document says, besides remarks."""
    return {key: value for key, value in document.items() if key not in ("remarks", "gate")}


# --- images that EXIF turns, with labels ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """One upright picture with its labels. boxes: x0 y0 x1 y1 in pixels."""

    pixels: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray
    mask: np.ndarray
    depth: np.ndarray


def scene(seed: int) -> Scene:
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (3, 5, 3), np.uint8))
    start = generator.integers(0, (WIDTH // 2, HEIGHT // 2), (2, 2))
    boxes = np.concatenate([start, start + generator.integers(6, (WIDTH // 2, HEIGHT // 2), (2, 2))], axis=1)
    mask = Image.fromarray(generator.integers(0, 3, (3, 5)).astype(np.uint8))
    return Scene(
        np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)),
        boxes,
        generator.integers(0, 3, 2),
        np.asarray(mask.resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)),
        generator.uniform(0.5, 4, (HEIGHT, WIDTH)).astype(np.float32),
    )


SCENES = [scene(i) for i in range(COUNT)]


def save(pixels: np.ndarray, path: Path, orientation: int | None = None, form: str = "PNG", **options: Any) -> None:
    """An upright image, as a file that lies as `orientation` says; None: without EXIF."""
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
        pixels = LYING.get(orientation, LYING[1])(pixels)
        options["exif"] = exif
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(pixels)).save(path, form, **options)


def lying_boxes(boxes: np.ndarray, orientation: int) -> np.ndarray:
    """The boxes in the pixels as stored, found by painting them."""
    found = []
    for x0, y0, x1, y1 in boxes:
        painted = np.zeros((HEIGHT, WIDTH), bool)
        painted[y0:y1, x0:x1] = True
        rows, columns = np.nonzero(LYING[orientation](painted))
        found.append((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
    return np.array(found)


@dataclass(frozen=True)
class Turned:
    """How a data set is written: each image's orientation (None: no EXIF), by its number, and whether sizes, boxes and
    maps are of the pixels as stored."""

    orientation: Callable[[int], int | None]
    form: str = "PNG"
    sizes: bool = False
    coordinates: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def write(self, root: Path) -> None:
        entries, objects = [], []
        for i, each in enumerate(SCENES):
            name, turned = f"{i:03}", self.orientation(i)
            save(each.pixels, root / f"images/{name}.{self.form.lower()}", turned, self.form, **dict(self.options))
            lying = turned if self.coordinates and turned in LYING else 1
            boxes = lying_boxes(each.boxes, lying)
            width, height = (HEIGHT, WIDTH) if self.sizes and (turned or 1) in (5, 6, 7, 8) else (WIDTH, HEIGHT)
            entries.append({"id": i, "file_name": f"{name}.{self.form.lower()}", "width": width, "height": height})
            for number, ((x0, y0, x1, y1), kind) in enumerate(zip(boxes.tolist(), each.classes.tolist(), strict=True)):
                outline: Any = [[x0, y0, x1, y0, x1, y1, x0, y1]]
                if number:  # run lengths, of columns
                    painted = np.zeros((HEIGHT, WIDTH), np.uint8)
                    painted[slice(*each.boxes[number][1::2]), slice(*each.boxes[number][::2])] = 1
                    stored = LYING[lying](painted)
                    outline = {"size": list(stored.shape), "counts": runs(stored)}
                objects.append(
                    {"id": len(objects), "image_id": i, "category_id": kind, "bbox": [x0, y0, x1 - x0, y1 - y0]}
                    | {"segmentation": outline, "area": (x1 - x0) * (y1 - y0), "iscrowd": 0}
                )
            upright = "".join(
                f"{kind} {(x0 + x1) / 2 / WIDTH} {(y0 + y1) / 2 / HEIGHT} {(x1 - x0) / WIDTH} {(y1 - y0) / HEIGHT}\n"
                for (x0, y0, x1, y1), kind in zip(each.boxes.tolist(), each.classes.tolist(), strict=True)
            )
            for folder in ("yolo", "masks", "depth"):
                (root / folder).mkdir(exist_ok=True)
            (root / f"yolo/{name}.txt").write_text(upright)
            Image.fromarray(np.ascontiguousarray(LYING[lying](each.mask))).save(root / f"masks/{name}.png")
            np.save(root / f"depth/{name}.npy", LYING[lying](each.depth))
        categories = [{"id": i, "name": name} for i, name in enumerate(("ant", "bee", "cat"))]
        document = {"images": entries, "annotations": objects, "categories": categories}
        (root / "coco.json").write_text(json.dumps(document))


def runs(mask: np.ndarray) -> list[int]:
    """COCO's run lengths: of columns, zeros first."""
    flat = mask.T.ravel()
    ends = [*(np.flatnonzero(np.diff(flat)) + 1).tolist(), len(flat)]
    counts = np.diff([0, *ends]).tolist()
    return [0, *counts] if flat[0] else counts


PLACES = {"yolo": "yolo", "coco": "coco.json", "masks": "masks", "depth": "depth"}
KINDS = {"yolo": "detection", "masks": "segmentation", "depth": "depth"}
PLAIN = Turned(lambda i: None)
LZW = (("compression", "tiff_lzw"),)
LOSSLESS = (("lossless", True),)
MIXED = (1, 3, 6, 8, None)
# name -> how it is written, the labels, the task, what is said of it in short ("": nothing)
SETS: dict[str, tuple[Turned, str, str, str]] = {
    "TIFF turned by EXIF, YOLO": (Turned(lambda i: 6, "TIFF"), "yolo", "detection", "upright"),
    "compressed TIFF in each orientation, COCO": (
        Turned(lambda i: i % 8 + 1, "TIFF", options=LZW),
        "coco",
        "detection",
        "upright",
    ),
    "turned TIFF among others, masks": (Turned(lambda i: (6, None)[i % 2], "TIFF"), "masks", "segmentation", "upright"),
    "PNG in each orientation, depth": (Turned(lambda i: i % 8 + 1), "depth", "depth", "upright"),
    "WebP mirrored by EXIF, outlines": (
        Turned(lambda i: 5, "WEBP", options=LOSSLESS),
        "coco",
        "instance-segmentation",
        "upright",
    ),
    "invalid orientations 0, 9 and 300, YOLO": (Turned(lambda i: (0, 9, 300)[i % 3]), "yolo", "detection", ""),
    "invalid orientations 0 and 9 in TIFF, COCO": (Turned(lambda i: (0, 9)[i % 2], "TIFF"), "coco", "detection", ""),
    "COCO of the stored pixels": (Turned(lambda i: 6, sizes=True, coordinates=True), "coco", "detection", "stored"),
    "COCO of the stored pixels, some images turned": (
        Turned(lambda i: MIXED[i % 5], sizes=True, coordinates=True),
        "coco",
        "detection",
        "stored",
    ),
    "COCO with stored sizes, upright boxes": (
        Turned(lambda i: 8, sizes=True),
        "coco",
        "detection",
        "upright",
    ),
    "COCO with upright sizes, stored boxes": (
        Turned(lambda i: 8, coordinates=True),
        "coco",
        "detection",
        "stored",
    ),
    "outlines and run lengths of the stored pixels": (
        Turned(lambda i: (7, None)[i % 2], sizes=True, coordinates=True),
        "coco",
        "instance-segmentation",
        "stored",
    ),
    "masks of the stored pixels": (
        Turned(lambda i: (5, 6, 7, 8)[i % 4], coordinates=True),
        "masks",
        "segmentation",
        "maps",
    ),
    "depth of the stored pixels": (Turned(lambda i: (8, None)[i % 2], coordinates=True), "depth", "depth", "maps"),
}
# What the remark says, and how the page has it.
SAID = {
    "": ("", "upright"),
    "upright": ("labels are assumed to match the upright image", "upright, with a remark"),
    "stored": (
        "describe the stored pixels, and are rotated with them",
        "labels turned, with a remark",
    ),
    "maps": (
        "with the size of the stored pixels is rotated with them",
        "labels turned, with a remark",
    ),
}
REFUSED = {
    "COCO whose size differs from that of a turned image": "VD2301 names both sizes and EXIF's orientation",
    "COCO with some boxes stored, others upright": "VD2301 names one image of each",
}
FILES = {
    "EXIF that is invalid, in PNG, WebP and JPEG": "the stored pixels",
    "a raw profile, chunk or checksum that is invalid (PNG)": "the stored pixels",
    "one image of 25 that is truncated": "VD2302; with --skip-bad 24 images, 1 skipped",
    "a folder of .jfif, .jpe, .pgm, .ppm, .pnm, .apng and .JPG": "all images",
    ".heic files, and images outside class folders": "left out, and counted in a remark",
    "a mask that is a TIFF with an orientation": "upright",
    "10 pictures under 640 names": "10 images, undecided",
    "copies with other labels": "the first label counts, with a warning",
    "copies in calibration and evaluation": "counted, with a warning",
    "names that are not UTF-8": "read, and shown with \\xff",
}
PAGE = Page(
    "images",
    """# Images

How vitdeploy reads images for labels, calibration, `predict` and servers. *Upright*: the results equal those of the
same images saved upright. `tests/compatibility/test_meaning_images.py` writes this page.
""",
    ("data", "read as"),
    (*SETS, *REFUSED, *FILES),
)


@pytest.fixture
def row(request):
    write = request.config.getoption("--write-compatibility")
    return lambda *cells: PAGE.check(cells, write=write)


@pytest.fixture
def file_row(row):
    """The row of FILES that begins so."""

    def check(start):
        name = next(each for each in FILES if each.startswith(start))
        row(name, FILES[name])

    return check


@pytest.fixture(scope="module")
def upright(sides, work):
    """What is found on the images without EXIF, by labels and task."""
    PLAIN.write(work / "plain")
    found = {}
    for labels, task in {(labels, task) for _, labels, task, _ in SETS.values()}:
        document = verified(sides[task], work / "plain/images", labels, work / "plain" / PLACES[labels])
        found[labels, task] = numbers(document)
    return found


@pytest.mark.parametrize("name", SETS)
def test_labels_belong_to_the_image_however_it_lies(sides, upright, tmp_path, row, name):
    written, labels, task, said = SETS[name]
    written.write(tmp_path)
    found = verified(sides[task], tmp_path / "images", labels, tmp_path / PLACES[labels])
    assert numbers(found) == upright[labels, task]
    remarks = [each for each in found["remarks"] if "EXIF" in each]
    if said:
        assert len(remarks) == 1 and SAID[said][0] in remarks[0] and "without an EXIF orientation" in remarks[0]
    else:
        assert not remarks
    row(name, SAID[said][1])


@pytest.mark.parametrize("name", REFUSED)
def test_labels_of_no_known_image_are_refused(sides, tmp_path, row, name):
    if name.startswith("COCO with another size"):
        Turned(lambda i: 6).write(tmp_path)
        document = json.loads((tmp_path / "coco.json").read_text())
        document["images"][3]["width"] = 50
        texts = ("EXIF's orientation 6", f"{HEIGHT}x{WIDTH}", f"{WIDTH}x{HEIGHT}", "50x24")
    else:
        Turned(lambda i: 6, coordinates=True).write(tmp_path)
        document = json.loads((tmp_path / "coco.json").read_text())
        for each in document["annotations"]:
            if each["image_id"] == 5:
                each["bbox"], each["segmentation"] = [30, 2, 9, 9], []
        texts = ("EXIF", "005.png (upright)", "(stored)")
    (tmp_path / "coco.json").write_text(json.dumps(document))
    with pytest.raises(VitdeployError) as caught:
        verified(sides["detection"], tmp_path / "images", "coco", tmp_path / "coco.json")
    assert caught.value.code == "VD2301"
    assert all(text in str(caught.value) for text in texts)
    row(name, REFUSED[name])


# --- files ------------------------------------------------------------------------------------------------------------


def coloured(seed: int, colour: int) -> np.ndarray:
    """Noise in which one colour is strongest."""
    pixels = np.random.default_rng(seed).integers(0, 120, (24, 28, 3), np.uint8)
    pixels[..., colour] += 100
    return pixels


def classes(root: Path, count: int, ending: Callable[[int], str] = lambda i: "png") -> list[Path]:
    """Images in folders of their colours."""
    paths = []
    for i in range(count):
        paths.append(root / COLOURS[i % 3] / f"{i:03}.{ending(i)}")
        form = {"jfif": "JPEG", "jpe": "JPEG", "JPG": "JPEG", "apng": "PNG", "png": "PNG", "webp": "WEBP"}.get(
            ending(i)
        )
        save(coloured(i, i % 3), paths[-1], None, form or "PPM")
    return paths


@pytest.mark.parametrize("name", ["EXIF that", "a raw profile"])
def test_broken_metadata_is_passed_over(sides, tmp_path, file_row, name):
    paths = classes(tmp_path, 25, lambda i: ("png", "webp", "JPG")[i // 3 % 3] if "EXIF" in name else "png")
    for i, path in enumerate(paths):
        image = Image.open(path)
        options: dict[str, Any] = {"exif": b"Exif\0\0garbage" + bytes(i)} if "EXIF" in name else {"pnginfo": PngInfo()}
        if "EXIF" not in name and i % 2:
            options["pnginfo"].add_text("Raw profile type exif", "\nexif\n 8\nzz")
        elif "EXIF" not in name:
            options["pnginfo"].add(b"iCCP", b"name\0\7zz")
        image.load()
        image.save(path, image.format, **options)
    if "EXIF" not in name:
        data = bytearray(paths[1].read_bytes())
        data[data.index(b"tEXt") + 5] ^= 255
        paths[1].write_bytes(data)
    found = verified(sides["classification"], tmp_path)
    assert (found["n"], found["reference_value"], found["skipped"]) == (25, 100.0, [])
    file_row(name)


def test_one_broken_image_is_named_or_counted(sides, tmp_path, file_row):
    paths = classes(tmp_path, 25)
    paths[7].write_bytes(paths[7].read_bytes()[:400])
    with pytest.raises(VitdeployError, match=r"007\.png cannot be read as an image") as caught:
        verified(sides["classification"], tmp_path)
    assert caught.value.code == "VD2302" and "--skip-bad" in caught.value.fix
    found = verified(sides["classification"], tmp_path, skip_bad=True)
    assert (found["n"], found["skipped"], found["reference_value"]) == (24, [str(paths[7])], 100.0)
    file_row("one image of 25")


def test_every_ending_of_a_format_that_is_read_is_an_image(sides, tmp_path, file_row):
    endings = ("jfif", "jpe", "ppm", "pnm", "apng", "JPG")
    classes(tmp_path, 36, lambda i: endings[i // 3 % 6])
    for i in range(3):
        (tmp_path / f"{COLOURS[i]}/grey{i}.pgm").write_bytes(b"P5 4 4 255\n" + bytes(range(i, i + 16)))
    found = verified(sides["classification"], tmp_path)
    assert found["n"] == 39 and found["remarks"] == []
    file_row("a folder of")


def test_what_is_left_out_is_said(sides, tmp_path, file_row):
    paths = classes(tmp_path, 9)
    for i in range(4):
        (tmp_path / f"blue/{i}.heic").write_bytes(b"no image that is read")
    shutil.copy(paths[0], tmp_path / "lone.png")
    (tmp_path / "red/notes.txt").write_text("no image")
    found = verified(sides["classification"], tmp_path)
    assert found["n"] == 9
    assert found["remarks"] == [f"{tmp_path}: ignored 4 .heic, 1 images outside the class folders"]
    file_row(".heic")


def test_a_mask_stands_upright_too(sides, upright, tmp_path, file_row):
    Turned(lambda i: 6, "TIFF").write(tmp_path)
    for i, each in enumerate(SCENES):
        save(each.mask, tmp_path / f"masks/{i:03}.png", (6, 8, 3)[i % 3], "TIFF")
    found = verified(sides["segmentation"], tmp_path / "images", "masks", tmp_path / "masks")
    assert numbers(found) == upright["masks", "segmentation"]
    file_row("a mask")


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1 << 30, 64], ids=["at once", "in shards"])
def test_a_picture_under_many_names_is_one_image(sides, tmp_path, monkeypatch, file_row, most):
    monkeypatch.setattr(sharded, "WINDOW", 8)
    monkeypatch.setattr(sharded, "MOST", most)
    for i in range(640):
        path = tmp_path / COLOURS[i % 10 % 3] / f"{i:03}.png"
        path.parent.mkdir(exist_ok=True)
        if i < 10:
            save(coloured(i, i % 3), path)
        else:
            os.link(tmp_path / COLOURS[i % 10 % 3] / f"{i % 10:03}.png", path)
    found = verified(sides["classification"], tmp_path, budget=Budget(min_agreement=95))
    assert (found["n"], found["agreement"]) == (10, 100.0)
    assert [round(each, 2) for each in found["agreement_ci95"]] == [72.25, 100.0]
    assert found["gate"]["status"] == "undecided"
    assert found["copies"] == {"evaluation": 630, "calibration": 0, "shared": 0, "relabelled": 0}
    [said] = found["remarks"]
    assert said.startswith("630 of 640 evaluation images are copies; each image counts once: 10 are")
    file_row("10 pictures")


@pytest.mark.parametrize("most", [1 << 30, 64], ids=["at once", "in shards"])
def test_copies_with_other_labels_are_named(sides, tmp_path, monkeypatch, file_row, most):
    monkeypatch.setattr(sharded, "WINDOW", 8)
    monkeypatch.setattr(sharded, "MOST", most)
    paths = classes(tmp_path, 90)
    shutil.copy(paths[0], tmp_path / "blue/copy.png")  # of a red one: the first in order counts
    shutil.copy(paths[3], tmp_path / "red/zz.png")
    found = verified(sides["classification"], tmp_path)
    assert (found["n"], found["copies"]["evaluation"], found["copies"]["relabelled"]) == (90, 2, 1)
    assert found["reference_value"] == pytest.approx(100 * 89 / 90)
    [warning] = [each for each in found["warnings"] if "have a different label" in each]
    assert str(paths[0]) in warning and "blue/copy.png" in warning
    file_row("copies with")


def test_copies_within_and_between_the_parts_are_counted(tmp_path, file_row):
    calibration, evaluation = classes(tmp_path / "calibration", 9), classes(tmp_path / "evaluation", 12)
    for path in evaluation[9:]:  # the others are the calibration images
        save(coloured(int(path.stem) + 100, COLOURS.index(path.parent.name)), path)
    shutil.copy(calibration[0], calibration[0].with_name("again.png"))
    shutil.copy(evaluation[10], evaluation[10].with_name("again.png"))
    adapter = make_adapter(Setting("classification", PREPROCESS, labels=COLOURS, classes=3))
    data = adapter.load(DataChoice(tmp_path, "folders", None, 10, "all", 0), skip_bad=False, progress=silent)
    assert (len(data.calibration), len(data.evaluation)) == (10, 12)
    found = data.copies
    assert (found.evaluation, found.calibration, found.shared, found.relabelled) == (1, 1, 9, 0)
    assert sum(each.startswith("9 of 12 evaluation images are also") for each in data.warnings) == 1
    file_row("copies in")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX alone")
def test_a_name_that_is_no_utf8_is_read_everywhere(sides, work, tmp_path, file_row):
    odd = os.fsdecode(b"caf\xe9 \xff")
    root = tmp_path / odd
    paths = classes(root, 12)
    renamed = [path.rename(path.with_name(os.fsdecode(b"\xfe") + path.name)) for path in paths]
    shutil.copy(renamed[1], renamed[1].with_name(os.fsdecode(b"copy \xe9.png")))
    for kind in range(3):
        save(coloured(kind, kind), tmp_path / "odd" / os.fsdecode(b"\xe9%d" % kind) / "a.png")
    adapter = make_adapter(Setting("classification", PREPROCESS, classes=3))
    data = adapter.load(DataChoice(tmp_path / "odd", "folders", None, 0, "all", 0), skip_bad=False, progress=silent)
    assert data.classes == ("\\xe90", "\\xe91", "\\xe92")
    bundle, other = (str(work / f"classification-{name}") for name in (ENGINE, ORIGINAL))
    graph_file = root / f"{odd}.onnx"
    shutil.copy(work / f"classification-{ORIGINAL}.onnx", graph_file)
    with command_line(tmp_path, tmp_path / "store") as run:
        found = run("verify", bundle, "--against", other, "--data", str(root), "--json")
        assert found.document["n"] == 12 and "\\xff" in found.document["remarks"][0]
        assert "\\xff" in run("verify", bundle, "--against", other, "--data", str(root)).stdout
        answered = run("predict", other, str(root), "--json")
        assert answered.returncode == 0, answered.stderr
        broken = renamed[0]
        broken.write_bytes(b"no image")
        refused = run("verify", bundle, "--against", other, "--data", str(root))
        assert refused.returncode == 2 and "VD2302" in refused.stderr
        found = run("verify", bundle, "--against", other, "--data", str(root), "--json", "--skip-bad")
        assert len(found.document["skipped"]) == 1
        broken.unlink()
        options = ("--target", "onnxruntime-cpu", "-o", f"{odd} graph", "--num-samples", "8")
        quantized = run("quantize", str(graph_file), "--data", str(root), *options)
        assert quantized.returncode == 0, quantized.stderr
    file_row("names that")
