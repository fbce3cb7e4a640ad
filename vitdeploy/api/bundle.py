"""Bundles as files: packed, unpacked, checked; and their engines against golden answers. Light, but for `selftest`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.values import human_bytes
from vitdeploy.bundle.checked import open_checked
from vitdeploy.bundle.pack import Packed, pack_bundle, read_packed, unlisted_files
from vitdeploy.bundle.pack import unpack as unpack_file
from vitdeploy.bundle.read import MANIFEST_FILE, is_packed, read_bundle
from vitdeploy.bundle.sign import SIGNATURE_FILE, signed_by
from vitdeploy.errors import HostError, OutputError
from vitdeploy.progress import Progress
from vitdeploy.publish import replacing, replacing_file, storage_errors, temporary_folder
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import check_golden
from vitdeploy.spec import EngineSpec, Manifest
from vitdeploy.stages.step import check_target

if TYPE_CHECKING:
    from vitdeploy.document.commands import SelftestDocument


# --- A bundle as one file: packed, unpacked and checked, each as a document and its lines for people ------------------


Told = tuple[dict[str, Any], list[str]]


def pack(bundle: Path, output: Path, progress: Progress) -> Told:
    """Make one file of a bundle's folder; a packed bundle that is there is replaced.

    Raises:
        OutputError: the file would lie in the bundle, or another file is there. Errors of `pack_bundle` propagate.
    """
    if bundle.resolve() in output.resolve().parents:
        raise OutputError(f"{output} would lie in the bundle that it is made of", fix="choose another -o")
    with replacing_file(output, is_packed) as file:
        packed = pack_bundle(bundle, file, _megabytes(progress))
    left_out = unlisted_files(bundle, packed.manifest)
    lines = [*_lines(output, packed), *_told("left out, as the manifest does not list them", left_out)]
    return {**_document(output, packed), "left_out": left_out}, lines


def unpack(file: Path, output: Path, expect: str | None, trust: Path | None, progress: Progress) -> Told:
    """Make the folder of a packed bundle; arguments and errors as `bundle.unpack.unpack`."""

    packed = unpack_file(file, output, expect_digest=expect, trust=trust, progress=_megabytes(progress))
    document = {**_document(file, packed), "folder": str(output), "signed_by": str(trust) if trust else None}
    return document, [*_lines(file, packed), _signature(packed.signed, trust)]


def check(bundle: Path, expect: str | None, trust: Path | None, progress: Progress) -> Told:
    """Check that a bundle, folder or packed, is unchanged: every digest; with `expect` also its own SHA-256 in hex, and
    with `trust` who signed it. Errors of `read_packed`, `verify_files` and `signed_by` propagate."""
    document, lines = (_verify_file if bundle.is_file() else _verify_folder)(bundle, expect, trust, progress)
    return {**document, "signed_by": str(trust) if trust else None}, lines


def _verify_file(
    file: Path, expect: str | None, trust: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[str]]:

    if trust is None:
        packed = read_packed(file, None, expect, _megabytes(progress))
    else:  # OpenSSF's library checks a folder
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as private, storage_errors(Path(private)):
            packed = read_packed(file, Path(private), expect, _megabytes(progress))
            signed_by(Path(private), trust, called=file)
    return _document(file, packed), [*_lines(file, packed), _signature(packed.signed, trust)]


def _verify_folder(
    folder: Path, expect: str | None, trust: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[str]]:

    files = open_checked(folder, expect_digest=expect)
    manifest, digest = files.manifest, files.digest
    progress("check", 0, 1)
    files.require()
    signed_by(folder, trust)
    signed, unlisted = (folder / SIGNATURE_FILE).is_file(), unlisted_files(folder, manifest)
    document = {"path": str(folder), "name": manifest.name, "manifest_sha256": digest, "files": len(manifest.files)}
    lines = [
        f"{folder}: bundle {manifest.name}, {_files(len(manifest.files))}, all digests match",
        f"its {MANIFEST_FILE}: sha256:{digest}",
        _signature(signed, trust),
        *_told("not of the bundle, as the manifest does not list them", unlisted),
    ]
    return {**document, "signed": signed, "unlisted": unlisted}, lines


def _megabytes(progress: Progress) -> Progress:
    """Report progress in megabytes: bytes are too small a unit for a bar."""

    def told(text: str, done: int, total: int) -> None:
        progress(f"{text}, MB", done // 1_000_000, total // 1_000_000)

    return told


def _document(file: Path, packed: Packed) -> dict[str, Any]:
    return {
        "path": str(file),
        "name": packed.manifest.name,
        "bytes": packed.bytes,
        "sha256": packed.sha256,
        "manifest_sha256": packed.manifest_sha256,
        "files": len(packed.manifest.files),
        "signed": packed.signed,
    }


def _lines(file: Path, packed: Packed) -> list[str]:
    name, count = packed.manifest.name, _files(len(packed.manifest.files))
    return [
        f"{file}: bundle {name}, {count}, {human_bytes(packed.bytes)}, all digests match",
        f"the file: sha256:{packed.sha256}",
        f"its manifest.json: sha256:{packed.manifest_sha256}",
    ]


def _files(count: int) -> str:
    return f"{count} file" + ("" if count == 1 else "s")


def _told(what: str, names: list[str]) -> list[str]:
    """A line that names files, if there are any."""
    shown = ", ".join(map(ascii, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"{what}: {shown}"] if names else []


def _signature(signed: bool, trust: Path | None) -> str:
    if trust is not None:
        return f"signed by {trust}"
    return "signed, by whom was not checked: name a key with --trust" if signed else "not signed"


# --- Every engine of a bundle against its golden answers, on this machine ---------------------------------------------


def check_bundle(folder: Path, trust: Path | None) -> tuple[list[dict[str, Any]], list[str], bool]:
    """The result for each engine, its lines for people, and whether all that run here give the golden answers.

    Raises:
        HostError: no engine runs here. Errors of reading the bundle propagate.
    """

    manifest = read_bundle(folder)
    signed_by(folder, trust)
    documents = [_check(folder, manifest, engine, trust) for engine in manifest.engines]
    if all(each["ok"] is None for each in documents):
        raise HostError(
            f"no engine of {folder} runs here", found="; ".join(each["error"] for each in documents) or "no engine"
        )
    return documents, [_line(each) for each in documents], all(each["ok"] is not False for each in documents)


def _check(folder: Path, manifest: Manifest, engine: EngineSpec, trust: Path | None) -> dict[str, Any]:
    """`ok` is None if the engine does not run here."""

    try:
        with make_runner(folder, engine, trust=trust) as runner:
            found = check_golden(folder, manifest, engine, runner)
    except HostError as error:
        return {"engine": engine.artifact, "ok": None, "error": error.message}
    return {"engine": engine.artifact, "ok": found.ok, "gate": manifest.gate(engine), **vars(found)}


def _line(found: dict[str, Any]) -> str:
    if found["ok"] is None:
        return f"golden {found['engine']}: does not run here: {found['error']}"
    right = found["difference"] <= found["tolerance"] and found["same"] >= found["least_same"]
    verdict = "ok" if found["ok"] else f"PROVES NOTHING ({found['proves_nothing']})" if right else "DIFFERS"
    failed = "; it failed its budget when the bundle was made" if found["gate"] == "fail" else ""
    return (
        f"golden {found['engine']}: {verdict}, {found['same']} of {found['inputs']} answers are the original's "
        f"(at least {found['least_same']} must be), largest difference {found['difference']:.1e} of the largest output "
        f"from when the bundle was made (allowed {found['tolerance']:.1e}){failed}"
    )


# --- One target proven on this machine, and one folder to send back ---------------------------------------------------


def selftest(target: str, folder: Path, duration: float, progress: Progress) -> tuple[SelftestDocument, list[str]]:
    """Build, verify and bench engines of built-in models; the report is in `folder`. A step that fails is recorded.

    Args:
        duration: seconds an artifact and scenario of the bench.

    Raises:
        TargetError: an unknown target. OutputError: `folder` holds something else.
    """
    from vitdeploy.benchmark.protocol import Protocol

    check_target(target)
    from vitdeploy.store.store import Store
    from vitdeploy.workflows.selftest import REPORT_NAMES, default_cases, run_selftest

    with replacing(folder, REPORT_NAMES) as work, temporary_folder(folder.parent) as store:
        protocol = Protocol(duration=duration)
        document = run_selftest(target, default_cases(), work, Store(store), protocol=protocol, progress=progress)
    lines = (folder / "doctor.txt").read_text(encoding="utf-8").splitlines()
    for row in document.steps:
        seconds = f"{row.seconds:.1f} s" if row.status == "done" else row.detail
        lines.append(f"{row.status:<7}  {row.model:<16} {row.step:<28} {seconds}")
    return document, [*lines, document.sentence]
