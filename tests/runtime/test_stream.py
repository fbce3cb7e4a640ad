"""What an app does beside asking for one answer: streams, tensors, timings, and why it has this engine."""

import itertools
import threading

import numpy as np
import pytest

from vitdeploy.errors import HostError, ImageError, InputError, MissingFileError, TensorError
from vitdeploy.runtime import load
from vitdeploy.runtime.preprocess import load_pixels, normalise


@pytest.fixture(scope="module")
def predictor(small_bundle):
    with load(small_bundle) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def images(digits):
    return [sorted(folder.glob("*.png"))[0] for folder in sorted((digits / "evaluation").iterdir())]


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 3, 100])
def test_a_stream_gives_the_same_answers_in_the_same_order(predictor, images, in_flight):
    found = list(predictor.stream(iter(images), top=10, in_flight=in_flight))
    assert found == [predictor.predict(image, top=10) for image in images]


def test_a_stream_takes_no_more_than_is_in_flight(predictor, images):
    taken = []

    def source():
        for number in itertools.count():
            taken.append(number)
            yield images[number % 10]

    answers = predictor.stream(source(), in_flight=3)
    for given in range(1, 6):
        next(answers)
        assert len(taken) == given + 2
    answers.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vitdeploy-stream")]


def test_a_bad_image_ends_a_stream_in_its_turn(predictor, images):
    answers = predictor.stream([*images[:3], b"no image", *images[3:]], in_flight=2)
    assert len(list(itertools.islice(answers, 3))) == 3
    with pytest.raises(ImageError, match="the image bytes cannot be read"):
        next(answers)
    assert list(answers) == []


@pytest.mark.parametrize("batch", [None, 3])
def test_a_stream_can_go_on_behind_bad_images(small_bundle, images, batch):
    bad = {0: b"no image", 2: "absent.png", 3: np.zeros((0, 1), np.uint8), 8: "/proc/self/mem"}
    source = [bad.get(number, image) for number, image in enumerate(images)]
    with load(small_bundle, batch=batch) as predictor:
        found = list(predictor.stream(source, return_exceptions=True))
        good = [image for number, image in enumerate(images) if number not in bad]
        answers = predictor.predict_batch(good)
        assert next(predictor.stream([b""], return_exceptions=True)).code == "VD2302"
    kinds = {number: type(each) for number, each in enumerate(found) if isinstance(each, InputError)}
    assert kinds == {0: ImageError, 2: MissingFileError, 3: TensorError, 8: ImageError}
    assert [each.top[0].index for number, each in enumerate(found) if number not in bad] == [
        each.top[0].index for each in answers
    ]


def test_a_stream_needs_something_in_flight(predictor):
    with pytest.raises(ValueError, match="in_flight 0"):
        next(predictor.stream([], in_flight=0))


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_a_tensor_gives_what_its_images_give(predictor, images):
    pixels = np.stack([load_pixels(image, predictor.preprocess) for image in images])
    assert predictor.predict_tensor(pixels) == predictor.predict_batch(images)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pixels: pixels[:0],
        lambda pixels: np.zeros((), np.uint8),
        lambda pixels: pixels[:, 1:],
        lambda pixels: pixels.astype(np.float32),
    ],
    ids=["none", "no axis", "another size", "another type"],
)
def test_a_tensor_that_does_not_fit_is_refused(predictor, images, spoil):
    pixels = np.stack([load_pixels(image, predictor.preprocess) for image in images])
    with pytest.raises(TensorError):
        predictor.predict_tensor(spoil(pixels))
    with pytest.raises(TensorError, match="sizes must have one entry per image"):
        predictor.predict_tensor(pixels, sizes=[(1, 1)])


def test_normalised_tensors_are_not_taken_for_pixels(predictor, images):
    pixels = np.stack([load_pixels(image, predictor.preprocess) for image in images])
    with pytest.raises(TensorError, match="wrong dtype or shape"):
        predictor.predict_tensor(normalise(pixels, predictor.preprocess))


# --- timings ----------------------------------------------------------------------------------------------------------


def test_every_image_is_timed_in_every_stage(small_bundle, images):
    with load(small_bundle) as predictor:
        assert predictor.timings.to_dict() == {
            **dict.fromkeys(("images", "decode", "preprocess", "infer", "postprocess"), 0)
        }
        list(predictor.stream(images))
        found = predictor.timings
    assert found.images == len(images)
    assert min(found.decode, found.preprocess, found.infer, found.postprocess) > 0


# --- why --------------------------------------------------------------------------------------------------------------


def test_the_choice_of_an_engine_is_explained(small_bundle):
    with load(small_bundle) as predictor:
        assert predictor.why == "onnxruntime-cpu-fp32: the bundle's only engine"
    with load(small_bundle, "onnxruntime-cpu") as predictor:
        assert predictor.why == "onnxruntime-cpu-fp32: selected by the target onnxruntime-cpu"


def test_an_engine_that_does_not_answer_does_not_work_here(small_bundle, monkeypatch):
    from vitdeploy.errors import EngineError
    from vitdeploy.runtime.ort import OnnxRuntimeRunner

    closed = []

    def fails(self, feeds):
        raise EngineError("no kernel for this CPU")

    monkeypatch.setattr(OnnxRuntimeRunner, "_infer", fails)
    monkeypatch.setattr(OnnxRuntimeRunner, "_close", lambda self: closed.append(self))
    with pytest.raises(HostError, match="no kernel for this CPU"):
        load(small_bundle)
    assert closed
