"""The server behind a real socket: answers, every refusal, limits, load and its end."""

import contextlib
import io
import json
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from vitdeploy.errors import EngineError
from vitdeploy.serve.batcher import ExecutionPlan

INFER = "/v2/models/quarters/infer"
JSON = {"Content-Type": "application/json"}
PNG = {"Content-Type": "image/png"}


def picture(seed=0, side=8):
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return pixels, stream.getvalue()


def message(*images, **extra):
    tensor = {"name": "image", "shape": [len(images), 8, 8, 1], "datatype": "UINT8"}
    return json.dumps({"inputs": [{**tensor, "data": np.array(images).ravel().tolist()}], **extra})


def logits(pixels):
    return pixels.reshape(4, 16).sum(1) / np.float32(255)


def until(condition, seconds=10.0):
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.005)


class Held:
    """The real engines, which wait until they may run."""

    def __init__(self, engines):
        self.model, self.predictor, self.workers = engines.model, engines.predictor, 1
        self._engines = engines
        self.started, self.free = threading.Semaphore(0), threading.Event()

    def plan(self, waiting, running):
        plan = self._engines.plan(waiting, running)
        return plan and ExecutionPlan(lambda tensor: self.run(plan, tensor), plan.images)

    def run(self, plan, tensor):
        self.started.release()
        self.free.wait(20)
        return plan.run(tensor)


@pytest.fixture
def held(engines):
    held = Held(engines)
    yield held
    held.free.set()


@pytest.fixture
def log(caplog, monkeypatch):
    logger = logging.getLogger("vitdeploy.serve")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, "vitdeploy.serve")
    return caplog


def test_health_and_metadata(server):
    assert server.ask("GET", "/v2/health/live")[::2] == (200, {"live": True})
    assert server.ask("GET", "/v2/health/ready")[::2] == (200, {"ready": True})
    assert server.ask("GET", "/v2")[2]["extensions"] == ["binary_tensor_data"]
    for version in ("", "/versions/1"):
        status, _, metadata = server.ask("GET", f"/v2/models/quarters{version}")
        assert status == 200
        assert metadata["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 8, 8, 1]}]
        ready = server.ask("GET", f"/v2/models/quarters{version}/ready")
        assert ready[::2] == (200, {"name": "quarters", "ready": True})


def test_tensors_in_json_and_binary_give_the_predictors_outputs(server):
    images = [picture(seed)[0] for seed in range(3)]
    status, _, answer = server.ask("POST", INFER, message(*images, id="seven"), JSON)
    assert (status, answer["id"], answer["model_name"]) == (200, "seven", "quarters")
    assert answer["outputs"][0]["shape"] == [3, 4]
    assert np.allclose(answer["outputs"][0]["data"], np.ravel([logits(image) for image in images]))

    parameters = {"parameters": {"binary_data_output": True}}
    tensor = {"name": "image", "shape": [3, 8, 8, 1], "datatype": "UINT8", "parameters": {"binary_data_size": 192}}
    head = json.dumps({"inputs": [tensor], **parameters}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    status, given, body = server.ask("POST", INFER, head + np.array(images).tobytes(), headers)
    length = int(given["inference-header-content-length"])
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 48}
    assert np.frombuffer(body[length:], "<f4").tolist() == answer["outputs"][0]["data"]


def test_images_give_the_predictors_answer_and_timings(server, engines):
    pixels, file = picture(5)
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + file + b"\r\n--x--\r\n"
    forms = {"Content-Type": "multipart/form-data; boundary=x"}
    for body, headers in ((file, PNG), (file, {}), (form, forms)):
        status, _, answer = server.ask("POST", "/predict?top=2", body, headers)
        timings, model = answer.pop("timings"), answer.pop("model")
        assert (status, model) == (200, "quarters")
        assert answer == engines.predictor.predict(pixels[..., None], 2).to_dict()
        assert set(timings) == {"prepare", "wait", "infer", "answer"}
    assert len(server.ask("POST", "/predict", file, PNG)[2]["top"]) == 4


def bomb():
    stream = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("status", "error", "method", "path", "body", "headers"),
    [
        (404, "here: GET /v2, .*POST /predict, GET /metrics, .*infer$", "GET", "/", None, {}),
        (404, "nothing is at this path; here: .*GET /v2/health/ready", "GET", "/health", None, {}),
        (404, "no model cats; available: quarters, version 1", "GET", "/v2/models/cats", None, {}),
        (404, "no model cats;", "POST", "/v2/models/cats/infer", "{}", JSON),
        (404, "no model quarters version 2;", "GET", "/v2/models/quarters/versions/2/ready", None, {}),
        (405, r"takes POST with an image \(curl -F file=@IMAGE\), not GET", "GET", "/predict", None, {}),
        (405, "takes (GET, HEAD|HEAD, GET), not POST", "POST", "/v2", "", {}),
        (415, "content type text/xml: expected application/json", "POST", INFER, "<a/>", {"Content-Type": "text/xml"}),
        (415, "octet-stream: expected", "POST", INFER, "a", {"Content-Type": "application/octet-stream"}),
        (415, "content encoding gzip", "POST", INFER, "a", {**JSON, "Content-Encoding": "gzip"}),
        (415, "form-urlencoded: expected an image", "POST", "/predict", "a", {"Content-Type": "x-www-form-urlencoded"}),
        (400, "not valid JSON", "POST", INFER, "{", JSON),
        (400, "not valid JSON", "POST", INFER, None, JSON),
        (400, "'1e3' is not a number", "POST", INFER, "{}", {"Inference-Header-Content-Length": "1e3"}),
        (400, "9 images|8, 8, 1", "POST", INFER, message(*[np.zeros((4, 4))] * 9), JSON),
        (400, "cannot be read as an image; found: an unknown format", "POST", "/predict", b"no image", PNG),
        (400, "cannot be read as an image", "POST", "/predict", picture()[1][:60], PNG),
        (400, "too large to decode; found: 9000x9000 pixels", "POST", "/predict", bomb(), PNG),
        (400, "does not accept texts; found: the task classification", "POST", "/predict?texts=[]", picture()[1], PNG),
        (400, "does not accept image_id", "POST", f"/predict?image_id=sha256:{64 * '0'}", None, {}),
        (400, "the body has no file", "POST", "/predict", "{}", JSON),
        (400, "top '0'", "POST", "/predict?top=0", picture()[1], PNG),
        (400, "Missing boundary", "POST", "/predict", "a", {"Content-Type": "multipart/form-data"}),
        (
            400,
            "form has no file",
            "POST",
            "/predict",
            "--x--\r\n",
            {"Content-Type": "multipart/form-data; boundary=x"},
        ),
        (400, "not a multipart form", "POST", "/predict", "--yy", {"Content-Type": "multipart/form-data; boundary=x"}),
        (413, "larger than 20000 bytes", "POST", "/predict", b"x" * 20_001, PNG),
        (413, "larger than 20000 bytes", "POST", INFER, iter([b"x" * 9000] * 3), JSON),
    ],
)
def test_every_refusal_is_clear(server, status, error, method, path, body, headers):
    found, given, answer = server.ask(method, path, body, headers)
    assert found == status
    assert list(answer) == ["error"]
    assert re.search(error, answer["error"])
    assert " at 0x" not in answer["error"]
    assert given["x-request-id"]


