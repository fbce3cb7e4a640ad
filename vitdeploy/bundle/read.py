"""Read a bundle folder: `manifest.json`, format 1, and the digests of the files that it lists.

Rules of the format, each with its error:
- `manifest.json` is UTF-8 JSON of at most 8 MiB, without duplicate keys or NaN, and decodes as `spec.Manifest`.
- `preprocess` has 1 or 3 channels with a std above 0 each, and sides of 1 to 8192 pixels.
- every engine, and every part of one, has a file, inputs and outputs, a batch of 1 to 65,536, and only vitdeploy's own
  runtime options; the files of parts are among the engine's; the tensors of its parts fit the engine's flow.
- every path is relative, at most 240 characters long, with segments in `[A-Za-z0-9._-]`, none of them `.` or `..`.
- each of `sizes` is "HEIGHTxWIDTH" and names a separate bundle in `sizes/`.
- every file named by a graph, engine, golden set, labels, tokenizer or monitor is listed in `files`.
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
    """Return whether `folder` is a bundle. A bundle left aside by an interrupted replacement is restored first."""
    file = folder / MANIFEST_FILE
    return is_file(file) or (restore(folder) and is_file(file))


def read_bundle(folder: Path) -> Manifest:
    """Return the manifest of the bundle in `folder`, checked against the rules above (digests are not checked).

    Raises:
        MissingFileError: no such folder, or no manifest in it.
        ManifestError: the manifest breaks a rule.
    """
    return parse_manifest(manifest_bytes(folder), folder / MANIFEST_FILE)


def manifest_bytes(folder: Path) -> bytes:
    """Return the bytes of a bundle's `manifest.json`.

    Raises:
        MissingFileError: no such folder, or no manifest in it.
        ManifestError: it is larger than 8 MiB.
    """
    path = folder / MANIFEST_FILE
    if not is_bundle(folder):
        packed = is_packed(folder)
        absent = f"no {MANIFEST_FILE} in it" if is_dir(folder) else "no such folder"
        raise MissingFileError(
            f"{folder} is not a bundle" + (" folder but a packed bundle" if packed else ""),
            found="a file" if is_file(folder) else absent,
            expected="a folder made by `vitdeploy run` or `vitdeploy compile`",
            fix=f"vitdeploy bundle unpack {quoted(folder)} -o DIR, or vitdeploy.runtime.unpack"
            if packed
            else "check the path; vitdeploy compile GRAPH --target TARGET -o DIR makes a bundle from a graph",
        )
    if (size := path.stat().st_size) > MAX_MANIFEST_BYTES:
        raise too_large(path, size, MAX_MANIFEST_BYTES)
    return path.read_bytes()


def is_packed(path: Path) -> bool:
    """Return whether a file starts like a packed bundle; the rest is checked when it is read."""
    if not is_file(path):
        return False
    with path.open("rb") as file:
        return begins_with(file.read(64), MANIFEST_FILE)


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """Return the manifest in the bytes of a `manifest.json`; `path` names it in errors.

    Raises:
        ManifestError: it breaks a rule.
    """
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not JSON", found=str(error)[:200]) from None
    if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > MANIFEST_FORMAT:
        raise ManifestError(
            f"{path} has a newer format than this vitdeploy reads",
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
    """Text from an external file with unprintable characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:500])


def _check_values(path: Path, manifest: Manifest) -> None:
    if manifest.preprocess is not None:
        check_preprocess(path, manifest.preprocess)
    if (manifest.preprocess is None) != (manifest.task == "sequence"):
        problem = "has no preprocess" if manifest.preprocess is None else "has preprocess, but its inputs are tokens"
        raise ManifestError(f"{path} {problem}", expected="preprocess for every task except sequence")
    if (expected := postprocess_of(manifest.task)) is not None and not isinstance(manifest.postprocess, expected):
        raise ManifestError(
            f"{path} has no postprocess for its task", expected=f"postprocess of the task {manifest.task}"
        )
    if manifest.format != MANIFEST_FORMAT:
        raise ManifestError(f"{path} has an unknown format", found=str(manifest.format), expected=str(MANIFEST_FORMAT))
    for engine in manifest.engines:
        _check_engine(path, engine)
        if manifest.postprocess is not None and (misfit := manifest.postprocess.misfit(engine.outputs)):
            raise ManifestError(
                f"postprocess in {path} does not fit the engine {_printable(engine.artifact)}",
                found=_printable(misfit),
                expected="postprocess that reads the engine's outputs",
                fix="make the bundle again",
            )
    for size in manifest.sizes:
        if not _SIZE.fullmatch(size):
            raise ManifestError(
                f"{path} has an invalid image size", found=_printable(repr(size)), expected="such as 384x384"
            )


