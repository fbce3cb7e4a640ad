"""`vitdeploy run` once for each task and kind of source, up to a bundle that `predict` and `verify` read.

Labels are what the original itself answers, read by other code than ours where there is any: so an original has all of
its metric only if it sees the same pixels, and if every box, segment and token arrives where it belongs.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.command_line import ROOT, Command, command_line
from tests.tasks.lively_detr import CLASSES, MEAN, SIDE, STD, lively, save
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.models.catalog import find_or_raise
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.panoptic import segment
from vitdeploy.spec import PreprocessSpec

IMAGES, CALIBRATION = 12, 4
SIZE = (80, 48)
THRESHOLD = 0.3
THINGS = (0, 1, 2, 3)
GREY = {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]}


@dataclass(frozen=True)
class Line:
    """A finished run: its bundle, report.json, and the command line in the folder of both."""

    bundle: Path
    report: dict[str, Any]
    command: Command

    def verified(self, artifact: str) -> dict[str, Any]:
        return next(engine["verify"] for engine in self.report["engines"] if engine["artifact"] == artifact)

    def verify(self, *arguments: object) -> Any:
        return self.command("verify", self.bundle, "--json", "--data", *arguments).document

    def predict(self, *inputs: object) -> Any:
        return self.command("predict", self.bundle, *inputs, "--json").document["predictions"]


@pytest.fixture(scope="module")
def command(tmp_path_factory, shared_store):
    with command_line(tmp_path_factory.mktemp("tasks"), shared_store, short_bench=True) as command:
        yield command


# As much as the few images of these tests can prove.
PROVABLE = {"min_agreement": 40}


def run(command: Command, recipe: Path | dict[str, Any], out: Path, *options: object) -> Line:
    """`vitdeploy run` with a recipe, and what is true of every run."""
    if isinstance(recipe, dict):
        path = out.parent / f"{out.name}.yaml"
        bench = {"scenarios": ["single"], "batch": [1], "duration": 0.1}
        common = {"vitdeploy": 1, "name": out.name, "bench": bench, "budget": PROVABLE}
        path.write_text(json.dumps({**common, **recipe}), encoding="utf-8")
        recipe = path
    report = command("run", recipe, "-o", out, "--json", *options).document
    manifest = read_bundle(out)
    verify_files(out, manifest)
    assert manifest.task == report["task"]
    assert max(row["max_relative_difference"] for row in report["export"]["parity"]) < 1e-4
    assert max(report["optimize"]["difference"].values()) < 1e-4
    engines = [engine["artifact"] for engine in report["engines"]]
    assert [row["artifact"] for row in report["bench"]["results"]] == ["original", *engines]
    assert report["verdict"]["sentence"] in (out / "report.html").read_text(encoding="utf-8")
    return Line(out, report, command)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Pictures wider than high, of coloured rectangles on noise."""
    folder = tmp_path_factory.mktemp("scenes") / "images"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        pixels = generator.integers(0, 90, (SIZE[1], SIZE[0], 3), np.uint8)
        for _ in range(3):
            x, y = generator.integers(0, 60), generator.integers(0, 30)
            pixels[y : y + 18, x : x + 20] = generator.integers(0, 256, 3)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def answers(scenes, tmp_path_factory):
    """A panoptic DETR's folder, the pictures' paths, and what transformers' own module says to them.

    The pictures are prepared by Pillow and the formula alone.
    """
    paths = sorted(scenes.glob("*.png"))
    images = [Image.open(path).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for path in paths]
    pixels = np.stack([np.asarray(image, np.float32) for image in images]) / 255
    tensors = torch.from_numpy((pixels - np.float32(MEAN)) / np.float32(STD)).permute(0, 3, 1, 2)
    model = lively(True, tensors)
    folder = tmp_path_factory.mktemp("detr")
    save(model, folder)
    with torch.no_grad():
        return folder, paths, model(tensors)


