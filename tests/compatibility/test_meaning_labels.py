"""docs/results/compatibility/labels.md: labels as tools write them, with the metric of a model whose answers are
known, or the reason why they are refused.

Each case is evaluated by `verify` on a real runtime. The models are as simple as can be: one that tells the classes of
uniform greys, one that finds no foreground anywhere, and one that finds two objects at fixed places.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx import parser
from onnx_ir.serde import deserialize_model
from PIL import Image

import vitdeploy as vd
from tests.compatibility_page import Page
from tests.data.made import write_tar
from vitdeploy.data.containers.uris import BESIDE
from vitdeploy.errors import VitdeployError
from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.spec import PreprocessSpec

CLASSES = 12
# The numbers 1 to 12 in the order in which tools sort folders of these names, and two other spellings of them.
NUMBERS = tuple(sorted(str(number) for number in range(1, CLASSES + 1)))
PADDED = tuple(f"{number:02}" for number in range(1, CLASSES + 1))
WORDS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "koi", "lynx")
# Of the 2,500 pixels of a map so many are foreground: for a model that finds none of them, mIoU is 41.98 %.
SIDE, FOREGROUND = 50, 401
# The objects that the detector finds in every image, of 40x20 pixels: class, x, y, width and height.
OBJECTS = ((0, 5, 5, 10, 10), (1, 25, 5, 10, 10))

GREYS = """<ir_version: 9, opset_import: ["": 18]>
g (float[batch, 1, 8, 8] image) => (float[batch, 12] logits)
<float[12] greys = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, float[1] scale = {12.75}, int64[1] axes = {1}> {
  flat = Flatten(image)
  mean = ReduceMean(flat, axes)
  grey = Mul(mean, scale)
  distance = Sub(grey, greys)
  square = Mul(distance, distance)
  logits = Neg(square)
}"""
BACKGROUND = """<ir_version: 9, opset_import: ["": 18]>
g (float[batch, 1, 50, 50] image) => (float[batch, CLASSES, 50, 50] logits)
<float[1] one = {1}> {
  low = Sub(image, image)
  high = Add(low, one)
  logits = Concat<axis = 1>(high, LOW)
}"""
FIXED = """<ir_version: 9, opset_import: ["": 18]>
g (float[batch, 1, 20, 40] image) => (float[batch, 2, 3] logits, float[batch, 2, 4] boxes)
<float[1, 2, 3] scores = {9, 0, 0, 0, 9, 0}, int64[1] axes = {1},
 float[1, 2, 4] places = {0.25, 0.5, 0.25, 0.5, 0.75, 0.5, 0.25, 0.5}> {
  flat = Flatten(image)
  mean = ReduceMean(flat, axes)
  none = Sub(mean, mean)
  zero = Unsqueeze(none, axes)
  logits = Add(zero, scores)
  boxes = Add(zero, places)
}"""


def saved(path: Path, text: str, size: tuple[int, int], **metadata: object) -> Path:
    """The model as a graph that says what its input and its outputs mean."""
    model = deserialize_model(parser.parse_model(text))
    spec = PreprocessSpec(size, size, "nearest", (0.0,), (1.0,))
    set_metadata(model, GraphMetadata(name="known", preprocess=spec, **metadata))
    save_graph(model, path)
    return path


def greys(path: Path, labels: Sequence[str]) -> Path:
    return saved(path, GREYS, (8, 8), task="classification", labels=tuple(labels))


def background(path: Path, labels: Sequence[str], head: SegmentationSpec = SegmentationSpec()) -> Path:  # noqa: B008
    low = ", ".join(["low"] * (len(labels) - 1))
    text = BACKGROUND.replace("CLASSES", str(len(labels))).replace("LOW", low)
    return saved(path, text, (SIDE, SIDE), task="segmentation", postprocess=head, labels=tuple(labels))


def detector(path: Path, labels: Sequence[str]) -> Path:
    return saved(path, FIXED, (20, 40), task="detection", postprocess=PostprocessSpec(), labels=tuple(labels))


# --- data ------------------------------------------------------------------------------------------------------------

Model = Callable[[Path, Sequence[str]], Path]
# Data in a folder: where the images are, the kind of their labels, and where these are.
Made = tuple[Path, str | None, Path | None]
Make = Callable[[Path], Made]


def grey(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), 20 * value).save(path)


def images(root: Path, classes: Sequence[int]) -> None:
    """i.png of each class."""
    for index, value in enumerate(classes):
        grey(root / f"{index}.png", value)


def listed(text: str, *, name: str = "list.csv", beside: str = "", classes: Sequence[int] = (0, 1, 2, 3)) -> Make:
    """A list of the images 0.png, 1.png and so on of these classes; `beside`: what classes.txt says."""

    def make(root: Path) -> Made:
        images(root, classes)
        (root / name).write_text(text, encoding="utf-8")
        if beside:
            (root / "classes.txt").write_text(beside, encoding="utf-8")
        return root if name in BESIDE else root / name, None, None

    return make


def rows(labels: Sequence[object], header: str = "path,label", separator: str = ",") -> str:
    return "".join(f"{line}\n" for line in (header, *(f"{i}.png{separator}{label}" for i, label in enumerate(labels))))


def numbered(labels: Sequence[object], names: Sequence[str] = NUMBERS, **how: object) -> Make:
    """A list of the images of the classes that these labels name."""
    return listed(rows(labels), classes=[names.index(str(label)) for label in labels], **how)


def tar(labels: Sequence[str], names: Sequence[str], key: str = "") -> Make:
    """With the labels in .cls, or under a key in .json."""

    def make(root: Path) -> Made:
        images(root, [names.index(label) for label in labels])
        pixels = [(root / f"{i}.png").read_bytes() for i in range(len(labels))]
        texts = [{"json": json.dumps({key: label})} if key else {"cls": label} for label in labels]
        samples = [
            {f"{i}.png": image, **{f"{i}.{suffix}": text.encode() for suffix, text in more.items()}}
            for i, (image, more) in enumerate(zip(pixels, texts, strict=True))
        ]
        return write_tar(root / "0.tar", *samples), None, None

    return make


def parquet(labels: Sequence[object], names: Sequence[str], column: str = "label") -> Make:
    def make(root: Path) -> Made:
        import pyarrow as pa
        import pyarrow.parquet as pq

        images(root, [names.index(str(label)) for label in labels])
        pixels = [(root / f"{i}.png").read_bytes() for i in range(len(labels))]
        pq.write_table(pa.table({"image": pixels, column: list(labels)}), root / "0.parquet")
        return root / "0.parquet", None, None

    return make


def folders(root: Path) -> Made:
    for value in range(CLASSES):
        grey(root / f"n{value:08}" / "0.png", value)
    return root, "folders", None


def maps(*values: tuple[int, int] | tuple[int, int, int], dtype: type = np.uint8) -> Make:
    """A map with these values for each image: of the background, of FOREGROUND pixels, and of a row at the top."""

    def make(root: Path) -> Made:
        for name in ("images", "masks"):
            (root / name).mkdir(parents=True)
        for index, (low, high, *void) in enumerate(values):
            found = np.full(SIDE * SIDE, low, dtype)
            found[-FOREGROUND:], found[: SIDE * len(void)] = high, void[0] if void else low
            Image.fromarray(found.reshape(SIDE, SIDE)).save(root / "masks" / f"{index}.png")
            Image.new("L", (SIDE, SIDE), 9 * index).save(root / "images" / f"{index}.png")
        return root / "images", "masks", root / "masks"

    return make


def pictures(root: Path, *names: str) -> Path:
    for index, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (40, 20), index).save(root / name)
    return root


def yolo(*lines: str, names: str = "", order: Sequence[int] = (0, 1)) -> Make:
    """The lines of a.png; b.png and c.png are labelled as usual, with the classes in this order."""

    def make(root: Path) -> Made:
        folder = pictures(root / "images", "a.png", "b.png", "c.png")
        (root / "labels").mkdir()
        usual = f"{order[0]} 0.25 0.5 0.25 0.5\n{order[1]} 0.75 0.5 0.25 0.5\n"
        for name, text in (("a", "".join(f"{line}\n" for line in lines)), ("b", usual), ("c", usual)):
            (root / "labels" / f"{name}.txt").write_text(text, encoding="utf-8")
        if names:
            (root / "data.yaml").write_text(names, encoding="utf-8")
        return folder, "yolo", root / "labels"

    return make


def entry(id: int, name: str, **more: object) -> dict[str, object]:
    return {"id": id, "file_name": name, "width": 40, "height": 20, **more}


def objects(*ids: int) -> list[dict[str, object]]:
    return [{"image_id": id, "category_id": c, "bbox": box} for id in ids for c, *box in OBJECTS]


def coco(
    *entries: dict[str, object], more: Sequence[object] = (), at: str = "images", names: str = "ab", **lists: object
) -> Make:
    """COCO's file with the usual objects of each id, and further annotations; the images are a.png, b.png and c.png."""

    def make(root: Path) -> Made:
        folder = pictures(root / at, "a.png", "b.png", "c.png")
        ids = dict.fromkeys(each["id"] for each in entries)
        document = {
            "images": entries,
            "annotations": [*objects(*ids), *more],
            "categories": [{"id": i, "name": name} for i, name in enumerate(names)],
            **lists,
        }
        (root / "coco.json").write_text(json.dumps(document), encoding="utf-8")
        return folder, "coco", root / "coco.json"

    return make


