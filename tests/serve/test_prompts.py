"""Prompts over HTTP: the predictor's answers, what is kept of an image, every refusal, and several clients at once."""

import base64
import contextlib
import io
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from tests.serve.conftest import FORM, Running, form
from tests.serve.prompted_bundle import make_prompted
from tests.serve.test_server import until
from vitdeploy.errors import ClosedError, InputError
from vitdeploy.runtime import Monitor, load
from vitdeploy.runtime.flows import IMAGE_ENCODER
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.serve.answering import Embeddings
from vitdeploy.serve.engines import load_engines

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_prompted(tmp_path_factory.mktemp("prompted"))


@pytest.fixture(scope="module")
def engines(bundle):
    with load_engines(bundle, max_batch=4) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(engines):
    with Running(engines, max_prompts=8) as running:
        yield running


def picture(shade=128, size=(96, 64), mode="RGB"):
    stream = io.BytesIO()
    Image.new(mode, size, (shade,) * len(mode)).save(stream, "PNG")
    return stream.getvalue()


def ask(server, file=None, prompts=None, **fields):
    given = fields if prompts is None else {"prompts": json.dumps(prompts), **fields}
    return server.ask("POST", "/predict", form(file, **given), FORM)


POINT = [{"points": [[40, 30]]}]


def test_a_predictor_that_is_closed_while_it_is_asked_says_so(bundle):
    predictor, going = load(bundle), threading.Barrier(4)

    def ask(seed):
        image = np.random.default_rng(seed).integers(0, 256, (48, 48, 3), np.uint8)
        going.wait(20)
        while True:
            predictor.predict(image, points=[(5, 5)])

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, seed) for seed in range(3)]
        going.wait(20)
        time.sleep(0.05)
        predictor.close()
        assert {type(each.exception(20)) for each in asked} == {ClosedError}
    assert predictor.flow.linked._kept == {}


def test_an_encoder_that_gives_no_numbers_is_told_to_who_watches(bundle, monkeypatch):
    events = []
    with pytest.warns(RuntimeWarning, match="has no monitor reference"):
        predictor = load(bundle, monitor=Monitor(share=float("inf"), on_event=events.append))
    with predictor:
        predictor.embed(picture(100))
        assert (predictor.monitor.state, events) == ("starting", [])
        encoder = predictor.flow.linked.runners[IMAGE_ENCODER]
        infer = encoder.infer
        monkeypatch.setattr(encoder, "infer", lambda feeds: {k: v * np.nan for k, v in infer(feeds).items()})
        predictor.embed(picture(200))
        assert predictor.monitor.state == "fault"
    assert [event.kind for event in events] == ["non-finite"]


def test_answers_are_those_of_the_predictor(server, bundle):
    prompts = [
        {"points": [[40, 30], [80.5, 60]], "labels": [1, 0], "box": None},
        {"box": [20, 10, 60, 50]},
        {"points": [[12, 7]], "labels": [], "box": []},
    ]
    with load(bundle) as predictor:
        image = predictor.embed(picture())
        expected = [
            image.masks([[40, 30], [80.5, 60]], [1, 0])[0],
            image.masks(boxes=[20, 10, 60, 50])[0],
            image.masks([[12, 7]])[0],
        ]
        alone = image.masks([[12, 7]], multimask=False)[0]
    status, _, answer = ask(server, picture(), prompts)
    assert (status, answer["width"], answer["height"], answer["kept"]) == (200, 96, 64, False)
    assert answer["prompts"] == [each.to_dict() for each in expected]
    assert [len(each["scores"]) for each in answer["prompts"]] == [1, 1, 3]
    mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["prompts"][1]["mask_png"]))))
    assert ((mask == 255) == expected[1].mask).all() and mask.any() and not mask.all()
    assert answer["model"] == "squares" and set(answer["timings"]) == {"prepare", "embed", "decode", "answer"}
    lengths = ask(server, picture(), prompts, masks="rle", multimask="false")[2]["prompts"]
    for each, other in zip(lengths, (*expected[:2], alone), strict=True):
        found = each["segmentation"]
        runs = RunLengths(tuple(found["size"][::-1]), np.array(found["counts"], np.int32))
        assert (runs.mask == other.mask).all() and len(each["scores"]) == 1


