"""docs/tasks.md is executed: the walk of each task, from a model's folder to an app, and what its recipe promises.

Fewer scenes are drawn and judged by than a reader has, and the bench is short. Walks that embed both a program and a
page need both targets; most others are on one, and on both with VITDEPLOY_TEST_DEPTH=1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from calibration.scenes.write import render
from tests.command_line import ROOT, command_line
from tests.dense_models import save
from tests.references import reference
from tests.serve.conftest import FORM, Running, form
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.graph.analysis.rows import unplaced_weights
from vitdeploy.graph.io.files import load_graph
from vitdeploy.serve.engines import load_engines

PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
TARGETS = ("openvino-cpu", "onnxruntime-cpu")
# Of each section: scenes to calibrate on and to judge by; the metric, what the original has at least of it, and how
# much INT8 may be off on so few; the target, where it is not both.
SCENES = {
    "Detection": (8, 8, "mAP", 50.0, 3.0, ""),
    "Depth": (8, 8, "delta-1", 70.0, 2.0, ""),
    "Foreground": (8, 8, "IoU", 80.0, 1.0, ""),
    "Numbers": (16, 24, "R2", 60.0, 4.0, ""),
    "Labels of their own": (32, 48, "mean AP", 70.0, 3.0, ""),
    "Yes or no": (32, 48, "AUROC", 80.0, 4.0, ""),
    "Anomalies": (16, 24, "image AUROC", 60.0, 6.0, ""),
    "Embeddings": (64, 40, "recall@1", 70.0, 5.0, ""),
    "Several heads": (64, 40, "worst head", 100.0, 5.0, ""),
    "Images against texts": (24, 32, "top-1", 35.0, 10.0, "openvino-cpu"),
    "Key points": (8, 8, "OKS AP", 45.0, 5.0, ""),
    "Promptable segmentation": (8, 8, "mask IoU", 60.0, 2.0, "openvino-cpu"),
    "Image to text": (16, 16, "character accuracy", 95.0, 2.0, "onnxruntime-cpu"),
}
# So few scenes prove little: nothing is asked of the engines.
SHORT = ("budget.min_agreement=0", "bench.duration=0.1")

DEEP = pytest.mark.skipif("VITDEPLOY_TEST_DEPTH" not in os.environ, reason="much like others; VITDEPLOY_TEST_DEPTH=1")


def section(title: str) -> str:
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    return text


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section(title), flags=re.MULTILINE | re.DOTALL)


def commands(title: str) -> list[str]:
    """The commands of a section, and, if it starts no server, those for every bundle and one of its images."""
    own = "".join(blocks(title, "sh")).splitlines()
    if any("serve" in line.split() for line in own):
        return own
    bundle, image = next(line.split()[2:4] for line in own if line.startswith("vitdeploy predict"))
    common = "".join(blocks("How to run the examples", "sh"))
    return [*own, *common.replace("out/segments", bundle).replace("photos/street.png", image).splitlines()]


class Walk:
    """The commands of a section in a folder that is as the repository's root: each program is a method."""

    def __init__(self, folder: Path, command: Any, title: str, *settings: str) -> None:
        self.folder, self.command, self.title, self.settings = folder, command, title, settings
        self.bundle, self.report, self.served = folder, {}, {}
        self.predicted: list[dict[str, Any]] = []
        with contextlib.ExitStack() as self.open:
            for line in commands(title):
                if words := shlex.split(line, comments=True):
                    getattr(self, words[0])(*words[1:])

    def python(self, dash: str, module: str, verb: str, kind: str, out: str) -> None:
        assert (dash, module, verb) == ("-m", "calibration.scenes", "render")
        render(kind, self.folder / out, dict(zip(("calibration", "evaluation"), SCENES[self.title], strict=False)))

    def vitdeploy(self, verb: str, *arguments: str) -> None:
        if verb == "run":
            self.bundle = self.folder / arguments[-1]
            given = [each for option in (*SHORT, *self.settings) for each in ("--set", option)]
            self.report = self.command("run", *arguments, *given, "--json").document
        elif verb == "predict":
            self.predicted = self.command("predict", *arguments, "--json").document["predictions"]
        elif verb == "embed":
            done = self.command("embed", *arguments)
            assert done.returncode == 0, done.stderr
            assert any((self.folder / arguments[-1]).iterdir())
        else:
            assert (verb, self.folder / arguments[0]) == ("serve", self.bundle)
            engines = self.open.enter_context(load_engines(self.bundle, max_batch=1))
            self.server = self.open.enter_context(Running(engines))

    def curl(self, *arguments: str) -> None:
        *options, address = arguments
        assert set(options[::2]) == {"-F"}
        fields = dict(field.split("=", 1) for field in options[1::2])
        body = form((self.folder / fields.pop("file").removeprefix("@")).read_bytes(), **fields)
        path = address.removeprefix("http://127.0.0.1:8080")
        status, _, self.served = self.server.ask("POST", path, body, FORM)
        assert status == 200

    def verified(self, artifact: str) -> dict[str, Any]:
        return next(each["verify"] for each in self.report["engines"] if each["artifact"] == artifact)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """What a reader's clone has of what the page names."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "calibration").symlink_to(ROOT / "calibration")
    return folder


@pytest.fixture(scope="module")
def command(root, shared_store):
    reference("transformers")
    with command_line(root, shared_store, short_bench=True) as command:
        yield command


@pytest.mark.parametrize("title", SCENES)
def test_a_walk_on_drawn_scenes(title, root, command):
    if title in ("Detection", "Key points"):
        pytest.importorskip("pycocotools", reason="pip install 'vitdeploy[export]'")
    calibration, scenes, metric, least, most, target = SCENES[title]
    targets = (target,) if target and "VITDEPLOY_TEST_DEPTH" not in os.environ else TARGETS
    settings = (f"data.calibration.images={calibration}", "budget.max_drop=100", f"targets=[{','.join(targets)}]")
    walk = Walk(root, command, title, *settings)
    verify_files(walk.bundle, read_bundle(walk.bundle))
    for target in targets:
        exact, rounded = (walk.verified(f"{target}-{precision}") for precision in ("fp32", "int8"))
        assert (exact["metric"], exact["n"] >= scenes) == (metric, True)
        assert exact["reference_value"] >= least
        assert exact["value"] == pytest.approx(exact["reference_value"], abs=0.2)
        assert exact["agreement"] >= 99.9
        assert rounded["value"] == pytest.approx(rounded["reference_value"], abs=most)
        assert rounded["agreement"] >= 85
        [kernels] = [each["kernels"] for each in walk.report["engines"] if each["artifact"] == f"{target}-int8"]
        assert kernels["int8"] > 5
    assert len(walk.report["bench"]["results"]) == 1 + 2 * len(targets)
    CHECKS[title](walk)


def detected(walk: Walk) -> None:
    """Most drawn shapes are found where they are, the picture has their boxes, and the server tells them."""
    drawn = json.loads((walk.folder / "out/scenes/detection/annotations.json").read_text(encoding="utf-8"))
    names = {each["id"]: each["name"] for each in drawn["categories"]}
    [image] = [each["id"] for each in drawn["images"] if each["file_name"] == "evaluation/000001.png"]
    shapes = [each for each in drawn["annotations"] if each["image_id"] == image]
    [answer] = walk.predicted

    def found(shape: dict[str, Any]) -> bool:
        x, y, width, height = shape["bbox"]
        return any(
            each["label"] == names[shape["category_id"]]
            and np.abs(np.subtract(each["box"], [x, y, x + width, y + height])).max() < 5
            for each in answer["objects"]
        )

    assert len(shapes) > 1 and np.mean([found(shape) for shape in shapes]) > 0.5
    [picture] = answer["drawn"]
    before, after = (np.asarray(Image.open(walk.folder / path).convert("RGB")) for path in (answer["image"], picture))
    assert before.shape == after.shape and (before != after).any()
    assert [each["label"] for each in walk.served["objects"]] == [each["label"] for each in answer["objects"]]


def labelled(walk: Walk) -> None:
    """Most digits that are drawn are said, and no others; the server says the same."""
    rows = (walk.folder / "out/scenes/digits/labels.csv").read_text(encoding="utf-8").split()
    header, row = (
        next(each.split(",") for each in rows if each.startswith(name)) for name in ("image", "evaluation/000003")
    )
    drawn = {name for name, flag in zip(header[1:], row[1:], strict=True) if flag == "1"}
    [answer] = walk.predicted
    names = {each["label"] for each in answer["labels"]}
    assert len(names ^ drawn) <= 1 and [each["label"] for each in answer["scores"]] == header[1:]
    assert {each["label"] for each in walk.served["labels"]} == names


def decided(walk: Walk) -> None:
    [answer] = walk.predicted
    assert (answer["label"], answer["yes"]) == ("seven", answer["score"] > answer["threshold"])
    assert walk.served["yes"] == answer["yes"] and walk.served["score"] == pytest.approx(answer["score"], rel=1e-4)


def measured(walk: Walk) -> None:
    [answer] = walk.predicted
    picture, numbers, sixteen = (walk.folder / path for path in answer["drawn"])
    depth = np.load(numbers)
    assert Image.open(picture).size == Image.open(sixteen).size == depth.shape[::-1] == (96, 96)
    assert 0.5 < depth.min() < depth.max() < 20
    assert walk.served["median"] == pytest.approx(answer["median"], rel=1e-3)


def cut_out(walk: Walk) -> None:
    """The figure is cut out where it was drawn; the program of the page says the same."""
    [answer] = walk.predicted
    picture, grey = (Image.open(walk.folder / path) for path in answer["drawn"])
    assert (picture.mode, grey.mode) == ("RGBA", "L")
    matte = np.asarray(grey) / 255
    drawn = np.asarray(Image.open(walk.folder / "out/scenes/foreground/mattes/evaluation/000003.png")) / 255
    assert np.abs(matte - drawn).mean() < 0.03
    assert walk.served["box"] == answer["box"] and walk.served["share"] == pytest.approx(answer["share"])
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(walk.folder)
        exec(blocks(walk.title, "python")[0], found)  # noqa: S102 - of our own page
    np.testing.assert_array_equal(np.asarray(found["figure"]), np.asarray(picture))


def counted(walk: Walk) -> None:
    """The number is nearly that of the table, and the server's; and INT8 costs little of the mean absolute error."""
    rows = dict(
        row.split(",") for row in (walk.folder / "out/scenes/counts/labels.csv").read_text("utf-8").splitlines()
    )
    [answer], [number] = walk.predicted, walk.served["numbers"]
    assert answer["numbers"] == [{**number, "value": pytest.approx(number["value"], rel=1e-3)}]
    assert (number["name"], number["unit"]) == ("shapes", "")
    assert abs(number["value"] - int(rows["evaluation/000003.png"])) < 1
    for target in TARGETS:
        rounded = walk.verified(f"{target}-int8")
        assert rounded["mae"] == pytest.approx(rounded["reference_mae"], rel=0.1) and rounded["difference_max"] < 0.5