USUAL = (entry(1, "a.png"), entry(2, "b.png"), entry(3, "c.png"))
BOX = {"image_id": 1, "category_id": 0, "bbox": [5, 5, 10, 10]}
ALL = "".join(f"{number}\n" for number in range(CLASSES + 1))

# What lies there; the names of the model's classes; the model; what makes the data.
CASES: dict[str, tuple[Sequence[str], Model, Make]] = {
    "maps of 0 and 255, two classes": ("ab", background, maps((0, 255), (0, 255))),
    "maps of 0 and 65535, two classes": ("ab", background, maps((0, 65535), (0, 65535), dtype=np.uint16)),
    "some maps of 0 and 255, some of 0 and 1": ("ab", background, maps((0, 255), (0, 1), (0, 1))),
    "maps of 0, 1 and 255, two classes": ("ab", background, maps((0, 1, 255), (0, 1))),
    "maps of 0 and 255, three classes": ("abc", background, maps((0, 255), (0, 1))),
    "maps without a pixel of one class": ("ab", background, maps((0, 0), (0, 0))),
    "maps of 0 and 1, `postprocess.ignore: 1`": (
        "ab",
        partial(background, head=SegmentationSpec(ignore=1)),
        maps((0, 1), (0, 1)),
    ),
    "maps of 0 and 128, two classes": ("ab", background, maps((0, 1), (0, 128))),
    "CSV: path,target": (WORDS, greys, listed(rows(WORDS[:4], "path,target"))),
    "CSV: path,category": (WORDS, greys, listed(rows(WORDS[:4], "path,category"))),
    "CSV: file_name,label": (WORDS, greys, listed(rows(WORDS[:4], "file_name,label"))),
    "CSV: Image Path;Class Name": (WORDS, greys, listed(rows(WORDS[:4], "Image Path;Class Name", ";"))),
    "CSV: pandas index, class number and name": (
        WORDS,
        greys,
        listed(",filename,class_id,class_name\n0,0.png,5,ant\n1,1.png,6,bee\n2,2.png,7,cat\n"),
    ),
    "CSV without a header, the label first": (WORDS, greys, listed("ant,0.png\nbee,1.png\n")),
    "CSV: unknown label column": (WORDS, greys, listed(rows(WORDS[:4], "path,diagnosis"))),
    "CSV: unknown image column, tabs": (
        WORDS,
        greys,
        listed(rows(WORDS[:4], "shot\tlabel", "\t")),
    ),
    "CSV: an unquoted label with a comma": (WORDS, greys, listed(rows(["ant, red", "bee"]))),
    "CSV: some numbers with a decimal point": (WORDS, greys, listed(rows(["0.0", "1", "2.0", "3"]))),
    "CSV: a line twice": (WORDS, greys, listed("path,label\n0.png,ant\n1.png,bee\n./1.png,bee\n")),
    "CSV: no label in the first line": (WORDS, greys, listed(rows(["", "bee", "cat", "dog"]))),
    "CSV: numbers and words (a class 3)": (("3", *WORDS[1:]), greys, listed(rows(["3", "bee", "cat", "dog"]))),
    "CSV: an image with two labels": (WORDS, greys, listed("path,label\n0.png,ant\n1.png,bee\n1.png,cat\n")),
    "metadata.csv": (WORDS, greys, listed(rows(WORDS[:4], "file_name,label"), name="metadata.csv")),
    "metadata.csv, unknown column": (
        WORDS,
        greys,
        listed(rows(WORDS[:4], "file_name,finding"), name="metadata.csv"),
    ),
    "metadata.jsonl for some images": (
        WORDS,
        greys,
        listed(
            '{"file_name": "0.png", "label": "ant"}\n{"file_name": "1.png", "label": "bee"}\n', name="metadata.jsonl"
        ),
    ),
    "metadata.csv for some images": (
        WORDS,
        greys,
        listed(rows(WORDS[:3], "file_name,label"), name="metadata.csv"),
    ),
    "labels.tsv": (
        WORDS,
        greys,
        listed(rows(WORDS[:4], "path\ttarget", "\t"), name="labels.tsv"),
    ),
    "labels.csv, one column per class": (
        WORDS,
        greys,
        listed(rows(["1,0", "0,1", "1,0", "0,1"], "file_name,ant,bee"), name="labels.csv"),
    ),
    "Roboflow's _classes.csv": (
        WORDS,
        greys,
        listed(rows(["1, 0", "0, 1", "1, 0", "0, 1"], "filename, ant, bee"), name="_classes.csv"),
    ),
    "text: a space before the number": (WORDS, greys, listed("0.png 0\n1.png 1\n", name="list.txt")),
    "tar: target in .json": (WORDS, greys, tar(WORDS[:4], WORDS, "target")),
    "Parquet: column category": (WORDS, greys, parquet(WORDS[:4], WORDS, "category")),
    "Parquet: unknown label column": (WORDS, greys, parquet(WORDS[:4], WORDS, "finding")),
    "classes 1 to 12, CSV with all of them": (NUMBERS, greys, numbered(range(1, 13))),
    "classes 1 to 12, CSV with some": (NUMBERS, greys, numbered((1, 2, 3, 4))),
    "classes 1 to 12, CSV with some, classes.txt of 0 to 12": (NUMBERS, greys, numbered((1, 2, 3, 4), beside=ALL)),
    "classes 1 to 12, CSV with some, the model's classes.txt": (
        NUMBERS,
        greys,
        numbered((1, 2, 3, 4), beside="".join(f"{name}\n" for name in NUMBERS)),
    ),
    "classes 1 to 12, CSV with class numbers": (NUMBERS, greys, listed(rows((0, 1, 2, 3)))),
    "classes 01 to 12, CSV with names": (PADDED, greys, numbered(PADDED, PADDED)),
    "classes 01 to 12, CSV with numbers": (PADDED, greys, listed(rows((12, 11, 10)), classes=(11, 10, 9))),
    "classes 1 to 12, a tar": (NUMBERS, greys, tar(NUMBERS, NUMBERS)),
    "classes 1 to 12, Parquet": (NUMBERS, greys, parquet(range(1, 13), NUMBERS)),
    "classes 2 and 1, YOLO's names 1 and 2": (
        "21",
        detector,
        yolo("1 .25 .5 .25 .5", "0 .75 .5 .25 .5", names="names: ['1', '2']", order=(1, 0)),
    ),
    "classes 1 and 0, YOLO without names": ("10", detector, yolo("0 .25 .5 .25 .5", "1 .75 .5 .25 .5")),
    "classes 1 and 0, COCO's categories 0 and 1": ("10", detector, coco(*USUAL, names="10")),
    "folders of WordNet ids": (WORDS, greys, folders),
    "COCO: two images with one id": ("ab", detector, coco(entry(1, "a.png"), entry(1, "b.png"), entry(3, "c.png"))),
    "COCO: an image twice, with its id": ("ab", detector, coco(*USUAL, entry(1, "a.png"))),
    "COCO: an image with two ids": (
        "ab",
        detector,
        coco(*USUAL, entry(4, "a.png"), annotations=[BOX, {**BOX, "image_id": 4}, *objects(1)[1:], *objects(2, 3)]),
    ),
    "COCO: repeated annotations and categories": (
        "ab",
        detector,
        coco(
            *USUAL, more=[BOX, BOX], categories=[{"id": i, "name": name} for i, name in ((0, "a"), (1, "b"), (1, "b"))]
        ),
    ),
    "COCO: two categories with one id": (
        "ab",
        detector,
        coco(*USUAL, categories=[{"id": 0, "name": "a"}, {"id": 1, "name": "b"}, {"id": 1, "name": "c"}]),
    ),
    "COCO: ./a.png, images/b.png, images\\c.png": (
        "ab",
        detector,
        coco(entry(1, "./a.png"), entry(2, "images/b.png"), entry(3, "images\\c.png")),
    ),
    "COCO: val/a.png and train/a.png, folder val": (
        "ab",
        detector,
        coco(
            entry(1, "val/a.png"), entry(2, "val/b.png"), entry(3, "train/a.png"), at="val", annotations=objects(1, 2)
        ),
    ),
    "COCO: unknown image names": ("ab", detector, coco(entry(1, "1.png"), entry(2, "2.png"))),
    "COCO: empty, outside or zero-width boxes": (
        "ab",
        detector,
        coco(
            *USUAL,
            more=[{**BOX, "bbox": []}, {**BOX, "bbox": [9, 9, 0, 4]}, {**BOX, "bbox": [50, 5, 9, 9]}],
        ),
    ),
    "COCO: a box partly outside": ("ab", detector, coco(*USUAL, more=[{**BOX, "bbox": [-2, 5, 17, 10]}])),
    "COCO: an annotation of an unlisted image": ("ab", detector, coco(*USUAL, more=[{**BOX, "image_id": 9}])),
    "COCO: ids with a decimal point": (
        "ab",
        detector,
        coco(entry(1.0, "a.png"), *USUAL[1:]),
    ),
    "YOLO: 1.0004": ("ab", detector, yolo("0 .25 .5 .25 .5", "1 .75 .5 .25 .5", "1 .5 1.0004 .1 .0")),
    "YOLO: the class 0.0": ("ab", detector, yolo("0.0 .25 .5 .25 .5", "1.0 .75 .5 .25 .5")),
    "YOLO: a polygon": ("ab", detector, yolo("0 .125 .25 .375 .25 .375 .75 .125 .75", "1 .75 .5 .25 .5")),
    "YOLO: a confidence column": ("ab", detector, yolo("0 .25 .5 .25 .5 .9", "1 .75 .5 .25 .5 1")),
    "YOLO: a row twice": ("ab", detector, yolo("0 .25 .5 .25 .5", "1 .75 .5 .25 .5", "0 .25 .5 .25 .5")),
    "YOLO: a zero-width row": ("ab", detector, yolo("0 .25 .5 .25 .5", "1 .75 .5 .25 .5", "0 .5 .5 0 .5")),
    "YOLO: pixels": ("ab", detector, yolo("0 10 10 10 10")),
}

