"""docs/results/compatibility/data.md: data as people have it, and how its classes become those of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.compatibility_page import Page
from tests.data.made import sample, table, write_tar
from vitdeploy.errors import VitdeployError
from vitdeploy.progress import silent
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.registry import make_adapter

SPEC = PreprocessSpec(8, (8, 8), "bilinear", (0.5,), (0.5,))
PETS = ("dog", "cat", "bird", "great white shark", "hot dog, hotdog", "tench, Tinca tinca")
WORDNET = ("n01443537", "n01440764")
NUMBERS = [str(number) for number in range(11)]

LIST = "list.csv"

Make = Callable[[Path], None]


def folders(*names: str, empty: tuple[str, ...] = (), beside: tuple[str, ...] = ()) -> Make:
    """Two images in each of the folders; `beside` are further images."""

    def make(root: Path) -> None:
        for name in empty:
            (root / name).mkdir(parents=True)
        for path in (*(f"{name}/{i}.png" for name in names for i in (0, 1)), *beside):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8)).save(root / path)

    return make


def coco(*names: str) -> Make:
    """Two images with an object of each category, whose ids have holes."""

    def make(root: Path) -> None:
        folders("images")(root)
        categories = [{"id": 3 * i + 1, "name": name} for i, name in enumerate(names)]
        images = [{"id": i, "file_name": f"{i}.png", "width": 8, "height": 8} for i in (0, 1)]
        objects = [{"image_id": i % 2, "category_id": c["id"], "bbox": [1, 1, 4, 4]} for i, c in enumerate(categories)]
        document = {"images": images, "annotations": objects, "categories": categories}
        (root / "annotations").write_text(json.dumps(document), encoding="utf-8")

    return make


def yolo(names: str = "") -> Make:
    """Two images with an object of class 0 and one of class 1; `names` is the content of data.yaml."""

    def make(root: Path) -> None:
        folders("images")(root)
        (root / "annotations").mkdir()
        for i in (0, 1):
            (root / "annotations" / f"{i}.txt").write_text(f"{i} 0.5 0.5 0.5 0.5\n", encoding="utf-8")
        if names:
            (root / "data.yaml").write_text(names, encoding="utf-8")

    return make


def tars(*labels: object, names: str = "", part: str = "") -> Make:
    """A tar of images with these labels; `names` is the content of classes.txt."""

    def make(root: Path) -> None:
        (root / part).mkdir(parents=True, exist_ok=True)
        write_tar(root / part / "000.tar", *(sample(f"{i}", label, i) for i, label in enumerate(labels)))
        if names:
            (root / part / "classes.txt").write_text(names, encoding="utf-8")

    return make


def parquet(*labels: int, names: tuple[str, ...] | None = None) -> Make:
    """A Parquet file of images with these labels; `names` are those of datasets' ClassLabel."""

    def make(root: Path) -> None:
        import pyarrow.parquet as pq

        root.mkdir(parents=True)
        pq.write_table(table(list(labels), names), root / "0.parquet")

    return make


def uris(*labels: str) -> Make:
    """A list of images with these labels."""

    def make(root: Path) -> None:
        folders(beside=tuple(f"{i}.png" for i in range(len(labels))))(root)
        (root / LIST).write_text("".join(f"{i}.png,{label}\n" for i, label in enumerate(labels)), encoding="utf-8")

    return make


def both(*makes: Make) -> Make:
    def make(root: Path) -> None:
        for each in makes:
            each(root)

    return make


