"""`vitdeploy serve` under load and under attack, beside `vitdeploy bench --scenario offline` of the same engine.

    python benchmarks/serve_load.py BUNDLE [--target openvino-cpu] [--seconds 10] [--parts throughput,memory]

The server is a process of its own; the load comes from this one, on the same cores, which it takes from the engine: it
sends prepared bytes over a few kept connections and reads no more of an answer than it must.

throughput: as many requests as are answered, 16 at once, of one image and of eight, as binary data. Blocks of half a
second of the bench's own worker, at batch 8, and of the server alternate; the ratio is that of paired blocks.
latency: single images that arrive at random (Poisson) at 70 % of the throughput just measured, from when they were due.
memory: what the server holds after 1,000 requests and after 10,000 more, half of them images to decode.
hostile: bodies of 100 MB, clients that dawdle and answers that nobody reads, while others go on asking.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ratios import paired_ratio, student
from vitdeploy.benchmark.protocol import SETTLE_SECONDS
from vitdeploy.benchmark.run import engine_candidate, started
from vitdeploy.bundle.read import read_bundle

PARTS = ("throughput", "latency", "memory", "hostile")
AT_ONCE = 16
BLOCK, TIMEOUT = 0.5, 120.0
LENGTH = re.compile(rb"\ncontent-length: (\d+)", re.IGNORECASE)
CLI = (sys.executable, "-c", "from vitdeploy.cli.main import main; main()")
MIB = 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--target", default="openvino-cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each side")
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    parts = options.parts.split(",")
    with served(options.bundle, options.target) as server:
        print(server.batches)
        rate = 0.0
        if "throughput" in parts or "latency" in parts:
            rate = throughput(server, options.bundle, options.target, options.seconds)
        if "latency" in parts:
            asyncio.run(latency(server, 0.7 * rate, options.seconds))
        if "memory" in parts:
            asyncio.run(memory(server))
        if "hostile" in parts:
            asyncio.run(hostile(server))


class Served:
    """A running server, and what is sent to it."""

    def __init__(self, process: subprocess.Popen[str], document: dict[str, Any], bundle: Path) -> None:
        self.process = process
        self.port = int(document["address"].rpartition(":")[2])
        self.batches = document["batches"]
        manifest = json.loads((bundle / "manifest.json").read_text())
        tensor = manifest["graphs"]["model"]["inputs"][0]
        self.name, self.input, self.shape, self.dtype = manifest["name"], tensor["name"], tensor["shape"][1:], "UINT8"
        if tensor["dtype"] != "uint8":
            sys.exit(f"expected a bundle that takes uint8 images, found {tensor}")

    def infer(self, count: int) -> bytes:
        """A request of `count` images."""
        pixels = np.random.default_rng(count).integers(0, 256, (count, *self.shape), np.uint8).tobytes()
        tensor = {"name": self.input, "shape": [count, *self.shape], "datatype": self.dtype}
        tensor["parameters"] = {"binary_data_size": len(pixels)}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        extra = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Type: application/octet-stream\r\n"
        return self.request(f"/v2/models/{self.name}/infer", head + pixels, extra)

    def picture(self) -> bytes:
        """A request with a JPEG file."""
        from PIL import Image

        height, width, channels = self.shape
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels.squeeze()).save(stream, "JPEG")
        return self.request("/predict", stream.getvalue(), "Content-Type: image/jpeg\r\n")

    def request(self, path: str, body: bytes, extra: str) -> bytes:
        return f"POST {path} HTTP/1.1\r\nHost: a\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def rss(self) -> float:
        """MiB that the process holds."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


@contextlib.contextmanager
def served(bundle: Path, target: str) -> Iterator[Served]:
    command = [*CLI, "serve", str(bundle), "--target", target, "--port", "0", "--json", "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield Served(process, json.loads("".join(iter(process.stdout.readline, "}\n")) + "}"), bundle)
    finally:
        process.send_signal(signal.SIGTERM)
        print(f"stopped with {process.wait(60)}")


class Connection:
    """Sends one request after the other."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.status = 0

    async def open(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def ask(self, request: bytes) -> int:
        """The status of the answer."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        await self.reader.readexactly(int(LENGTH.search(head)[1]))  # type: ignore[index]
        return int(head[9:12])


async def closed_loop(server: Served, request: bytes, until: float, at_once: int = AT_ONCE) -> int:
    """How many requests were answered until then."""

    async def ask() -> int:
        connection, count = await Connection(server.port).open(), 0
        while time.perf_counter() < until:
            assert await connection.ask(request) == 200
            count += 1
        connection.writer.close()
        return count

    return sum(await asyncio.gather(*(ask() for _ in range(at_once))))


