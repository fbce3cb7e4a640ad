"""Compare a candidate with a baseline: what it lost and gained."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api.bench import ratio_text
from vitdeploy.api.bundle import Bundle
from vitdeploy.api.images import Images, ImagesLike, images
from vitdeploy.api.values import Line, Reporter, Shown, interval, reporting, unrelated
from vitdeploy.spec import GateStatus

if TYPE_CHECKING:
    from vitdeploy.document.comparison import AccuracyChange, ComparisonDocument, PairFacts
    from vitdeploy.tasks.adapter import DataChoice

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


def compare(
    baseline: Bundle | str | Path,
    candidate: Bundle | str | Path,
    data: ImagesLike | None = None,
    folder: str | Path | None = None,
    *,
    max_drop: float | None = None,
    max_slowdown: float | None = None,
    target: str | None = None,
    duration: float = 10.0,
    bench: bool = True,
    junit: str | Path | None = None,
    skip_bad: bool = False,
    trust: str | Path | None = None,
    progress: bool | Reporter = True,
) -> Compared:
    """Compare two bundles, which are run here, or two reports, which are read. What is not kept is said, not raised.

    Args:
        baseline, candidate: a `Bundle`, the path of one, or of a report.json.
        data: images, as `vitdeploy.images` takes them, best with labels, that the engines of both bundles answer.
        folder: where compare.json and compare.html are written; None writes neither.
        max_drop: points of accuracy that may be lost.
        max_slowdown: percent by which latency and time per image may grow.
        target: compare the engines of this target only.
        duration: seconds an engine and scenario of the bench.
        bench: measure times; without it answers alone are compared.
        junit: a file for the checks as JUnit's XML.
        skip_bad: go on without unreadable images.
        trust: bundles must be signed by this public key or certificate (PEM).
        progress: as for `vitdeploy.export`.

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
    old, new = (each.folder if isinstance(each, Bundle) else Path(each) for each in (baseline, candidate))
    chosen = _checked(old, new, data, target)

    from vitdeploy.benchmark.protocol import Protocol
    from vitdeploy.document.comparison import Limits
    from vitdeploy.publish import replacing, storage_errors
    from vitdeploy.report.html import render_regression
    from vitdeploy.report.text import render_junit
    from vitdeploy.runtime.trust import write_atomic
    from vitdeploy.stages.step import write_json
    from vitdeploy.workflows.regression.compare import compare as compare_paths

    reporter = reporting(progress)
    with reporter, contextlib.ExitStack() as stack:
        work = stack.enter_context(replacing(Path(folder), OUTPUT_FILES)) if folder is not None else None
        document = compare_paths(
            old,
            new,
            Limits(max_drop, max_slowdown),
            target=target,
            choice=None if chosen is None else _choice(chosen, old),
            protocol=Protocol(duration=duration) if bench else None,
            skip_bad=skip_bad,
            trust=None if trust is None else Path(trust),
            progress=reporter.progress,
        )
        if work is not None:
            write_json(work / "compare.json", document)
            (work / "compare.html").write_text(render_regression(document), encoding="utf-8")
        if junit is not None:
            with storage_errors(Path(junit)):
                write_atomic(Path(junit), render_junit(document))
    return Compared(document)


def _checked(baseline: Path, candidate: Path, data: ImagesLike | None, target: str | None) -> Images | None:
    """Check names and paths before anything heavy is imported; returns the images."""
    from vitdeploy.pipeline.early import check_data, check_target, is_report, require_annotations

    if target is not None:
        check_target(target)
    for path in (baseline, candidate):
        is_report(path)
    if data is None:
        return None
    chosen = images(data)
    if chosen.path is not None:
        check_data(chosen.path)
    require_annotations(chosen.annotations)
    return chosen


def _choice(chosen: Images, baseline: Path) -> DataChoice:
    """All of the images; those in memory are written as the baseline takes them."""
    from vitdeploy.pipeline.artifact import open_bundle
    from vitdeploy.pipeline.setting import engine_setting
    from vitdeploy.tasks.adapter import DataChoice, Setting

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
