"""`vitdeploy bundle|inspect|explain`: a bundle as one file, its content, and the attention of its model;
`doctor|selftest|completion`: this machine and its shell."""

# Annotations of options are evaluated: no future import.

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from vitdeploy.api.option import Options, option, required
from vitdeploy.api.options import (
    DURATION,
    EXPECT_DIGEST,
    OUTPUT,
    TRUST,
)
from vitdeploy.bundle.read import is_bundle, is_packed, read_bundle
from vitdeploy.bundle.sign import sign_bundle
from vitdeploy.cli.options import Console, api, command_line, command_of
from vitdeploy.errors import GateError, HostError, MissingFileError
from vitdeploy.paths import is_file

SUFFIX = ".vitb"
DIGEST = "Accept only the bundle with this SHA-256: of the packed file, or of a folder's manifest.json."


@click.group("bundle", context_settings={"help_option_names": ["-h", "--help"]})
def bundle() -> None:
    """Pack, unpack, verify and sign a bundle as one file."""


@dataclass(frozen=True)
class Sign(Options):
    bundle: Path = field(metadata=required(place="one"))
    key: Path = field(metadata=required("Private key: elliptic curve, PEM, no password."))
    certificate: Path | None = option(None, "Certificate of the key, to sign with certificates.")
    chain: Sequence[Path] = option((), "Intermediate certificates up to the root. Repeatable.")

    def check(self) -> None:
        if self.chain and self.certificate is None:
            self.refuse("<chain> needs a <certificate>.")


@command_of(Sign, name="sign", parent=bundle)
def sign(console: Console, options: Sign) -> None:
    """Sign a bundle with your private key; no network needed.

    `openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem` makes a key; `openssl ec -in KEY.pem -pubout -out
    PUBLIC_KEY.pem` writes its public key.

    Users pass your public key or certificate to --trust: predict, verify and bench then accept the bundle only if you
    signed it and no file has changed since.

    \b
    Example:
      vitdeploy bundle sign out/digits --key KEY.pem
    """
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
    file: Path = field(metadata=required(OUTPUT, help=f"The file to write, such as x{SUFFIX}.", metavar="FILE"))
    slim: bool = option(False, "Pack only what a device needs to run <target>: engines, golden answers, labels.")
    target: str | None = option(None, "Target of a slim pack.", complete="targets")
    key: Path | None = option(None, "Sign the slim bundle with this private key.")

    def check(self) -> None:
        if self.slim != (self.target is not None):
            self.refuse("<slim> and <target> need each other.")
        if self.key is not None and not self.slim:
            self.refuse("<key> signs only a slim pack; sign a whole bundle before packing: vitdeploy bundle sign.")