@pytest.fixture(scope="module")
def segmented(command, scenes, answers, tmp_path_factory):
    """The run of the panoptic model with COCO's files of what it sees, and the path of these."""
    folder, paths, outputs = answers
    home = tmp_path_factory.mktemp("panoptic")
    (home / "panoptic").mkdir()
    preprocess = PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), "bilinear", MEAN, STD)
    head = PostprocessSpec(threshold=THRESHOLD, things=THINGS)
    columns = {"logits": outputs.logits, "boxes": outputs.pred_boxes, "masks": outputs.pred_masks}
    annotations, images = [], []
    for index, path in enumerate(paths):
        found = segment({name: column[index].numpy() for name, column in columns.items()}, SIZE, preprocess, head, None)
        colours = np.stack([found.map, np.zeros_like(found.map), np.zeros_like(found.map)], axis=-1)
        Image.fromarray(colours.astype(np.uint8)).save(home / "panoptic" / path.name)
        images.append({"id": index, "file_name": path.name, "width": SIZE[0], "height": SIZE[1]})
        segments = [{"id": each.id, "category_id": each.index} for each in found.segments]
        annotations.append({"image_id": index, "file_name": path.name, "segments_info": segments})
    categories = [{"id": i, "name": name, "isthing": int(i in THINGS)} for i, name in enumerate(CLASSES)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (home / "panoptic.json").write_text(json.dumps(document), encoding="utf-8")
    recipe = {
        "source": {"model": f"hf:{folder}", "image_size": SIDE},
        "postprocess": {"threshold": THRESHOLD, "things": THINGS},
        "data": {
            "path": str(scenes),
            "labels": "panoptic",
            "annotations": str(home / "panoptic.json"),
            "calibration": {"images": CALIBRATION},
        },
        "export": {"preprocess": False},
        "precision": "fp32",
        "targets": ["onnxruntime-cpu"],
    }
    return run(command, recipe, home / "bundle"), home / "panoptic.json"


def test_a_panoptic_model_of_a_hugging_face_folder(segmented, answers, scenes):
    made, labels = segmented
    verified = made.verified("onnxruntime-cpu-fp32")
    assert (verified["metric"], verified["n"], made.report["task"]) == ("PQ", IMAGES - CALIBRATION, "panoptic")
    assert verified["segments"] >= 5
    assert verified["reference_value"] > 99
    assert verified["value"] == pytest.approx(verified["reference_value"], abs=0.1)
    assert verified["agreement"] > 99.9
    assert verified["things"]["pq"] > 99
    assert verified["stuff"]["pq"] > 99
    assert (made.report["model"]["family"], made.report["model"]["checkpoint"]) == ("detr", "model.safetensors")
    assert (made.bundle / "labels.txt").read_text(encoding="utf-8").splitlines() == list(CLASSES)

    annotations = json.loads(labels.read_text(encoding="utf-8"))["annotations"]
    [answer] = made.predict(scenes / "03.png")
    assert answer["segments"]
    assert [found["index"] for found in answer["segments"]] == [
        expected["category_id"] for expected in annotations[3]["segments_info"]
    ]
    original = ("--against", f"hf:{answers[0]}", "--image-size", SIDE)
    again = made.verify(scenes, "--labels", "panoptic", "--annotations", labels, *original, "--num-samples", 4)
    assert (again["metric"], again["n"]) == ("PQ", 4)
    assert again["value"] > 99


def inside(box):
    """YOLO's centre and sides of a box cut at the border of the image, as post-processing does."""
    x, y, w, h = box
    left, right, top, bottom = max(x - w / 2, 0), min(x + w / 2, 1), max(y - h / 2, 0), min(y + h / 2, 1)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top


def test_a_detector_that_comes_as_onnx_with_yolo_labels(command, segmented, answers, scenes, tmp_path):
    """The detector is the panoptic model's graph without its masks, as if somebody else had exported it."""
    _, paths, outputs = answers
    graph = onnx.load(segmented[0].bundle / "model.onnx")
    del graph.metadata_props[:]
    [masks] = [output for output in graph.graph.output if output.name == "masks"]
    graph.graph.output.remove(masks)
    onnx.save(graph, tmp_path / "theirs.onnx")
    (tmp_path / "labels").mkdir()
    for where in ("names.txt", "labels/classes.txt"):
        (tmp_path / where).write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    scores, classes = outputs.logits.softmax(dim=-1)[..., :-1].max(dim=-1)
    expected = {}
    for path, score, index, boxes in zip(paths, scores, classes, outputs.pred_boxes, strict=True):
        shown = [(int(c), inside(b.tolist())) for s, c, b in zip(score, index, boxes, strict=True) if s > THRESHOLD]
        expected[path.name] = len(shown)
        lines = "".join(f"{c} {' '.join(f'{side:.6f}' for side in box)}\n" for c, box in shown)
        again = lines.splitlines(keepends=True)[-1:]  # which is no further object
        (tmp_path / "labels" / f"{path.stem}.txt").write_text("".join([lines, *again]), encoding="utf-8")
    recipe = {
        "source": {"model": "theirs.onnx", "labels": "names.txt"},
        "preprocess": {"resize": [SIDE, SIDE], "crop": SIDE, "interpolation": "bilinear", "mean": MEAN, "std": STD},
        "postprocess": {"threshold": THRESHOLD},
        "data": {
            "path": str(scenes),
            "labels": "yolo",
            "annotations": "labels",
            "calibration": {"images": CALIBRATION},
        },
        "precision": "int8",
        "targets": ["openvino-cpu"],
    }
    made = run(command, recipe, tmp_path / "bundle")
    exact, rounded = made.verified("openvino-cpu-fp32"), made.verified("openvino-cpu-int8")
    for verified in (exact, rounded):
        assert (verified["metric"], verified["n"]) == ("mAP", IMAGES - CALIBRATION)
        assert verified["reference_value"] == pytest.approx(100, abs=0.01)
    assert exact["objects"] > IMAGES
    assert (exact["agreement"], exact["value"]) == (100, exact["reference_value"])
    assert exact["max_difference"] < 1e-3 < rounded["max_difference"]
    assert (made.report["model"]["family"], made.report["model"]["checkpoint"]) == ("onnx", "theirs.onnx")
    assert made.report["data"]["unannotated"] == 0
    [text] = made.report["data"]["remarks"]
    shown = sum(count > 0 for count in expected.values())
    assert text.startswith(f"labels: repeated boxes, counted once: {shown} (first: ")
    assert text in made.report["verdict"]["remarks"]

    # Whether INT8 is the faster one of so small a model, and so the first of the bundle, its short bench does not say.
    fields = command("predict", made.bundle, *paths, "--target", "openvino-cpu-int8", "--json").document
    assert fields["engine"] == "openvino-cpu-int8"
    assert sum(len(answer["objects"]) for answer in fields["predictions"]) > sum(expected.values()) / 2
    for answer in fields["predictions"]:
        assert (answer["width"], answer["height"]) == SIZE
        assert all(each["label"] in CLASSES and each["score"] > THRESHOLD for each in answer["objects"])
    again = made.verify(
        *(scenes, "--labels", "yolo", "--annotations", tmp_path / "labels", "--against", tmp_path / "theirs.onnx")
    )
    assert (again["metric"], again["n"], again["against"]) == ("mAP", IMAGES, str(tmp_path / "theirs.onnx"))
    assert again["reference_value"] == pytest.approx(100, abs=0.01)
    assert again["agreement"] < 100 or again["value"] == again["reference_value"]


def test_a_checkpoint_without_a_head_gives_features(command, small_checkpoint, digits, tmp_path):
    state = {key: tensor for key, tensor in load_file(small_checkpoint).items() if not key.startswith("head.")}
    save_file(state, tmp_path / "headless.safetensors")
    recipe = {
        "source": {"checkpoint": "headless.safetensors", "heads": 2},
        "preprocess": GREY,
        "data": {"path": str(digits), "calibration": {"images": 4}, "evaluation": {"images": 200}},
        "precision": "fp32",
        "targets": ["onnxruntime-cpu"],
    }
    made = run(command, recipe, tmp_path / "bundle")
    verified = made.verified("onnxruntime-cpu-fp32")
    assert (made.report["task"], made.report["model"]["checkpoint"]) == ("features", "headless.safetensors")
    assert (verified["metric"], verified["n"], verified["agreement"]) == ("1-NN top-1", 200, 100)
    assert verified["value"] == verified["reference_value"] > 20  # even random features know that much of a digit
    assert verified["cosine_min"] > 0.9999

    [answer] = made.predict(next(digits.glob("evaluation/4/*.png")))
    assert len(answer["vector"]) == 32
    original = ("--against", "vit_w32d2h2_patch8_32", "--checkpoint", tmp_path / "headless.safetensors")
    again = made.verify(digits, *original, "--num-samples", 20)
    assert (again["metric"], again["n"], again["agreement"]) == ("1-NN top-1", 20, 100)


@pytest.mark.parametrize("task", ["features", "embedding"])
def test_an_app_is_not_told_whom_the_folders_are_called_after(task, command, small_checkpoint, digits, tmp_path):
    """Folders of a data set of faces have the names of people. Reports say which images they show, and no other text
    does."""
    people = ("Ada Lovelace", "Alan Turing", "Grace Hopper")
    for person, digit in zip(people, "147", strict=True):
        (tmp_path / "faces" / person).mkdir(parents=True)
        for path in sorted(digits.glob(f"evaluation/{digit}/*.png"))[:12]:
            shutil.copyfile(path, tmp_path / "faces" / person / path.name)
    state = {key: tensor for key, tensor in load_file(small_checkpoint).items() if not key.startswith("head.")}
    save_file(state, tmp_path / "headless.safetensors")
    recipe = {
        "source": {"checkpoint": "headless.safetensors", "heads": 2, "task": task},
        "preprocess": GREY,
        "data": {"path": str(tmp_path / "faces"), "calibration": {"images": 4}},
        "precision": "fp32",
        "targets": ["onnxruntime-cpu"],
    }
    made = run(command, recipe, tmp_path / "bundle")
    assert (made.report["task"], read_bundle(made.bundle).labels) == (task, None)
    naming = {
        path.name
        for path in made.bundle.rglob("*")
        if path.is_file() and any(part.encode() in path.read_bytes() for person in people for part in person.split())
    }
    assert naming == {"report.json", "report.html"} and not (made.bundle / "labels.txt").exists()
    examples = made.report["examples"]
    assert examples and all(row["label"] in people and row["sample"].startswith(row["label"]) for row in examples)


def test_an_encoder_decoder_with_token_arrays(command, tmp_path):
    """The recipe that is shipped, for one target and on few sequences; its model has learnt to reverse strings."""
    options = ("targets=[openvino-cpu]", "data.evaluation.images=20", "bench.duration=0.1")
    made = run(
        command,
        ROOT / "recipes" / "transformer_reverse.yaml",
        tmp_path / "bundle",
        *(part for option in options for part in ("--set", option)),
    )
    verified = made.verified("openvino-cpu-fp32")
    assert (made.report["task"], made.report["data"]["noun"]) == ("sequence", "sequence")
    assert (verified["metric"], verified["n"], verified["tokens"] > 100) == ("token accuracy", 20, True)
    assert (verified["value"], verified["reference_value"], verified["exact_match"]) == (100, 100, 100)
    assert verified["agreement"] == 100
    assert set(read_bundle(made.bundle).graphs) == {"encoder", "decoder_step"}

    source = np.array([[3, 4, 5, 2, 0], [9, 2, 0, 0, 0], [12, 11, 10, 9, 2]])
    np.savez(tmp_path / "tokens.npz", source=source)
    found = [[token for token in answer["tokens"] if token > 2] for answer in made.predict(tmp_path / "tokens.npz")]
    assert found == [[5, 4, 3], [9], [9, 10, 11, 12]]
    weights = ROOT / "calibration" / "reverse" / "transformer_reverse.safetensors"
    original = ("--against", "transformer_w32e2d2h4_v13_l20", "--checkpoint", weights)
    again = made.verify(tmp_path / "tokens.npz", *original)
    assert (again["metric"], again["n"], again["agreement"]) == (None, 3, 100)


@pytest.fixture(scope="module")
def external_graph(tmp_path_factory, small_checkpoint):
    """The small model as PyTorch's TorchScript exporter writes it: opset 14, LayerNorm and GELU taken apart."""
    family, config = find_or_raise("vit_w32d2h2_patch8_32")
    model = family.build(dataclasses.replace(config, num_classes=10, in_channels=1)).eval()
    model.load_state_dict(load_file(small_checkpoint))
    path = tmp_path_factory.mktemp("external") / "theirs.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.zeros(2, 1, 32, 32),),
            path,
            dynamo=False,
            opset_version=14,
            input_names=["pixel_values"],
            output_names=["class_scores"],
            dynamic_axes={"pixel_values": {0: "n"}, "class_scores": {0: "n"}},
        )
    return path


