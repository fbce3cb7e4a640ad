"""Read a bundle folder: `manifest.json`, format 1, and the digests of the files that it lists.

Rules of the format, each with its error:
- `manifest.json` is UTF-8 JSON of at most 8 MiB, without duplicate keys or NaN, and decodes as `spec.Manifest`.
- `preprocess` has 1 or 3 channels with a std above 0 each, and sides of 1 to 8192 pixels.
- every engine has a file, inputs and outputs, a batch of 1 to 65,536, and no runtime option but vitdeploy's own; so has
  every part of one, and its files are among the engine's; the tensors of its parts fit the engine's flow.
- every path is relative, of segments in `[A-Za-z0-9._-]`, none of them `.` or `..`, at most 240 characters.
- every one of `sizes` is "HEIGHTxWIDTH", and names a bundle of its own in `sizes/`.
- every file that a graph, engine, golden set, the labels, a tokenizer or a monitor name stands in `files`.
- a listed file is a regular file inside the folder, reached through no link, of the recorded size and SHA-256.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitdeploy.bundle.layout import begins_with, mismatches, tensors_of
from vitdeploy.errors import DigestError, ManifestError, MissingFileError, VitdeployError, quoted
from vitdeploy.paths import is_dir, is_file
from vitdeploy.publish import restore
from vitdeploy.spec import (
    MANIFEST_FORMAT,
    MAX_BATCH,
    DecodeError,
    EngineSpec,
    FileEntry,
    Manifest,
    PreprocessSpec,
    decode,
    postprocess_of,
    tokenizer_file,
)

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 8 * 1024 * 1024
SIZES_FOLDER = "sizes"
MONITOR_FILE = "monitor.json"
MAX_FILES = 10_000
MAX_SIDE = 8192
# A runtime has options that name files to read or folders to write; a bundle must not set those.
ENGINE_OPTIONS = {
    *("INFERENCE_PRECISION_HINT", "SHAPE_NODES", "SNIPPETS_MODE"),
    *("EXECUTION_MODE_HINT", "ENABLE_STARTUP_FALLBACK", "ENABLE_RUNTIME_FALLBACK"),
}
_SIZE = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")


def is_bundle(folder: Path) -> bool:
    """Whether a bundle lies there. One that was moved aside to be replaced, and was not, has its name again then."""
    file = folder / MANIFEST_FILE
    return is_file(file) or (restore(folder) and is_file(file))


def read_bundle(folder: Path) -> Manifest:
    """The manifest of the bundle in `folder`, checked against the rules above (but not the files' digests).

    Raises:
        MissingFileError: no such folder, or no manifest in it.
        ManifestError: the manifest breaks a rule.
    """
    return parse_manifest(manifest_bytes(folder), folder / MANIFEST_FILE)


def manifest_bytes(folder: Path) -> bytes:
    """The bytes of the `manifest.json` of a bundle's folder.

    Raises:
        MissingFileError: no such folder, or no manifest in it.
        ManifestError: it is larger than any manifest.
    """
    path = folder / MANIFEST_FILE
    if not is_bundle(folder):
        packed = is_packed(folder)
        absent = f"no {MANIFEST_FILE} in it" if is_dir(folder) else "no such folder"
        raise MissingFileError(
            f"{folder} is not a bundle" + (", but a packed one" if packed else ""),
            found="a file" if is_file(folder) else absent,
            expected="a folder made by `vitdeploy run` or `vitdeploy compile`",
            fix=f"vitdeploy bundle unpack {quoted(folder)} -o DIR, or vitdeploy.runtime.unpack"
            if packed
            else "check the path; vitdeploy compile GRAPH --target TARGET -o DIR makes one of a graph",
        )
    if (size := path.stat().st_size) > MAX_MANIFEST_BYTES:
        raise too_large(path, size, MAX_MANIFEST_BYTES)
    return path.read_bytes()


def is_packed(path: Path) -> bool:
    """Whether a file starts as a packed bundle does; the rest is judged when it is read."""
    if not is_file(path):
        return False
    with path.open("rb") as file:
        return begins_with(file.read(64), MANIFEST_FILE)


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """The manifest that the bytes of a `manifest.json` say; `path` is what errors call it.

    Raises:
        ManifestError: it breaks a rule.
    """
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not JSON", found=str(error)[:200]) from None
    if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > MANIFEST_FORMAT:
        raise ManifestError(
            f"{path} has a newer format",
            found=str(data["format"]),
            expected=str(MANIFEST_FORMAT),
            fix="pip install --upgrade vitdeploy",
        )
    try:
        manifest = decode(Manifest, data)
    except DecodeError as error:
        shown = "; ".join(error.problems[:5])
        raise ManifestError(f"{path} does not fit format {MANIFEST_FORMAT}", found=_printable(shown)) from None
    except RecursionError:
        raise ManifestError(f"{path} is nested too deeply") from None
    _check_values(path, manifest)
    _check_paths(path, manifest)
    return manifest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _printable(text: str) -> str:
    """Text of an external file, fit to be shown in a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:500])