def test_an_image_is_sent_once_and_asked_by_its_id(engines):
    with Running(engines) as server:
        asked_by_its_id(server)


def asked_by_its_id(server):
    first = ask(server, picture(10), POINT)[2]
    again = ask(server, picture(10), POINT)[2]
    by_id = ask(server, None, POINT, image_id=first["image_id"])[2]
    body = json.dumps({"image_id": first["image_id"], "prompts": POINT})
    in_json = server.ask("POST", "/predict", body, JSON)[2]
    whole = json.dumps({"image": base64.b64encode(picture(10)).decode(), "prompts": POINT})
    query = f"/predict?image_id={first['image_id']}&prompts=[%7B%22points%22:[[40,30]]%7D]"
    others = [again, by_id, in_json, server.ask("POST", "/predict", whole, JSON)[2], server.ask("POST", query)[2]]
    assert [each["kept"] for each in (first, *others)] == [False, True, True, True, True, True]
    for each in others:
        assert (each["prompts"], each["image_id"]) == (first["prompts"], first["image_id"])
    counts = server.ask("GET", "/metrics")[2].decode()
    assert 'vitdeploy_prompted_images_total{kept="no"} 1.0' in counts
    assert 'vitdeploy_prompted_images_total{kept="yes"} 5.0' in counts
    assert "vitdeploy_decoder_seconds_count 6.0" in counts
    assert "vitdeploy_batch_images_count 1.0" in counts
    assert f"vitdeploy_kept_bytes {4 * 12 * 12}.0" in counts


def test_so_many_bytes_are_kept_and_no_more(engines):
    with Running(engines, kept=2 * 4 * 12 * 12) as server:
        ids = [ask(server, picture(shade), POINT)[2]["image_id"] for shade in (1, 2)]
        assert ask(server, None, POINT, image_id=ids[0])[2]["kept"]
        ask(server, picture(3), POINT)
        assert ask(server, None, POINT, image_id=ids[0])[0] == 200
        status, _, answer = ask(server, None, POINT, image_id=ids[1])
        assert (status, answer) == (404, {"error": f"image {ids[1]} is not cached: send the file again"})
    with Running(engines, kept=0) as server:
        found = ask(server, picture(1), POINT)[2]
        assert ask(server, None, POINT, image_id=found["image_id"])[0] == 404


def test_clients_with_images_of_their_own_and_one_in_common(engines):
    """Each answer is of its own image, whatever the others ask meanwhile; the same image runs once."""
    shades = [5 * number for number in range(20)] + [250] * 20
    with Running(engines) as server, ThreadPoolExecutor(40) as pool:
        gate = threading.Barrier(40)

        def one(shade):
            gate.wait()
            return ask(server, picture(shade), [{"points": [[48, 32]]}, {"box": [0, 0, 96, 64]}])

        found = list(pool.map(one, shades))
        counts = server.ask("GET", "/metrics")[2].decode()
    assert {status for status, _, _ in found} == {200}
    areas = [answer["prompts"][1]["area"] for _, _, answer in found]
    assert areas[:20] == sorted(areas[:20]) and areas[0] < areas[19] < areas[20] and len(set(areas[20:])) == 1
    assert "vitdeploy_batch_images_count 21.0" in counts