def test_a_classifier_that_comes_as_onnx(command, external_graph, digits, tmp_path):
    recipe = {
        "source": {"model": str(external_graph)},
        "preprocess": GREY,
        "data": {"path": str(digits), "calibration": {"images": 32}, "evaluation": {"images": 40}},
        "precision": "int8",
        "budget": {"min_agreement": 0},  # its answers are all of one class, so that agreement proves nothing
        "targets": ["onnxruntime-cpu"],
    }
    made = run(command, recipe, tmp_path / "bundle")
    exact, rounded = made.verified("onnxruntime-cpu-fp32"), made.verified("onnxruntime-cpu-int8")
    assert (made.report["model"]["family"], made.report["model"]["classes"]) == ("onnx", 10)
    assert made.report["model"]["checkpoint"] == "theirs.onnx"
    assert (exact["metric"], exact["agreement"], exact["value"]) == ("top-1", 100, exact["reference_value"])
    assert exact["max_difference"] < 1e-4 < rounded["max_difference"]
    [shipped] = [engine for engine in made.report["engines"] if engine["shipped"]]
    assert shipped["kernels"]["int8"] >= 8  # the linears of a graph that somebody else wrote are found all the same
    assert made.report["optimize"]["rewrites"]["model"]["class_token_only"] == 1

    again = made.verify(digits, "--against", external_graph, "--num-samples", 40)
    assert (again["against"], again["metric"]) == (str(external_graph), "top-1")
    assert again["agreement"] >= 80
