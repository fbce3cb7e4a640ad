"""What an app calls: load a bundle, classify images."""

import dataclasses
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.bundle.write import write_bundle
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.errors import (
    DigestError,
    HostError,
    ImageError,
    ManifestError,
    MissingFileError,
    MissingPackageError,
    TargetError,
)
from vitdeploy.runtime import Predictor, load
from vitdeploy.runtime.choice import select_engines
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.postprocess import best_classes, softmax
from vitdeploy.runtime.preprocess import load_pixels
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.tasks.classification import classify
from vitdeploy.runtime.tasks.detection import Detections, PostprocessSpec
from vitdeploy.runtime.tasks.features import Features
from vitdeploy.runtime.tasks.panoptic import Panoptic
from vitdeploy.runtime.values import number_of_classes
from vitdeploy.spec import GraphSpec, PreprocessSpec, TensorSpec

PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
# Label 3 holds characters that some take for the end of a line.
LABELS = ["zero", "one", "two", "th\x0bre\u2028e\x85", "four", "five", "six", "seven", "eight", "nine"]
GRAPH = GraphSpec(
    "model.onnx",
    (TensorSpec("image", "uint8", ("batch", 32, 32, 1)),),
    (TensorSpec("logits", "float32", ("batch", 10)),),
)
TARGETS = {"onnxruntime-cpu": "onnxruntime", "openvino-cpu": "openvino"}


@pytest.fixture(scope="module")
def made(small_export, tmp_path_factory):
    """make(labels, batch, targets): a bundle of the small model."""
    for package in TARGETS.values():
        pytest.importorskip(package, reason=f"pip install 'vitdeploy[{package}]'")

    def make(labels=LABELS, batch=1, targets=tuple(TARGETS)):
        root = tmp_path_factory.mktemp("bundle")
        engines = []
        for target in targets:
            folder = root / target
            folder.mkdir()
            graph = small_export / "model.onnx"
            spec = compile_engine(graph, folder, target=target, precision="fp32", batch=batch, placed=0)
            engines.append((spec, folder))
        (root / "bundle").mkdir()
        write_bundle(
            root / "bundle",
            name="small",
            task="classification",
            graphs={"model": (small_export / "model.onnx", GRAPH)},
            preprocess=PREPROCESS,
            engines=engines,
            labels=labels,
        )
        return root / "bundle"

    return make


@pytest.fixture(scope="module")
def bundle(made):
    return made()


@pytest.fixture
def own_bundle(bundle, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.fixture(params=TARGETS)
def predictor(request, bundle):
    with load(bundle, request.param) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def images(digits):
    """One image of each digit; what the small model says of them differs in every score."""
    return [sorted(folder.glob("*.png"))[0] for folder in sorted((digits / "evaluation").iterdir())]


def change_manifest(bundle, change):
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def scores(results):
    """float64 [n, classes] in the order of the classes."""
    return np.array([[c.score for c in sorted(r.top, key=lambda c: c.index)] for r in results])


# --- predict ----------------------------------------------------------------------------------------------------------


def test_one_by_one_and_all_at_once_are_equal(predictor, images):
    together = predictor.predict_batch(images, top=10)
    alone = [predictor.predict(image, top=10) for image in images]
    np.testing.assert_allclose(scores(alone), scores(together), rtol=0, atol=1e-6)
    assert [r.label for r in alone] == [r.label for r in together]
    assert np.ptp(scores(together), axis=0).min() > 1e-4  # so that swapped answers would be seen


def test_the_answers_are_those_of_the_original(predictor, images, small_checkpoint):
    from vitdeploy.models.load import load_model
    from vitdeploy.models.source import Source
    from vitdeploy.models.torch_runner import TorchRunner

    with TorchRunner(load_model(Source("vit_w32d2h2_patch8_32", small_checkpoint))) as original:
        expected = Predictor(original, PREPROCESS, LABELS).predict_batch(images, top=10)
    np.testing.assert_allclose(scores(predictor.predict_batch(images, top=10)), scores(expected), rtol=0, atol=1e-5)


def test_a_classification_has_the_best_first_and_sums_to_one(predictor, images):
    result = predictor.predict(images[0], top=10)
    found = [c.score for c in result.top]
    assert found == sorted(found, reverse=True)
    assert sum(found) == pytest.approx(1)
    assert (result.label, result.index, result.score) == (
        result.top[0].label,
        result.top[0].index,
        result.top[0].score,
    )


@pytest.mark.parametrize("top", [1, 3, 10, 99])
def test_as_many_classes_as_asked_for_and_there_are(predictor, images, top):
    assert len(predictor.predict(images[0], top=top).top) == min(top, 10)


def test_no_images_give_no_answers(predictor):
    assert predictor.predict_batch([]) == []


@pytest.mark.parametrize("count", [1, 4, 6, 8, 9])
def test_the_last_run_of_a_batch_is_padded_and_the_padding_dropped(small_export, images, count):
    chosen = images[:count]
    with Predictor(OnnxRuntimeRunner(small_export / "model.onnx", name="one", batch=1), PREPROCESS, None) as single:
        expected = scores(single.predict_batch(chosen, top=10))
    for batch in (4, None):
        runner = OnnxRuntimeRunner(small_export / "model.onnx", name="more", batch=batch)
        with Predictor(runner, PREPROCESS, None) as predictor:
            found = scores(predictor.predict_batch(chosen, top=10))
        assert found.shape == (count, 10)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_bundle_of_batch_four_takes_six_images(made, bundle, images):
    with load(made(batch=4, targets=["openvino-cpu"])) as four, load(bundle, "openvino-cpu") as one:
        found, expected = (scores(p.predict_batch(images[:6], top=10)) for p in (four, one))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_bad_image_is_an_error_and_the_predictor_goes_on(predictor, images):
    with pytest.raises(ImageError):
        predictor.predict(b"<html>")
    with pytest.raises(MissingFileError):
        predictor.predict("absent.png")
    assert predictor.predict(images[0]).label in LABELS


def test_eight_threads_may_share_a_predictor(predictor, images):
    alone = [predictor.predict(image) for image in images]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(predictor.predict, images)) == alone