def inspected(walk: Walk) -> None:
    """The scratch is where its mask is; heat is drawn there; and no engine quantizes the distances to the bank."""
    [answer] = walk.predicted
    test = walk.folder / "out/scenes/anomaly/test/scratch/000003.png"
    mask = np.asarray(Image.open(walk.folder / "out/scenes/anomaly/ground_truth/scratch/000003_mask.png")) > 0
    rows, columns = np.nonzero(mask)
    assert np.hypot(columns - answer["peak"][0], rows - answer["peak"][1]).min() < 8
    picture, numbers = (walk.folder / path for path in answer["drawn"])
    assert Image.open(picture).size == Image.open(test).size == np.load(numbers).shape[::-1] == (64, 64)
    assert walk.served["score"] == pytest.approx(answer["score"], rel=1e-3)
    assert walk.served["anomalous"] == answer["anomalous"] == (answer["score"] > answer["threshold"])
    for target in TARGETS:
        assert walk.verified(f"{target}-int8")["pixel_auroc"] > 70
        graph = load_graph(walk.bundle / "engines" / target / "graph.onnx")
        assert unplaced_weights(graph) == {"memory_bank": "its weights have 3 axes"}


def compared(walk: Walk) -> None:
    assert len(walk.predicted) == SCENES[walk.title][1]
    assert {each["label"] for each in walk.predicted} <= {"a red circle", "a blue star"}
    nearest = {"red": "a red circle", "blue": "a blue star"}
    known = [each for each in walk.predicted if Path(each["image"]).parent.name.split()[0] in nearest]
    right = [each["label"] == nearest[Path(each["image"]).parent.name.split()[0]] for each in known]
    assert len(right) > 3 and np.mean(right) >= 0.7
    assert [each["label"] for each in walk.served["top"]] == ["a blue star", "a red circle"]