def check_preprocess(where: object, spec: PreprocessSpec, kind: type[VitdeployError] = ManifestError) -> None:
    """Raise an error of class `kind` if the preprocessing, read from an untrusted file, is not valid."""
    sides = (*((spec.resize,) if isinstance(spec.resize, int) else spec.resize), *spec.crop)
    if (
        spec.channels not in (1, 3)
        or len(spec.std) != spec.channels
        or min(spec.std) <= 0
        or not all(1 <= side <= MAX_SIDE for side in sides)
    ):
        raise kind(
            f"{where} has invalid preprocessing",
            found=f"sides {sides}, mean {spec.mean[:4]}, std {spec.std[:4]}",
            expected=f"sides of 1 to {MAX_SIDE} pixels, 1 or 3 channels, a std above 0 for each",
        )


def _check_engine(path: Path, engine: EngineSpec) -> None:
    unknown = sorted(set(engine.options) - ENGINE_OPTIONS)
    if unknown or not 1 <= engine.batch <= MAX_BATCH or not (engine.files and engine.inputs and engine.outputs):
        raise ManifestError(
            f"{path} has an invalid engine",
            found=_printable(f"files: {len(engine.files)}, batch: {engine.batch}, unknown options: {unknown}"),
            expected=f"a file, inputs, outputs, a batch of 1 to {MAX_BATCH:,}, options among {sorted(ENGINE_OPTIONS)}",
        )
    problems = mismatches(engine.flow, tensors_of(engine.parts)) if engine.flow is not None else []
    if problems:
        raise ManifestError(
            f"{path} has an engine whose graphs do not fit together",
            found=_printable("; ".join(problems)),
            expected="tensor names, types and sizes that match between graphs",
        )
    for part in engine.parts:
        _check_engine(path, part)
        unlisted = sorted(set(part.files) - set(engine.files))  # what is verified before an engine is loaded
        if unlisted:
            raise ManifestError(
                f"{path} has an engine part with files that its engine does not list",
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
                f"{path} lists an invalid path",
                found=repr(name)[:120],
                expected="a relative path of at most 240 characters: A-Z a-z 0-9 . _ - /",
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
    """Return every file of an engine: its placement, the files that the runtime loads, and those of its parts."""
    own = [engine.graph] if engine.graph else []
    return [*own, *engine.files, *(name for part in engine.parts for name in files_of(part))]


def require_graphs(folder: Path, manifest: Manifest, what: str) -> None:
    """Raise MissingFileError if the bundle is slim, that is, without graphs; `what` names the operation that needs
    them."""
    if not manifest.graphs:
        raise MissingFileError(
            f"{folder} is a slim bundle, and {what} needs its graphs",
            found=f"engines for {', '.join(sorted({engine.target for engine in manifest.engines}))} only",
            expected="a bundle with graphs",
            fix="use the full bundle that it was made from",
        )


def plain_path(name: str) -> bool:
    """Return whether a name from a document is a relative path that is safe to read and write on any file system."""
    return len(name) <= 240 and all(s not in (".", "..") and _SEGMENT.fullmatch(s) for s in name.split("/"))


def verify_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Check size and SHA-256 of the files in `names`, or of all.

    Raises:
        DigestError: a file is missing, not a regular file, or differs from the manifest's record.
    """
    entries = {entry.path: entry for entry in manifest.files}
    for name in entries if names is None else names:
        verify_file(folder, entries[name])


def verify_file(folder: Path, entry: FileEntry) -> None:
    path = regular_file(folder, entry)
    if file_sha256(path) != entry.sha256:
        raise other_file(path, entry, "a different SHA-256")


def regular_file(folder: Path, entry: FileEntry) -> Path:
    """Return the path of a listed file inside `folder`, checked to be reached through no link and to have the recorded
    size.

    Raises:
        DigestError: the file is missing, a link, or has the wrong size.
    """
    path = folder / entry.path
    inside = (path, *path.parents)[: entry.path.count("/") + 1]
    if any(part.is_symlink() for part in inside) or not path.is_file():
        raise DigestError(f"{path} is missing or not a regular file", fix="copy the bundle again, or rebuild it")
    size = path.stat().st_size
    if size != entry.bytes:
        raise other_file(path, entry, f"{size:,} bytes")
    return path


def other_file(path: Path, entry: FileEntry, found: str) -> DigestError:
    return DigestError(
        f"{path} is not the file that the manifest records",
        found=found,
        expected=f"{entry.bytes:,} bytes, sha256 {entry.sha256[:16]}...",
        fix="copy the bundle again, or rebuild it",
    )


def too_large(path: Path, size: int, most: int) -> ManifestError:
    return ManifestError(f"{path} is too large", found=f"{size:,} bytes", expected=f"at most {most:,} bytes")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
