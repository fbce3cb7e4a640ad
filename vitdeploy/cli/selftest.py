"""`vitdeploy selftest --target T`: one command that proves a target on this machine, and one folder to send back."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.options import Console, Number, command_line, output_options


@click.command("selftest")
@click.option(
    "--target", shell_complete=complete_targets, required=True, help="tensorrt, onnxruntime-cuda, or any other target."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The report's folder. Default: out/selftest-<target>"
)
@click.option(
    "--duration",
    type=Number(min=0, min_open=True, max=3600),
    default=10.0,
    show_default=True,
    help="Seconds an artifact and scenario of the bench.",
)
@output_options
def command(console: Console, target: str, output: Path | None, duration: float) -> None:
    """Prove a target on this machine: build, verify and bench engines, and write one report.

    Builds the digits model and a ViT-B/16 with seeded weights in every precision of the target, verifies each engine
    against PyTorch, and measures all in turns; on a GPU against torch.compile in FP16. A step that fails is recorded,
    and the rest continues. Exit code 5 if an engine does not give the original's answers, 4 if the target does not work
    here or a step failed; the report is written in any case.
    """
    from vitdeploy.api.bundle import selftest
    from vitdeploy.errors import GateError, HostError

    out = output or Path("out") / f"selftest-{target}"
    with console:
        document, lines = selftest(target, out, duration, console.progress)
    then = f"send {command_line(out)} back; open {command_line(out / 'report.html')}"
    console.finish(document, lines, out, then)
    if not document.passed:
        wrong = any(row.error and row.error.code == GateError.code for row in document.steps)
        click.get_current_context().exit(GateError.exit_code if wrong else HostError.exit_code)
