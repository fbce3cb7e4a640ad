"""The files of a history: written whole or not at all, by many at once; what is none of ours is named and left out."""

import dataclasses
import datetime
import multiprocessing
import os
import threading

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.history.made import bench_document, bench_rows
from vitdeploy.errors import InputError, MissingFileError, MissingPackageError, StorageError
from vitdeploy.history import files
from vitdeploy.history.files import append, read_rows
from vitdeploy.history.row import FORMAT_KEY, open_place, schema
from vitdeploy.remote import shown_uri


def silent(text, done, total):
    """Nobody is told how far it is."""


def add(where, p50=1.0, number=0):
    return append(open_place(where), bench_rows(p50, number), bench_document(p50))


def read(where):
    return read_rows(open_place(where), silent)


@pytest.fixture(params=["folder", "uri"])
def where(request, tmp_path):
    if request.param == "folder":
        yield str(tmp_path / "new" / "history")
        return
    yield f"memory://{tmp_path.name}/history"
    fsspec.filesystem("memory").store.clear()


def test_what_is_written_is_read_in_its_order(where):
    names = [add(where, p50) for p50 in (1.0, 3.0, 2.0)]
    rows, left_out = read(where)
    assert left_out == [] and [row.p50_ms for row in rows] == [1.0, 3.0, 2.0]
    assert [row.sequence for row in rows] == [1, 2, 3]
    assert len({row.run for row in rows}) == 3 and names == sorted(names)
    expected = dataclasses.replace(bench_rows(1.0)[0], sequence=1, run=rows[0].run, host=rows[0].host)
    assert rows[0] == expected and rows[0].host == os.uname().nodename


def test_clocks_that_differ_by_hours_change_no_order(tmp_path):
    for hours in (0, 1, -9, 2):  # the third machine's clock is ten hours behind
        add(tmp_path, p50=10.0 + hours, number=hours)
    assert [row.p50_ms for row in read(tmp_path)[0]] == [10.0, 11.0, 1.0, 12.0]


def test_any_tool_reads_the_columns_and_the_document(tmp_path):
    for p50 in (1.0, 2.0):
        add(tmp_path, p50)
    found = duckdb.read_parquet(f"{tmp_path}/*.parquet")
    query = "SELECT model, max(p50_ms), count(*) FROM found WHERE decided GROUP BY model"
    assert found.query("found", query).fetchall() == [("vit", 2.0, 2)]
    query = "SELECT document->>'$.results[0].precision' FROM found WHERE document IS NOT NULL"
    assert found.query("found", query).fetchall() == [("fp32",), ("fp32",)]


def append_some(where, barrier):
    barrier.wait()
    for _ in range(10):
        add(where)


def test_two_writers_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    writers = [context.Process(target=append_some, args=(str(tmp_path), barrier)) for _ in range(2)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
    rows, left_out = read(tmp_path)
    assert [each.exitcode for each in writers] == [0, 0] and left_out == []
    assert len({row.run for row in rows}) == len(rows) == 20
    assert all(path.suffix == ".parquet" for path in tmp_path.iterdir())


def test_a_file_cut_anywhere_is_named_and_left_out(tmp_path):
    whole = tmp_path / add(tmp_path)
    content = whole.read_bytes()
    for size in {0, 3, len(content) // 3, len(content) // 2, len(content) - 1}:
        (tmp_path / f"cut-{size}.parquet").write_bytes(content[:size])
    rows, left_out = read(tmp_path)
    assert len(rows) == 1 and len(left_out) == 5
    assert all(each.what.startswith("cut-") and "not a complete Parquet file" in each.why for each in left_out)


def test_a_flipped_bit_never_crashes(tmp_path):
    content = bytearray((tmp_path / add(tmp_path)).read_bytes())
    for place in range(8, len(content) - 8, 97):
        broken = bytearray(content)
        broken[place] ^= 0x10
        (tmp_path / "broken.parquet").write_bytes(broken)
        rows, left_out = read(tmp_path)
        assert 1 <= len(rows) <= 2 and len(left_out) <= 1


def written(path, change):
    """A file of a history with its table changed."""
    table = pa.Table.from_pylist([vars(dataclasses.replace(bench_rows(1.0)[0], sequence=1))], schema())
    pq.write_table(change(table), path / "other.parquet")


def column(name, values):
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda table: table.replace_schema_metadata({}), "not a history file of vitdeploy"),
        (
            lambda table: table.replace_schema_metadata({FORMAT_KEY: b"2"}),
            "format 2 of a newer vitdeploy; this one reads formats up to 1",
        ),
        (lambda table: table.replace_schema_metadata({FORMAT_KEY: b"x"}), "not a history file of vitdeploy"),
        (lambda table: table.drop_columns(["model"]), "model is missing"),
        (column("p50_ms", pa.array(["fast"])), "p50_ms is string, expected double"),
        (column("p50_ms", pa.array([float("nan")])), "invalid values: p50_ms"),
        (column("throughput", pa.array([-1.0])), "invalid values: throughput"),
        (column("sequence", pa.array([-5])), "invalid values: sequence"),
        (column("model", pa.array([None], pa.string())), "invalid values: model"),
        (lambda table: pa.concat_tables([table] * 6), "6 rows; at most 5 are allowed"),
        (column("time", pa.array([2**62], pa.timestamp("us", tz="UTC"))), "not a complete Parquet file"),
    ],
)
def test_what_is_no_file_of_a_history_is_left_out_with_the_reason(tmp_path, monkeypatch, change, expected):
    monkeypatch.setattr(files, "MAX_ROWS", 5)
    written(tmp_path, change)
    rows, (left_out,) = read(tmp_path)
    assert rows == [] and left_out.what == "other.parquet" and expected in left_out.why