def test_a_client_that_left_takes_its_image_with_it(engines, monkeypatch):
    """An image that nobody waits for any more does not run, but for the one that ran already."""
    free, runs, encode = threading.Event(), [], engines._alone

    def held(tensor):
        runs.append(len(tensor))
        free.wait(20)
        return encode(tensor)

    monkeypatch.setattr(engines, "_alone", held)
    with Running(engines) as server, contextlib.ExitStack() as clients:
        for shade in (1, 2, 3):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            body = form(picture(shade), prompts=json.dumps(POINT))
            head = f"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: {FORM['Content-Type']}\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: len(server.service._answerer._going) == 3 and runs)
        clients.close()
        until(lambda: not server.service._answerer._going)
        free.set()
        assert ask(server, picture(4), POINT)[0] == 200
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("status", "error", "prompts"),
    [
        (422, "prompts[0]: a point is outside the image; found: x 96, y 5 in an image of 96x64; expected: 0 <= x < 96",
         [{"points": [[96, 5]]}]),
        (422, "prompts[1]: a point is outside the image; found: x -1, y 5", [*POINT, {"points": [[-1, 5]]}]),
        (422, "prompts[0]: a box is not inside the image; found: 50,10,20,60", [{"box": [50, 10, 20, 60]}]),
        (422, 'prompts[0]: prompts have an unexpected shape or type; found: [["40", "30"]]',
         [{"points": [["40", "30"]]}]),
        (422, "prompts[0]: prompts have an unexpected shape or type; found: [[true, true]]",
         [{"points": [[True, True]]}]),
        (422, "prompts[0]: prompts have an unexpected shape or type; found: [1, 2]; expected: points [n, 2]: x, y",
         [{"points": [1, 2]}]),
        (422, "prompts[0]: prompts have an unexpected shape or type; found: everything", [{"points": "everything"}]),
        (422, "prompts[0]: prompts have an unexpected shape or type; found: [1, 2]; expected: box [4]",
         [{"box": [1, 2]}]),
        (422, "prompts[0] has more than one prompt; found: 2 prompts", [{"points": [[[1, 2]], [[3, 4]]]}]),
        (422, "prompts[0]: labels do not match the points; found: [2]", [{"points": [[1, 2]], "labels": [2]}]),
        (422, "prompts[0]: labels without points", [{"labels": [1], "box": [1, 2, 3, 4]}]),
        (422, "prompts[0]: no prompt: points or boxes are needed to select an object; expected: points", [{}]),
        (422, "no prompt: points or boxes are needed", []),
        (422, "a prompt has too many points; found: 4 points; expected: at most 3", [{"points": [[1, 2]] * 4}]),
        (422, "too many prompts; found: 10000; expected: at most 8 per request; send the others with", POINT * 10_000),
        (400, "prompts must be a list of objects", {"points": [[1, 2]]}),
        (400, "prompts must be a list of objects", [[1, 2]]),
        (400, "prompts have unknown keys point; expected: points, labels, box", [{"point": [1, 2]}]),
    ],
)  # fmt: skip
def test_prompts_that_are_none_are_refused(server, status, error, prompts):
    found = ask(server, picture(), prompts)
    assert found[0] == status
    assert found[2]["error"].replace("'", '"').replace("True", "true").startswith(error)


@pytest.mark.parametrize(
    ("status", "error", "body", "headers"),
    [
        (422, "no prompts: the request does not say", form(picture()), FORM),
        (400, "prompts is not valid JSON", form(picture(), prompts="[{"), FORM),
        (400, "duplicate field prompts", form(picture(), prompts=1).replace(b"--end--", form(None, prompts=2)), FORM),
        (400, "the form has no file", form(None, prompts="[]"), FORM),
        (400, "image_id must be the image_id of an answer", form(None, prompts="[]", image_id="cat"), FORM),
        (400, "send either an image or an image_id", form(picture(), image_id="sha256:" + 64 * "0"), FORM),
        (404, "image sha256:0", form(None, prompts=json.dumps(POINT), image_id="sha256:" + 64 * "0"), FORM),
        (400, "masks must be png or rle", form(picture(), prompts="[]", masks="svg"), FORM),
        (400, "multimask must be true or false", form(picture(), prompts="[]", multimask="3"), FORM),
        (400, "this model does not accept texts; found: the task promptable-segmentation; expected: image_id, prompts,",
         form(picture(), texts="[]"), FORM),
        (400, "cannot be read as an image", form(b"no image", prompts=json.dumps(POINT)), FORM),
        (400, "unknown fields file", json.dumps({"file": "a"}), JSON),
        (400, "image must be a file in Base64", json.dumps({"image": "\u00e9"}), JSON),
        (400, "image must be a string with a file in Base64", json.dumps({"image": [1]}), JSON),
        (400, "the body has no file", json.dumps({"prompts": []}), JSON),
        (400, "not valid JSON", '{"prompts": [NaN]}', JSON),
    ],
)  # fmt: skip
def test_requests_that_are_none_are_refused(server, status, error, body, headers):
    found = server.ask("POST", "/predict", body, headers)
    assert (found[0], error in found[2]["error"]) == (status, True), found[2]