def test_outputs_are_those_of_the_runner(predictor, images):
    pixels = [load_pixels(image, PREPROCESS) for image in images[:3]]
    alone = np.concatenate([predictor.runner.infer({"image": p[None]})["logits"] for p in pixels])
    found = predictor.outputs(pixels)
    assert set(found) == {"logits"}
    assert np.array_equal(found["logits"], alone)


# --- load -------------------------------------------------------------------------------------------------------------


def test_auto_takes_the_first_engine(bundle, own_bundle):
    change_manifest(own_bundle, lambda m: m["engines"].reverse())
    with load(bundle) as first, load(own_bundle) as second:
        assert (first.target, second.target) == ("onnxruntime-cpu-fp32", "openvino-cpu-fp32")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_can_be_chosen(bundle, target):
    with load(str(bundle), target) as predictor:
        assert predictor.target == f"{target}-fp32"


@pytest.mark.parametrize("target", ["tpu", "openvino", ""])
def test_a_target_that_the_bundle_lacks_is_refused(bundle, target):
    with pytest.raises(TargetError) as caught:
        load(bundle, target)
    assert caught.value.found == "onnxruntime-cpu-fp32, openvino-cpu-fp32"


def test_a_bundle_without_engines_has_no_target(own_bundle):
    change_manifest(own_bundle, lambda m: m.update(engines=[]))
    with pytest.raises(TargetError) as caught:
        load(own_bundle)
    assert caught.value.found == "none"


def test_auto_goes_on_to_the_next_engine_where_a_runtime_is_missing(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with load(bundle) as predictor:
        assert predictor.target == "openvino-cpu-fp32"


def test_a_chosen_target_whose_runtime_is_missing_is_an_error(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingPackageError) as caught:
        load(bundle, "openvino-cpu")
    assert caught.value.fix == "pip install 'vitdeploy[openvino]'"


def test_without_any_runtime_every_way_out_is_named(bundle, monkeypatch):
    for package in TARGETS.values():
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HostError, match=r"no engine of .* works here") as caught:
        load(bundle)
    assert caught.value.fix == "pip install 'vitdeploy[onnxruntime]' or pip install 'vitdeploy[openvino]'"


@pytest.mark.parametrize(
    ("target", "name"),
    [("onnxruntime-cpu", "graph.onnx"), ("openvino-cpu", "model.xml"), ("openvino-cpu", "model.bin")],
)
def test_a_tampered_engine_is_not_loaded(own_bundle, target, name):
    path = own_bundle / "engines" / target / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=name) as caught:
        load(own_bundle, target)
    assert caught.value.exit_code == 3