def _check_values(path: Path, manifest: Manifest) -> None:
    if manifest.preprocess is not None:
        check_preprocess(path, manifest.preprocess)
    if (manifest.preprocess is None) != (manifest.task == "sequence"):
        told = "does not say how images are prepared" if manifest.preprocess is None else "prepares images for tokens"
        raise ManifestError(f"{path} {told}", expected="preprocess of every task but sequence")
    if (expected := postprocess_of(manifest.task)) is not None and not isinstance(manifest.postprocess, expected):
        raise ManifestError(
            f"{path} does not say how the outputs are read", expected=f"postprocess, for the task {manifest.task}"
        )
    if manifest.format != MANIFEST_FORMAT:
        raise ManifestError(f"{path} has an unknown format", found=str(manifest.format), expected=str(MANIFEST_FORMAT))
    for engine in manifest.engines:
        _check_engine(path, engine)
        if manifest.postprocess is not None and (misfit := manifest.postprocess.misfit(engine.outputs)):
            raise ManifestError(
                f"{path} does not fit its engine {_printable(engine.artifact)}",
                found=_printable(misfit),
                expected="postprocess of this model",
                fix="make the bundle again",
            )
    for size in manifest.sizes:
        if not _SIZE.fullmatch(size):
            raise ManifestError(f"{path} names no image size", found=_printable(repr(size)), expected="such as 384x384")


def check_preprocess(where: object, spec: PreprocessSpec, kind: type[VitdeployError] = ManifestError) -> None:
    """Raise an error of a kind for a preprocessing out of a file from anybody that cannot be done."""
    sides = (*((spec.resize,) if isinstance(spec.resize, int) else spec.resize), *spec.crop)
    if (
        spec.channels not in (1, 3)
        or len(spec.std) != spec.channels
        or min(spec.std) <= 0
        or not all(1 <= side <= MAX_SIDE for side in sides)
    ):
        raise kind(
            f"{where} has a preprocessing that is not allowed",
            found=f"sides {sides}, mean {spec.mean[:4]}, std {spec.std[:4]}",
            expected=f"sides of 1 to {MAX_SIDE} pixels, 1 or 3 channels, a std above 0 for each",
        )


def _check_engine(path: Path, engine: EngineSpec) -> None:
    unknown = sorted(set(engine.options) - ENGINE_OPTIONS)
    if unknown or not 1 <= engine.batch <= MAX_BATCH or not (engine.files and engine.inputs and engine.outputs):
        raise ManifestError(
            f"{path} has an engine that is not allowed",
            found=_printable(f"{len(engine.files)} files, batch {engine.batch}, options {unknown}"),
            expected=f"a file, inputs, outputs, a batch of 1 to {MAX_BATCH:,}, options among {sorted(ENGINE_OPTIONS)}",
        )
    problems = mismatches(engine.flow, tensors_of(engine.parts)) if engine.flow is not None else []
    if problems:
        raise ManifestError(
            f"{path} has an engine whose graphs do not fit together",
            found=_printable("; ".join(problems)),
            expected="names, types and sizes that agree from graph to graph",
        )
    for part in engine.parts:
        _check_engine(path, part)
        unlisted = sorted(set(part.files) - set(engine.files))  # what is verified before an engine is loaded
        if unlisted:
            raise ManifestError(
                f"{path} has a part of an engine with files that are not the engine's",
                found=_printable(", ".join(unlisted[:5])),
                expected="every file of a part among the files of its engine",
            )


