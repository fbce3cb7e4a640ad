"""The HTTP clients of four languages, as they are by default, and a reverse proxy: each sends an image three ways."""

import base64
import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import time

import numpy as np
import pytest
from PIL import Image

PIXELS = np.repeat(np.arange(4, dtype=np.uint8)[:, None] * 60, 16, axis=1).reshape(8, 8)

# Each program gets a base URL and the file of an image, asks on one client, and prints a label a line: the image as the
# body, then in JSON, then as the body in chunks of unknown length.
JAVA = r"""
import java.net.URI;
import java.net.http.*;
import java.net.http.HttpRequest.BodyPublishers;
import java.nio.file.*;
import java.util.*;

class Client {
    static HttpClient client = HttpClient.newHttpClient();

    static void ask(String url, String type, HttpRequest.BodyPublisher body) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(url + "/predict")).header("Content-Type", type);
        var answer = client.send(request.POST(body).build(), HttpResponse.BodyHandlers.ofString());
        System.out.println(answer.statusCode() + " " + answer.body());
    }

    public static void main(String[] given) throws Exception {
        byte[] image = Files.readAllBytes(Path.of(given[1]));
        ask(given[0], "image/png", BodyPublishers.ofByteArray(image));
        String text = Base64.getMimeEncoder().encodeToString(image).replace("\r\n", "\\r\\n");
        ask(given[0], "application/json", BodyPublishers.ofString("{\"image\": \"" + text + "\"}"));
        ask(given[0], "image/png", BodyPublishers.ofInputStream(() -> new java.io.ByteArrayInputStream(image)));
    }
}
"""

GO = r"""
package main

import ("bytes"; "encoding/base64"; "fmt"; "io"; "net/http"; "os")

func ask(url string, kind string, body io.Reader) {
	answer, err := http.Post(url+"/predict", kind, body)
	if err != nil { panic(err) }
	text, _ := io.ReadAll(answer.Body)
	answer.Body.Close()
	fmt.Println(answer.StatusCode, string(text))
}

func main() {
	url := os.Args[1]
	image, _ := os.ReadFile(os.Args[2])
	ask(url, "image/png", bytes.NewReader(image))
	text := base64.RawURLEncoding.EncodeToString(image)
	ask(url, "application/json", bytes.NewReader([]byte(fmt.Sprintf("{\"image\": %q}", text))))
	ask(url, "image/png", io.MultiReader(bytes.NewReader(image)))
}
"""

NODE = """
const fs = require("fs");
const [url, file] = process.argv.slice(2);
const image = fs.readFileSync(file);
async function ask(type, body) {
    const headers = {"Content-Type": type};
    const answer = await fetch(url + "/predict", {method: "POST", headers, body, duplex: "half"});
    console.log(answer.status + " " + await answer.text());
}
(async () => {
    await ask("image/png", image);
    await ask("application/json", JSON.stringify({image: "data:image/png;base64," + image.toString("base64")}));
    await ask("image/png", new Blob([image]).stream());
})();
"""

CURL = r"""
ask() { curl -sS -w ' %{http_code}\n' "$@"; }
ask -H 'Content-Type: image/png' --data-binary @"$2" "$1/predict"
ask --http2 -F file=@"$2" "$1/predict"
ask -H 'Content-Type: image/png' -H 'Transfer-Encoding: chunked' --data-binary @"$2" "$1/predict"
"""

CLIENTS = {
    "java": ("Client.java", JAVA, ["java", "Client.java"]),
    "go": ("client.go", GO, ["go", "run", "client.go"]),
    "node": ("client.js", NODE, ["node", "client.js"]),
    "curl": ("client.sh", CURL, ["bash", "client.sh"]),
}
NGINX = """
daemon off; pid {folder}/pid; error_log stderr error; worker_processes 1; events {{}}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    upstream bundle {{ server 127.0.0.1:{port}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{listen};
        location / {{ proxy_pass http://bundle; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
}}
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "south.png"
    Image.fromarray(PIXELS.copy()).save(path)
    return path


@pytest.fixture(scope="module")
def direct(engines, running):
    with running(engines) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def proxied(direct, tmp_path_factory):
    """The same behind nginx, which keeps its connections."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed, the reverse proxy of this test")
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = free.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=direct.rpartition(":")[2], listen=listen))
    process = subprocess.Popen([program, "-p", folder, "-c", config], stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", listen), 1):
                break
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listen}"
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("way", ["direct", "proxied"])
@pytest.mark.parametrize("client", CLIENTS)
def test_clients_as_they_are_by_default(request, image, tmp_path, client, way):
    file, program, argv = CLIENTS[client]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    url = request.getfixturevalue(way)
    (tmp_path / file).write_text(program)
    done = subprocess.run(
        [*argv, url, image], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "GOFLAGS": "-mod=mod", "GO111MODULE": "off"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 3, done.stdout
    for line in lines:
        assert "200" in (line[:3], line[-3:]) and '"label":"west"' in line, line


def raw(url, *parts):
    """The answer to bytes that are sent with pauses between the parts."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 20) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(0.05)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0, h2c"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("cut", [1, 40, 120, None])
def test_an_upgrade_is_declined_and_the_body_kept(direct, image, offer, chunked, cut):
    body = image.read_bytes()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    head = (
        f"POST /predict?top=1 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\n"
        f"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Type: image/png\r\n{length}\r\n\r\n"
    ).encode()
    whole = head + sent
    following = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    found = raw(direct, *([whole] if cut is None else [whole[:cut], whole[cut:]]), following)
    assert found.count(b"HTTP/1.1 200 OK") == 2, found
    assert b'"label":"west"' in found and b'{"live":true}' in found


def test_connect_is_refused(direct):
    assert raw(direct, b"CONNECT a.example:80 HTTP/1.1\r\nHost: a.example\r\n\r\n").startswith(b"HTTP/1.1 400")


def json_answer(server, text):
    return server.ask("POST", "/predict", json.dumps({"image": text}), {"Content-Type": "application/json"})


@pytest.fixture(scope="module")
def odd_image():
    """A file whose Base64 has padding, and both characters that the alphabet for URLs replaces."""
    for seed in range(100):
        stream = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8), np.uint8)).save(stream, "PNG")
        text = base64.b64encode(stream.getvalue() + b"\0" * (seed % 3)).decode()
        if text.endswith("=") and "+" in text and "/" in text:
            return text
    raise AssertionError


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text,
        lambda text: text.rstrip("="),
        lambda text: text.replace("+", "-").replace("/", "_"),
        lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
        lambda text: "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76)) + "\n",
        lambda text: f"data:image/png;base64,{text}",
        lambda text: f"DATA:;base64,{text.rstrip('=')}",
        lambda text: "data:image/png;charset=x;base64," + text.replace("+", "%2B").replace("=", "%3D"),
    ],
)
def test_base64_in_the_forms_that_clients_send(server, odd_image, form):
    expected = json_answer(server, odd_image)[2]
    status, _, found = json_answer(server, form(odd_image))
    assert (status, found["top"]) == (200, expected["top"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("iVBO*w0K", "found: '*' after 4 characters"),
        ("iVBOR", "found: 5 characters, which is incomplete"),
        ("data:image/svg+xml,<svg/>", "data URL without Base64"),
        (7, "found: int"),
    ],
)
def test_what_is_no_base64_is_told(server, text, told):
    status, _, found = json_answer(server, text)
    assert status == 400 and told in found["error"]
