"""A bundle that is ready to be deployed: intact, signed where that is asked for, with golden answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256
from vitdeploy.bundle.sign import SIGNATURE_FILE, signed_digests
from vitdeploy.devices.registry import check_deployment
from vitdeploy.errors import SignatureError, TargetError
from vitdeploy.pipeline.artifact import open_bundle
from vitdeploy.runtime.choice import select_engines, usable_engines
from vitdeploy.runtime.golden import has_golden, no_golden
from vitdeploy.spec import EngineSpec, FileEntry, Manifest

# The comparison with the current release: latency alone, and no longer than asked for.
BLOCK_SECONDS = 0.5


@dataclass(frozen=True)
class Release:
    """`digest` is the SHA-256 of the manifest; `files` are all of the bundle, by what they are sent as. `worse`: how
    much slower p99 may be than that of the release before, 0.1 for a tenth."""

    deployment: str
    digest: str
    manifest: Manifest
    files: Mapping[FileEntry, Path]
    target: str
    protocol: Protocol
    worse: float


def ready(folder: Path, name: str | None, *, trust: Path | None, target: str, duration: float, worse: float) -> Release:
    """The release of a bundle; `name` of the deployment, by default the bundle's.

    Raises:
        MissingFileError, ManifestError, DigestError: no bundle, or not an intact one.
        SignatureError: not signed by `trust`.
        TargetError, GateError: no engine for the target that may be used, or several that take other batches.
        InputError: an engine without golden answers, or a name that no deployment can have.
    """
    manifest, _ = open_bundle(folder, trust)
    engines = usable_engines(manifest, select_engines(manifest, target))
    for engine in engines:
        if not has_golden(manifest, engine):
            raise no_golden(manifest, engine.artifact)
    own = [name for name in (MANIFEST_FILE, SIGNATURE_FILE) if (folder / name).is_file()]
    entries = [FileEntry(each, (folder / each).stat().st_size, file_sha256(folder / each)) for each in own]
    if trust is not None:
        _require_signed([*entries[:1], *manifest.files], signed_digests(folder, trust), folder, trust)
    files = {entry: folder / entry.path for entry in (*entries, *manifest.files)}
    return Release(
        check_deployment(name or manifest.name),
        entries[0].sha256,
        manifest,
        files,
        target,
        _protocol(manifest, engines, duration),
        worse,
    )


def _require_signed(entries: list[FileEntry], signed: frozenset[str], folder: Path, trust: Path) -> None:
    """What is sent is what the signature is of, whatever has become of the folder since it was checked."""
    if any(entry.sha256 not in signed for entry in entries):
        raise SignatureError(f"{folder} has changed while its signature was checked", wanted=f"a signature by {trust}")


def _protocol(manifest: Manifest, engines: list[EngineSpec], duration: float) -> Protocol:
    batches = {1 if engine.dynamic_batch else engine.batch for engine in engines}
    if len(batches) > 1:
        raise TargetError(
            f"the engines of {manifest.name} take other batches, so that one measurement does not fit all",
            found=", ".join(f"{engine.artifact}: {engine.batch}" for engine in engines),
            wanted="one batch",
            fix="name one of them: --target " + engines[0].artifact,
        )
    return Protocol(("single",), (batches.pop(),), duration, min(BLOCK_SECONDS, duration), max_extension=1)
