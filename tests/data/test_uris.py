"""Lists of images behind URIs: what a service fails to give is named, and no secret of an address is."""

import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

fsspec = pytest.importorskip("fsspec", reason="pip install 'vitdeploy[data]'")

from tests.data.made import picture  # noqa: E402
from vitdeploy.data import decoding  # noqa: E402
from vitdeploy.data.containers import uris  # noqa: E402
from vitdeploy.data.containers.listing import DataClasses  # noqa: E402
from vitdeploy.data.containers.uris import Uri, mark_of  # noqa: E402
from vitdeploy.data.decoding import Skipped, decode_images  # noqa: E402
from vitdeploy.data.file_digests import FileDigests  # noqa: E402
from vitdeploy.data.folder import digest, has_container_labels, list_images  # noqa: E402
from vitdeploy.errors import DataError, ImageError, MissingPackageError, StorageError  # noqa: E402
from vitdeploy.spec import PreprocessSpec  # noqa: E402

SPEC = PreprocessSpec(8, (8, 8), "bilinear", (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def memory():
    """An empty service of fsspec's own."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()


def listed(tmp_path, text, labels="folders", name="list.txt"):
    (tmp_path / name).write_text(text)
    return list_images(tmp_path / name, labels)


def refused(tmp_path, text, said, labels="folders", name="list.txt"):
    with pytest.raises(DataError, match=said) as told:
        listed(tmp_path, text, labels, name)
    return told.value


def test_a_list_mixes_services_and_files(tmp_path, memory):
    memory.pipe_file("/b/1.png", picture(1))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "2.png").write_bytes(picture(2))
    (tmp_path / "a b.png").write_bytes(picture(3))
    rows = ["# pets", "memory://b/1.png\tdog", "own/2.png\tcat", "", f"file://{tmp_path}/a%20b.png\tdog"]
    samples, classes = listed(tmp_path, "\n".join(rows))
    assert [each.content() for each in samples] == [picture(i) for i in (1, 2, 3)]
    assert (samples.labels.tolist(), classes) == ([1, 0, 1], DataClasses(("cat", "dog"), "words"))
    assert [each.shown for each in samples] == ["memory://b/1.png", f"{tmp_path}/own/2.png", f"{tmp_path}/a b.png"]
    assert [each.held for each in samples] == [Uri("memory://b/1.png"), None, None]
    assert [each.name_below(tmp_path) for each in samples] == ["memory://b/1.png", "own/2.png", "a b.png"]


@pytest.mark.parametrize(
    "text",
    [
        "a.png,1\nb.png,0\n",
        "uri,label\na.png,1\nb.png,0\n",
        "label,width,path\n1,9,a.png\n0,9,b.png\n",
        "﻿a.png, 1\nb.png ,0",
    ],
)
def test_a_csv_file_may_have_a_header(tmp_path, text):
    samples, classes = listed(tmp_path, text, name="list.csv")
    assert list(samples.names) == ["a.png", "b.png"] and samples.labels.tolist() == [1, 0]
    assert classes == DataClasses(("0", "1"), "numbers") and has_container_labels(tmp_path / "list.csv")


def test_lists_without_labels_have_none(tmp_path):
    samples, _ = listed(tmp_path, "a.png\nb.png", "none")
    assert samples.labels is None and not has_container_labels(tmp_path / "list.txt")
    assert list(listed(tmp_path, "url\na.png", "none", name="l.csv")[0].names) == ["a.png"]


def test_lines_that_are_not_clear_are_refused(tmp_path):
    assert "--labels none" in refused(tmp_path, "a.png\t1\nb.png", "line 2 of .* has no label").fix
    refused(tmp_path, "a.png\t1\t2", "line 1 of .* does not name an image")
    refused(tmp_path, "\tdog", "line 1 of .* does not name an image")
    refused(tmp_path, 'a.png,"1', "is not valid CSV", name="l.csv")
    refused(tmp_path, "a.png\t1\nb.png\t2\na.png\t3", "lists an image twice with different labels")
    refused(tmp_path, "http://h/x?a=1\t1\nhttp://h/x?a=1\t2", "lists an image twice with different labels")
    refused(tmp_path, "# none", "contains no images")


def test_what_is_no_list_is_told(tmp_path):
    (tmp_path / "list.txt").write_bytes(b"a.png\xff\t1")
    with pytest.raises(DataError, match="is not UTF-8"):
        list_images(tmp_path / "list.txt", "folders")
    with pytest.raises(DataError, match="is not a data set"):
        list_images(__import__("pathlib").Path(__file__), "none")
    with pytest.raises(DataError, match="cannot read images from a folder at s3://"):
        list_images(__import__("pathlib").Path("s3://bucket/images"), "none")


def test_secrets_are_read_with_and_never_shown(tmp_path, memory):
    samples, _ = listed(tmp_path, "https://me:SECRET@h/x.png?sig=SECRET\t1\nhttps://h/x.png?sig=OTHER\t0")
    assert [each.shown for each in samples] == ["https://h/x.png"] * 2
    assert list(samples.names) == ["https://h/x.png#line-1", "https://h/x.png#line-2"]
    assert samples[0].held.uri == "https://me:SECRET@h/x.png?sig=SECRET"
    assert samples._holder.picked(samples.places[1:]).at(0, "") == samples[1].held


def test_what_is_missing_for_a_protocol_is_named(tmp_path, monkeypatch):
    samples, _ = listed(tmp_path, "s3://key:SECRET@bucket/x.png\nnosuch://me:SECRET@host/x.png", "none")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match=r"a data set at s3:// needs the package s3fs"):
        samples[0].content()
    with pytest.raises(DataError, match=r"the data set nosuch://host/x\.png cannot be opened") as told:
        samples[1].content()
    assert "SECRET" not in str(told.value)


class Service(BaseHTTPRequestHandler):
    """Answers as the path says."""

    times = 0

    def do_GET(self):
        kind = self.path.strip("/").partition("/")[0]
        if kind == "late":
            threading.Event().wait(1)
        if kind in ("404", "403"):
            self.send_error(int(kind))
            return
        content = b"x" * 3000 if kind == "large" else picture(7)
        self.send_response(200)
        self.send_header("ETag", '"seven"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        Service.times += kind == "broken"
        if self.command == "GET":
            half = kind == "half" or (kind == "broken" and Service.times == 1)
            self.wfile.write(content[: len(content) // 2] if half else content)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    found = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    Service.times = 0
    monkeypatch.setattr(uris, "WAIT_SECONDS", 0.0)
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def real_http():
    pytest.importorskip("aiohttp", reason="pip install aiohttp, by which fsspec reads http://")


def test_an_answer_that_broke_off_is_asked_for_again(server, real_http):
    assert Uri(f"{server}/broken/x.png").read("x") == picture(7) and Service.times == 2


def test_what_a_server_fails_to_give_is_told(server, real_http, monkeypatch):
    with pytest.raises(ImageError, match=r"x\.png does not exist"):
        Uri(f"{server}/404/x.png").read("x.png")
    with pytest.raises(StorageError, match="cannot be read") as told:
        Uri(f"{server}/half/x.png").read("x.png")
    assert "Payload" in told.value.found
    with pytest.raises(StorageError) as told:
        Uri(f"{server.replace('//', '//me:SECRET@')}/403/x.png").read("x.png")
    assert "403" in told.value.found and "SECRET" not in str(told.value)
    monkeypatch.setattr("vitdeploy.data.containers.uris.MAX_FILE_BYTES", 2000)
    with pytest.raises(ImageError, match="is too large for an image file"):
        Uri(f"{server}/large/x.png").read("x.png")
    monkeypatch.setattr("vitdeploy.remote.PATIENCE_SECONDS", 0.1)
    with pytest.raises(StorageError) as told:
        Uri(f"{server}/late/x.png").read("x.png")
    assert told.value.found == "no answer for 0 s"
    with pytest.raises(StorageError, match="cannot be read"):
        Uri("http://127.0.0.1:9/x.png").read("x.png")


def test_images_that_are_not_there_are_skipped_where_that_is_asked_for(tmp_path, server, real_http, monkeypatch):
    """In this process and in others."""
    monkeypatch.setattr(decoding, "FIRST_IMAGES", 1)
    monkeypatch.setattr(decoding, "WORTH_SECONDS", -1.0)
    monkeypatch.setattr(decoding, "usable_cores", lambda: 2)
    rows = [f"{server}/ok/{i}.png" for i in range(4)]
    rows[2] = f"{server}/404/x.png"
    samples, _ = listed(tmp_path, "\n".join(rows), "none")
    skipped = Skipped([])
    found = list(decode_images(samples, SPEC, skipped))
    assert len(found) == 3 and skipped.paths == [rows[2]]
    assert {pixels.tobytes() for _, pixels, _ in found} == {found[0][1].tobytes()}
    with pytest.raises(ImageError, match=r"404/x\.png does not exist") as told:
        list(decode_images(samples, SPEC))
    assert "--skip-bad" in told.value.fix


def test_images_of_a_service_are_known_again_by_its_mark(tmp_path, server, real_http, memory):
    memory.pipe_file("/b/1.png", picture(1))
    rows = [f"{server}/ok/1.png?token=SECRET", "memory://b/1.png", f"{server}/404/x.png"]
    samples, _ = listed(tmp_path, "\n".join(rows), "none")
    assert mark_of(rows[0]) == (len(picture(7)), '"seven"') and mark_of(rows[2]) is None
    hashed = []
    for _ in range(2):
        with FileDigests(tmp_path / "digests.sqlite") as digests:
            found = digests.of(samples)
        hashed.append(digests.hashed)
    assert hashed == [2, 1]  # memory:// says of nothing when it changed
    assert found[:2] == [digest_of(7), digest_of(1)] and found[2].startswith("unread")
    content = "".join(map(str, sqlite3.connect(tmp_path / "digests.sqlite").execute("SELECT * FROM files")))
    assert "SECRET" not in content


def digest_of(seed):
    import hashlib

    return hashlib.sha256(picture(seed)).hexdigest()


def test_the_digest_of_a_list_follows_its_images(tmp_path, memory):
    memory.pipe_file("/b/1.png", picture(1))
    samples, _ = listed(tmp_path, "memory://b/1.png", "none")
    before = digest(samples, tmp_path)
    memory.pipe_file("/b/1.png", picture(2))
    assert digest(samples, tmp_path) != before
