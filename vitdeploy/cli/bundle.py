"""`vitdeploy bundle pack|unpack|verify|sign`: a bundle as one file, from one machine to another."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from vitdeploy.cli.options import Console, command_line, digest_of, output_options, trust_option

SUFFIX = ".vitb"


digest_option = click.option(
    "--expect-digest",
    "expect",
    callback=digest_of,
    metavar="sha256:HEX",
    help="Refuse any other bundle: the SHA-256 of the packed file, or of a folder's manifest.json.",
)


@click.group("bundle", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Pack, unpack, verify and sign a bundle as one file that travels to an app."""


@command.command("sign")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), help="Your private key: elliptic curve, PEM, no password."
)
@click.option("--certificate", type=click.Path(path_type=Path), help="Of that key, where you sign with certificates.")
@click.option(
    "--chain", multiple=True, type=click.Path(path_type=Path), help="Certificates between yours and the root's."
)
@output_options
def sign(console: Console, bundle: Path, key: Path, certificate: Path | None, chain: tuple[Path, ...]) -> None:
    """Sign a bundle with your key, without a network.

    With --trust, others name your public key or certificate: predict, verify and bench then accept the bundle only if
    you signed it and no file has changed since.
    """
    from vitdeploy.bundle.sign import sign_bundle

    if chain and certificate is None:
        raise click.UsageError("--chain is for a --certificate.")
    signature = sign_bundle(bundle, key, certificate, chain)
    identity = "PUBLIC_KEY.pem" if certificate is None else "CERTIFICATE.pem"
    lines = [f"signed {bundle} with {key}: {signature}"]
    console.finish(
        {"bundle": str(bundle), "signature": str(signature)},
        lines,
        None,
        command_line("vitdeploy", "predict", bundle, "IMAGE", "--trust", identity),
    )


@command.command("pack")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help=f"The file, as x{SUFFIX}."
)
@output_options
def pack(console: Console, bundle: Path, output: Path) -> None:
    """Make one file of a bundle.

    It is a zip, stored, of what the manifest lists and the signature. The same bundle gives the same bytes everywhere.
    Other files of the folder are left out, and named.
    """
    from vitdeploy.api.bundle import pack as pack_bundle

    with console:
        document, lines = pack_bundle(bundle, output, console.progress)
    folder = output.with_suffix("") if output.suffix else output.with_name(f"{output.name}-unpacked")
    console.finish(
        document,
        lines,
        output,
        f"vitdeploy bundle unpack {shlex.quote(output.name)} -o {shlex.quote(folder.name)} "
        f"--expect-digest sha256:{document['sha256']}" + (" --trust PUBLIC_KEY.pem" if document["signed"] else ""),
    )


@command.command("unpack")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The bundle's folder."
)
@digest_option
@trust_option
@output_options
def unpack_file(console: Console, file: Path, output: Path, expect: str | None, trust: Path | None) -> None:
    """Make the folder of a packed bundle.

    All or nothing: every byte of the file is checked, each file's digest, and with --trust whose signature it has,
    before the folder is there. A bundle that is at DIR already is replaced.
    """
    from vitdeploy.api.bundle import unpack

    with console:
        document, lines = unpack(file, output, expect, trust, console.progress)
    console.finish(
        document,
        lines,
        output,
        f"vitdeploy inspect {shlex.quote(str(output))} --check"
        + (f" --trust {shlex.quote(str(trust))}" if trust else ""),
    )


@command.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@digest_option
@trust_option
@output_options
def verify(console: Console, bundle: Path, expect: str | None, trust: Path | None) -> None:
    """Check a bundle, folder or packed.

    It is as it was made, or the exit code is 3. Every digest is checked, with --expect-digest that it is the
    one you were told of, and with --trust who signed it.
    """
    from vitdeploy.api.bundle import check

    with console:
        document, lines = check(bundle, expect, trust, console.progress)
    console.finish(document, lines, None)