def talk(server, *parts, pause=0.0):
    """What a server says to bytes that come in parts, and seconds until it closed the connection.

    What is sent to a connection that the server has closed is lost; what the server said before that is still read.
    """
    heard, started = b"", time.perf_counter()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            for part in parts:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(part)
                time.sleep(pause)
            while data := connection.recv(65536):
                heard += data
        except ConnectionError:
            heard = heard or b"reset"
    return heard, time.perf_counter() - started


def test_slow_clients_are_sent_away(server):
    """All at once: they wait for nothing but the limits."""
    head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/png\r\nContent-Length: 50\r\n\r\n"
    heads = ((), (b"GET /v2 HT",), (b"G", b"E", b"T", b" ", b"/"))
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(talk, server, *parts, pause=0.2) for parts in (*heads, (head, b"a", b"b"))]
    for heard, seconds in (future.result() for future in slow):
        assert heard.startswith(b"HTTP/1.1 408 ")
        assert 0.4 <= seconds < 5
    said = [future.result()[0].rpartition(b"\r\n")[2] for future in slow]
    assert said[:3] == [b'{"error": "no complete request head within 0.8 s"}'] * 3
    assert said[3] == b'{"error":"the body was not received within 0.4 s"}'


def test_a_connection_that_was_used_may_not_dawdle_either(server):
    heard, seconds = talk(server, b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n", b"GE", pause=0.2)
    assert heard.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in heard
    assert seconds < 5


def test_what_is_no_http_or_too_long_a_head_is_refused(server):
    heard, _ = talk(server, b"hello\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 400 ")
    heard, _ = talk(server, b"GET / HTTP/1.1\r\na: ", b"x" * 16_400)
    assert heard.startswith(b"HTTP/1.1 431 ") or heard == b"reset"
    heard, _ = talk(server, b"GET /v2 HTTP/1.1\r\nHost: a\r\na: " + b"x" * 20_000 + b"\r\n\r\n")  # whole, in one part
    assert heard.startswith(b"HTTP/1.1 431 ") or heard == b"reset"
    assert server.ask("GET", "/v2?" + "x" * 10_000)[0] == 200


def test_a_large_body_is_refused_before_it_came(server):
    head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/png\r\nContent-Length: 100000000\r\n"
    heard, _ = talk(server, head + b"Expect: 100-continue\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 413 ")
    heard, _ = talk(server, head + b"\r\n", b"x" * 1_000_000)  # the answer is not lost in a reset
    assert heard.startswith(b"HTTP/1.1 413 ")


def test_too_much_at_once_is_told_to_come_later(running, held, log):
    with running(held, max_queue=3, deadline=20.0) as server, ThreadPoolExecutor(4) as pool:
        first = pool.submit(server.ask, "POST", INFER, message(picture(0)[0]), JSON)
        held.started.acquire()
        others = [pool.submit(server.ask, "POST", INFER, message(picture(seed)[0]), JSON) for seed in (1, 2)]
        until(lambda: server.service._working == 3)
        status, headers, answer = server.ask("POST", "/predict", picture()[1], PNG)
        assert (status, headers["retry-after"]) == (429, "1")
        assert answer == {"error": "the server is busy: 3 active requests"}
        counts = server.ask("GET", "/metrics")[2].decode()
        assert "vitdeploy_rejected_total 1.0" in counts
        assert "vitdeploy_working_requests 3.0" in counts
        assert "vitdeploy_waiting_images 2.0" in counts
        held.free.set()
        assert [future.result()[0] for future in (first, *others)] == [200] * 3
        counts = server.ask("GET", "/metrics")[2].decode()
    assert 'vitdeploy_requests_total{endpoint="infer",status="200"} 3.0' in counts
    assert 'vitdeploy_batch_images_bucket{le="2.0"} 2.0' in counts
    lines = [record.fields for record in log.records if record.name == "vitdeploy.serve" and hasattr(record, "fields")]
    assert [line["batch"] for line in lines if line["path"] == INFER] == [1, 2, 2]


def test_bodies_that_are_too_large_together_are_told_to_come_later(running, engines):
    with running(engines, buffered=1000) as server:
        assert server.ask("POST", "/predict", b"x" * 1001, PNG)[0] == 429
        until(lambda: not server.service.app.buffered)  # the refused one is forgotten
        assert server.ask("POST", "/predict", picture()[1], PNG)[0] == 200


def test_more_connections_than_allowed_are_refused(running, engines):
    with running(engines, connections=2) as server:
        with socket.create_connection(("127.0.0.1", server.port)), socket.create_connection(("127.0.0.1", server.port)):
            heard, _ = talk(server)
            assert heard.startswith(b"HTTP/1.1 503 ")
            assert b"too many connections" in heard
        until(lambda: not server.server.server_state.connections)
        assert server.ask("GET", "/v2")[0] == 200


def test_a_late_answer_and_a_client_that_left(running, held, log):
    with running(held, deadline=0.2) as server:
        status, _, answer = server.ask("POST", INFER, message(picture()[0]), JSON)
        assert (status, answer) == (504, {"error": "no answer within 0.2 s"})
        body = message(picture()[0]).encode()
        head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
            until(lambda: server.service._working)
        until(lambda: not server.service._working)
        held.free.set()
    statuses = [record.fields["status"] for record in log.records if hasattr(record, "fields")]
    assert statuses == [504, 499]


def test_errors_of_the_server_show_an_id_only(running, held, log, monkeypatch):
    def broken(plan, tensor):
        raise EngineError("the engine at /secret/path failed")

    held.run = broken
    with running(held) as server:
        status, headers, answer = server.ask("POST", INFER, message(picture()[0]), {**JSON, "X-Request-Id": "mine-7"})
    assert status == 500
    assert answer == {"error": "internal error mine-7: see the server's log"}
    assert headers["x-request-id"] == "mine-7"
    entry = next(record for record in log.records if getattr(record, "fields", {}).get("id") == "mine-7")
    assert "/secret/path" in str(entry.exc_info[1])
    assert entry.levelname == "ERROR"


def test_200_connections_at_once_and_one_in_a_hundred_malformed(running, engines):
    """Each answer is that of its own image, whatever the others sent."""
    wrong = [b"{", message(picture()[0]).replace("UINT8", "FP32").encode(), b'{"inputs": [NaN]}']
    sent = [(wrong[i % 3], None) if i % 100 == 37 else (None, picture(i)[0]) for i in range(400)]
    with running(engines) as server, ThreadPoolExecutor(200) as pool:
        gate = threading.Barrier(200)

        def ask(number):
            if number < 200:
                gate.wait()
            body, image = sent[number]
            return server.ask("POST", INFER, body or message(image), JSON)

        answers = list(pool.map(ask, range(400)))
    for (_, image), (status, _, answer) in zip(sent, answers, strict=True):
        assert status == (400 if image is None else 200), answer
        if image is not None:
            assert np.allclose(answer["outputs"][0]["data"], logits(image), rtol=1e-5)


def test_stopping_answers_what_was_accepted_and_takes_no_more(running, held):
    with running(held) as server, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.ask, "POST", INFER, message(picture(seed)[0]), JSON) for seed in range(8)]
        held.started.acquire()
        until(lambda: server.service._working == 8)
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            time.sleep(0.05)  # accepted
            server.service.app.draining = True
            connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
            heard = connection.recv(4096)
        assert heard.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in heard
        server.server.stop()
        time.sleep(0.15)
        with pytest.raises(OSError, match=r"refused|reset"):
            server.ask("GET", "/v2")
        held.free.set()
        answers = [future.result() for future in futures]
    assert [status for status, _, _ in answers] == [200] * 8
