"""`vitdeploy bundle pack|unpack|verify|sign`: a bundle as one file, from one machine to another."""

# Annotations of options are evaluated: no future import.

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from vitdeploy.api.options import EXPECT_DIGEST, OUTPUT, TRUST, Options, option, required
from vitdeploy.cli.options import Console, api, command_line, command_of

SUFFIX = ".vitb"
DIGEST = "Refuse any other bundle: the SHA-256 of the packed file, or of a folder's manifest.json."


@click.group("bundle", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Pack, unpack, verify and sign a bundle as one file that travels to an app."""


@dataclass(frozen=True)
class Sign(Options):
    bundle: Path = field(metadata=required(place="one"))
    key: Path = field(metadata=required("Your private key: elliptic curve, PEM, no password."))
    certificate: Path | None = option(None, "Of that key, where you sign with certificates.")
    chain: Sequence[Path] = option((), "Certificates between yours and the root's.")

    def check(self) -> None:
        if self.chain and self.certificate is None:
            self.refuse("<chain> is for a <certificate>.")


@command_of(Sign, name="sign", parent=command)
def sign(console: Console, options: Sign) -> None:
    """Sign a bundle with your key, without a network.

    With --trust, others name your public key or certificate: predict, verify and bench then accept the bundle only if
    you signed it and no file has changed since.
    """
    from vitdeploy.bundle.sign import sign_bundle

    bundle = options.bundle
    signature = sign_bundle(bundle, options.key, options.certificate, options.chain)
    identity = "PUBLIC_KEY.pem" if options.certificate is None else "CERTIFICATE.pem"
    console.finish(
        {"bundle": str(bundle), "signature": str(signature)},
        [f"signed {bundle} with {options.key}: {signature}"],
        None,
        command_line("vitdeploy", "predict", bundle, "IMAGE", "--trust", identity),
    )


@dataclass(frozen=True)
class Pack(Options):
    bundle: Path = field(metadata=required(place="one"))
    file: Path = field(metadata=required(OUTPUT, help=f"The file, as x{SUFFIX}.", metavar="FILE"))


@command_of(Pack, name="pack", parent=command)
def pack(console: Console, options: Pack) -> None:
    """Make one file of a bundle.

    It is a zip, stored, of what the manifest lists and the signature. The same bundle gives the same bytes everywhere.
    Other files of the folder are left out, and named.
    """
    file = options.file
    with console:
        document, lines = api("bundle").pack(options.bundle, file, console.progress)
    folder = file.with_suffix("") if file.suffix else file.with_name(f"{file.name}-unpacked")
    console.finish(
        document,
        lines,
        file,
        f"vitdeploy bundle unpack {shlex.quote(file.name)} -o {shlex.quote(folder.name)} "
        f"--expect-digest sha256:{document['sha256']}" + (" --trust PUBLIC_KEY.pem" if document["signed"] else ""),
    )


@dataclass(frozen=True)
class Unpack(Options):
    file: Path = field(metadata=required(place="one"))
    folder: Path = field(metadata=required(OUTPUT, help="The bundle's folder.", metavar="DIR"))
    expect_digest: str | None = option(None, EXPECT_DIGEST, help=DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(Unpack, name="unpack", parent=command)
def unpack(console: Console, options: Unpack) -> None:
    """Make the folder of a packed bundle.

    All or nothing: every byte of the file is checked, each file's digest, and with --trust whose signature it has,
    before the folder is there. A bundle that is at DIR already is replaced.
    """
    folder, trust = options.folder, options.trust
    with console:
        document, lines = api("bundle").unpack(options.file, folder, options.expect_digest, trust, console.progress)
    console.finish(
        document,
        lines,
        folder,
        f"vitdeploy inspect {shlex.quote(str(folder))} --check"
        + (f" --trust {shlex.quote(str(trust))}" if trust else ""),
    )


@dataclass(frozen=True)
class VerifyBundle(Options):
    bundle: Path = field(metadata=required(place="one"))
    expect_digest: str | None = option(None, EXPECT_DIGEST, help=DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(VerifyBundle, name="verify", parent=command)
def verify(console: Console, options: VerifyBundle) -> None:
    """Check a bundle, folder or packed.

    It is as it was made, or the exit code is 3. Every digest is checked, with --expect-digest that it is the
    one you were told of, and with --trust who signed it.
    """
    with console:
        document, lines = api("bundle").check(options.bundle, options.expect_digest, options.trust, console.progress)
    console.finish(document, lines, None)