def test_columns_that_an_earlier_vitdeploy_lacked_have_their_default(tmp_path):
    written(tmp_path, lambda table: table.drop_columns(["driver", "agreement"]).append_column("later", pa.array([1])))
    (row,), left_out = read(tmp_path)
    assert left_out == [] and (row.driver, row.agreement, row.p50_ms) == ("", None, 1.0)


def test_a_copy_of_a_file_counts_once(tmp_path):
    content = (tmp_path / add(tmp_path)).read_bytes()
    (tmp_path / "copy.parquet").write_bytes(content)
    assert len(read(tmp_path)[0]) == 1


def test_rows_of_one_result_that_are_called_the_same_are_all_there(tmp_path):
    """As of two engines that are compared with one."""
    twice = [dataclasses.replace(bench_rows(p50)[0], gate=gate) for p50, gate in ((1.0, "pass"), (1.0, "fail"))]
    append(open_place(str(tmp_path)), twice, bench_document(1.0))
    assert [row.gate for row in read(str(tmp_path))[0]] == ["pass", "fail"]


def test_other_files_and_folders_in_it_are_no_concern(tmp_path):
    add(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".tmp-1.parquet").write_text("hidden")
    (tmp_path / "folder.parquet").mkdir()
    rows, (left_out,) = read(tmp_path)
    assert len(rows) == 1 and (left_out.what, left_out.why) == ("folder.parquet", "folder.parquet is not a file")


def test_a_file_that_is_too_large_is_not_read(where, monkeypatch):
    add(where)
    monkeypatch.setattr("vitdeploy.history.row.MAX_BYTES", 100)
    rows, (left_out,) = read(where)
    assert rows == [] and "is too large" in left_out.why


def test_no_history_is_there(where):
    with pytest.raises(MissingFileError, match="no history at"):
        read(where)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    for use in (add, read):
        with pytest.raises(InputError, match="is not a folder"):
            use(tmp_path / "file")


def test_a_folder_that_nobody_may_write_to_is_told_before():
    with pytest.raises(StorageError, match="cannot be written"):
        open_place("/sys/history").prepare()


def test_a_disk_that_fails_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    add(tmp_path)

    def full(self, data):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(StorageError, match="no space left"):
        add(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


SECRETS = ["s3://KEY:SEC/RET@bucket/h", "ftp://me:pass@word@host/h", "https://host/h?sig=SECRET#x"]


@pytest.mark.parametrize("uri", SECRETS)
def test_no_credentials_are_shown(uri):
    assert not any(word in shown_uri(uri) for word in ("KEY", "SEC", "RET", "pass", "word", "me", "sig"))


def test_what_is_behind_a_filter_is_shown_without_credentials_too():
    assert shown_uri("simplecache::s3://a:b@bucket/h") == "simplecache::s3://bucket/h"


def test_a_uri_that_nobody_knows_is_refused_without_its_secret():
    with pytest.raises(InputError, match="cannot be opened") as told:
        open_place("nosuch://me:SECRET@host/h")
    assert "SECRET" not in str(told.value) and "nosuch://host/h" in str(told.value)


def test_a_service_that_does_not_answer_is_told_without_the_secret():
    with pytest.raises((StorageError, MissingPackageError)) as told:
        open_place("ftp://me:SECRET@127.0.0.1:9/h").names()
    assert "SECRET" not in str(told.value) and told.value.__suppress_context__


def test_a_service_that_is_silent_is_not_waited_for_without_end(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    place = open_place("memory://silent/history")
    monkeypatch.setattr("vitdeploy.remote.PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(MemoryFileSystem, "exists", lambda self, path: threading.Event().wait(5))
    with pytest.raises(StorageError, match="memory://silent/history cannot be read") as told:
        place.names()
    assert told.value.found == "no answer for 0 s"


def test_an_interrupted_write_to_a_service_leaves_no_file(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    place = open_place("memory://cut/history")

    def stop(self, *paths, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "mv", stop)
        with pytest.raises(KeyboardInterrupt):
            append(place, bench_rows(1.0), {})
    assert place.names() == [] and not MemoryFileSystem().ls("cut/history")
    MemoryFileSystem.store.clear()


def test_times_are_utc():
    assert bench_rows(1.0)[0].time.utcoffset() == datetime.timedelta(0)