def test_a_tampered_engine_is_not_passed_over(own_bundle):
    (own_bundle / "engines/onnxruntime-cpu/graph.onnx").write_bytes(b"other")
    with pytest.raises(DigestError):
        load(own_bundle)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match="is not a bundle"):
        load(tmp_path)


# --- labels -----------------------------------------------------------------------------------------------------------


def test_labels_come_back_as_they_were(bundle):
    with load(bundle) as predictor:
        assert predictor.labels == LABELS


def test_without_labels_the_index_is_the_label(made, images):
    with load(made(labels=(), targets=["onnxruntime-cpu"])) as predictor:
        result = predictor.predict(images[0])
    assert predictor.labels is None
    assert result.label == str(result.index)


def test_tampered_labels_are_not_used(own_bundle):
    (own_bundle / "labels.txt").write_text("nine\n" * 10, encoding="utf-8")
    with pytest.raises(DigestError, match=r"labels\.txt"):
        load(own_bundle)


@pytest.mark.parametrize("count", [1, 9, 11])
def test_labels_that_do_not_fit_the_classes_are_refused(made, count):
    folder = made(labels=[f"class {i}" for i in range(count)], targets=["onnxruntime-cpu"])
    with pytest.raises(ManifestError, match="does not match the classes of the engine") as caught:
        load(folder)
    assert caught.value.found == f"{count} labels"


# --- other tasks ------------------------------------------------------------------------------------------------------

COLOUR = PreprocessSpec((8, 16), (8, 16), "bilinear", (0.5,) * 3, (0.5,) * 3)


class Fixed(Runner):
    """The same outputs for every image, at batch 2."""

    def __init__(self, **arrays):
        super().__init__("fixed")
        self.arrays = {name: np.array(array, np.float32) for name, array in arrays.items()}

    def _load(self):
        self.inputs = (TensorSpec("image", "float32", (2, 3, 8, 16)),)
        self.outputs = tuple(TensorSpec(name, "float32", (2, *array.shape)) for name, array in self.arrays.items())
        self.provider = "numpy"

    def _infer(self, feeds):
        return {name: np.stack([array, array]) for name, array in self.arrays.items()}

    def _close(self):
        pass


def answer_of(task, postprocess=None, labels=None, **arrays):
    """The answer for an image of 40x20 pixels."""
    with Predictor(Fixed(**arrays), COLOUR, labels, task, postprocess) as predictor:
        first, second, third = predictor.predict_batch([np.zeros((20, 40, 3), np.uint8)] * 3)
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict()) == json.dumps(third.to_dict())
    return first


def test_features_are_the_vector_and_the_patches_where_there_are_any():
    result = answer_of("features", features=[1, 2], patch_features=[[1, 2], [3, 4], [5, 6]])
    assert isinstance(result, Features)
    assert (result.vector.tolist(), result.patches.shape) == ([1, 2], (3, 2))
    assert result.to_dict() == {"vector": [1.0, 2.0], "patches": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}
    assert answer_of("features", features=[1, 2]).to_dict() == {"vector": [1.0, 2.0], "patches": None}


def test_objects_are_found_in_the_pixels_of_the_original():
    logits = [[9.0, 0.0, 0.0], [0.0, 0.0, 9.0]]  # a cat, and no object
    boxes = [[0.5, 0.5, 0.5, 1.0], [0.1, 0.1, 0.1, 0.1]]
    result = answer_of("detection", PostprocessSpec(), ["cat", "dog"], logits=logits, boxes=boxes)
    assert isinstance(result, Detections)
    [found] = result.objects
    assert found.label == "cat"
    assert found.box == pytest.approx((10.0, 0.0, 30.0, 20.0))


def test_a_panoptic_answer_has_a_segment_for_every_pixel_of_the_original():
    masks = np.full((2, 4, 8), -9.0)
    masks[0, :, :4], masks[1, :, 4:] = 9.0, 9.0  # left and right
    result = answer_of(
        "panoptic",
        PostprocessSpec(things=(0,)),
        ["cat", "sky"],
        logits=[[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]],
        boxes=[[0.25, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0]],
        masks=masks,
    )
    assert isinstance(result, Panoptic)
    assert [(found.label, found.isthing) for found in result.segments] == [("cat", True), ("sky", False)]
    cat, sky = (found.id for found in result.segments)
    assert result.map.shape == (20, 40)
    assert (result.map[:, :19] == cat).all()
    assert (result.map[:, 21:] == sky).all()


