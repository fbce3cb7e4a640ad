"""WebDataset tars: images in archives with their label files, read in place.

Nothing is extracted. The standard library's tarfile reads the headers once; the offset and size of each image are kept.
Consecutive files with the same name up to the first dot form a sample: an image, and a label in .cls (a number or a
name) or in .json ("label", "cls" or "class"). Source: the WebDataset format's specification
(https://github.com/webdataset/webdataset).
"""

import tarfile  # noqa: TID251 - an index of headers: no member is ever extracted
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from vitdeploy.data.containers import held, listing
from vitdeploy.errors import DataError
from vitdeploy.limits import bounded
from vitdeploy.publish import storage_errors

SUFFIX = ".tar"
IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif"})
LABEL, DOCUMENT = "cls", "json"
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
BLOCK = 512
# Maximum bytes of a header, such as a long name; of a label; of the JSON of one sample.
MAX_HEADER, MAX_LABEL, MAX_JSON = 1 << 20, 4096, 4 << 20
# Limit for the offsets in a tar; the memory of `tarfile` is limited separately.
BOUND_BYTES = 8 << 30


@dataclass
class _Sample:
    """The files of one key. `key`: its name in the tar. `files`: offset and size, by suffix."""

    key: str
    files: dict[str, tuple[int, int]] = field(default_factory=dict)


def list_tars(paths: Sequence[Path], root: Path, labelled: bool) -> listing.Listing:
    """Return the images of some tars, in the order of their members.

    Args:
        root: the folder that names are relative to: "shard-000.tar/0001.jpg".
        labelled: read the label of each.

    Raises:
        DataError: a tar that is compressed, damaged, or contains links or other special members; a sample without an
            image, with several, or without a label; two samples with the same key.
        LimitError: reading exceeds a limit.
    """
    names, labels = listing.NameColumn(), listing.LabelColumn(root if len(paths) > 1 else paths[0])
    containers, which, offsets, sizes = list[held.Container](), array("i"), array("q"), array("q")
    for number, path in enumerate(paths):
        first, below = len(names), path.relative_to(root).as_posix()
        with storage_errors(path), bounded(f"read {path.name}", min(path.stat().st_size, BOUND_BYTES)):
            container = held.Container.of(path)
            containers.append(container)
            with container.open() as file:
                for sample in _samples(file, container.size, path):
                    suffix, (offset, size) = _image(sample, path)
                    names.add(f"{below}/{sample.key}.{suffix}")
                    which.append(number)
                    offsets.append(offset)
                    sizes.append(size)
                    if labelled:
                        labels.add(_label(file, sample, path), f"{path}/{sample.key}")
        _check_once(names, first, path)
    places = listing.Places(
        containers, np.array(which, np.int32), np.array(offsets, np.int64), np.array(sizes, np.int64), held.FilePart
    )
    return listing.Listing(root, names, *labels.finish(lambda: listing.listed_names(root)), places)


def has_labels(path: Path) -> bool:
    """Whether the first sample of a tar has a label; errors as `list_tars`."""
    with storage_errors(path):
        container = held.Container.of(path)
        with container.open() as file:
            first = next(_samples(file, container.size, path), None)
            if first is None:
                return False
            return LABEL in first.files or _in_json(file, first, path) is not None


def _image(sample: _Sample, path: Path) -> tuple[str, tuple[int, int]]:
    found = [suffix for suffix in sample.files if suffix.lower() in IMAGES]
    if len(found) != 1:
        raise DataError(
            f"the sample {sample.key!r} of {path} has {'several images' if found else 'no image'}",
            found=", ".join(f".{suffix}" for suffix in sample.files)[:200] or "no files",
            expected=f"one file that ends in {', '.join(sorted(f'.{suffix}' for suffix in IMAGES))} for each key",
            fix="write the shards with one image per sample",
        )
    return found[0], sample.files[found[0]]


def _label(file: IO[bytes], sample: _Sample, path: Path) -> int | str:
    text = _content(file, sample, LABEL, MAX_LABEL, path)
    found = None if text is None else _text_label(text, f"{path}/{sample.key}.{LABEL}")
    other = _in_json(file, sample, path)
    label = other if found is None else found
    if label is None:
        raise DataError(
            f"the sample {sample.key!r} of {path} has no label",
            found=", ".join(f".{suffix}" for suffix in sample.files)[:200],
            expected='a number or a name in .cls, or in .json as "label"',
            fix=f"add a label to each image; or {listing.NO_LABELS}",
        )
    if found is not None and other is not None and not listing.same_label(found, other):
        raise DataError(
            f"the sample {sample.key!r} of {path} has two labels",
            found=f"{found!r} in .cls, {other!r} in .json",
            expected="one label",
            fix=f"write the shards again with the right one; or {listing.NO_LABELS}",
        )
    return label


def _text_label(content: bytes, name: str) -> int | str:
    try:
        found = listing.read_label(content.decode("utf-8"))
    except UnicodeDecodeError:
        found = ""
    if found == "":
        raise DataError(f"{name} contains no label", found=repr(content[:60]), expected="a number or a name, in UTF-8")
    return found


def _in_json(file: IO[bytes], sample: _Sample, path: Path) -> int | str | None:
    content = _content(file, sample, DOCUMENT, MAX_JSON, path)
    return None if content is None else listing.label_in_json(content, f"{path}/{sample.key}.{DOCUMENT}")


