"""`vitdeploy bundle|inspect|explain`: a bundle as one file, what it holds, and where its model looks;
`doctor|selftest|completion`: what this machine has."""

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
DIGEST = "Refuse any other bundle: the SHA-256 of the packed file, or of a folder's manifest.json."


@click.group("bundle", context_settings={"help_option_names": ["-h", "--help"]})
def bundle() -> None:
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


@command_of(Sign, name="sign", parent=bundle)
def sign(console: Console, options: Sign) -> None:
    """Sign a bundle with your key, without a network.

    With --trust, others name your public key or certificate: predict, verify and bench then accept the bundle only if
    you signed it and no file has changed since.

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
    file: Path = field(metadata=required(OUTPUT, help=f"The file, as x{SUFFIX}.", metavar="FILE"))
    slim: bool = option(False, "Pack only what a device needs to run <target>: engines, golden answers, labels.")
    target: str | None = option(None, "The target of a slim pack.", complete="targets")
    key: Path | None = option(None, "Sign the slim bundle with this private key.")

    def check(self) -> None:
        if self.slim != (self.target is not None):
            self.refuse("<slim> and <target> go together.")
        if self.key is not None and not self.slim:
            self.refuse("<key> signs a slim pack; sign a whole bundle first: vitdeploy bundle sign.")


@command_of(Pack, name="pack", parent=bundle)
def pack(console: Console, options: Pack) -> None:
    """Make one file of a bundle.

    It is a zip, stored, of what the manifest lists and the signature. The same bundle gives the same bytes everywhere.
    Other files of the folder are left out, and named. A slim pack has no float graph and no report: a device can run
    and check it, but not explain, quantize or compile it again.

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
    folder: Path = field(metadata=required(OUTPUT, help="The bundle's folder.", metavar="DIR"))
    expect_digest: str | None = option(None, EXPECT_DIGEST, help=DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(Unpack, name="unpack", parent=bundle)
def unpack(console: Console, options: Unpack) -> None:
    """Make the folder of a packed bundle.

    All or nothing: every byte of the file is checked, each file's digest, and with --trust whose signature it has,
    before the folder is there. A bundle that is at DIR already is replaced.

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
    """Check a bundle, folder or packed.

    It is as it was made, or the exit code is 3. Every digest is checked, with --expect-digest that it is the
    one you were told of, and with --trust who signed it.

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
    target: str | None = option(None, "Judge the graphs by what this target takes: tensorrt.", complete="targets")
    target_version: str | None = option(None, "The release to judge by: 10.3, 10.16 or 11.4. Default: all three.")
    check_answers: bool = option(False, "Run every engine of a bundle on its golden inputs.", flag="--check")
    expect_digest: str | None = option(None, EXPECT_DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(Inspect)
def inspect(console: Console, options: Inspect) -> None:
    """Show what a bundle or an ONNX file contains, and check every digest of a bundle.

    --target names what that target would refuse (exit 5), slow down or leave unfused, and the fix. --check runs every
    engine that works here on the bundle's golden inputs: exit 5 if its outputs differ from those of the build by more
    than the manifest's tolerance, or if its answers are not the original's.

    \b
    Example:
      vitdeploy inspect out/digits --check
    """
    path = options.path
    if is_packed(path):
        read_bundle(path)  # which says how to unpack it
    if options.check_answers and (options.target is not None or not is_bundle(path)):
        options.refuse("<check_answers> runs the engines of a bundle: leave <target> out.")
    if options.trust is not None and not options.check_answers:
        options.refuse("<trust> goes with <check_answers>: nothing else of a bundle is run.")
    api("values").require_pinned(options.expect_digest, [path])
    if options.target is not None:
        _lint(console, path, options.target, options.target_version)
        return
    if options.target_version is not None:
        options.refuse("<target_version> goes with <target> tensorrt.")
    document, lines = api("inspect").inspect(path)
    if not options.check_answers:
        console.finish(document, lines, None)
        return
    checked, told, ok = api("inspect").check_bundle(path, options.trust)
    console.finish({**document, "check": checked}, [*lines, *told], None)
    if not ok:
        raise GateError(
            "an engine does not give the golden answers",
            found=", ".join(each["engine"] for each in checked if each["ok"] is False),
            expected="what the engine gave when the bundle was made, within its tolerance, and the original's answers",
            fix="make the bundle on a machine like this one: other CPUs and runtimes have other kernels",
        )


def _lint(console: Console, path: Path, target: str, version: str | None) -> None:
    document, lines, findings = api("inspect").lint_graphs(path, target, version)
    console.finish(document, lines, None)
    errors = sorted({finding.rule for finding in findings if finding.severity == "error"})
    if errors:
        raise GateError(
            f"{target} would refuse {path}, or compute something else", found=", ".join(errors), fix="the fixes above"
        )


@dataclass(frozen=True)
class Explain(Options):
    bundle: Path = field(metadata=required(place="one"))
    image: Path = field(metadata=required(place="one"))
    folder: Path = field(metadata=required(OUTPUT, help="The .png file to write."))


@command_of(Explain)
def explain(console: Console, options: Explain) -> None:
    """Show where a model looks: attention maps over an image.

    For a ViT: every head of the last attention, their mean, and attention rollout over all blocks. For a DETR: the
    decoder's last cross-attention, for the best three objects. The maps come from the bundle's float graph on ONNX
    Runtime; shipped engines do not have them.

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
        f"{facts.read}: {rows}x{columns} patches after {facts.prefix_tokens} other tokens, "
        f"{facts.heads} heads, {facts.blocks} attentions"
    ]
    console.finish(facts, lines, options.folder)


# --- This machine, and its shell --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DoctorOptions(Options):
    target: str | None = option(
        None, "Everything that this one target needs; exit code 4 where it does not work here.", complete="targets"
    )
    measure: bool = option(
        False, "Time single layers on this CPU, some minutes, and choose INT8 graphs by their costs from now on."
    )


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
    target: str = field(metadata=required("tensorrt, onnxruntime-cuda, or any other target.", complete="targets"))
    folder: Path | None = option(
        None, OUTPUT, help="The report's folder. Default: out/selftest-<target>", required=False
    )
    duration: float = option(10.0, DURATION)


@command_of(Selftest)
def selftest(console: Console, options: Selftest) -> None:
    """Prove a target on this machine: build, verify and bench engines, and write one report.

    Builds the digits model and a ViT-B/16 with seeded weights in every precision of the target, verifies each engine
    against PyTorch, and measures all in turns; on a GPU against torch.compile in FP16. A step that fails is recorded,
    and the rest continues. Exit code 5 if an engine does not give the original's answers, 4 if the target does not work
    here or a step failed; the report is written in any case.

    \b
    Example:
      vitdeploy lab selftest --target openvino-cpu
    """
    out = options.folder or Path("out") / f"selftest-{options.target}"
    with console:
        document, lines = api("inspect").selftest(options.target, out, options.duration, console.progress)
    then = f"send {command_line(out)} back; open {command_line(out / 'report.html')}"
    console.finish(document, lines, out, then)
    if not document.passed:
        wrong = any(row.error and row.error.code == GateError.code for row in document.steps)
        click.get_current_context().exit(GateError.exit_code if wrong else HostError.exit_code)


SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """What a shell reads to complete commands, options, targets, models and devices.

    \b
    bash  eval "$(vitdeploy lab completion bash)"      at the end of ~/.bashrc
    zsh   eval "$(vitdeploy lab completion zsh)"       at the end of ~/.zshrc, after compinit
    fish  vitdeploy lab completion fish > ~/.config/fish/completions/vitdeploy.fish
    """
    from vitdeploy.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "vitdeploy", "_VITDEPLOY_COMPLETE").source())
