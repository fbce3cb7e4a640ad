"""Read a bundle folder: `manifest.json`, format 1, and the digests of the files that it lists.

Rules of the format, each with its error:
- `manifest.json` is UTF-8 JSON of at most 8 MiB, without duplicate keys, and decodes as `spec.Manifest`.
- every path is relative, of segments in `[A-Za-z0-9._-]`, none of them `.` or `..`, at most 240 characters.
- every file that a graph, engine, golden set or the labels name stands in `files`.
- a listed file is a regular file inside the folder, of the recorded size and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitdeploy.errors import DigestError, ManifestError, MissingFileError
from vitdeploy.spec import MANIFEST_FORMAT, DecodeError, FileEntry, Manifest, decode

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 8 * 1024 * 1024
MAX_FILES = 10_000
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")


def is_bundle(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def read_bundle(folder: Path) -> Manifest:
    """The manifest of the bundle in `folder`, checked against the rules above (but not the files' digests).

    Raises:
        MissingFileError: no such folder, or no manifest in it.
        ManifestError: the manifest breaks a rule.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise MissingFileError(
            f"{folder} is not a bundle",
            found=f"no {MANIFEST_FILE} in it" if folder.is_dir() else "no such folder",
            wanted="a folder made by `vitdeploy run` or `vitdeploy compile`",
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"{path} is too large",
            found=f"{path.stat().st_size:,} bytes",
            wanted=f"at most {MAX_MANIFEST_BYTES:,} bytes",
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not JSON", found=str(error)[:200]) from None
    if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > MANIFEST_FORMAT:
        raise ManifestError(
            f"{path} has a newer format",
            found=str(data["format"]),
            wanted=str(MANIFEST_FORMAT),
            fix="pip install --upgrade vitdeploy",
        )
    try:
        manifest = decode(Manifest, data)
    except DecodeError as error:
        shown = "; ".join(error.problems[:5])
        raise ManifestError(f"{path} does not fit format {MANIFEST_FORMAT}", found=shown) from None
    _check_paths(path, manifest)
    return manifest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return dict(pairs)


def _check_paths(path: Path, manifest: Manifest) -> None:
    if len(manifest.files) > MAX_FILES:
        raise ManifestError(f"{path} lists too many files", found=str(len(manifest.files)), wanted=f"<= {MAX_FILES}")
    listed = [entry.path for entry in manifest.files]
    for name in listed:
        segments = name.split("/")
        if len(name) > 240 or any(s in (".", "..") or not _SEGMENT.fullmatch(s) for s in segments):
            raise ManifestError(
                f"{path} names a path that is not allowed",
                found=repr(name)[:120],
                wanted="relative, segments of A-Z a-z 0-9 . _ -",
            )
    if len(set(listed)) != len(listed):
        raise ManifestError(f"{path} lists a file twice")
    named = [graph.file for graph in manifest.graphs.values()]
    named += [name for engine in manifest.engines for name in (engine.graph, *engine.files)]
    named += [manifest.golden.inputs, manifest.golden.outputs] if manifest.golden else []
    named += [manifest.labels] if manifest.labels else []
    missing = sorted(set(named) - set(listed))
    if missing:
        raise ManifestError(f"{path} uses files that it does not list", found=", ".join(missing[:5]))


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Check size and SHA-256 of the files in `names`, or of all.

    Raises:
        DigestError: a file is missing, is no regular file, or differs from what the manifest records.
    """
    entries = {entry.path: entry for entry in manifest.files}
    for name in entries if names is None else names:
        verify_file(folder, entries[name])


def verify_file(folder: Path, entry: FileEntry) -> None:
    path = folder / entry.path
    if path.is_symlink() or not path.is_file():
        raise DigestError(f"{path} is missing or not a regular file", fix="copy the bundle again, or make it again")
    size = path.stat().st_size
    if size != entry.bytes or file_sha256(path) != entry.sha256:
        raise DigestError(
            f"{path} is not the file that the manifest records",
            found=f"{size:,} bytes" if size != entry.bytes else "another SHA-256",
            wanted=f"{entry.bytes:,} bytes, sha256 {entry.sha256[:16]}...",
            fix="copy the bundle again, or make it again",
        )


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
