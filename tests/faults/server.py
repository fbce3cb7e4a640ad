"""A server under load and attack for minutes, and stopped and started again under load.

Load: eight clients ask for answers that are known (random pixels, whose quarters the model adds up); one request of a
hundred is malformed; beside them are clients that read slowly, send half a request, reset, or send nothing. Every
answer is compared, to 1e-5 of the largest as batches add up in another order; every malformed request must get a 4xx.
At the end the server's descriptors are as many as before, and its memory at most 5 % or 10 MiB above that after a
quarter of the time.

Restarts: SIGTERM while all clients ask. What was accepted is answered, and rightly; others get 503 or no connection;
the exit status is 0, and the log has as many answers as the clients got.

VITDEPLOY_FAULT_SECONDS is how long the load goes on where that is longer than the form: 3600 for the hour.
"""

from __future__ import annotations

import http.client
import io
import itertools
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.gate import Row, asked_seconds, timed

ROOT = Path(__file__).parents[2]
SECONDS = {True: 600.0, False: 6.0}
RESTARTS = {True: 50, False: 1}
CLIENTS, MALFORMED, LINGERING = 8, 0.01, 24
# Between two requests of a client: other figures run at the same time.
PAUSE = 0.004
WARM_UP = 0.25  # of the time
GROWTH, LEAST = 0.05, 10 << 20
LIMIT = 20.0
SIDE = 8
INFER = "/v2/models/quarters/infer"
JSON = {"Content-Type": "application/json"}


def run(full: bool, work: Path) -> list[Row]:
    from tests.serve.conftest import make_bundle

    bundle = make_bundle(work, "batch")
    seconds = max(SECONDS[full], asked_seconds())
    return [timed(_load, bundle, seconds, work), timed(_restarts, bundle, RESTARTS[full], work)]


# --- the figures ------------------------------------------------------------------------------------------------------


def _load(bundle: Path, seconds: float, work: Path) -> Row:
    row = Row(
        f"server: {seconds:.0f} s, {CLIENTS} clients, 1 % malformed, slow readers, half-open connections", CLIENTS + 9
    )
    with served(bundle, work / "load.log") as server:
        idle = server.facts()
        end = time.monotonic() + seconds
        clients = [Client(server.port, seed, end) for seed in range(CLIENTS)]
        hostile = Hostile(server.port, end)
        for thread in (*clients, hostile):
            thread.start()
        time.sleep(WARM_UP * seconds)
        before = {**server.facts(), "descriptors": idle["descriptors"]}
        for thread in (*clients, hostile):
            thread.join(seconds + 4 * LIMIT)
        alive = [thread.name for thread in (*clients, hostile) if thread.is_alive()]
        after = server.settled(before["descriptors"])
    for client in clients:
        # A case for each hundred answers, and each malformed request.
        for number, (slowest, wrong) in enumerate(client.blocks):
            row.add(
                f"{client.name} block {number}", "wrong" if wrong else "accepted", slowest, note="; ".join(wrong[:3])
            )
        for name, status, took in client.refused:
            right = 400 <= status < 500
            row.add(f"{client.name} {name}", "clean" if right else "wrong", took, note=f"status {status}")
        if client.error:
            row.add(client.name, "wrong", note=client.error)
    for name, count in hostile.done.items():
        row.add(f"{name} x {count}", "clean")
    _outcomes(row, server, before, after, alive)
    return row


def _outcomes(row: Row, server: Server, before: dict[str, float], after: dict[str, float], alive: list[str]) -> None:
    """What must hold at the end."""
    most = before["memory"] + max(GROWTH * before["memory"], LEAST)
    held = f"{before['memory'] / 1e6:.1f} MB became {after['memory'] / 1e6:.1f}, allowed {most / 1e6:.1f}"
    row.add("memory", "clean" if after["memory"] <= most else "wrong", peak_mb=after["memory"] / 1e6, note=held)
    open_files = f"{before['descriptors']:.0f} became {after['descriptors']:.0f}"
    row.add("descriptors", "clean" if after["descriptors"] <= before["descriptors"] else "wrong", note=open_files)
    row.add("all ended", "hang" if alive else "clean", note=", ".join(alive))
    traces = [line for line in server.log() if line.get("trace") or line.get("status", 0) >= 500]
    bad = server.status != 0 or traces
    row.add("exit and log", "crash" if bad else "clean", note=f"status {server.status}; {str(traces[:1])[:300]}")


