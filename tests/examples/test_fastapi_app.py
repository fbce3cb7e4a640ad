"""The web app as a process behind a real socket."""

import asyncio
import http.client
import io
import json
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.examples_page import block, load_example
from vitdeploy.runtime import load

for package in ("fastapi", "uvicorn", "python_multipart"):
    pytest.importorskip(package, reason="pip install fastapi uvicorn python-multipart")
BOUNDARY = "a-boundary"


@pytest.fixture(scope="module")
def port(clone):
    """Where the command of the page listens, but for its port; it ends without an error at SIGTERM."""
    process = clone.start(*block("", "python examples/fastapi_app.py").split(), "--port", "0")
    told = []
    try:
        for line in process.stderr:
            told.append(line)
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                break
        else:
            pytest.fail("".join(told))
        reader = threading.Thread(target=lambda: told.extend(process.stderr))
        reader.start()
        output = threading.Thread(target=process.stdout.read)
        output.start()
        yield int(found[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
        reader.join()
        output.join()
        assert "Application shutdown complete" in "".join(told) and "Traceback" not in "".join(told)
    finally:
        process.kill()


def ask(port, image=None, path="/predict", method="POST", name="file"):
    """Status and document of one request."""
    body = None
    if image is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="x"\r\n\r\n'
        body = head.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(data) if answer.getheader("content-type") == "application/json" else data


@pytest.fixture(scope="module")
def images(clone):
    return [path.read_bytes() for path in sorted((clone.folder / "calibration").rglob("*.png"))][:32]


def test_many_at_once_get_the_predictors_answers(port, clone, images):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda image: ask(port, image), images))
    with load(clone.folder / "out" / "digits") as predictor:
        assert found == [(200, predictor.predict(image).to_dict()) for image in images]


def test_the_page_runs_word_for_word(port, clone):
    if not shutil.which("curl"):
        pytest.skip("install curl")
    answer, health = "\n".join(clone.shell("curl", ":8000/", f":{port}/")).replace("}{", "}\n{").splitlines()
    assert len(json.loads(answer)["top"]) == 2
    assert json.loads(health)["pending"] == 0


@pytest.mark.parametrize("spoil", [lambda image: b"", lambda image: b"no image", lambda image: image[:-40]])
def test_broken_images_are_the_askers_fault(port, images, spoil):
    status, document = ask(port, spoil(images[0]))
    assert (status, "cannot be read as an image" in document["detail"]) == (400, True)
    assert "0x" not in document["detail"]


def test_a_body_above_the_limit_is_refused_and_others_are_answered(port, images):
    assert ask(port, b"x" * (16 * 1024 * 1024)) == (413, b"Content Too Large")
    assert ask(port, images[0])[0] == 200


@pytest.mark.parametrize(
    ("status", "options"),
    [
        (422, {"image": b"x", "name": "other"}),
        (422, {"image": b"x", "path": "/predict?top=0"}),
        (405, {"method": "GET"}),
        (404, {"path": "/other"}),
    ],
)
def test_other_requests_are_refused(port, status, options):
    assert ask(port, **options)[0] == status


def test_who_comes_while_too_many_wait_is_sent_away(clone, images, monkeypatch):
    """In this process, where all come in one turn of the event loop."""
    import fastapi

    example = load_example("fastapi_app")
    monkeypatch.setattr(example, "MAX_PENDING", 2)
    app = example.make_app(clone.folder / "out" / "digits")
    predict = next(route.endpoint for route in app.routes if route.path == "/predict")

    async def come(count):
        files = [fastapi.UploadFile(io.BytesIO(image)) for image in images[:count]]
        return await asyncio.gather(*map(predict, files), return_exceptions=True)

    async def all_of_them():
        async with app.router.lifespan_context(app):
            return await come(5), await come(2)

    crowd, then = asyncio.run(all_of_them())
    assert [getattr(each, "status_code", 200) for each in crowd] == [200, 200, 503, 503, 503]
    assert crowd[4].headers == {"Retry-After": "1"}
    assert then == crowd[:2]