PAGE = Page(
    "labels",
    """# Labels

What `verify` makes of labels as tools and people write them. *Right*: the metric is 100 %. The classifier and the
detector are right about every image; the segmentation model finds no foreground (mIoU 41.98 % if labels are read
correctly). Remarks and warnings are shortened, and every error prints a fix. Classifiers have twelve classes, `ant` to
`lynx`, unless the row names others; detectors have `a` and `b`.

If numbers can be read in two ways: for names, write `classes.txt` beside the data with the lines 0, 1, 2 and so on; for
class numbers, give the model other names. `tests/compatibility/test_meaning_labels.py` writes this page.
""",
    ("data", "result"),
    tuple(CASES),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, ...], Path]:
    """The model of each case, once for all that share it."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for labels, model, _ in CASES.values():
        key = (str(model), *labels)
        if key not in made:
            made[key] = model(folder / f"{len(made)}.onnx", labels)
    return made


def short(remark: str) -> str:
    """What a remark says, without counts and examples."""
    return remark.removeprefix("labels: ").partition(": ")[0]


def happens(model: Path, made: Made) -> str:
    """The metric and all that is said of the labels, in short; or the error."""
    path, kind, annotations = made
    try:
        data = vd.images(path, kind, annotations=annotations)
        found = vd.verify(model, model, data, progress=False).found
    except VitdeployError as error:
        return f"{error.code}: {error.message}"
    remarks = [each for each in found.remarks if not each.startswith("classes are mapped by number")]
    said = [*map(short, remarks), *(f"warning: {short(text)}" for text in found.warnings)]
    value = f"{found.verified.value:.2f}"
    return "; ".join(["right" if value == "100.00" else f"{found.verified.metric} {value} %", *said])


@pytest.mark.parametrize("name", CASES)
def test_labels(
    name: str, models: Mapping[tuple[str, ...], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    labels, model, make = CASES[name]
    if model is detector:
        pytest.importorskip("pycocotools", reason="pip install 'vitdeploy[export]'")
    said = happens(models[(str(model), *labels)], make(tmp_path / "data")).replace(str(tmp_path / "data"), "DATA")
    row = (name, said.replace("|", "\\|"))
    PAGE.check(row, write=request.config.getoption("--write-compatibility"))


def test_the_page_has_these_rows_and_no_other() -> None:
    assert sorted(PAGE.read()) == sorted(CASES)
