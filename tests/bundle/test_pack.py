"""A packed bundle: the same bytes for the same bundle, all of it back, and nothing else taken for one."""

import base64
import contextlib
import copy
import hashlib
import io
import json
import os
import resource
import stat
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.bundle.test_read import FILES, GOOD
from tests.command_line import command_line
from vitdeploy.api import inspect
from vitdeploy.bundle.layout import PackedMember, directory, local_header
from vitdeploy.bundle.pack import pack_bundle, packed_order, read_packed, unlisted_files
from vitdeploy.bundle.read import MANIFEST_FILE, is_packed, read_bundle
from vitdeploy.bundle.sign import SIGNATURE_FILE
from vitdeploy.errors import (
    ArchiveError,
    DigestError,
    ManifestError,
    MissingFileError,
    OutputError,
    SignatureError,
    StorageError,
    UnsafeError,
)
from vitdeploy.publish import replacing, replacing_file
from vitdeploy.runtime import load

EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def write(folder, files, manifest=GOOD):
    for name, data in {**files, MANIFEST_FILE: json.dumps(manifest).encode()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def entry(name, data):
    return {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def statement(digests):
    """What a signature says, without the proof of who says it."""
    resources = [{"name": name, "algorithm": "sha256", "digest": digest} for name, digest in digests.items()]
    payload = json.dumps({"predicate": {"resources": resources}}).encode()
    return json.dumps({"dsseEnvelope": {"payload": base64.b64encode(payload).decode()}}).encode()


def signature_of(folder, **changed):
    listed = {each["path"]: each["sha256"] for each in GOOD["files"]}
    manifest = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
    return statement({MANIFEST_FILE: manifest, **listed, **changed})


@pytest.fixture
def bundle(tmp_path):
    return write(tmp_path / "bundle", FILES)


@pytest.fixture
def packed(bundle, tmp_path):
    file = tmp_path / "x.vitb"
    pack_bundle(bundle, file)
    return file


@pytest.fixture
def vitdeploy(tmp_path):
    with command_line(tmp_path, tmp_path / "store") as run:
        yield run


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(file, error=ArchiveError, **options):
    """The error of a file that is not taken; it leaves nothing behind."""
    out = file.parent / "out"
    before = sorted(file.parent.iterdir())
    with pytest.raises(error) as caught, replacing(out, ()) as work:
        read_packed(file, work, **options)
    assert sorted(file.parent.iterdir()) == before
    return caught.value


# --- there and back ---------------------------------------------------------------------------------------------------


def test_a_bundle_comes_back_byte_for_byte(bundle, packed, tmp_path):
    (tmp_path / "back").mkdir()
    read = read_packed(packed, tmp_path / "back")
    assert content(tmp_path / "back") == content(bundle)
    assert read.manifest == read_bundle(bundle)
    assert (read.bytes, read.signed) == (packed.stat().st_size, False)
    assert read.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()
    assert read.manifest_sha256 == hashlib.sha256((bundle / MANIFEST_FILE).read_bytes()).hexdigest()


def test_other_programs_read_it(bundle, packed):
    with zipfile.ZipFile(packed) as archive:
        assert archive.namelist() == [MANIFEST_FILE, *sorted(FILES)]
        assert {name: archive.read(name) for name in archive.namelist()} == content(bundle)
        for each in archive.infolist():
            assert (each.compress_type, each.external_attr >> 16) == (zipfile.ZIP_STORED, stat.S_IFREG | 0o644)


def test_the_same_bundle_gives_the_same_bytes(bundle, packed, tmp_path):
    other = tmp_path / "elsewhere"
    for name in sorted(content(bundle), reverse=True):  # made in another order, at another time, with other rights
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_bytes((bundle / name).read_bytes())
        (other / name).chmod(0o755)
        os.utime(other / name, (10**9, 10**9))
    pack_bundle(other, tmp_path / "y.vitb")
    assert (tmp_path / "y.vitb").read_bytes() == packed.read_bytes()


NAMES = st.lists(
    st.lists(
        st.text("abAB01._-", min_size=1, max_size=6).filter(lambda s: s not in (".", "..")), min_size=1, max_size=3
    ),
    max_size=6,
)


@EXAMPLES
@given(NAMES.map(lambda names: ["/".join(segments) for segments in names]), st.data())
def test_any_bundle_comes_back(names, data):
    files = {**FILES, **{name: data.draw(st.binary(max_size=200)) for name in names}}
    manifest = {**GOOD, "files": [entry(name, each) for name, each in sorted(files.items(), key=lambda f: f[1])]}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "back").mkdir()
        (Path(place) / "bundle").mkdir()
        with contextlib.suppress(OSError):  # a file where another has its folder
            write(Path(place) / "bundle", files, manifest)
            try:
                packed_order(read_bundle(Path(place) / "bundle"), Path(MANIFEST_FILE))
            except ManifestError:
                assume(False)
            pack_bundle(Path(place) / "bundle", Path(place) / "x.vitb")
            read_packed(Path(place) / "x.vitb", Path(place) / "back")
            assert content(Path(place) / "back") == content(Path(place) / "bundle")
            with zipfile.ZipFile(Path(place) / "x.vitb") as archive:
                assert archive.testzip() is None


def test_what_the_manifest_does_not_list_stays_behind(bundle, tmp_path):
    (bundle / "notes").mkdir()
    (bundle / "notes" / "mine.txt").write_text("private", encoding="utf-8")
    (bundle / "link").symlink_to("/etc/passwd")
    packed = pack_bundle(bundle, tmp_path / "x.vitb")
    assert unlisted_files(bundle, packed.manifest) == ["link", "notes/mine.txt"]
    assert b"private" not in (tmp_path / "x.vitb").read_bytes()


def test_files_beyond_4_gib_have_zip64_fields(tmp_path):
    """A sparse file with a large one in the middle and one behind it, as Python's reader sees it."""
    sizes, members, offset = {"a": 3, "b": 5 * 2**30, "c": 2**32 - 1, "d": 2**32 - 2, "e": 7}, [], 0
    with (tmp_path / "large.zip").open("wb") as file:
        for name, size in sizes.items():
            members.append(PackedMember(name, size, 0x1234, offset))
            file.seek(offset)
            file.write(local_header(members[-1]))
            offset = file.tell() + size
        file.seek(offset)
        file.write(directory(members))
    with zipfile.ZipFile(tmp_path / "large.zip") as archive:
        read = [(each.filename, each.file_size, each.compress_size, each.header_offset) for each in archive.infolist()]
        assert read == [(each.name, each.bytes, each.bytes, each.offset) for each in members]
        for name in sizes:
            archive.open(name).close()  # compares the local header's name
    wide = [local_header(member)[26:] for member in members]
    assert [struct.unpack_from("<H", each, 2)[0] for each in wide] == [0, 20, 20, 0, 0]


# --- signatures -------------------------------------------------------------------------------------------------------


def test_the_signature_goes_along(bundle, tmp_path):
    (bundle / SIGNATURE_FILE).write_bytes(signature_of(bundle))
    assert pack_bundle(bundle, tmp_path / "x.vitb").signed
    (tmp_path / "back").mkdir()
    read_packed(tmp_path / "x.vitb", tmp_path / "back")
    assert content(tmp_path / "back") == content(bundle)


def test_a_pack_tells_whether_it_is_signed(bundle, tmp_path):
    phases = set()
    for signed in (False, True):
        if signed:
            (bundle / SIGNATURE_FILE).write_bytes(signature_of(bundle))
        _, lines = inspect.pack(bundle, tmp_path / f"{signed}.vitb", lambda text, done, total: phases.add(text))
        assert any(line.startswith("signed") for line in lines) == signed
    assert phases == {"packing, in MB", "checking, in MB"}


@pytest.mark.parametrize("changed", [{"labels.txt": "0" * 64}, {"more.txt": "0" * 64}])
def test_a_signature_of_other_files_is_not_packed(bundle, tmp_path, changed):
    (bundle / SIGNATURE_FILE).write_bytes(signature_of(bundle, **changed))
    with pytest.raises(SignatureError) as caught:
        pack_bundle(bundle, tmp_path / "x.vitb")
    assert repr(next(iter(changed))) in caught.value.found


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"\xff", b'{"dsseEnvelope": {"payload": 1}}', b"[" * 100_000, statement({"a": []})]
)
def test_what_is_no_signature_is_not_packed(bundle, tmp_path, text):
    (bundle / SIGNATURE_FILE).write_bytes(text)
    with pytest.raises(SignatureError, match="does not match the bundle's files"):
        pack_bundle(bundle, tmp_path / "x.vitb")


