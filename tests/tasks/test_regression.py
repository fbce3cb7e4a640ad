"""Regression: numbers with names and units, against independent implementations, labels in columns, and bad input."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics
from torch import nn

import vitdeploy as vd
from tests.references import reference
from tests.workflows.dense_graphs import graph, picture
from vitdeploy.errors import CheckpointError, DataError, VitdeployError
from vitdeploy.runtime.tasks.regression import REGRESSION, RegressionSpec, numbers_of
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import DecodeError, decode, encode
from vitdeploy.tasks.adapter import Setting
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.tasks.regression import SPREAD_SHARE, compare_numbers, read_numbers
from vitdeploy.verification.intervals import draws
from vitdeploy.verification.records import Answers

TARGETS = ("onnxruntime-cpu", "openvino-cpu")
SIDE = 16
SPEC = vd.Preprocess(SIDE, (SIDE, SIDE), mean=(0.0,) * 3, std=(1.0,) * 3)


def sides(n=40, k=2, noise=0.1):
    random = np.random.default_rng(0)
    truth = random.normal(3, (1, 20)[:k], (n, k))
    theirs = truth + random.normal(0, 0.3, (n, k))
    return theirs + random.normal(0, noise, (n, k)), theirs, truth


def compared(ours, theirs, truth, spec=None, labels=()):
    return compare_numbers(ours, theirs, truth, spec or RegressionSpec(tolerance=0.25), labels, max_difference=0.0)


# --- the measures -----------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_scikit_learn():
    ours, theirs, truth = sides()
    found = compared(ours, theirs, truth, labels=("age", "weight"))
    for side, value, mae in ((ours, found.value, found.mae), (theirs, found.reference_value, found.reference_mae)):
        assert value == pytest.approx(100 * metrics.r2_score(truth, side))
        assert mae == pytest.approx(metrics.mean_absolute_error(truth, side))
    assert found.drop == pytest.approx(found.reference_value - found.value)
    assert found.difference_max == pytest.approx(metrics.max_error(theirs.ravel(), ours.ravel()))
    assert found.difference_mean == pytest.approx(metrics.mean_absolute_error(theirs, ours))
    assert found.agreement == 100 * np.mean((np.abs(ours - theirs) <= 0.25).all(axis=1))
    for j, (number, name) in enumerate(zip(found.numbers, ("age", "weight"), strict=True)):
        assert (number.name, number.tolerance) == (name, 0.25)
        assert number.r2 == pytest.approx(100 * metrics.r2_score(truth[:, j], ours[:, j]))
        assert number.reference_mae == pytest.approx(metrics.mean_absolute_error(truth[:, j], theirs[:, j]))
        assert number.mae_change == pytest.approx(number.mae - number.reference_mae)


def test_intervals_are_those_of_images_that_are_drawn_again():
    """scikit-learn on every draw, as a list of images; the interval of R2 is wide enough for so few images, too."""
    ours, theirs, truth = sides(30, 1, 0.4)
    found, drops, changes = compared(ours, theirs, truth), [], []
    for times in draws(30, 0).astype(int):
        images = np.repeat(np.arange(30), times)
        shares = [metrics.r2_score(truth[images], side[images]) for side in (theirs, ours)]
        errors = [metrics.mean_absolute_error(truth[images], side[images]) for side in (theirs, ours)]
        drops.append(100 * (shares[0] - shares[1]))
        changes.append(errors[1] - errors[0])
    assert found.mae_change_ci95 == pytest.approx(tuple(np.percentile(changes, [2.5, 97.5])))
    low, high = np.percentile(drops, [2.5, 97.5])
    assert found.drop_ci95[0] <= low < found.drop < high <= found.drop_ci95[1]
    perfect = compared(theirs, theirs, truth)
    assert (perfect.agreement, perfect.drop, perfect.mae_change_ci95) == (100, 0, (0, 0))
    assert perfect.drop_ci95[1] > 5  # 30 images prove no less


def test_units_do_not_matter_where_the_tolerance_follows_from_the_answers():
    ours, theirs, truth = sides(60, 1, 0.2)
    found, scaled = (compared(f * ours, f * theirs, f * truth, RegressionSpec()) for f in (1, 1000))
    assert (found.agreement, found.value) == pytest.approx((scaled.agreement, scaled.value))
    assert 1000 * found.mae == pytest.approx(scaled.mae)
    assert found.numbers[0].tolerance == pytest.approx(SPREAD_SHARE * theirs.std())
    assert f"{SPREAD_SHARE} of their standard deviation" in found.agreement_of


def test_labels_of_one_value_have_no_r2():
    ours, theirs, truth = sides(8, 2)
    truth[:, 1] = 4
    with pytest.raises(DataError, match="do not vary") as refused:
        compared(ours, theirs, truth, labels=("age", "weight"))
    assert refused.value.found == "weight: one value for 8 images"


def test_a_model_with_one_answer_proves_nothing():
    _, theirs, _ = sides(20, 1)
    adapter = make_adapter(Setting("regression", SPEC, RegressionSpec(tolerance=100.0), classes=1))
    answers = Answers({"numbers": list(theirs.astype(np.float32))})
    found = adapter.verify(answers, answers, SimpleNamespace(truth=None, evaluation=range(20)))
    assert found.agreement == 100 and found.control.agreement == 100  # so wide a tolerance
    assert "agree to 100.00 %" in found.proves_nothing


def test_a_report_shows_numbers_as_exactly_as_the_tolerance_asks_for():
    answers = Answers({"numbers": [np.array([31.2345, 1234.5], np.float32)]})
    for tolerance, text in ((None, "a 31.2, b 1230"), (0.25, "a 31.2, b 1234.5"), ((3.0, 20.0), "a 31, b 1230")):
        adapter = make_adapter(Setting("regression", SPEC, RegressionSpec(tolerance=tolerance), classes=2))
        assert adapter.show(answers, 0, ["a", "b"]).label == text


# --- on the device ----------------------------------------------------------------------------------------------------


def test_an_answer_has_names_values_and_units():
    spec = RegressionSpec(("years", ""), (2.0, 0.1))
    answer = numbers_of(np.array([31.25, 0.5], np.float32), spec, ["age", "quality"])
    assert str(answer) == "age 31.25 years, quality 0.5" and answer.value == 31.25
    assert answer.to_dict()["numbers"][0] == {"index": 0, "name": "age", "value": 31.25, "unit": "years"}
    assert str(numbers_of(np.float32(7), RegressionSpec(), None)) == "number 7"
    assert decode(RegressionSpec, encode(spec)) == spec
    with pytest.raises(DecodeError, match="tolerance"):
        decode(RegressionSpec, {"units": [], "tolerance": -1.0})


@pytest.mark.parametrize(("spec", "same"), [(RegressionSpec(), 0.1), (RegressionSpec(tolerance=(3.0, 0.5)), 0.5)])
def test_two_models_agree_within_the_tolerance(spec, same):
    theirs, reading = {"numbers": np.array([100.0, 1.0])}, OutputReading((1, 1), None, spec)
    assert REGRESSION.same({"numbers": np.array([102.0, 1 + 0.9 * same])}, theirs, reading)
    assert not REGRESSION.same({"numbers": np.array([102.0, 1 - 1.2 * same])}, theirs, reading)


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def labelled(tmp_path):
    def write(*rows):
        for name in "abc":
            Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
        file = tmp_path / "labels.csv"
        file.write_text("\n".join(rows) + "\n")
        return tmp_path, file

    return write


def values(found):
    return {sample.path.stem: found.annotations[sample.path].values for sample in found.samples}


def test_columns_are_found_by_name_or_as_the_only_numbers(labelled):
    places = labelled("image,weight,note,age", "a,70,old,31", "b,,new,4", "c,2.5,new,1")
    found = read_numbers(*places, ("age", "weight"), 2)
    assert values(found) == {"a": (31, 70), "c": (1, 2.5)} and found.unannotated == 1
    assert "1 images have an empty cell in age, weight" in found.notes[-1]
    places = labelled("image,note,years", "a,old,31", "b,new,4", "c,new,1")
    assert values(read_numbers(*places, (), 1)) == {"a": (31,), "b": (4,), "c": (1,)}
    assert "column 'years' is used for 'age'" in read_numbers(*places, ("age",), 1).notes[-1]


@pytest.mark.parametrize(
    ("rows", "names", "count", "match", "found"),
    [
        (("image,age", "a,old", "b,young"), ("age",), 1, "row 1: the column 'age' is not a number", "'old'"),
        (("image,age", "a,31", "b,NaN", "c,4"), (), 1, "row 2: the column 'age' is not a number", "'NaN'"),
        (("image,age", 'a,31', 'b,"1,5"', "c,4"), (), 1, "row 2: the column 'age' is not a number", "'1,5'"),
        (("image,age", "a,old", "b,young"), (), 1, "row 1: the column 'age' is not a number", "'old'"),
        (("image,age,weight", "a,1,2", "b,3,4"), (), 1, "do not match the numbers", "numeric columns: age, weight"),
        (("image,age,weight", "a,1,2", "b,3,4"), (), 2, "do not match the numbers", "numeric columns: age, weight"),
        (("image,age", "a,1", "b,3"), ("age", "weight"), 2, "do not match the numbers", "numeric columns: age"),
        (("image,age", "a,1", "b,3"), (), 2, "do not match the numbers", "numeric columns: age"),
        (("image,age", "a,", "b,"), ("age",), 1, "annotates no image", "only empty cells in age"),
        (("image,age", "x,1", "y,2"), ("age",), 1, "annotates no image", "'image' with 'x'"),
    ],
    ids=["text", "nan", "decimal comma", "only text", "two for one", "two without names", "one is missing",
         "one for two", "empty", "no image"],
)  # fmt: skip
def test_columns_that_contradict_the_model_are_refused(labelled, rows, names, count, match, found):
    with pytest.raises(DataError, match=match) as refused:
        read_numbers(*labelled(*rows), names, count)
    assert found in refused.value.found and refused.value.code == "VD2301"


# --- models of others -------------------------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, count, returned=lambda numbers: numbers):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.returned = nn.Conv2d(3, 8, 5, 3), nn.Linear(8, count), returned

    def forward(self, image):
        return self.returned(10 * self.head(self.stem(image).relu().mean((2, 3))))


@pytest.mark.parametrize(
    ("count", "returned"),
    [(1, lambda numbers: numbers), (1, lambda numbers: numbers[:, 0]), (3, lambda numbers: {"logits": numbers})],
    ids=["[b, 1]", "[b]", "a mapping"],
)
def test_a_module_is_read_as_numbers_where_that_is_asked_for(count, returned, tmp_path):
    module, names = Head(count, returned).eval(), ["age", "weight", "height"][:count]
    spec = RegressionSpec(("years", "kg", "m")[:count])
    read = vd.model(module, preprocess=SPEC, task="regression", labels=names, postprocess=spec)
    assert read.task == "regression" and read.reference.outputs[0].name == "numbers"
    if count == 1:
        assert "--task regression" in vd.model(module, preprocess=SPEC).reference.notes[-1]
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    with torch.no_grad():
        right = Head(count).eval()(torch.tensor(pixels[None] / 255.0).permute(0, 3, 1, 2).float())[0].tolist()
    exported = vd.export(read, progress=False)
    for target in TARGETS:
        with vd.compile(exported, target, progress=False).load() as predictor:
            answer = predictor.predict(pixels)
        assert [number.name for number in answer.numbers] == names
        assert [number.value for number in answer.numbers] == pytest.approx(right, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("labels", "spec", "found"),
    [
        (["age"], RegressionSpec(), "1 lines"),
        (None, RegressionSpec(("years",)), "1 units for 2 numbers"),
        (None, RegressionSpec(tolerance=(1.0, 2.0, 3.0)), "3 tolerance for 2 numbers"),
    ],
)
def test_names_units_and_tolerances_are_as_many_as_the_numbers(labels, spec, found):
    with pytest.raises(CheckpointError) as refused:
        vd.model(Head(2), preprocess=SPEC, task="regression", labels=labels, postprocess=spec)
    assert found in refused.value.found


def module_and_folder(library, folder):
    """A regression DeiT as the library builds it, and its folder."""
    torch.manual_seed(0)
    if library == "transformers":
        transformers = reference("transformers")
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        names = {"problem_type": "regression", "id2label": {0: "age", 1: "quality"}}
        config = transformers.DeiTConfig(image_size=SIDE, patch_size=4, initializer_range=0.3, **sizes, **names)
        module = transformers.DeiTForImageClassification(config).eval()
        module.save_pretrained(folder)
        size = {"height": SIDE, "width": SIDE}
        transformers.DeiTImageProcessor(size=size, do_center_crop=False).save_pretrained(folder)
        return module, lambda image: module(image).logits, None
    timm = reference("timm")
    from safetensors.torch import save_file

    arguments = {"img_size": SIDE, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 1}
    module = timm.create_model("deit_tiny_patch16_224", **arguments).eval()
    nn.init.normal_(module.head.weight, std=0.5)
    save_file(module.state_dict(), folder / "model.safetensors")
    told = {"input_size": [3, SIDE, SIDE], "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3}
    config = {"architecture": "deit_tiny_patch16_224", "model_args": arguments, "num_classes": 1}
    (folder / "config.json").write_text(json.dumps({**config, "pretrained_cfg": {**told, "interpolation": "bicubic"}}))
    return module, module, "regression"


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_engines_give_the_numbers_of_the_librarys_own_head(library, tmp_path):
    _, forward, task = module_and_folder(library, tmp_path)
    read = vd.model(f"hf:{tmp_path}", task=task)
    assert (read.task, read.reference.labels) == ("regression", () if task else ("age", "quality"))
    spec, exported = read.reference.preprocess, vd.export(read, progress=False)
    for target in TARGETS:
        with vd.compile(exported, target, progress=False).load() as predictor:
            for seed in range(3):
                picture(tmp_path / "image.png", seed)
                pixels = np.asarray(Image.open(tmp_path / "image.png").resize((SIDE, SIDE), Image.Resampling.BICUBIC))
                scaled = (pixels / 255.0 - spec.mean) / spec.std
                with torch.no_grad():
                    right = forward(torch.tensor(scaled[None]).permute(0, 3, 1, 2).float())[0].tolist()
                found = [number.value for number in predictor.predict(pixels).numbers]
                assert found == pytest.approx(right, rel=1e-4, abs=1e-4)


def test_a_config_beside_an_onnx_file_says_that_it_gives_numbers(tmp_path):
    file = graph("classification", tmp_path / "own.onnx")
    import onnx

    model = onnx.load(file)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "model.onnx")
    names = {str(k): f"n{k}" for k in range(24)}
    (tmp_path / "config.json").write_text(json.dumps({"problem_type": "regression", "id2label": names}))
    read = vd.model(tmp_path / "model.onnx")
    assert (read.task, read.reference.labels[:2]) == ("regression", ("n0", "n1"))
    with pytest.raises(VitdeployError, match="cannot be used for the task"):
        vd.model(tmp_path / "model.onnx", task="classification")
