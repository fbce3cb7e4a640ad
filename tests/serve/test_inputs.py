"""A model that takes more than the image, behind a socket: in forms, in JSON and as tensors, and what is refused."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

import vitdeploy as vd
from tests.graph.io.test_further import CLASSES, SIDE, written
from tests.serve.conftest import Running
from vitdeploy.runtime import load
from vitdeploy.serve.engines import load_engines

RANDOM = np.random.default_rng(5)
PIXELS = RANDOM.integers(0, 256, (6, SIDE, SIDE, 3), np.uint8)
MASKS = RANDOM.integers(0, 2, (6, 1, SIDE, SIDE)).astype(np.float32)


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def form(*files):
    lines = b""
    for name, content in files:
        head = f'--end\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\n\r\n'
        lines += head.encode() + content + b"\r\n"
    return lines + b"--end--\r\n", {"Content-Type": "multipart/form-data; boundary=end"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A running server, and the answers of its bundle in Python."""
    home = tmp_path_factory.mktemp("lanes")
    graph = vd.export(
        vd.model(written(home / "lanes.onnx"), bind={"mask": "input"}, task="classification"), progress=False
    )
    bundle = vd.compile(graph, "onnxruntime-cpu", home / "bundle", progress=False).folder
    with load(bundle) as predictor:
        answers = [predictor.predict_with(i, {"mask": m}).to_dict() for i, m in zip(PIXELS, MASKS, strict=True)]
        tensors = predictor.outputs(list(PIXELS), [{"mask": mask} for mask in MASKS])["logits"]
    with load_engines(bundle, max_batch=4) as engines, Running(engines) as running:
        yield running, answers, tensors, engines.model.name


def asked(running, body, headers, path="/predict"):
    status, _, answer = running.ask("POST", path, body, headers)
    return status, answer


def test_forms_and_json_bring_the_mask_as_a_file(served):
    running, answers, _, _ = served
    white = png((255 * MASKS[0, 0]).astype(np.uint8))
    document = {
        "image": base64.b64encode(png(PIXELS[0])).decode(),
        "inputs": {"mask": base64.b64encode(white).decode()},
    }
    for body, headers in (
        form(("file", png(PIXELS[0])), ("mask", npy(MASKS[0]))),
        form(("mask", white), ("image", png(PIXELS[0]))),
        (json.dumps(document), {"Content-Type": "application/json"}),
    ):
        status, found = asked(running, body, headers)
        assert status == 200, found
        assert {key: found[key] for key in answers[0]} == answers[0]


def test_each_request_of_a_batch_has_its_own_mask(served):
    running, answers, _, _ = served
    expected = [n % len(PIXELS) for n in range(24)]
    with ThreadPoolExecutor(8) as pool:
        bodies = [form(("file", png(PIXELS[n])), ("mask", npy(MASKS[n]))) for n in expected]
        found = list(pool.map(lambda each: asked(running, *each), bodies))
    for n, (status, answer) in zip(expected, found, strict=True):
        assert status == 200 and answer["index"] == answers[n]["index"]
        assert answer["score"] == pytest.approx(answers[n]["score"], rel=1e-4)
    assert len({each["index"] for each in answers}) > 1


def test_tensors_come_by_their_names(served):
    running, _, tensors, name = served
    inputs = [
        {"name": "image", "shape": list(PIXELS[:3].shape), "datatype": "UINT8", "data": PIXELS[:3].ravel().tolist()},
        {"name": "mask", "shape": list(MASKS[:3].shape), "datatype": "FP32", "data": MASKS[:3].ravel().tolist()},
    ]
    path, headers = f"/v2/models/{name}/infer", {"Content-Type": "application/json"}
    status, found = asked(running, json.dumps({"inputs": inputs}), headers, path)
    assert status == 200, found
    answer = np.array(found["outputs"][0]["data"]).reshape(3, CLASSES)
    np.testing.assert_allclose(answer, tensors[:3], rtol=1e-4, atol=1e-5)
    assert asked(running, json.dumps({"inputs": inputs[:1]}), headers, path)[0] == 400


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ([("file", png(PIXELS[0]))], 400, "this model takes an image and mask (-F mask=@FILE); found: an image"),
        ([("file", png(PIXELS[0])), ("maks", npy(MASKS[0]))], 400, "found: an image and maks"),
        ([("a", png(PIXELS[0])), ("mask", npy(MASKS[0]))], 400, "expected the image as file"),
        ([("file", png(PIXELS[0])), ("mask", npy(MASKS[0, :, 1:]))], 400, "float32 [1, 7, 8]"),
        ([("file", png(PIXELS[0])), ("mask", npy(MASKS[0].astype(np.float64)))], 400, "float64 [1, 8, 8]"),
        ([("file", png(PIXELS[0])), ("mask", npy(np.array([{}])))], 400, "object [1]"),
        ([("file", png(PIXELS[0])), ("mask", npy(MASKS[0])[:-9])], 400, "the input mask cannot be read"),
        ([("file", png(PIXELS[0])), ("mask", b"none")], 400, "the input mask is neither a .npy nor a .png file"),
        ([("file", png(PIXELS[0])), ("mask", png(np.zeros((8, 8), np.uint16)))], 400, "mode I;16"),
    ],
)
def test_what_the_model_does_not_take_is_refused(served, files, status, words):
    running, *_ = served
    found, answer = asked(running, *form(*files))
    assert found == status and words in json.dumps(answer), answer


def test_a_model_of_images_alone_takes_no_other_file(engines):
    grey = png(np.zeros((8, 8), np.uint8))
    with Running(engines) as running:
        status, answer = asked(running, *form(("file", grey), ("mask", grey)))
    assert status == 400 and "this model does not accept inputs" in json.dumps(answer)
