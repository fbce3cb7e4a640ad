"""Signs bundles and checks who made them (OpenSSF Model Signing 1.0), without a network.

The digests in `manifest.json` prove integrity: nothing changed by accident. They do not prove origin, as whoever
changes a file can change its digest too. A signature covers every file of the folder, the manifest among them, and is
checked against a public key, or a certificate, that the user got in another way.

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
# What the library raises: TypeError for a key with a password, AttributeError for one that is not of a curve.
BAD_KEY = (ValueError, TypeError, AttributeError)
CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def sign_bundle(folder: Path, key: Path, certificate: Path | None = None, chain: Sequence[Path] = ()) -> Path:
    """Sign every file of a bundle that is intact; returns the signature's file, `model.sig` in it.

    Args:
        key: the private key, PEM without a password.
        certificate: of that key, where identities are certificates; `chain`: those between it and the root.

    Raises:
        MissingFileError, ManifestError, DigestError: no bundle, not an intact one, or no key there.
        InputError: the key or a certificate is not one that can sign.
        MissingPackageError: model-signing is not installed. StorageError: the disk is full or not writable.
    """
    model_signing = _require("signing a bundle")
    verify_files(folder, read_bundle(folder))
    for path in (key, *([certificate] if certificate else []), *chain):
        _existing(path)
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
    """Where a file is written before it moves into a folder: not in there, as what a kill leaves would be a file too
    many. In there all the same where nothing can move between the two."""
    parent = folder.absolute().parent
    return folder if os.path.ismount(folder) or not os.access(parent, os.W_OK) else parent


def signed_by(folder: Path, trust: Path | None, called: Path | None = None) -> bool:
    """Whether a bundle is signed by the identity that the user trusts; False where the user names none.

    Every file of the folder must be as it was signed, and there may be no other. A bundle of one image size inside of
    another bundle, without a signature of its own, is covered by that of the whole, whose every file is then checked.

    Args:
        trust: a public key, or certificates of which one is the signer's or has issued it (PEM). From the user, never
            from the bundle.
        called: what errors call the bundle, where it lies in a temporary folder.

    Raises:
        SignatureError: not signed, signed by somebody else, or a file was changed, added or removed since.
        MissingFileError, InputError: the file of the identity is not there, or is no such file.
        MissingPackageError: model-signing is not installed.
    """
    return trust is not None and bool(_signed_files(folder, trust, called))


def signed_digests(folder: Path, trust: Path | None) -> frozenset[str]:
    """The SHA-256 (lower-case hex) of every file of a bundle that is signed by the identity that the user trusts, as
    the signature says them; none where the user names none. Errors as `signed_by`."""
    return frozenset() if trust is None else frozenset(_signed_files(folder, trust).values())


def _signed_files(folder: Path, trust: Path, called: Path | None = None) -> dict[str, str]:
    """The files that a signature is of, each with its SHA-256, once all of them are as it says.

    They are taken from the very bytes of the signature that were verified, so that no change of the folder while it is
    looked at can put another digest among them.
    """
    model_signing = _require("checking who signed a bundle")
    verifier = model_signing.verifying.Config().set_hashing_config(_hashing(model_signing))
    try:
        if CERTIFICATE in _existing(trust).read_bytes():
            verifier.use_certificate_verifier(certificate_chain=[trust])
        else:
            verifier.use_elliptic_key_verifier(public_key=trust)
    except BAD_KEY as error:
        raise InputError(
            f"{trust} names no identity",
            found=_first_line(error),
            expected=f"the public half of {CURVES}, or a certificate as PEM",
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
            fix="vitdeploy bundle sign BUNDLE --key KEY.pem, by whoever made it",
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
    """The digest of each file in a signature, whoever made it: a DSSE envelope around an in-toto statement.

    Source: OpenSSF Model Signing, specification of version 1.0, "predicate": "resources" with "name", "algorithm" and
    "digest".
    """
    envelope = json.loads(signature.decode("utf-8"))["dsseEnvelope"]
    resources = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["resources"]
    return {entry["name"]: entry["digest"] for entry in resources if entry["algorithm"] == "sha256"}


def _signed_folder(folder: Path) -> Path:
    """The folder whose signature covers this bundle: its own, or that of the bundle which it is an image size of."""
    if (folder / SIGNATURE_FILE).exists():
        return folder
    place = folder.resolve()  # where it really lies, which is what the signature of the whole is about
    whole = place.parent.parent
    inside = place.parent.name == SIZES_FOLDER and is_bundle(whole)
    return whole if inside else folder


def _refusal(folder: Path, trust: Path, error: Exception) -> SignatureError:
    """The problem behind an error without a type of its own."""
    found = _first_line(error)
    if found.startswith("Signature mismatch"):
        return SignatureError(
            f"{folder} is not what was signed",
            found=found.removeprefix("Signature mismatch: "),
            expected="every file as it was signed, and no other",
            fix="get the bundle again, or have it signed again by whoever made it",
        )
    if found.startswith("Key mismatch") or type(error).__name__ in ("InvalidSignature", "X509StoreContextError"):
        return SignatureError(
            f"{folder} is not signed by {trust}",
            found=found,
            expected="a signature by that identity",
            fix="name the key or certificate of whoever signed it, if you trust them",
        )
    return SignatureError(
        f"{folder / SIGNATURE_FILE} cannot be checked against {trust}",
        found=f"{type(error).__name__}: {found}",
        expected="a signature of OpenSSF Model Signing by that identity",
        fix="get the bundle again, or have it signed again by whoever made it",
    )


def _hashing(model_signing: ModuleType) -> Any:
    """What to sign: the SHA-256 of each file except the signature itself; no links."""
    return model_signing.hashing.Config().set_ignored_paths(paths=[SIGNATURE_FILE], ignore_git_paths=False)


def _require(why: str) -> ModuleType:
    try:
        return importlib.import_module("model_signing")
    except ModuleNotFoundError as error:
        raise MissingPackageError("model-signing", "sign", why, error=error) from None


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingFileError(f"no key or certificate at {path}", expected="a PEM file", fix="check the path")
    return path


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """The library prints its warnings to standard output, which is the command's own."""
    return contextlib.redirect_stdout(sys.stderr)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