def posed(walk: Walk) -> None:
    first, second = walk.predicted
    assert first["drawn"] == second["drawn"] and len(first["points"]) == len(walk.served["points"]) == 17
    for answer in (first, second):
        left, top, right, bottom = answer["box"]
        shown = [point for point in answer["points"] if point["score"] >= answer["threshold"]]
        inside = [left - 8 <= each["x"] <= right + 8 and top - 8 <= each["y"] <= bottom + 8 for each in shown]
        assert len(shown) >= 5 and np.mean(inside) > 0.8


def outlined(walk: Walk) -> None:
    """The page asks for one box last: one mask, drawn over the image and alone, mostly inside of the box. Server and
    app answer the same."""
    [answer] = walk.predicted
    [prompt] = answer["prompts"]
    over, alone = (np.asarray(Image.open(walk.folder / path)) for path in answer["drawn"])
    assert over.shape[:2] == alone.shape == (96, 96)
    rows, columns = np.nonzero(alone)
    x0, y0, x1, y1 = prompt["box"]
    assert np.mean((columns >= x0 - 2) & (columns < x1 + 2) & (rows >= y0 - 2) & (rows < y1 + 2)) > 0.9
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(walk.folder)
        exec(blocks(walk.title, "python")[0], found)  # noqa: S102 - of our own page
    both, boxed = walk.served["prompts"]
    assert {**boxed, "mask_png": None} == {**prompt, "mask_png": None}
    assert (both["area"], both["scores"]) == (found["shape"].mask.sum(), pytest.approx([found["shape"].score]))