# What lies there, the labels of the model (or how many classes it has without any), what makes it, data.labels.
CASES: dict[str, tuple[tuple[str, ...] | int, Make, str]] = {
    "folders named as the labels (dog, cat, bird), other order": (PETS[:3], folders("bird", "cat", "dog"), "folders"),
    "folders with another spelling": (PETS, folders("Dog", "great_white-shark"), "folders"),
    "folders of some classes": (PETS, folders("bird", "dog"), "folders"),
    "folders named by the first synonym": (PETS, folders("hot dog", "tench"), "folders"),
    "WordNet ids with names, labels are ids": (WORDNET, folders("n01440764_tench", "n01443537"), "folders"),
    "WordNet ids of all classes, labels are names": (PETS[:2], folders(*WORDNET), "folders"),
    "WordNet ids of some classes, labels are names": (PETS, folders(*WORDNET), "folders"),
    "a folder named as two classes' label": (("crane", "dog", "crane"), folders("crane"), "folders"),
    "one misspelt folder": (PETS, folders("bird", "dogs"), "folders"),
    "an empty folder that is not a label": (PETS, folders("bird", "cat", empty=("rubbish",)), "folders"),
    "folders 0 to 9, no labels": (10, folders(*NUMBERS[:10]), "folders"),
    "folders 0 to 10, no labels": (11, folders(*NUMBERS), "folders"),
    "two classes and an empty folder, no labels": (
        3,
        folders("cat", "dog", empty=("rubbish",)),
        "folders",
    ),
    "train and val with class folders, no labels": (2, folders("train/cat", "train/dog", "val/cat"), "folders"),
    "calibration and evaluation with different classes": (
        PETS,
        folders("calibration/cat", "evaluation/cat", "evaluation/dog"),
        "folders",
    ),
    "hidden folders and files": (
        PETS,
        folders("cat", "dog", beside=(".ipynb_checkpoints/x.png", "cat/._0.png"), empty=("__MACOSX",)),
        "folders",
    ),
    "images without class folders": (PETS, folders(beside=("0.png", "1.png")), "folders"),
    "COCO categories in another order": (PETS, coco("cat", "dog"), "coco"),
    "unknown COCO categories": (PETS, coco("helmet", "vest"), "coco"),
    "YOLO with names in data.yaml": (PETS, yolo("names: [cat, dog]"), "yolo"),
    "YOLO without names": (PETS, yolo(), "yolo"),
    "tars with names": (PETS, tars("cat", "dog", "great_white_shark"), "folders"),
    "tars with a name in two spellings": (PETS, tars("cat", "Cat"), "folders"),
    "tars with names, no labels": (2, tars("cat", "dog"), "folders"),
    "tars with numbers": (PETS, tars(0, 1, 5), "folders"),
    "tars with numbers, no labels": (10, tars(0, 9, 3), "folders"),
    "tars with unknown numbers": (PETS, tars(0, 6), "folders"),
    "tars with numbers, `classes.txt` in another order": (PETS, tars(0, 1, names="cat\ndog\n"), "folders"),
    "calibration and evaluation as tars": (
        PETS,
        both(tars(0, part="calibration"), tars(1, part="evaluation")),
        "folders",
    ),
    "Parquet with names in another order": (PETS, parquet(0, 1, 1, names=("cat", "dog")), "folders"),
    "Parquet with names, no labels": (2, parquet(0, 1, 1, names=("cat", "dog")), "folders"),
    "Parquet with names of other classes": (PETS, parquet(0, 1, names=("helmet", "vest")), "folders"),
    "Parquet with too few names, no labels": (
        3,
        parquet(0, 1, names=("cat", "dog")),
        "folders",
    ),
    "Parquet without names": (PETS, parquet(0, 1), "folders"),
    "a list with names": (PETS, uris("dog", "cat"), "folders"),
    "a list with an unknown name": (PETS, uris("dog", "cats"), "folders"),
}

PAGE = Page(
    "data",
    """# Data

How vitdeploy maps the classes of data to those of the model ([recipes](../../recipes.md)), or the error; its fix is
printed. Unless a row says otherwise, the labels are `dog`, `cat`, `bird`, `great white shark`, `hot dog, hotdog` and
`tench, Tinca tinca`; "no labels" means that the model has none. `tests/compatibility/test_data_folders.py` writes this
page.

- **name**: as written
- **spelling**: ignoring case, spaces, hyphens and underscores; or by the first synonym or the WordNet id
- **position**: sorted folders are classes 0, 1, 2, ...; a warning if the model has labels
- **number**: number n is class n
""",
    ("data", "classes are mapped by"),
    tuple(CASES),
)


def happens(root: Path, labels: tuple[str, ...] | int, kind: str) -> str:
    """What `run`, `tune`, `verify` and `compare` make of it: by what classes are mapped, or the error."""
    named, classes = ((), labels) if isinstance(labels, int) else (labels, len(labels))
    head = PostprocessSpec(scores="sigmoid")
    task = "classification" if kind == "folders" else "detection"
    place = root if kind == "folders" else root / "images"
    place = root / LIST if (root / LIST).exists() else place
    choice = DataChoice(place, kind, None if kind == "folders" else root / "annotations", 1, "all", 0)
    try:
        adapter = make_adapter(Setting(task, SPEC, head, labels=named, classes=classes))
        mapping = adapter.load(choice, skip_bad=False, progress=silent).mapping
    except VitdeployError as error:
        return f"{error.code}: {error.message.replace(str(root), 'DATA')}"
    assert mapping is not None
    return mapping.how


@pytest.mark.parametrize("name", CASES)
def test_a_data_folder(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    labels, make, kind = CASES[name]
    make(tmp_path / "data")
    row = (name, happens(tmp_path / "data", labels, kind))
    PAGE.check(row, write=request.config.getoption("--write-compatibility"))


def test_the_page_has_these_rows_and_no_other() -> None:
    assert sorted(PAGE.read()) == sorted(CASES)