# --- what is not packed -----------------------------------------------------------------------------------------------


def test_a_file_that_was_changed_is_not_packed(bundle, tmp_path):
    (bundle / "labels.txt").write_bytes(b"zero\nONE\n")
    with pytest.raises(DigestError) as caught:
        pack_bundle(bundle, tmp_path / "x.vitb")
    assert caught.value.message == f"{bundle}/labels.txt is not the file that the manifest records"


@pytest.mark.parametrize(
    "name", ["Labels.txt", "MANIFEST.json", MANIFEST_FILE, SIGNATURE_FILE, "labels.txt/a", "ENGINES/b", "engines"]
)
def test_names_that_clash_are_not_packed(bundle, name):
    manifest = read_bundle(write(bundle, {}, {**GOOD, "files": [*GOOD["files"], entry(name, b"")]}))
    with pytest.raises(ManifestError, match="clash on some file systems"):
        packed_order(manifest, bundle / MANIFEST_FILE)


def test_another_file_is_never_replaced(tmp_path):
    (tmp_path / "mine.vitb").write_bytes(b"PK\x03\x04 of another kind")
    (tmp_path / "link.vitb").symlink_to(tmp_path / "x.vitb")
    for name, found in (("mine.vitb", "another file"), ("link.vitb", "a link"), ("", "a folder")):
        with pytest.raises(OutputError) as caught, replacing_file(tmp_path / name, is_packed):
            raise AssertionError
        assert caught.value.found == found