@pytest.mark.parametrize(
    ("shape", "postprocess", "classes"),
    [
        (("batch", 10), None, 10),
        (("batch", 5, 92), PostprocessSpec("softmax"), 91),
        (("batch", 5, 80), PostprocessSpec("sigmoid"), 80),
        (("batch", "classes"), None, None),
        (None, PostprocessSpec("given"), None),
    ],
    ids=str,
)
def test_the_number_of_classes_is_that_of_the_logits_without_no_object(shape, postprocess, classes):
    outputs = [TensorSpec("boxes", "float32", ("batch", 5, 4))]
    outputs += [TensorSpec("logits", "float32", shape)] if shape else []
    assert number_of_classes(outputs, postprocess) == classes


# --- the parts --------------------------------------------------------------------------------------------------------


def test_softmax_holds_for_large_logits():
    found = softmax(np.array([[1000.0, 1000.0], [-1000.0, 1000.0]], np.float32))
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.0, 1.0]])


def test_of_equal_classes_the_first_comes_first():
    result = classify(np.zeros(4, np.float32), ["a", "b", "c", "d"], 2)
    assert [c.label for c in result.top] == ["a", "b"]
    assert result.score == 0.25


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([1, 5, 250, 251, 1000]), st.integers(0, 1000))
def test_the_best_classes_are_those_of_a_stable_sort(seed, values, classes, count):
    scores = np.random.default_rng(seed).integers(0, values, classes).astype(np.float64)  # many are equal
    for spoilt in ((), (0,), (classes - 1,)):
        scores[list(spoilt)] = np.nan
        expected = np.argsort(-scores, kind="stable")[:count]
        np.testing.assert_array_equal(best_classes(scores, count), expected)


@pytest.mark.parametrize("classes", [1, 10, 1000])
def test_the_scores_of_the_best_classes_are_those_of_softmax(classes):
    logits = np.random.default_rng(classes).normal(0, 4, classes).astype(np.float32)
    found = classify(logits, None).top
    assert [each.score for each in found] == softmax(logits)[[each.index for each in found]].tolist()
    assert [each.index for each in found] == np.argsort(-logits)[:5].tolist()
    assert classify(logits, None, 0).top == ()


def test_a_classification_as_plain_data():
    found = classify(np.array([0.0, 100.0], np.float32), ["no", "yes"]).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["label"], found["index"], found["score"]) == ("yes", 1, pytest.approx(1.0))
    assert [entry["label"] for entry in found["top"]] == ["yes", "no"]


def test_engines_are_selected_in_the_order_of_the_manifest(bundle):
    from vitdeploy.bundle.read import read_bundle

    manifest = read_bundle(bundle)
    assert select_engines(manifest, "auto") == list(manifest.engines)
    twice = dataclasses.replace(manifest, engines=(*manifest.engines, manifest.engines[0]))
    assert select_engines(twice, "onnxruntime-cpu") == [manifest.engines[0]] * 2


def test_an_engine_is_selected_by_its_name_where_a_target_has_several(bundle):
    from vitdeploy.bundle.read import read_bundle

    manifest = read_bundle(bundle)
    engine = manifest.engines[0]
    other = dataclasses.replace(engine, precision="int8")
    both = dataclasses.replace(manifest, engines=(engine, other))
    assert select_engines(both, engine.target) == [engine, other]
    assert select_engines(both, other.artifact) == [other]


def test_a_closed_predictor_has_closed_its_runner(bundle, images):
    with load(bundle) as predictor:
        predictor.predict(images[0])
    with pytest.raises(RuntimeError, match="is closed"):
        predictor.predict(images[0])


def test_the_runner_of_a_bundle_can_be_driven_alone(bundle):
    from vitdeploy.bundle.read import read_bundle

    engine = read_bundle(bundle).engines[0]
    with make_runner(bundle, engine, batch=3) as runner:
        assert runner.infer({"image": np.zeros((3, 32, 32, 1), np.uint8)})["logits"].shape == (3, 10)