def _content(file: IO[bytes], sample: _Sample, suffix: str, most: int, path: Path) -> bytes | None:
    if suffix not in sample.files:
        return None
    offset, size = sample.files[suffix]
    if size > most:
        raise DataError(
            f"{path}/{sample.key}.{suffix} is too large", found=f"{size:,} bytes", expected=f"at most {most:,}"
        )
    here = file.tell()
    file.seek(offset)
    content = file.read(size)
    file.seek(here)
    return content


def _check_once(names: listing.NameColumn, first: int, path: Path) -> None:
    """Raise DataError if two samples of a tar, whose names start at `first`, have the same key."""
    twice = listing.first_repeated(_key(names, index) for index in range(first, len(names)))
    if twice is not None:
        raise DataError(
            f"two samples of {path} have the same key",
            found=_key(names, first + twice).decode("utf-8", "backslashreplace"),
            expected="consecutive files for each sample, and a unique key per sample",
            fix="sort the tar by name (tar --sort=name), or write it again",
        )


def _key(names: listing.NameColumn, index: int) -> bytes:
    return names.encoded(index).rpartition(b".")[0]


def _samples(file: IO[bytes], size: int, path: Path) -> Iterator[_Sample]:
    """Yield the samples of an open tar of `size` bytes. `file` may be read and sought between them if its position is
    restored."""
    sample: _Sample | None = None
    for member in _members(file, size, path):
        split = _split(member.name)
        if split is None:
            continue
        key, suffix = split
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if suffix in sample.files:
            raise DataError(f"{path} contains {member.name!r} twice", found="two members", expected="one")
        sample.files[suffix] = (member.offset_data, member.size)
    if sample is not None:
        yield sample


def _split(name: str) -> tuple[str, str] | None:
    """Return the key and suffix of a member, split at the first dot of its file name; None for a hidden file, or
    without a suffix."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return (f"{folder}{slash}{stem}", suffix) if stem and dot else None


def _members(file: IO[bytes], size: int, path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar, each checked to be inside the file and to have a plain name."""
    file.seek(0)
    _check_plain(file.read(BLOCK), path)
    file.seek(0)
    last = "the start"
    bounded_file = _Headers(file)
    try:
        archive = tarfile.TarFile(fileobj=bounded_file, mode="r", errorlevel=2)  # type: ignore[arg-type]
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # or it keeps each of a million
            _check_member(member, size, path)
            last = repr(member.name)
            if member.isreg():
                member.name = member.name.removeprefix("./")
                yield member
    except (tarfile.TarError, ValueError, UnicodeError, OverflowError) as error:
        raise _damaged(path, f"after {last}: {str(error)[:120] or type(error).__name__}") from None
    _check_end(file, archive.offset, path, last)


class _Headers:
    """An open tar for `tarfile` with a limit on the size of reads: it would read headers of any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell: Callable[[], int] = file.tell
        self.seek: Callable[..., int] = file.seek

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER:
            raise ValueError(f"a header of {size:,} bytes")
        return self._file.read(size)


def _check_plain(start: bytes, path: Path) -> None:
    """Raise DataError for a file that is not a tar, or a compressed one."""
    packed = next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None)
    if packed is not None or path.name.lower().endswith(COMPRESSED_SUFFIXES):
        raise compressed(path, packed)
    if len(start) < BLOCK:
        raise _damaged(path, f"{len(start)} bytes" if start else "an empty file")


def compressed(path: Path, packed: str | None = None) -> DataError:
    return DataError(
        f"{path} is a compressed tar",
        found=f"{packed or path.suffix[1:]} compression",
        expected="a plain .tar: images are read in place, which a compressed file does not allow",
        fix="decompress it once (gunzip, bunzip2, unxz or zstd -d); JPEG and PNG hardly grow",
    )


def _check_member(member: tarfile.TarInfo, size: int, path: Path) -> None:
    """Raise DataError for a forbidden or incomplete member."""
    name = member.name
    parts = name.split("/")
    kind = "a sparse file" if member.issparse() else _kind(member)
    if kind is not None:
        raise DataError(
            f"{path} contains {kind}, {name!r}",
            found="a member that refers to another file, or is not stored byte for byte",
            expected="only files and folders",
            fix="write the tar without it (tar --dereference --hard-dereference, without --sparse)",
        )
    if ".." in parts or name.startswith("/") or "\0" in name:
        raise DataError(
            f"{path} contains a member whose path leaves the archive", found=repr(name), expected="a plain name"
        )
    if member.size < 0 or member.offset_data + member.size > size:
        there = max(0, size - member.offset_data)
        raise _damaged(path, f"{name!r} has {member.size:,} bytes, but only {there:,} are present")


def _kind(member: tarfile.TarInfo) -> str | None:
    """Return a description of a member that is neither a file nor a folder, else None."""
    if member.issym() or member.islnk():
        return "a link"
    return None if member.isreg() or member.isdir() else "a device, a pipe or another special member"


def _check_end(file: IO[bytes], offset: int, path: Path, last: str) -> None:
    """Raise DataError unless the tar has an end-of-archive marker and no data after it."""
    file.seek(offset)
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise _damaged(path, f"no end-of-archive marker after {last}: the file is truncated")
    if any(block):
        raise _damaged(path, f"no header after {last}")
    while block := file.read(1 << 20):
        if any(block):
            raise DataError(
                f"{path} has trailing data after the end-of-archive marker",
                found=f"bytes after {last} that tar readers ignore",
                expected="one archive",
                fix="concatenated tars are not supported: pass a folder of tars",
            )


def _damaged(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} is not a complete tar", found=found, expected="an intact tar", fix="download or write it again"
    )
