"""`vitdeploy bundle pack|unpack|verify|sign`: a bundle as one file, from one machine to another."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.api.tables import human_bytes
from vitdeploy.cli import sign
from vitdeploy.cli.console import Console, output_options
from vitdeploy.cli.options import trust_option

if TYPE_CHECKING:
    from vitdeploy.bundle.archive import Packed

SUFFIX = ".vitb"


def _digest(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The hex of a SHA-256."""
    from vitdeploy.bundle.archive import digest_hex
    from vitdeploy.errors import InputError

    try:
        return None if value is None else digest_hex(value)
    except InputError as error:
        raise click.BadParameter(f"{error.message}: {error.wanted}.") from None


digest_option = click.option(
    "--expect-digest",
    "expect",
    callback=_digest,
    metavar="sha256:HEX",
    help="Refuse any other bundle: the SHA-256 of the packed file, or of a folder's manifest.json.",
)


@click.group("bundle", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Pack, unpack, verify and sign a bundle as one file that travels to an app."""


command.add_command(sign.command)


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
    from vitdeploy.bundle.pack import pack_bundle, unlisted_files
    from vitdeploy.bundle.read import is_packed
    from vitdeploy.errors import OutputError
    from vitdeploy.publish import replacing_file

    if bundle.resolve() in output.resolve().parents:
        raise OutputError(f"{output} would lie in the bundle that it is made of", fix="choose another -o")
    with console, replacing_file(output, is_packed) as file:
        packed = pack_bundle(bundle, file, _progress(console))
    left_out = unlisted_files(bundle, packed.manifest)
    folder = output.with_suffix("") if output.suffix else output.with_name(f"{output.name}-unpacked")
    console.finish(
        {**_document(output, packed), "left_out": left_out},
        [*_lines(output, packed), *_told("left out, as the manifest does not list them", left_out)],
        output,
        f"vitdeploy bundle unpack {shlex.quote(output.name)} -o {shlex.quote(folder.name)} "
        f"--expect-digest sha256:{packed.sha256}" + (" --trust PUBLIC_KEY.pem" if packed.signed else ""),
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
    from vitdeploy.bundle.unpack import unpack

    with console:
        packed = unpack(file, output, expect_digest=expect, trust=trust, progress=_progress(console))
    console.finish(
        {**_document(file, packed), "folder": str(output), "signed_by": str(trust) if trust else None},
        [*_lines(file, packed), _signature(packed.signed, trust)],
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
    with console:
        document, lines = (_verify_file if bundle.is_file() else _verify_folder)(console, bundle, expect, trust)
    console.finish({**document, "signed_by": str(trust) if trust else None}, lines, None)


def _verify_file(
    console: Console, file: Path, expect: str | None, trust: Path | None
) -> tuple[dict[str, Any], list[str]]:
    import tempfile

    from vitdeploy.bundle.archive import read_packed
    from vitdeploy.bundle.sign import signed_by
    from vitdeploy.publish import storage_errors

    if trust is None:
        packed = read_packed(file, None, expect, _progress(console))
    else:  # OpenSSF's library checks a folder
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as private, storage_errors(Path(private)):
            packed = read_packed(file, Path(private), expect, _progress(console))
            signed_by(Path(private), trust, called=file)
    return _document(file, packed), [*_lines(file, packed), _signature(packed.signed, trust)]


def _verify_folder(
    console: Console, folder: Path, expect: str | None, trust: Path | None
) -> tuple[dict[str, Any], list[str]]:
    from vitdeploy.bundle.archive import check_digest
    from vitdeploy.bundle.pack import unlisted_files
    from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, read_bundle, verify_files
    from vitdeploy.bundle.sign import SIGNATURE_FILE, signed_by

    manifest = read_bundle(folder)
    digest = file_sha256(folder / MANIFEST_FILE)
    if expect is not None:
        check_digest(folder, digest, expect, MANIFEST_FILE)
    console.progress("check", 0, 1)
    verify_files(folder, manifest)
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


def _progress(console: Console) -> Any:
    """Megabytes are told: a byte is too little to be a unit of a bar."""

    def told(text: str, done: int, total: int) -> None:
        console.progress(f"{text}, MB", done // 1_000_000, total // 1_000_000)

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