def throughput(server: Served, bundle: Path, target: str, seconds: float) -> float:
    """Prints images a second; gives those of single images."""
    requests = {1: server.infer(1), 8: server.infer(8)}
    offline: list[float] = []
    served: dict[int, list[float]] = {count: [] for count in requests}
    candidate = engine_candidate(next(e for e in read_bundle(bundle).engines if e.target == target), bundle)
    with started({candidate.artifact: candidate.argv}) as (worker,):
        worker.ask({"do": "load", "request": {**candidate.request, "threads": 0}, "batches": [8]}, TIMEOUT)
        while len(offline) * BLOCK < seconds:
            block = worker.ask({"do": "block", "batch": 8, "seconds": BLOCK}, TIMEOUT)
            offline.append(8 * len(block["latencies_ns"]) / block["seconds"])
            for count, request in requests.items():
                time.sleep(SETTLE_SECONDS)
                start = time.perf_counter()
                answered = asyncio.run(closed_loop(server, request, start + BLOCK))
                served[count].append(answered * count / (time.perf_counter() - start))
            time.sleep(SETTLE_SECONDS)
    print(f"bench, offline, batch 8: {statistics.median(offline):.1f} images/s, {len(offline)} blocks of {BLOCK} s")
    for count, values in served.items():
        paired = paired_ratio(values[1:], offline[1:])  # the first round warms up
        ratio, low, high = student(paired.log, paired.error, paired.freedom)
        middle = statistics.median(values)
        print(
            f"serve, {count} a request: {middle:.1f} images/s, / bench {ratio:.3f} [{low:.3f}, {high:.3f}]", flush=True
        )
    return statistics.median(served[1])


async def latency(server: Served, rate: float, seconds: float) -> None:
    """Arrivals do not wait for answers; each request uses a free connection, or a new one."""
    request, free, waited = server.infer(1), list[Connection](), list[float]()
    statuses: dict[int, int] = {}

    async def ask(due: float) -> None:
        connection = free.pop() if free else await Connection(server.port).open()
        status = await connection.ask(request)
        waited.append(1e3 * (time.perf_counter() - due))
        statuses[status] = statuses.get(status, 0) + 1
        free.append(connection)

    await closed_loop(server, request, time.perf_counter() + 1)
    chance, tasks, due = random.Random(1), [], time.perf_counter()  # noqa: S311
    end = due + seconds
    while due < end:
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(due)))
    await asyncio.gather(*tasks)
    waited.sort()
    p50, p99 = (waited[int(share * len(waited))] for share in (0.5, 0.99))
    print(f"at {rate:.1f} images/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms, of {len(waited)}; statuses {statuses}")


async def memory(server: Served) -> None:
    requests = (server.infer(1), server.picture())
    connections = [await Connection(server.port).open() for _ in range(AT_ONCE)]
    held = []
    for count in (1_000, 10_000):
        left = iter(range(count))

        async def ask(connection: Connection, left: Iterator[int] = left) -> None:
            for number in left:
                assert await connection.ask(requests[number % 2]) == 200

        await asyncio.gather(*map(ask, connections))
        held.append(server.rss())
    print(f"memory: {held[0]:.1f} MiB after 1,000 requests, {held[1]:.1f} MiB after 10,000 more")


async def hostile(server: Served) -> None:
    """The replies to the attackers, the server's memory meanwhile, and the answers to other clients."""
    before, peak = server.rss(), 0.0
    head = b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: image/png\r\n"
    told: dict[str, int] = {}

    async def attack(kind: str, parts: list[bytes], pause: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        reading = asyncio.create_task(reader.read(12))
        with contextlib.suppress(ConnectionError):
            for part in parts:
                if reading.done():  # like clients that read the reply
                    break
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
        heard = b""
        with contextlib.suppress(ConnectionError):
            heard = await reading
        answer = f"{kind}: {heard[9:12].decode() or 'closed'}"
        told[answer] = told.get(answer, 0) + 1
        writer.close()

    large = [head + b"Content-Length: 100000000\r\n\r\n", *[b"x" * MIB] * 100]
    chunk = b"100000\r\n" + b"x" * MIB + b"\r\n"
    chunked = [head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 100]
    slow = [head + b"Content-Length: 60\r\n\r\n", *[b"x"] * 60]
    attacks = [attack("100 MB", large, 0) for _ in range(8)]
    attacks += [attack("100 MB in chunks", chunked, 0) for _ in range(8)]
    attacks += [attack("slow body", slow, 1.0) for _ in range(64)]
    attacks += [attack("slow head", [bytes([each]) for each in head], 1.0) for _ in range(64)]
    under_attack = asyncio.gather(*attacks)
    others = await Connection(server.port).open()
    request, answers = server.infer(1), 0
    while not under_attack.done():
        assert await others.ask(request) == 200
        answers += 1
        peak = max(peak, server.rss())
        await asyncio.sleep(0.01)
    print(f"hostile: {told}; others: {answers} of {answers} answered")
    print(f"memory: {before:.1f} MiB before, at most {peak:.1f} MiB meanwhile, {server.rss():.1f} MiB after")


if __name__ == "__main__":
    main()