@command_of(Pack, name="pack", parent=bundle)
def pack(console: Console, options: Pack) -> None:
    """Pack a bundle into one file.

    The file is an uncompressed zip of the files in the manifest and the signature. The same bundle always gives the
    same bytes. Other files of the folder are left out and listed. A slim pack has no float graph and no report: a
    device can run and check it, but not explain, quantize or compile it again.

    \b
    Example:
      vitdeploy bundle pack out/digits -o digits.vitb
    """
    file, module = options.file, api("inspect")
    with console:
        if options.target is None:
            document, lines = module.pack(options.bundle, file, console.progress)
        else:
            document, lines = module.pack_slim(options.bundle, options.target, file, options.key, console.progress)
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
    folder: Path = field(metadata=required(OUTPUT, help="Folder for the bundle.", metavar="DIR"))
    expect_digest: str | None = option(None, EXPECT_DIGEST, help=DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(Unpack, name="unpack", parent=bundle)
def unpack(console: Console, options: Unpack) -> None:
    """Unpack a bundle into a folder.

    All or nothing: every byte, every digest and (with --trust) the signature are checked before the folder appears. An
    existing bundle at DIR is replaced.

    \b
    Example:
      vitdeploy bundle unpack digits.vitb -o unpacked
    """
    folder, trust = options.folder, options.trust
    with console:
        document, lines = api("inspect").unpack(options.file, folder, options.expect_digest, trust, console.progress)
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


@command_of(VerifyBundle, name="verify", parent=bundle)
def verify(console: Console, options: VerifyBundle) -> None:
    """Check that a bundle, folder or packed file, is unchanged.

    Checks every digest, with --expect-digest the identity of the bundle, and with --trust its signer. Exit code 3 if a
    check fails.

    \b
    Example:
      vitdeploy bundle verify digits.vitb
    """
    with console:
        document, lines = api("inspect").check(options.bundle, options.expect_digest, options.trust, console.progress)
    console.finish(document, lines, None)


@dataclass(frozen=True)
class Inspect(Options):
    path: Path = field(metadata=required(place="one"))
    target: str | None = option(None, "Check the graphs against the rules of a target: tensorrt.", complete="targets")
    target_version: str | None = option(None, "TensorRT release of the rules: 10.3, 10.16 or 11.4. Default: all three.")
    check_answers: bool = option(False, "Run every engine of a bundle on its golden inputs.", flag="--check")
    expect_digest: str | None = option(None, EXPECT_DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(Inspect)
def inspect(console: Console, options: Inspect) -> None:
    """Show what a bundle or an ONNX file contains, and check every digest of a bundle.

    --target lists what that target would refuse (exit code 5), slow down or leave unfused, with fixes. --check runs
    every engine that works here on the bundle's golden inputs: exit code 5 if outputs differ from those of the build by
    more than the manifest's tolerance, or if answers differ from the original's.

    \b
    Example:
      vitdeploy inspect out/digits --check
    """
    path = options.path
    if is_packed(path):
        read_bundle(path)  # its error shows how to unpack it
    if options.check_answers and (options.target is not None or not is_bundle(path)):
        options.refuse("<check_answers> runs the engines of a bundle: leave <target> out.")
    if options.trust is not None and not options.check_answers:
        options.refuse("<trust> needs <check_answers>: otherwise no engine is run.")
    api("values").require_pinned(options.expect_digest, [path])
    if options.target is not None:
        _lint(console, path, options.target, options.target_version)
        return
    if options.target_version is not None:
        options.refuse("<target_version> needs <target> tensorrt.")
    document, lines = api("inspect").inspect(path)
    if not options.check_answers:
        console.finish(document, lines, None)
        return
    checked, check_lines, ok = api("inspect").check_bundle(path, options.trust)
    console.finish({**document, "check": checked}, [*lines, *check_lines], None)
    if not ok:
        raise GateError(
            "an engine does not reproduce the golden answers",
            found=", ".join(each["engine"] for each in checked if each["ok"] is False),
            expected="the outputs recorded when the bundle was built, within its tolerance, and the original's answers",
            fix="build the bundle on a machine like this one: other CPUs and runtimes use other kernels",
        )


def _lint(console: Console, path: Path, target: str, version: str | None) -> None:
    document, lines, findings = api("inspect").lint_graphs(path, target, version)
    console.finish(document, lines, None)
    errors = sorted({finding.rule for finding in findings if finding.severity == "error"})
    if errors:
        raise GateError(
            f"{target} would refuse {path} or compute wrong results",
            found=", ".join(errors),
            expected="no finding with severity error",
            fix="apply the fixes listed above",
        )


@dataclass(frozen=True)
class Explain(Options):
    bundle: Path = field(metadata=required(place="one"))
    image: Path = field(metadata=required(place="one"))
    folder: Path = field(metadata=required(OUTPUT, help="The .png file to write."))


@command_of(Explain)
def explain(console: Console, options: Explain) -> None:
    """Draw attention maps over an image: where the model looks.

    ViT: every head of the last attention, their mean, and attention rollout over all blocks. DETR: the decoder's last
    cross-attention for the best three objects. The maps come from the bundle's float graph on ONNX Runtime; engines do
    not output them.

    \b
    Example:
      vitdeploy explain out/digits calibration/digits/evaluation/7/0017.png -o where.png
    """
    read_bundle(options.bundle)  # and the image, before what reads graphs is imported
    if not is_file(options.image):
        raise MissingFileError(f"no image at {options.image}", fix="check the path")

    from vitdeploy.workflows.explain import explain

    with console:
        console.progress("attention maps", 0, 1)
        facts = explain(options.bundle, options.image, options.folder)
        console.progress("attention maps", 1, 1)
    rows, columns = facts.grid
    lines = [
        f"{facts.read}: {rows}x{columns} patches, {facts.prefix_tokens} prefix "
        f"token{'' if facts.prefix_tokens == 1 else 's'}, "
        f"{facts.heads} heads, {facts.blocks} attentions"
    ]
    console.finish(facts, lines, options.folder)


# --- This machine, and its shell --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DoctorOptions(Options):
    target: str | None = option(
        None, "Check everything that this target needs; exit code 4 if it does not work here.", complete="targets"
    )
    measure: bool = option(False, "Time single layers on this CPU (a few minutes); later INT8 builds use these costs.")


@command_of(DoctorOptions)
def doctor(console: Console, options: DoctorOptions) -> None:
    """Show what is installed here and which targets work.

    \b
    Example:
      vitdeploy doctor --target openvino-cpu
    """
    module, target = api("inspect"), options.target
    if options.measure:
        with console:
            document, lines = module.measure_layers(target, console.progress)
        console.finish(document, lines, None)
        return
    document, lines = module.diagnose() if target is None else module.diagnose_target(target)
    console.finish(document, lines, None)
    if target is not None and not document["works"]:
        click.get_current_context().exit(HostError.exit_code)


@dataclass(frozen=True)
class Selftest(Options):
    target: str = field(metadata=required("Target to test, such as tensorrt or onnxruntime-cuda.", complete="targets"))
    folder: Path | None = option(
        None, OUTPUT, help="Folder for the report. Default: out/selftest-<target>.", required=False
    )
    duration: float = option(10.0, DURATION)


@command_of(Selftest)
def selftest(console: Console, options: Selftest) -> None:
    """Test a target end to end on this machine: build, verify and bench engines, and write one report.

    Builds the digits model and a ViT-B/16 with seeded weights in every precision of the target, verifies each engine
    against PyTorch, and measures all in alternating runs; on a GPU against torch.compile in FP16. A failed step is
    recorded, and the rest continues. Exit code 5 if an engine's answers differ from the original's, 4 if the target
    does not work here or a step failed; the report is always written.

    \b
    Example:
      vitdeploy lab selftest --target openvino-cpu
    """
    out = options.folder or Path("out") / f"selftest-{options.target}"
    with console:
        document, lines = api("inspect").selftest(options.target, out, options.duration, console.progress)
    then = f"send back the folder {command_line(out)}; open {command_line(out / 'report.html')}"
    console.finish(document, lines, out, then)
    if not document.passed:
        wrong = any(row.error and row.error.code == GateError.code for row in document.steps)
        click.get_current_context().exit(GateError.exit_code if wrong else HostError.exit_code)


SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the shell-completion script for commands, options, targets, models and devices.

    \b
    bash  eval "$(vitdeploy lab completion bash)"      at the end of ~/.bashrc
    zsh   eval "$(vitdeploy lab completion zsh)"       at the end of ~/.zshrc, after compinit
    fish  vitdeploy lab completion fish > ~/.config/fish/completions/vitdeploy.fish
    """
    from vitdeploy.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "vitdeploy", "_VITDEPLOY_COMPLETE").source())