def _restarts(bundle: Path, count: int, work: Path) -> Row:
    row = Row(f"server: {count} restarts under load", count)
    for number in range(count):
        begun = time.monotonic()
        wrong: list[str] = []
        with served(bundle, work / f"restart-{number}.log") as server:
            clients = [Client(server.port, seed, begun + LIMIT, until_refused=True) for seed in range(CLIENTS)]
            for client in clients:
                client.start()
            time.sleep(0.4 + 0.4 * random.Random(number).random())
            server.stop()
            for client in clients:
                client.join(LIMIT)
        statuses = Counter(itertools.chain.from_iterable(client.statuses for client in clients))
        answered, logged = statuses[200], sum(line.get("status") == 200 for line in server.log())
        wrong += [f"{client.name}: {client.error}" for client in clients if client.error]
        wrong += [text for client in clients for _, texts in client.blocks for text in texts]
        if server.status != 0:
            wrong.append(f"exit status {server.status}")
        if set(statuses) - {200, 503}:
            wrong.append(f"statuses {dict(statuses)}")
        if answered != logged or not answered:
            wrong.append(f"{answered} answers were read, and {logged} are in the log")
        hangs = any(client.is_alive() for client in clients)
        outcome = "hang" if hangs else "wrong" if wrong else "clean"
        row.add(
            f"restart {number}", outcome, time.monotonic() - begun, note="; ".join(wrong[:3]) or f"{answered} answers"
        )
    return row


# --- the server -------------------------------------------------------------------------------------------------------


class Server:
    """A running `vitdeploy serve`; `status` is that of its exit."""

    def __init__(self, process: subprocess.Popen[str], port: int, file: Path) -> None:
        self.process, self.port, self._file = process, port, file
        self.status: int | None = None

    def facts(self) -> dict[str, float]:
        """Its own count of its memory and of its descriptors."""
        status, body = ask(self.port, "GET", "/metrics")
        assert status == 200, status
        names = {"memory": "process_resident_memory_bytes", "descriptors": "process_open_fds"}
        text = body.decode()
        return {
            key: float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
            for key, name in names.items()
        }

    def settled(self, descriptors: float) -> dict[str, float]:
        """As `facts`, once connections that nobody has any more are closed: heads may take 10 s, bodies 30."""
        end = time.monotonic() + 45
        while (found := self.facts())["descriptors"] > descriptors and time.monotonic() < end:
            time.sleep(0.5)
        return found

    def stop(self) -> None:
        if self.status is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.status = self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.status = -1

    def log(self) -> Iterator[dict[str, Any]]:
        """Its lines one by one: an hour under load writes millions."""
        with self._file.open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("{"):
                    yield json.loads(line)


@contextmanager
def served(bundle: Path, log: Path) -> Iterator[Server]:
    words = ["serve", str(bundle), "--port", "0", "--json", "--max-batch", "4", "--monitor", "--monitor-window", "64"]
    command = [sys.executable, "-c", "from vitdeploy.cli.main import main; main()", *words]
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout:
        text = "".join(itertools.takewhile(lambda line: line != "}\n", process.stdout))
        try:
            server = Server(process, int(json.loads(text + "}")["address"].rpartition(":")[2]), log)
            yield server
            server.stop()
        finally:
            process.kill()
            process.wait()


def ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# --- the clients ------------------------------------------------------------------------------------------------------


class Client(threading.Thread):
    """Asks for answers that it knows, one after the other on one connection, until `end`; or until the server takes no
    more. `blocks`: of each hundred the slowest in seconds, and what was wrong. `refused`: the malformed ones."""

    def __init__(self, port: int, seed: int, end: float, until_refused: bool = False) -> None:
        super().__init__(name=f"client {seed}", daemon=True)
        self.port, self.end, self.until_refused = port, end, until_refused
        self.random = random.Random(seed)
        self.pixels = np.random.default_rng(seed)
        self.blocks: list[tuple[float, list[str]]] = []
        self.refused: list[tuple[str, int, float]] = []
        self.statuses: list[int] = []
        self.error = ""

    def run(self) -> None:
        try:
            while time.monotonic() < self.end and self._block():
                pass
        except Exception as error:  # the gate tells it
            self.error = f"{type(error).__name__}: {error}"[:300]

    def _block(self) -> bool:
        """A hundred requests; False once the server takes no more."""
        slowest, wrong, goes_on = 0.0, list[str](), True
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            for _ in range(100):
                if not self.until_refused and self.random.random() < MALFORMED:
                    self._malformed()
                start = time.monotonic()
                goes_on = self._one(connection, wrong)
                slowest = max(slowest, time.monotonic() - start)
                if not goes_on or time.monotonic() > self.end:
                    break
                time.sleep(0 if self.until_refused else PAUSE)
        finally:
            connection.close()
        self.blocks.append((slowest, wrong))
        return goes_on

    def _one(self, connection: http.client.HTTPConnection, wrong: list[str]) -> bool:
        images = self.pixels.integers(0, 256, (self.random.choice((1, 1, 1, 3)), SIDE, SIDE, 1), np.uint8)
        by_file = len(images) == 1 and self.random.random() < 0.3
        try:
            if by_file:
                connection.request("POST", "/predict?top=4", png(images[0]), {"Content-Type": "image/png"})
            else:
                connection.request("POST", INFER, infer_body(images), JSON)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException):
            if self.until_refused:  # nobody took the request
                return False
            raise
        data = answer.read()  # what was accepted must come whole
        self.statuses.append(answer.status)
        if answer.status != 200:
            if not (self.until_refused and answer.status == 503):
                wrong.append(f"status {answer.status}: {data[:100]!r}")
            return not self.until_refused
        found = from_file(json.loads(data)) if by_file else from_tensors(json.loads(data))
        expected = softmax(quarters(images)[0])[None] if by_file else quarters(images)
        bound = 1e-5 * float(np.abs(expected).max())
        if found.shape != expected.shape or float(np.abs(found - expected).max()) > bound:
            wrong.append(f"{found.tolist()} instead of {expected.tolist()}")
        return True

    def _malformed(self) -> None:
        name, send = self.random.choice(MALFORMED_REQUESTS)
        start = time.monotonic()
        self.refused.append((name, send(self.port), time.monotonic() - start))