def read(walk: Walk) -> None:
    lines = json.loads((walk.folder / "out/scenes/text/texts.json").read_text(encoding="utf-8"))
    [text] = [each["text"] for each in lines if each["file_name"] == "evaluation/000001.png"]
    [answer] = walk.predicted
    assert answer["text"] == walk.served["text"] == text
    assert answer["score"] <= 0 and not answer["cut"]


def known_again(walk: Walk) -> None:
    """The image itself is nearest, then those of its number; the server's vector is that of the app, of length 1."""
    [answer] = walk.predicted
    matches = answer["matches"]
    assert len(matches) == 4 and answer["image"].endswith(matches[0]["name"])
    identity = Path(answer["image"]).parent.name
    assert [match["identity"] == identity for match in matches[:3]].count(True) >= 2
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(walk.folder)
        exec(blocks(walk.title, "python")[0], found)  # noqa: S102 - of our own page
    assert found["alike"] > found["other"] and len(found["gallery"]) == SCENES[walk.title][1]
    assert np.linalg.norm(walk.served["vector"]) == pytest.approx(1, abs=1e-5)


def answered(walk: Walk) -> None:
    """Each head is right, server and app say the same, and INT8 costs little of each metric."""
    [answer] = walk.predicted
    number = Path(answer["image"]).parent.name
    assert answer["first"]["label"] == number[0]
    assert abs(answer["sum"]["numbers"][0]["value"] - sum(map(int, number))) < 2
    assert walk.served["number"]["vector"] == pytest.approx(answer["number"]["vector"], abs=1e-4)
    assert walk.served["first"]["label"] == answer["first"]["label"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(walk.folder)
        exec(blocks(walk.title, "python")[0], {})  # noqa: S102 - of our own page
    for target in TARGETS:
        first, total, vector = (part["comparison"] for part in walk.verified(f"{target}-int8")["parts"])
        assert [each["metric"] for each in (first, total, vector)] == ["top-1", "R2", "recall@1"]
        assert max(abs(each["drop"]) for each in (first, vector)) <= 2.5  # one of 40 scenes
        assert total["mae"] == pytest.approx(total["reference_mae"], rel=0.1)


CHECKS = {"Detection": detected, "Depth": measured, "Images against texts": compared, "Key points": posed}
CHECKS |= {"Labels of their own": labelled, "Yes or no": decided}
CHECKS |= {"Foreground": cut_out, "Anomalies": inspected, "Promptable segmentation": outlined, "Image to text": read}
CHECKS |= {"Numbers": counted}
CHECKS |= {"Embeddings": known_again, "Several heads": answered}


def photos(folder: Path, sizes: list[tuple[int, int]], enlarged: int = 1) -> None:
    """Pictures of a few colours each, the first of which is called as on the page; the same in the other folders."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number, (width, height) in enumerate(sizes):
        coarse = Image.fromarray(generator.integers(0, 256, (3, 4, 3), np.uint8))
        large = coarse.resize((width * enlarged, height * enlarged), Image.Resampling.BICUBIC)
        large.save(folder / ("street.png" if not number else f"{number}.png"))


def own(title: str, folder: Path, command: Any, *settings: str) -> Walk:
    """The walk of a section with a recipe of its own, which is in the file that its first command names."""
    name = next(line.split()[2] for line in "".join(blocks(title, "sh")).splitlines() if " run " in line)
    (folder / name).write_text(blocks(title, "yaml")[0], encoding="utf-8")
    return Walk(folder, command, title, "data.calibration.images=4", *settings)


@DEEP
def test_the_walk_of_a_segmentation_model_of_ones_own(root, command):
    save("SegFormer", root / "segformer-b0-finetuned-ade-512-512")
    photos(root / "photos", [(80, 48)] * 10)
    walk = own("Your own model", root, command)
    [answer] = walk.predicted
    picture, classes = (np.asarray(Image.open(walk.folder / path)) for path in answer["drawn"])
    assert picture.shape == (48, 80, 3) and classes.shape == (48, 80)
    assert {each["index"] for each in answer["classes"]} == set(np.unique(classes).tolist())
    assert [each["label"] for each in walk.served["classes"]] == [each["label"] for each in answer["classes"]]
    assert walk.verified("onnxruntime-cpu-fp32")["agreement"] > 99.9


@DEEP
def test_the_walk_of_an_image_to_image_model(root, command):
    library = reference("transformers")
    config = library.Swin2SRConfig(
        image_size=16, embed_dim=16, depths=[2], num_heads=[2], window_size=8, mlp_ratio=2.0, upscale=2,
        upsampler="pixelshuffledirect",
    )  # fmt: skip
    folder = root / "swin2SR-classical-sr-x2-64"
    library.Swin2SRForImageSuperResolution(config).save_pretrained(folder)
    library.Swin2SRImageProcessor().save_pretrained(folder)
    photos(root / "low", [(16, 16)] * 10)
    photos(root / "high", [(16, 16)] * 10, enlarged=2)
    walk = own("Image to image", root, command, "source.image_size=16", "budget.max_drop=100")
    [answer] = walk.predicted
    assert Image.open(walk.folder / answer["drawn"][0]).size == (32, 32)
    assert (walk.served["width"], walk.served["png"][:4]) == (32, "iVBO")
    assert walk.verified("openvino-cpu-fp32")["metric"] == "SSIM"
