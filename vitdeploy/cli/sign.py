"""`vitdeploy sign BUNDLE --key FILE`: whoever trusts this key can load the bundle's engines."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.options import Console, command_line, output_options


@click.command("sign")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), help="Your private key: elliptic curve, PEM, no password."
)
@click.option("--certificate", type=click.Path(path_type=Path), help="Of that key, where you sign with certificates.")
@click.option(
    "--chain", multiple=True, type=click.Path(path_type=Path), help="Certificates between yours and the root's."
)
@output_options
def command(console: Console, bundle: Path, key: Path, certificate: Path | None, chain: tuple[Path, ...]) -> None:
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
