"""`vitdeploy compare A B`: what B has lost or gained against A, as a gate for CI."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.api.bench_lines import ratio_text
from vitdeploy.api.tables import interval
from vitdeploy.cli.bundle_options import trust_option
from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.console import Console, Number, output_options
from vitdeploy.cli.evaluation import evaluation, label_options

if TYPE_CHECKING:
    from vitdeploy.document.comparison import AccuracyChange, PairFacts

OUTPUT_FILES = ("compare.json", "compare.html")


@click.command("compare")
@click.argument("baseline", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--max-drop", type=Number(min=0), help="Gate: points of accuracy that may be lost.")
@click.option("--max-slowdown", type=Number(min=0), help="Gate: percent by which latency and time per image may grow.")
@click.option("--data", type=click.Path(path_type=Path), help="Images, best with labels, that both bundles answer.")
@label_options
@click.option("--target", shell_complete=complete_targets, help="Compare the engines of this target only.")
@click.option(
    "--duration",
    type=Number(min=0, min_open=True, max=3600),
    default=10.0,
    show_default=True,
    help="Seconds an engine and scenario of the bench.",
)
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@click.option(
    "--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write the checks as JUnit's XML to this file."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write compare.json and compare.html here.")
@trust_option
@output_options
def command(
    console: Console,
    baseline: Path,
    candidate: Path,
    max_drop: float | None,
    max_slowdown: float | None,
    data: Path | None,
    labels: str | None,
    annotations: Path | None,
    target: str | None,
    duration: float,
    skip_bad: bool,
    junit: Path | None,
    output: Path | None,
    trust: Path | None,
) -> None:
    """Compare two bundles, or two reports: a gate against lost answers and slower engines.

    Bundles run here: engines of one target and precision answer the images of --data, and are measured in turns.
    Reports (report.json) are compared by their numbers; that is weaker, since they were not measured in turns. Exit
    code 5 when a limit is not kept, or not provably kept.
    """
    from vitdeploy.benchmark.protocol import Protocol
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.early import check_data, check_target, is_report, require_annotations

    if target is not None:
        check_target(target)
    for path in (baseline, candidate):
        is_report(path)
    if data is not None:
        check_data(data)
    require_annotations(annotations)

    from vitdeploy.document.comparison import Limits
    from vitdeploy.publish import replacing, storage_errors
    from vitdeploy.report.html import render_regression
    from vitdeploy.report.junit import render_junit
    from vitdeploy.runtime.atomic import write_atomic
    from vitdeploy.stages.files import write_json
    from vitdeploy.workflows.regression.compare import compare

    if junit is not None and not junit.parent.is_dir():
        raise click.BadParameter(f"no folder {junit.parent}", param_hint="--junit")
    if data is None and (labels is not None or annotations is not None):
        raise click.UsageError("--labels and --annotations need --data.")
    choice = evaluation(data, labels, annotations) if data is not None else None
    with console, contextlib.ExitStack() as stack:
        work = stack.enter_context(replacing(output, OUTPUT_FILES)) if output is not None else None
        document, gate = compare(
            baseline,
            candidate,
            Limits(max_drop, max_slowdown),
            target=target,
            choice=choice,
            protocol=Protocol(duration=duration),
            skip_bad=skip_bad,
            trust=trust,
            progress=console.progress,
        )
        if work is not None:
            write_json(work / "compare.json", document)
            (work / "compare.html").write_text(render_regression(document), encoding="utf-8")
        if junit is not None:
            with storage_errors(junit):
                write_atomic(junit, render_junit(document))
    lines = [line for engine in document.engines for line in _lines(engine)]
    lines += [*document.remarks, document.sentence]
    console.finish(document, lines, output)
    if gate.status in ("fail", "undecided"):
        raise GateError(
            "the gate is not met" if gate.status == "fail" else "the gate is not provably met",
            found="; ".join(gate.reasons),
            fix="evaluate on more images, measure for longer (--duration), or raise the limit",
        )


def _lines(engine: PairFacts) -> list[str]:
    """One pair of engines."""
    lines, accuracy = [engine.engine], engine.accuracy
    if engine.same_engine:
        lines.append("  the same files, so the same answers and the same times")
    elif accuracy is not None and accuracy.how == "same files":
        lines.append("  the same files, so the same answers")
    elif accuracy is not None:
        lines += _accuracy_lines(accuracy)
    for ratio in engine.ratios:
        said = f"{ratio_text(ratio, 3)}: {ratio.difference if ratio.decided else ratio.reason}"
        lines.append(f"  {ratio.metric:<11} candidate / baseline {said}")
    if engine.flags:
        lines.append(f"  flags       {' '.join(engine.flags)}")
    for check in engine.checks:
        if check.status != "none":
            lines.append(f"  {check.name + ' gate':<11} {check.status}" + "".join(f"; {r}" for r in check.reasons))
    return lines


def _accuracy_lines(accuracy: AccuracyChange) -> list[str]:
    lines = []
    if accuracy.drop is not None:
        drop = f"{accuracy.drop:.2f}"
        if accuracy.drop_ci95 is not None:
            drop = interval(accuracy.drop, accuracy.drop_ci95)
        both = f"{accuracy.candidate or 0:.2f} %, baseline {accuracy.baseline or 0:.2f} %"
        lines.append(f"  {accuracy.metric:<11} {both}, drop {drop} points ({accuracy.how}, {accuracy.n} samples)")
    if accuracy.agreement is not None:
        lines.append(f"  agreement   {interval(accuracy.agreement, accuracy.agreement_ci95)} %")
    return lines
