"""Sign bundles and verify their signatures (OpenSSF Model Signing 1.0), without a network.

The digests in `manifest.json` prove integrity: nothing changed by accident. They do not prove origin: whoever changes a
file can change its digest as well. A signature covers every file of the folder, the manifest among them, and is checked
against a public key, or a certificate, that the user obtained separately.

`model.sig` is a Sigstore bundle with a DSSE envelope around an in-toto statement, as OpenSSF's specification has it
(https://github.com/sigstore/model-transparency, docs/model_signing_format.md): its `model_signing verify key` reads it.
"""

import base64
import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vitdeploy.bundle.read import SIZES_FOLDER, is_bundle, read_bundle, verify_files
from vitdeploy.errors import InputError, MissingFileError, MissingPackageError, SignatureError
from vitdeploy.publish import flush, storage_errors, temporary_folder

SIGNATURE_FILE = "model.sig"
CURVES = "an elliptic-curve key (P-256, P-384 or P-521) as PEM"
# Errors of the library: TypeError for a key with a password, AttributeError for a key that is not elliptic-curve.
BAD_KEY = (ValueError, TypeError, AttributeError)
CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def sign_bundle(folder: Path, key: Path, certificate: Path | None = None, chain: Sequence[Path] = ()) -> Path:
    """Sign every file of an intact bundle and return the path of the signature, `model.sig` in the bundle.

    Args:
        key: the private key, PEM without a password.
        certificate: the certificate of that key, if identities are certificates; `chain`: those between it and the
        root.

    Raises:
        MissingFileError, ManifestError, DigestError: not a bundle, not an intact one, or a missing key.
        InputError: the key or certificate cannot sign.
        MissingPackageError: model-signing is not installed. StorageError: the disk is full or not writable.
    """
    manifest = read_bundle(folder)
    for path in (key, *([certificate] if certificate else []), *chain):
        require_pem(path)
    model_signing = _require("signing a bundle")
    verify_files(folder, manifest)
    config = model_signing.signing.Config().set_hashing_config(_hashing(model_signing))
    try:
        if certificate is None:
            config.use_elliptic_key_signer(private_key=key)
        else:
            # Version 1.1 reads no empty chain; the certificate itself adds nothing to it.
            config.use_certificate_signer(
                private_key=key, signing_certificate=certificate, certificate_chain=chain or (certificate,)
            )
    except BAD_KEY as error:
        raise InputError(
            f"{key} cannot sign" if certificate is None else f"{key} and {certificate} cannot sign",
            found=_first_line(error),
            expected=f"{CURVES}, without a password" + ("" if certificate is None else ", and its certificate"),
            fix="openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem",
        ) from None
    with temporary_folder(_beside(folder)) as work, storage_errors(folder):
        with _quiet():
            config.sign(folder, work / SIGNATURE_FILE)  # which reads every file before it writes this one
        flush(work / SIGNATURE_FILE)
        (work / SIGNATURE_FILE).replace(folder / SIGNATURE_FILE)
        flush(folder)
    return folder / SIGNATURE_FILE


def _beside(folder: Path) -> Path:
    """Return the folder for a temporary file that later moves into `folder`: its parent, so that a killed process
    leaves no extra file in the bundle; `folder` itself if files cannot move between the two."""
    parent = folder.absolute().parent
    return folder if os.path.ismount(folder) or not os.access(parent, os.W_OK) else parent


def signed_by(folder: Path, trust: Path | None, called: Path | None = None) -> bool:
    """Return whether a bundle is signed by the trusted identity; False if `trust` is None.

    Every file of the folder must match the signature, and no other file may exist. A bundle of one image size inside
    another bundle, without its own signature, is covered by the outer signature; every file of the outer bundle is then
    checked.

    Args:
        trust: a public key, or certificates that include the signer's or its issuer's (PEM). It comes from the user,
            never from the bundle.
        called: the bundle's name in errors, if it lies in a temporary folder.

    Raises:
        SignatureError: not signed, signed by another identity, or a file was changed, added or removed since.
        MissingFileError, InputError: the `trust` file is missing, or not a key or certificate.
        MissingPackageError: model-signing is not installed.
    """
    return trust is not None and bool(_signed_files(folder, trust, called))


def signed_digests(folder: Path, trust: Path | None) -> frozenset[str]:
    """Return the SHA-256 (lower-case hex) of every signed file of a bundle, from the signature of the trusted identity;
    empty if `trust` is None. Raises as `signed_by`."""
    return frozenset() if trust is None else frozenset(_signed_files(folder, trust).values())