def _check_paths(path: Path, manifest: Manifest) -> None:
    if len(manifest.files) > MAX_FILES:
        raise ManifestError(f"{path} lists too many files", found=str(len(manifest.files)), expected=f"<= {MAX_FILES}")
    listed = [entry.path for entry in manifest.files]
    for name in listed:
        if not plain_path(name):
            raise ManifestError(
                f"{path} names a path that is not allowed",
                found=repr(name)[:120],
                expected="relative, segments of A-Z a-z 0-9 . _ -",
            )
    if len(set(listed)) != len(listed):
        raise ManifestError(f"{path} lists a file twice")
    named = [graph.file for graph in manifest.graphs.values()]
    named += [name for engine in manifest.engines for name in files_of(engine)]
    if (golden := manifest.golden) is not None:
        named += [golden.inputs, golden.outputs, *(engine.outputs for engine in golden.engines.values())]
    named += [manifest.labels] if manifest.labels else []
    named += [file] if (file := tokenizer_file(manifest.postprocess)) is not None else []
    named += [manifest.monitor] if manifest.monitor else []
    named += [f"{SIZES_FOLDER}/{size}/{MANIFEST_FILE}" for size in manifest.sizes]
    missing = sorted(set(named) - set(listed))
    if missing:
        raise ManifestError(f"{path} uses files that it does not list", found=_printable(", ".join(missing[:5])))


def files_of(engine: EngineSpec) -> list[str]:
    """Every file that an engine names: its placement, what the runtime loads, and those of its parts."""
    own = [engine.graph] if engine.graph else []
    return [*own, *engine.files, *(name for part in engine.parts for name in files_of(part))]


def require_graphs(folder: Path, manifest: Manifest, what: str) -> None:
    """Raise MissingFileError if the bundle is slim, that is, has no graphs; `what` needs them."""
    if not manifest.graphs:
        raise MissingFileError(
            f"{folder} is a slim bundle, and {what} needs its graphs",
            found=f"engines for {', '.join(sorted({engine.target for engine in manifest.engines}))} alone",
            expected="the whole bundle",
            fix="use the bundle that it was packed from",
        )


def plain_path(name: str) -> bool:
    """Whether a name out of a document is a path that may be read and written below a folder, on any file system."""
    return len(name) <= 240 and all(s not in (".", "..") and _SEGMENT.fullmatch(s) for s in name.split("/"))


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Check size and SHA-256 of the files in `names`, or of all.

    Raises:
        DigestError: a file is missing, is no regular file, or differs from what the manifest records.
    """
    entries = {entry.path: entry for entry in manifest.files}
    for name in entries if names is None else names:
        verify_file(folder, entries[name])


def verify_file(folder: Path, entry: FileEntry) -> None:
    path = regular_file(folder, entry)
    if file_sha256(path) != entry.sha256:
        raise other_file(path, entry, "another SHA-256")


def regular_file(folder: Path, entry: FileEntry) -> Path:
    """The path of a listed file, which is inside of `folder`, reached through no link, and of the recorded size.

    Raises:
        DigestError: it is not.
    """
    path = folder / entry.path
    inside = (path, *path.parents)[: entry.path.count("/") + 1]
    if any(part.is_symlink() for part in inside) or not path.is_file():
        raise DigestError(f"{path} is missing or not a regular file", fix="copy the bundle again, or make it again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise other_file(path, entry, f"{size:,} bytes")
    return path


def other_file(path: Path, entry: FileEntry, found: str) -> DigestError:
    return DigestError(
        f"{path} is not the file that the manifest records",
        found=found,
        expected=f"{entry.bytes:,} bytes, sha256 {entry.sha256[:16]}...",
        fix="copy the bundle again, or make it again",
    )


def too_large(path: Path, size: int, most: int) -> ManifestError:
    return ManifestError(f"{path} is too large", found=f"{size:,} bytes", expected=f"at most {most:,} bytes")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
