"""The shared store on a server of S3's protocol, by the client that users have: whole objects, and few requests."""

import os

import pytest

pytest.importorskip("s3fs", reason="pip install s3fs 'moto[s3,server]', in an environment of their own")
pytest.importorskip("moto.server", reason="pip install s3fs 'moto[s3,server]', in an environment of their own")

from benchmarks.scale_requests import BUCKET, count_requests, operations
from tests.store.test_store import KEY, everything_in, make
from vitdeploy.store.shared import SharedStore
from vitdeploy.store.store import Store


@pytest.fixture(scope="module")
def counted():
    before = dict(os.environ)
    with count_requests() as found:
        yield found
    os.environ.clear()
    os.environ.update(before)


def test_what_one_machine_made_another_finds_and_nothing_lies_beside_it(counted, tmp_path):
    import fsspec

    url = f"s3://{BUCKET}/team/{tmp_path.name}"
    made = make(Store(tmp_path / "a", SharedStore(url)))
    found = Store(tmp_path / "b", SharedStore(url)).find(KEY)
    assert found.digest == made.digest and everything_in(found.path) == everything_in(made.path)
    files, at = fsspec.core.url_to_fs(url)
    assert {path.removeprefix(f"{at}/").split("/")[0] for path in files.find(at)} == {"artifacts", "files"}


def test_a_file_is_one_request_to_write(counted, tmp_path):
    found = operations(tmp_path, counted)
    assert found["make, the bytes are new"] == {"PUT": 2, "HEAD": 2, "LIST": 2}
    assert found["make, the bytes are there"] == {"PUT": 1, "HEAD": 2, "LIST": 1}
    assert found["find here, by the process that made it"] == {}