def quarters(images: np.ndarray) -> np.ndarray:
    """What the model gives: float32 [n, 4]."""
    return (images.reshape(len(images), 4, -1).astype(np.float64).sum(2) / 255).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    found = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(found / found.sum())


def from_tensors(document: dict[str, Any]) -> np.ndarray:
    (output,) = document["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def from_file(document: dict[str, Any]) -> np.ndarray:
    """The scores in the order of the classes."""
    return np.array([[each["score"] for each in sorted(document["top"], key=lambda each: each["index"])]])


def infer_body(images: np.ndarray) -> bytes:
    tensor = {"name": "image", "shape": list(images.shape), "datatype": "UINT8", "data": images.ravel().tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0]).save(stream, "PNG")
    return stream.getvalue()


def raw(port: int, *parts: bytes) -> int:
    """The status of what answers these bytes."""
    with socket.create_connection(("127.0.0.1", port), LIMIT) as connection:
        for part in parts:
            with suppress(OSError):  # refused before all of it was sent
                connection.sendall(part)
        data = b""
        with suppress(ConnectionResetError):
            while b"\r\n" not in data and (more := connection.recv(4096)):
                data += more
    return int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0


def _tensor(port: int, **changes: Any) -> int:
    body = json.loads(infer_body(np.zeros((1, SIDE, SIDE, 1), np.uint8)))
    body["inputs"][0].update(changes)
    return ask(port, "POST", INFER, json.dumps(body).encode(), JSON)[0]


PNG = {"Content-Type": "image/png"}
MALFORMED_REQUESTS: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("no JSON", lambda port: ask(port, "POST", INFER, b'{"inputs": [', JSON)[0]),
    ("deep JSON", lambda port: ask(port, "POST", INFER, b"[" * 100_000, JSON)[0]),
    ("another shape", lambda port: _tensor(port, shape=[1, 4, 16, 1])),
    ("a huge shape", lambda port: _tensor(port, shape=[1 << 40, SIDE, SIDE, 1])),
    ("another type", lambda port: _tensor(port, datatype="FP32")),
    ("numbers out of range", lambda port: _tensor(port, data=[1 << 70] * 64)),
    ("another model", lambda port: ask(port, "POST", "/v2/models/../../etc/infer", b"{}", JSON)[0]),
    ("another method", lambda port: ask(port, "DELETE", INFER)[0]),
    ("no image", lambda port: ask(port, "POST", "/predict", b"<html></html>", PNG)[0]),
    ("half an image", lambda port: ask(port, "POST", "/predict", png(np.zeros((8, 8, 1), np.uint8))[:40], PNG)[0]),
    ("no HTTP", lambda port: raw(port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")),
    ("a long head", lambda port: raw(port, b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n")),
    (
        "a large body",
        lambda port: raw(port, b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"),
    ),
    (
        "two lengths",
        lambda port: raw(
            port, b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\naaaaa"
        ),
    ),
)


class Hostile(threading.Thread):
    """Opens connections that hold something up, at most LINGERING at once, and lets go of the oldest. `done`: how many
    of each."""

    def __init__(self, port: int, end: float) -> None:
        super().__init__(name="hostile clients", daemon=True)
        self.port, self.end = port, end
        self.random = random.Random(0)
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        held: list[socket.socket] = []
        kinds = (self._slow_reader, self._half_head, self._half_body, self._reset, self._silent)
        while time.monotonic() < self.end:
            kind = self.random.choice(kinds)
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", self.port), LIMIT)
                held.append(connection)
                kind(connection)
                self.done[kind.__name__.strip("_").replace("_", " ")] += 1
            while len(held) > LINGERING:
                held.pop(0).close()
            time.sleep(0.05)
        for connection in held:
            connection.close()

    def _slow_reader(self, connection: socket.socket) -> None:
        """Asks for much, and reads three bytes of it."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 8)
        connection.recv(3)

    def _half_head(self, connection: socket.socket) -> None:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-")

    def _half_body(self, connection: socket.socket) -> None:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/png\r\nContent-Length: 90\r\n\r\nab"
        )

    def _reset(self, connection: socket.socket) -> None:
        """Is gone while its request is answered, with a reset in the place of an end."""
        body = infer_body(np.zeros((1, SIDE, SIDE, 1), np.uint8))
        head = (
            f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def _silent(self, connection: socket.socket) -> None:
        """Says nothing."""
