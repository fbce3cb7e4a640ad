"""How many requests an object store gets for each operation of a shared store, counted at a server of S3's protocol.

    pip install s3fs 'moto[s3,server]'        # in an environment of their own: neither is a dependency of vitdeploy
    PYTHONPATH=. python benchmarks/scale_requests.py [-o build/scale/requests.json]

The client is s3fs, as of a user; the server is moto's, on this machine. Requests are counted, not timed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from vitdeploy.store.key import Identity
from vitdeploy.store.shared import SharedStore
from vitdeploy.store.store import Store

ROOT = Path(__file__).parents[1]
BUCKET = "vitdeploy"


class Counted:
    """A WSGI application that counts its requests, as S3 bills them."""

    def __init__(self, application: Callable[..., object]) -> None:
        self._application = application
        self.seen: collections.Counter[str] = collections.Counter()

    def __call__(self, environ: dict[str, str], start_response: Callable[..., object]) -> object:
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        kind = "COPY" if "HTTP_X_AMZ_COPY_SOURCE" in environ else method
        self.seen["LIST" if method == "GET" and ("list-type" in query or "prefix=" in query) else kind] += 1
        return self._application(environ, start_response)

    def taken(self) -> dict[str, int]:
        found = dict(sorted(self.seen.items()))
        self.seen.clear()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "scale" / "requests.json")
    options = parser.parse_args()
    with count_requests() as counted, tempfile.TemporaryDirectory() as folder:
        found = operations(Path(folder), counted)
    kinds = sorted({kind for each in found.values() for kind in each})
    print(f"| operation | {' | '.join(kinds)} | all |\n|{'---|' * (2 + len(kinds))}")
    for name, each in found.items():
        print(f"| {name} | {' | '.join(str(each.get(kind, '')) for kind in kinds)} | {sum(each.values())} |")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def count_requests() -> Iterator[Counted]:
    """A server with an empty bucket, which this process's environment leads to."""
    import boto3
    from moto import server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_DEFAULT_REGION="us-east-1")  # noqa: S106
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
    counted = Counted(served._server.app)
    served._server.app = counted
    try:
        yield counted
    finally:
        served.stop()


def operations(folder: Path, counted: Counted) -> dict[str, dict[str, int]]:
    """The requests of each operation on an artifact of one file."""
    found = {}

    def store(name: str) -> Store:
        return Store(folder / name, SharedStore(f"s3://{BUCKET}/store"))

    def make(where: Store, name: str, text: bytes) -> None:
        where.make(Identity("shard-tally", {"name": name}, {}, {}), lambda out: _write(out / "tally.json", text))

    def find(where: Store, name: str, there: bool) -> None:
        assert (where.find(Identity("shard-tally", {"name": name}, {}, {}).key) is not None) == there

    first = store("first")
    make(first, "warm-up", b"0")
    steps: dict[str, Callable[[], None]] = {
        "make, the bytes are new": lambda: make(first, "one", b"1"),
        "make, the bytes are there": lambda: make(first, "two", b"1"),
        "look in vain": lambda: find(first, "absent", False),
        "find here, by the process that made it": lambda: find(first, "one", True),
        "find here, by a new process": lambda: find(store("first"), "one", True),
        "find there, and bring": lambda: find(store("second"), "one", True),
    }
    for name, step in steps.items():
        counted.taken()
        step()
        found[name] = counted.taken()
    return found


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)


if __name__ == "__main__":
    main()
