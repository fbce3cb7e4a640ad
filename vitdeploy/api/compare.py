"""Compare a candidate with a baseline: what it lost and gained."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.api.artifacts import Bundle
from vitdeploy.api.bench import ratio_text
from vitdeploy.api.calls import takes
from vitdeploy.api.images import Images, images
from vitdeploy.api.options import (
    Compare,
)
from vitdeploy.api.values import Line, Shown, interval, reporting, unrelated
from vitdeploy.benchmark import protocol
from vitdeploy.document.comparison import AccuracyChange, ComparisonDocument, ComparisonLimits, PairFacts
from vitdeploy.pipeline.early import open_bundle
from vitdeploy.pipeline.setting import engine_setting
from vitdeploy.publish import replacing, storage_errors
from vitdeploy.report.html import render_regression
from vitdeploy.report.text import render_junit
from vitdeploy.runtime.trust import write_atomic
from vitdeploy.spec import GateStatus
from vitdeploy.stages.step import write_json
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.workflows.regression import compare as compare_paths

OUTPUT_FILES = ("compare.json", "compare.html")


@dataclass(frozen=True, repr=False)
class Compared(Shown):
    """A candidate against a baseline, engine by engine; `document` is the compare.json."""

    document: ComparisonDocument

    @property
    def status(self) -> GateStatus:
        """ "pass", "fail" or "undecided" of the limits; "none" without one."""
        return self.document.gate.status

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each limit that is not kept, or not provably."""
        return self.document.gate.reasons

    def lines(self) -> list[Line]:
        document = self.document
        lines: list[Line] = [line for engine in document.engines for line in _lines(engine)]
        return [*lines, *document.remarks, document.sentence]


@takes(Compare)
def compare(options: Compare) -> Compared:
    """Compare two bundles, which are run here, or two reports, which are read. What is not kept is said, not raised.

    Raises:
        MissingFileError: an argument is neither a bundle nor a report. TargetError: the two have no engine in common.
        InputError: images for reports, which answer none. DataError, ImageError: of the images. OutputError: `folder`
            holds something else. Errors of engines.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> before, after = (vd.compile(graph, "onnxruntime-cpu", progress=False) for _ in range(2))
    >>> vd.compare(before, after, duration=0.1, max_drop=1.0, progress=False).status
    'pass'
    """
    sides = options.baseline, options.candidate
    old, new = (each.folder if isinstance(each, Bundle) else Path(each) for each in sides)
    reporter = reporting(options.progress)
    with reporter, contextlib.ExitStack() as stack:
        work = None
        if options.folder is not None:
            work = stack.enter_context(replacing(Path(options.folder), OUTPUT_FILES))
        document = compare_paths(
            old,
            new,
            ComparisonLimits(options.max_drop, options.max_slowdown),
            target=options.target,
            choice=None if options.data is None else _choice(images(options.data), old),
            protocol=protocol.Protocol(duration=options.duration) if options.bench else None,
            skip_bad=options.skip_bad,
            trust=None if options.trust is None else Path(options.trust),
            progress=reporter.progress,
        )
        if work is not None:
            write_json(work / "compare.json", document)
            (work / "compare.html").write_text(render_regression(document), encoding="utf-8")
        if options.junit is not None:
            with storage_errors(Path(options.junit)):
                write_atomic(Path(options.junit), render_junit(document))
    return Compared(document)


def _choice(chosen: Images, baseline: Path) -> DataChoice:
    """All of the images; those in memory are written as the baseline takes them."""
    setting = Setting("classification", None)  # which images that are files are not asked for
    if chosen.path is None:
        manifest, labels = open_bundle(baseline)
        setting = engine_setting(baseline, manifest, manifest.engines[0], labels)
    return DataChoice(*chosen.place(setting), chosen.annotations, 0, "all", 0)


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
        agreement = interval(accuracy.agreement, accuracy.agreement_ci95)
        lines.append(f"  agreement   {agreement} %{unrelated(accuracy.control)}")
    return lines