# --- what is not taken for a packed bundle ----------------------------------------------------------------------------


def zipped(files, change=lambda info: None, **options):
    """A zip by Python's own writer, as near to ours as it comes, each of whose entries `change` may spoil."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as archive:
        for name, data in files:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.create_version, info.extract_version = 0o100644 << 16, 10, 10
            info.compress_type = options.get("compression", zipfile.ZIP_STORED)
            change(info)
            archive.writestr(info, data)
    return buffer.getvalue()


ENTRIES = [(MANIFEST_FILE, json.dumps(GOOD).encode()), *sorted(FILES.items())]


def test_pythons_writer_makes_the_same_bytes(packed):
    """So that each of the next archives differs from a good one by what its name says."""
    assert zipped(ENTRIES) == packed.read_bytes()


def with_name(old, new):
    return [(new if name == old else name, data) for name, data in ENTRIES]


def spoilt(**fields):
    def change(info):
        for name, value in fields.items():
            setattr(info, name, value)

    return change


GOOD_ZIP = zipped(ENTRIES)
END = GOOD_ZIP.index(b"PK\x01\x02")
HOSTILE = {
    "deflated": zipped(ENTRIES, compression=zipfile.ZIP_DEFLATED),
    "encrypted": GOOD_ZIP.replace(b"PK\x03\x04\x0a\0\0\0", b"PK\x03\x04\x0a\0\1\0"),
    "a data descriptor": GOOD_ZIP.replace(b"PK\x03\x04\x0a\0\0\0", b"PK\x03\x04\x0a\0\x08\0"),
    "out of the folder": zipped(with_name("labels.txt", "../labels.txt")),
    "absolute": zipped(with_name("labels.txt", "/labels.txt")),
    "backslash": zipped(with_name("golden/inputs.npz", "golden\\inputs.npz")),
    "another case": zipped(with_name("labels.txt", "LABELS.txt")),
    "not ascii": zipped(with_name("labels.txt", "läbels.txt")),
    "twice": zipped([*ENTRIES, ("m0del.onnx", FILES["model.onnx"])]).replace(b"m0del", b"model"),
    "one more": zipped([*ENTRIES, ("z", b"")]),
    "one less": zipped(ENTRIES[:-1]),
    "another order": zipped([ENTRIES[0], *reversed(ENTRIES[1:])]),
    "manifest last": zipped([*ENTRIES[1:], ENTRIES[0]]),
    "a folder": zipped([*ENTRIES, ("golden/", b"")]),
    "a link": zipped(ENTRIES, spoilt(external_attr=0o120777 << 16)),
    "executable": zipped(ENTRIES, spoilt(external_attr=0o100755 << 16)),
    "another time": zipped(ENTRIES, spoilt(date_time=(2026, 1, 2, 3, 4, 6))),
    "extra fields": zipped(ENTRIES, spoilt(extra=b"\x55\x55\x04\0abcd")),
    "a comment of a file": zipped(ENTRIES, spoilt(comment=b"hello")),
    "a comment of all": GOOD_ZIP[:-2] + b"\x05\0hello",
    "in front": b"#!/bin/sh\n" + GOOD_ZIP,
    "behind": GOOD_ZIP + b"\0",
    "between": GOOD_ZIP[:END] + b"\0" + GOOD_ZIP[END:],
    "no directory": GOOD_ZIP[:END],
    "another directory": GOOD_ZIP[:END] + GOOD_ZIP[END:].replace(b"labels", b"lebals"),
    "overlapping": GOOD_ZIP[:END] + GOOD_ZIP[END:].replace(struct.pack("<I", len(ENTRIES[0][1]) + 43), b"\0" * 4, 1),
    "zip64 without need": GOOD_ZIP.replace(struct.pack("<2I", 9, 9), b"\xff" * 8),
    "empty": b"",
    "no bundle": zipped([("a.txt", b"a")]),
    "text": b"a" * 5000,
    "an archive in an archive": zipped([(MANIFEST_FILE, GOOD_ZIP)]),
}


def test_the_good_one_of_these_is_good(tmp_path):
    (tmp_path / "good.vitb").write_bytes(GOOD_ZIP)
    assert read_packed(tmp_path / "good.vitb").manifest.name == "small"


@pytest.mark.parametrize("kind", HOSTILE)
def test_any_other_zip_is_refused(tmp_path, kind):
    assert HOSTILE[kind] != GOOD_ZIP
    (tmp_path / "x.vitb").write_bytes(HOSTILE[kind])
    error = refused(tmp_path / "x.vitb", UnsafeError)
    assert (type(error), error.exit_code) == (ManifestError if "archive in" in kind else ArchiveError, 3)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("deflated", "manifest.json at byte 0 has compression method 8 instead of 0"),
        ("a data descriptor", "manifest.json at byte 0 has flags 8 instead of 0"),
        ("another case", "has a different name or extra fields"),
        ("manifest last", "it does not begin with an uncompressed manifest.json"),
        ("behind", "bytes: trailing data"),
        ("no directory", "bytes: truncated"),
        ("another directory", "(in its directory) does not match the files"),
        ("empty", "it does not begin with an uncompressed manifest.json"),
    ],
)
def test_a_refusal_says_where_and_what(tmp_path, kind, found):
    (tmp_path / "x.vitb").write_bytes(HOSTILE[kind])
    error = refused(tmp_path / "x.vitb")
    assert found in error.found
    assert error.message == f"{tmp_path / 'x.vitb'} is not an intact packed bundle"


@settings(EXAMPLES, max_examples=300)
@given(st.integers(0, 8 * len(GOOD_ZIP) - 1))
def test_no_bit_can_be_another(place):
    spoilt = bytearray(GOOD_ZIP)
    spoilt[place // 8] ^= 1 << place % 8
    refused_bytes(bytes(spoilt))


@settings(EXAMPLES, max_examples=100)
@given(st.integers(0, len(GOOD_ZIP)), st.integers(0, len(GOOD_ZIP)), st.binary(max_size=30))
def test_no_part_can_be_another(start, end, new):
    spoilt = GOOD_ZIP[:start] + new + GOOD_ZIP[max(start, end) :]
    assume(spoilt != GOOD_ZIP)
    refused_bytes(spoilt)


def refused_bytes(data):
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "x.vitb").write_bytes(data)
        refused(Path(place) / "x.vitb", UnsafeError)


def rebuilt(manifest, files, signature=None):
    """A packed bundle that is right but for what is in it."""
    extra = [] if signature is None else [(SIGNATURE_FILE, signature)]
    return zipped([(MANIFEST_FILE, json.dumps(manifest).encode()), *extra, *sorted(files.items())])


def test_a_whole_file_with_another_content_is_refused_by_its_digest(tmp_path):
    (tmp_path / "x.vitb").write_bytes(rebuilt(GOOD, {**FILES, "labels.txt": b"zero\nONE\n"}))
    error = refused(tmp_path / "x.vitb", DigestError)
    assert "x.vitb/labels.txt is not the file that the manifest records" in error.message


@pytest.mark.parametrize("name", ["../up", "/abs", "a//b", "a\\b", "a\0b", "é", "A/../b"])
def test_a_manifest_that_leads_elsewhere_is_refused(tmp_path, name):
    manifest = {**copy.deepcopy(GOOD), "files": [*GOOD["files"], entry(name, b"x")]}
    (tmp_path / "x.vitb").write_bytes(rebuilt(manifest, {**FILES, name: b"x"}))
    assert "lists an invalid path" in refused(tmp_path / "x.vitb", ManifestError).message


def test_names_that_clash_are_refused(tmp_path):
    manifest = {**GOOD, "files": [*GOOD["files"], entry("Labels.txt", b"x")]}
    (tmp_path / "x.vitb").write_bytes(rebuilt(manifest, {**FILES, "Labels.txt": b"x"}))
    assert refused(tmp_path / "x.vitb", ManifestError).found == "labels.txt and Labels.txt"


def test_a_manifest_or_signature_of_absurd_size_is_not_read(tmp_path):
    header = local_header(PackedMember(MANIFEST_FILE, 2**31))
    (tmp_path / "x.vitb").write_bytes(header)
    assert "manifest.json has 2,147,483,648 bytes, more than" in refused(tmp_path / "x.vitb").found
    text = json.dumps(GOOD).encode()
    start = local_header(PackedMember(MANIFEST_FILE, len(text), zlib.crc32(text))) + text
    (tmp_path / "x.vitb").write_bytes(start + local_header(PackedMember(SIGNATURE_FILE, 2**30)))
    assert "model.sig has 1,073,741,824 bytes, more than" in refused(tmp_path / "x.vitb").found


def test_a_file_that_promises_terabytes_is_refused_at_once(tmp_path):
    manifest = {**GOOD, "files": [*GOOD["files"], {"path": "z", "bytes": 10**15, "sha256": "0" * 64}]}
    (tmp_path / "x.vitb").write_bytes(rebuilt(manifest, {**FILES, "z": b""}))
    assert "truncated" in refused(tmp_path / "x.vitb").found


def test_another_digest_than_expected_is_refused(packed):
    sha256 = hashlib.sha256(packed.read_bytes()).hexdigest()
    assert read_packed(packed, expect=sha256).sha256 == sha256
    assert sha256 in refused(packed, DigestError, expect="0" * 64).found


@pytest.mark.parametrize(("name", "found"), [("absent", "no such file"), ("bundle", "a folder")])
def test_what_is_no_file_is_no_packed_bundle(bundle, name, found):
    with pytest.raises(MissingFileError) as caught:
        read_packed(bundle.parent / name)
    assert caught.value.found == found


def test_an_app_that_loads_a_packed_bundle_is_told_how_to_unpack_it(packed):
    with pytest.raises(MissingFileError) as caught:
        load(packed)
    assert caught.value.fix.startswith(f"vitdeploy bundle unpack {packed} -o DIR")


# --- the disk ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing(bundle, packed, tmp_path):
    with largest_file(500):  # the manifest is larger
        refused(packed, StorageError)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(StorageError), replacing_file(tmp_path / "y.vitb", is_packed) as file:
            pack_bundle(bundle, file)
    assert sorted(tmp_path.iterdir()) == before


# --- the commands -----------------------------------------------------------------------------------------------------


def test_the_commands_take_a_bundle_there_and_back(vitdeploy, bundle, tmp_path):
    (bundle / "notes.txt").write_text("mine", encoding="utf-8")
    done = vitdeploy("bundle", "pack", bundle, "-o", "x.vitb")
    digest = hashlib.sha256((tmp_path / "x.vitb").read_bytes()).hexdigest()
    assert done.returncode == 0, done.stderr
    assert "left out (not listed in the manifest): 'notes.txt'" in done.stdout
    then = done.stdout.splitlines()[-1].removeprefix("next: vitdeploy ").split()
    assert then == ["bundle", "unpack", "x.vitb", "-o", "x", "--expect-digest", f"sha256:{digest}"]
    done = vitdeploy(*then)
    assert done.returncode == 0, done.stderr
    (bundle / "notes.txt").unlink()
    assert content(tmp_path / "x") == content(bundle)
    assert [path for path in (tmp_path / "x").rglob("*") if path.is_file() and path.stat().st_mode & 0o111] == []
    for each in ("x", "x.vitb"):
        document = vitdeploy("bundle", "verify", each, "--json").document
        manifest = hashlib.sha256((bundle / MANIFEST_FILE).read_bytes()).hexdigest()
        assert document["manifest_sha256"] == manifest
        assert (document["name"], document["signed"], document["signed_by"]) == ("small", False, None)
        expected = manifest if each == "x" else digest
        assert vitdeploy("bundle", "verify", each, "--expect-digest", expected.upper()).returncode == 0
        done = vitdeploy("bundle", "verify", each, "--expect-digest", f"sha256:{'0' * 64}")
        assert done.returncode == 3
        assert f"sha256:{expected} of the " in done.stderr


def test_a_bundle_takes_the_place_of_another(vitdeploy, bundle, packed, tmp_path):
    for _ in range(2):
        assert vitdeploy("bundle", "unpack", packed, "-o", "out").returncode == 0
        assert vitdeploy("bundle", "pack", bundle, "-o", packed).returncode == 0
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    done = vitdeploy("bundle", "unpack", packed, "-o", "out")
    assert (done.returncode, "contains other files" in done.stderr) == (2, True)
    done = vitdeploy("bundle", "verify", "out")
    assert (done.returncode, "(not listed in the manifest): 'notes.txt'" in done.stdout) == (0, True)


def test_what_is_not_as_it_was_made_is_exit_3(vitdeploy, bundle, packed, tmp_path):
    (bundle / "labels.txt").write_bytes(b"ZERO\none\n")
    assert vitdeploy("bundle", "verify", bundle).returncode == 3
    done = vitdeploy("bundle", "pack", bundle, "-o", "new.vitb")
    assert (done.returncode, (tmp_path / "new.vitb").exists()) == (3, False)
    packed.write_bytes(packed.read_bytes()[:-1])
    assert vitdeploy("bundle", "verify", packed).returncode == 3
    done = vitdeploy("bundle", "unpack", packed, "-o", "out")
    assert (done.returncode, "VD3107" in done.stderr, (tmp_path / "out").exists()) == (3, True, False)
    assert list(tmp_path.glob(".tmp-*")) == []


def test_wrong_arguments_are_exit_2(vitdeploy, bundle, packed):
    done = vitdeploy("bundle", "verify", packed, "--expect-digest", "sha1:12")
    assert (done.returncode, "is not a SHA-256" in done.stderr) == (2, True)
    done = vitdeploy("bundle", "pack", bundle, "-o", bundle / "x.vitb")
    assert (done.returncode, "inside the bundle" in done.stderr) == (2, True)
    done = vitdeploy("inspect", packed)
    assert (done.returncode, "vitdeploy bundle unpack" in done.stderr) == (2, True)
    assert vitdeploy("bundle", "verify", "absent").returncode == 2
    assert vitdeploy("bundle", "unpack", "absent", "-o", "out").returncode == 2