def test_pictures_with_alpha_and_of_one_pixel_are_asked(server, bundle):
    """As the predictor sees them, which knows no alpha."""
    for file, point in ((picture(9, (7, 5), "RGBA"), [6.9, 4.9]), (picture(200, (1, 1)), [0, 0])):
        with load(bundle) as predictor:
            expected = predictor.predict(file, points=[point])
        status, _, answer = ask(server, file, [{"points": [point]}])
        assert (status, answer["prompts"]) == (200, expected.to_dict()["prompts"])


def test_prompts_without_end_are_asked_as_far_as_their_masks_fit(bundle):
    with load(bundle) as predictor:
        image = predictor.embed(picture())
        many = image.masks([[[x % 96, x % 64]] for x in range(100)])
        for place in (0, 15, 16, 99):
            alone = image.masks([[place % 96, place % 64]])[0]
            assert (many[place].masks == alone.masks).all() and many[place].scores == alone.scores
        large = predictor.embed(Image.new("RGB", (4000, 3000)))
        with pytest.raises(InputError, match="too many prompts: their masks do not fit") as caught:
            large.masks([[[5, 5]]] * 120)
        assert (caught.value.found, caught.value.expected) == ("360 masks of 4000x3000 pixels", "at most 357 masks")


def test_tensors_are_asked_as_the_protocol_says(server, engines):
    metadata = server.ask("GET", "/v2/models/squares")[2]
    assert [each["name"] for each in metadata["inputs"]] == ["image", "points", "labels"]
    shapes = {"image": ("UINT8", [2, 48, 48, 3]), "points": ("FP32", [2, 4, 2]), "labels": ("INT64", [2, 4])}
    arrays = {name: np.full(shape, 20) for name, (_, shape) in shapes.items()}
    arrays["labels"][:] = [1, -10, -10, -1]
    inputs = [
        {"name": name, "datatype": kind, "shape": shape, "data": arrays[name].ravel().tolist()}
        for name, (kind, shape) in shapes.items()
    ]
    status, _, answer = server.ask("POST", "/v2/models/squares/infer", json.dumps({"inputs": inputs}), JSON)
    assert (status, [each["shape"] for each in answer["outputs"]]) == (200, [[2, 4, 12, 12], [2, 4]])
    inputs[2] |= {"shape": [1, 4], "data": inputs[2]["data"][:4]}
    status, _, answer = server.ask("POST", "/v2/models/squares/infer", json.dumps({"inputs": inputs}), JSON)
    assert (status, answer["error"]) == (400, "inputs with different batch sizes: image 2, points 2, labels 1")


def test_an_engine_of_a_fixed_batch_gives_the_same(tmp_path, server):
    prompts = [{"points": [[x, 20]]} for x in range(0, 70, 10)]
    with load_engines(make_prompted(tmp_path, 3)) as fixed, Running(fixed) as other:
        found = ask(other, picture(), prompts)
        assert found[0] == 200 and found[2]["prompts"] == ask(server, picture(), prompts)[2]["prompts"]


def test_an_embedding_that_is_larger_than_all_is_not_kept():
    class Sized:
        def __init__(self, nbytes):
            self.nbytes = nbytes

    kept = Embeddings(10)
    for name, size in (("a", 11), ("b", 6), ("c", 4), ("b", 6)):
        kept.put(name, Sized(size))
    assert (len(kept), kept.nbytes, kept.get("a")) == (2, 10, None)
    kept.get("b")
    kept.put("d", Sized(1))
    assert (kept.get("c"), kept.nbytes) == (None, 7)