def _signed_files(folder: Path, trust: Path, called: Path | None = None) -> dict[str, str]:
    """Return the files of a verified signature, each with its SHA-256.

    The digests come from the same signature bytes that were verified, so a concurrent change of the folder cannot add
    another digest.
    """
    require_pem(trust)
    model_signing = _require("checking who signed a bundle")
    verifier = model_signing.verifying.Config().set_hashing_config(_hashing(model_signing))
    try:
        if CERTIFICATE in trust.read_bytes():
            verifier.use_certificate_verifier(certificate_chain=[trust])
        else:
            verifier.use_elliptic_key_verifier(public_key=trust)
    except BAD_KEY as error:
        raise InputError(
            f"{trust} is not a public key or certificate",
            found=_first_line(error),
            expected=f"the public key of {CURVES}, or a certificate as PEM",
            fix="openssl ec -in KEY.pem -pubout -out TRUSTED.pem",
        ) from None
    folder = _signed_folder(folder)
    called = called or folder
    signature = folder / SIGNATURE_FILE
    if signature.is_symlink() or not signature.is_file():
        raise SignatureError(
            f"{called} is not signed",
            found=f"no {SIGNATURE_FILE} in it",
            expected=f"a signature by {trust}",
            fix="the bundle's maker signs it with: vitdeploy bundle sign BUNDLE --key KEY.pem",
        )
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as private:
        verified = Path(private) / SIGNATURE_FILE
        try:
            verified.write_bytes(signature.read_bytes())
            with _quiet():
                verifier.verify(folder, verified)
            return digests_in(verified.read_bytes())
        except Exception as error:  # of the library, its parsers, cryptography and OpenSSL, without a common base
            raise _refusal(called, trust, error) from None


def digests_in(signature: bytes) -> dict[str, str]:
    """Return the digest of each file in a signature (a DSSE envelope around an in-toto statement); the signer is not
    checked.

    Source: OpenSSF Model Signing, specification of version 1.0, "predicate": "resources" with "name", "algorithm" and
    "digest".
    """
    envelope = json.loads(signature.decode("utf-8"))["dsseEnvelope"]
    resources = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["resources"]
    return {entry["name"]: entry["digest"] for entry in resources if entry["algorithm"] == "sha256"}


def _signed_folder(folder: Path) -> Path:
    """The folder whose signature covers this bundle: its own, or the outer bundle that has it as an image size."""
    if (folder / SIGNATURE_FILE).exists():
        return folder
    place = folder.resolve()  # where it really lies, which is what the signature of the whole is about
    whole = place.parent.parent
    inside = place.parent.name == SIZES_FOLDER and is_bundle(whole)
    return whole if inside else folder


def _refusal(folder: Path, trust: Path, error: Exception) -> SignatureError:
    """The SignatureError for an error of the library, which has no specific types."""
    found = _first_line(error)
    if found.startswith("Signature mismatch"):
        return SignatureError(
            f"{folder} does not match its signature",
            found=found.removeprefix("Signature mismatch: "),
            expected="exactly the signed files, unchanged",
            fix="get the bundle again, or ask its maker to sign it again",
        )
    if found.startswith("Key mismatch") or type(error).__name__ in ("InvalidSignature", "X509StoreContextError"):
        return SignatureError(
            f"{folder} is not signed by {trust}",
            found=found,
            expected="a signature by that identity",
            fix="if you trust the signer, use the signer's key or certificate",
        )
    return SignatureError(
        f"cannot verify {folder / SIGNATURE_FILE} with {trust}",
        found=f"{type(error).__name__}: {found}",
        expected="an OpenSSF Model Signing signature by that identity",
        fix="get the bundle again, or ask its maker to sign it again",
    )


def _hashing(model_signing: ModuleType) -> Any:
    """The hashing configuration: SHA-256 of each file except the signature itself; no links."""
    return model_signing.hashing.Config().set_ignored_paths(paths=[SIGNATURE_FILE], ignore_git_paths=False)


def _require(why: str) -> ModuleType:
    try:
        return importlib.import_module("model_signing")
    except ModuleNotFoundError as error:
        raise MissingPackageError("model-signing", "sign", why, error=error) from None


def require_pem(path: str | Path | None) -> None:
    """Raise MissingFileError for a path that is not a file."""
    if path is not None and not Path(path).is_file():
        raise MissingFileError(f"no key or certificate at {path}", expected="a PEM file", fix="check the path")


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Redirect the library's warnings to standard error: standard output belongs to the command."""
    return contextlib.redirect_stdout(sys.stderr)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
