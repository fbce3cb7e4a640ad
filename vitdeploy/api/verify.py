"""Compare an artifact's answers with the original's, and a candidate with a baseline."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.api import artifacts, bench, calls, values, workers
from vitdeploy.api.images import Images, images
from vitdeploy.api.options import (
    Bisect,
    Compare,
    Verify,
    VerifyOn,
)
from vitdeploy.benchmark import protocol
from vitdeploy.document import comparison, report
from vitdeploy.graph.io.files import admitted_metadata
from vitdeploy.pipeline.early import open_bundle
from vitdeploy.pipeline.setting import engine_setting, graph_setting
from vitdeploy.publish import replacing, storage_errors
from vitdeploy.report.html import render_regression
from vitdeploy.report.text import render_junit
from vitdeploy.runtime.trust import write_atomic
from vitdeploy.spec import Budget, GateStatus
from vitdeploy.stages.step import find_graph, write_json
from vitdeploy.tasks import adapter, features, tensors
from vitdeploy.verification.agreement import Agreement
from vitdeploy.verification.comparison import Comparison
from vitdeploy.workflows.bisection import bisect_artifact
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.regression import compare as compare_paths
from vitdeploy.workflows.subjects import emulation_offered, opened


@dataclass(frozen=True, repr=False)
class Verification(values.Shown):
    """An artifact compared with its original on the same samples; `found` has all results and the gate. `noun`: what a
    sample is called."""

    found: report.VerifyDocument
    noun: str = "image"

    @property
    def status(self) -> GateStatus:
        """The result of the budget: "pass", "fail" or "undecided"; "none" without one."""
        return self.found.gate.status

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each bound that is not met, or not provably."""
        return self.found.gate.reasons

    @property
    def agreement(self) -> float:
        """Percent of the samples on which the answer equals the original's."""
        return self.found.verified.agreement

    @property
    def drop(self) -> float | None:
        """Drop of the metric in points; None without labels."""
        return self.found.verified.drop

    def document(self) -> dict[str, object]:
        """The document that the command line prints with --json."""
        return self.found.document()

    def lines(self) -> list[values.Line]:
        found, verified, gate = self.found, self.found.verified, self.found.gate
        lines: list[values.Line] = [f"{found.artifact} against {found.against} on {verified.n} {self.noun}s"]
        if verified.metric is not None:
            lines.append(
                f"{verified.metric + ' ':<12}{verified.value:.2f} %, original {verified.reference_value:.2f} %, "
                f"drop {values.interval(verified.drop or 0.0, verified.drop_ci95)} points"
            )
        if isinstance(verified, Agreement) and verified.top5 is not None:
            lines.append(f"top-5       {verified.top5:.2f} %, original {verified.reference_top5:.2f} %")
        agreement = values.interval(verified.agreement, verified.agreement_ci95)
        lines.append(f"agreement   {agreement} % ({verified.agreement_of}){values.unrelated(verified.control)}")
        lines += [f"head        {name}: {_head(each)}" for name, each in verified.by_head.items()]
        distance = [f"KL {verified.kl:.2e} nats"] if isinstance(verified, Agreement) else []
        if isinstance(verified, Agreement | features.FeatureComparison):
            distance.append(f"cosine {verified.cosine_mean:.6f} (minimum {verified.cosine_min:.6f})")
        lines += [
            f"distance    {'; '.join([*distance, 'largest difference ' + format(verified.max_difference, '.1e')])}",
            f"diagnosis   {verified.diagnosis}",
        ]
        if isinstance(verified, tensors.TensorComparison):
            lines += [f"output      {_output(tensor)}" for tensor in verified.outputs]
        lines += found.remarks
        lines += [f"warning: {text}" for text in found.warnings]
        if gate.status != "none":
            lines.append(f"gate        {gate.status}" + "".join(f"; {reason}" for reason in gate.reasons))
        return lines


def _head(facts: Comparison) -> str:
    """One line on one of several heads."""
    agreement = f"agreement {values.interval(facts.agreement, facts.agreement_ci95)} %{values.unrelated(facts.control)}"
    if facts.metric is None:
        return agreement
    drop = f"drop {values.interval(facts.drop or 0.0, facts.drop_ci95)} points"
    return f"{facts.metric} {facts.value:.2f} %, original {facts.reference_value:.2f} %, {drop}; {agreement}"


def _output(facts: tensors.OutputFacts) -> str:
    """One line on one output without a known task."""
    if facts.equal is not None:
        return f"{facts.name}: {facts.equal:.2f} % of the elements are equal"
    noise = "no error" if facts.snr is None else f"signal to noise {facts.snr:.1f} dB"
    return f"{facts.name}: {noise}, cosine {facts.cosine_mean:.6f}, largest difference {facts.max_difference:.1e}"


@dataclass(frozen=True, repr=False)
class Bisection(values.Shown):
    """Where the error of an engine enters, and its fix; `document` has every tested part and layer.

    `fix` is the command that fixes it, "" without one.
    """

    document: Mapping[str, object]
    text: tuple[str, ...]
    fix: str

    def lines(self) -> list[values.Line]:
        return [*self.text, *([self.fix] if self.fix else [])]


@calls.takes(Verify)
def verify(options: Verify) -> Verification:
    """Compare an artifact with the original on the same images. An unmet bound is reported, not raised.

    Raises:
        InputError: the two have different tasks or classes, or the executor is unknown. DataError, ImageError: the
            images are unusable. WorkerError, MissingPackageError: the executor failed or is not installed. Errors of
            engines.

    >>> import numpy as np
    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> colours = np.random.default_rng(0).integers(0, 256, (80, 3), np.uint8)
    >>> plain = [np.tile(colour, (32, 32, 1)) for colour in colours]
    >>> vd.verify(graph, "vit_w32d2h2_patch8_32", plain, min_agreement=80, progress=False).status
    'pass'
    """
    chosen, reporter = images(options.data), values.reporting(options.progress)
    executor = workers.executor_for(options.executor, options.jobs)
    target, emulate = options.target, options.emulate
    name = artifacts.artifact_name(options.artifact)
    offer = contextlib.nullcontext() if emulate or name is None else emulation_offered(name, target)
    accepted, trust = tuple(options.accept_known_bad), bench.path_or_none(options.trust)
    with reporter, offer, opened(target=target, emulated=emulate, trust=trust, accepted=accepted) as finder:
        ours, theirs = (bench.found_by(finder, artifact)[0] for artifact in (options.artifact, options.against))
        document = verify_subjects(
            ours,
            theirs,
            data_choice(chosen, ours.setting, options),
            skip_bad=options.skip_bad,
            budget=Budget(max_drop=options.max_drop, min_agreement=options.min_agreement),
            progress=reporter.progress,
            note=reporter.note,
            executor=executor,
        )
    return Verification(document, noun_of(chosen))


@calls.takes(Bisect)
def bisect(options: Bisect) -> Bisection:
    """Find the part and the layer (its input or its weight) that makes an engine's answers differ from its float
    graph's, on calibration images. Both are graphs or bundles; arguments and errors as for `verify`."""
    name, original = calls.require_path(options.artifact), calls.require_path(options.against)
    chosen, reporter = images(options.data), values.reporting(options.progress)
    place = chosen.path
    if place is None:
        file = find_graph(Path(original))
        place, _ = chosen.place(graph_setting(file, admitted_metadata(file)))
    with reporter:
        document, lines, fix = bisect_artifact(
            name,
            original,
            place,
            target=options.target,
            num_samples=options.num_samples,
            seed=options.seed,
            skip_bad=options.skip_bad,
            progress=reporter.progress,
        )
    return Bisection(document, tuple(lines), fix)


def data_choice(chosen: Images, setting: adapter.Setting, options: VerifyOn) -> adapter.DataChoice:
    place, kind = chosen.place(setting)
    more = chosen.texts, chosen.template or adapter.TEMPLATE, chosen.inputs
    return adapter.DataChoice(place, kind, chosen.annotations, 0, options.num_samples or "all", options.seed, *more)


def noun_of(chosen: Images) -> str:
    return "sequence" if chosen.path is not None and chosen.path.suffix == ".npz" else "image"


# --- Compare a candidate with a baseline ------------------------------------------------------------------------------


OUTPUT_FILES = ("compare.json", "compare.html")


@dataclass(frozen=True, repr=False)
class Compared(values.Shown):
    """A candidate compared with a baseline, engine by engine; `document` is the compare.json."""

    document: comparison.ComparisonDocument

    @property
    def status(self) -> GateStatus:
        """The result of the limits: "pass", "fail" or "undecided"; "none" without limits."""
        return self.document.gate.status

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each limit that is exceeded, or not provably kept."""
        return self.document.gate.reasons

    def lines(self) -> list[values.Line]:
        document = self.document
        lines: list[values.Line] = [line for engine in document.engines for line in _lines(engine)]
        return [*lines, *document.remarks, document.sentence]


@calls.takes(Compare)
def compare(options: Compare) -> Compared:
    """Compare two bundles (run here) or two reports (read). An exceeded limit is reported, not raised.

    Raises:
        MissingFileError: an argument is neither a bundle nor a report. TargetError: the two have no engine in common.
        InputError: images given for reports. DataError, ImageError: the images are unusable. OutputError: `folder`
            holds something else. Errors of engines.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> before, after = (vd.compile(graph, "onnxruntime-cpu", progress=False) for _ in range(2))
    >>> vd.compare(before, after, duration=0.1, max_drop=1.0, progress=False).status
    'pass'
    """
    sides = options.baseline, options.candidate
    old, new = (side.folder if isinstance(side, artifacts.Bundle) else Path(side) for side in sides)
    reporter = values.reporting(options.progress)
    with reporter, contextlib.ExitStack() as stack:
        work = None
        if options.folder is not None:
            work = stack.enter_context(replacing(Path(options.folder), OUTPUT_FILES))
        document = compare_paths(
            old,
            new,
            comparison.ComparisonLimits(options.max_drop, options.max_slowdown),
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


def _choice(chosen: Images, baseline: Path) -> adapter.DataChoice:
    """All images; images in memory are written in the form that the baseline reads."""
    setting = adapter.Setting("classification", None)  # not used for images in files
    if chosen.path is None:
        manifest, labels = open_bundle(baseline)
        setting = engine_setting(baseline, manifest, manifest.engines[0], labels)
    return adapter.DataChoice(*chosen.place(setting), chosen.annotations, 0, "all", 0, inputs=chosen.inputs)


def _lines(engine: comparison.PairFacts) -> list[str]:
    """One pair of engines."""
    lines, accuracy = [engine.engine], engine.accuracy
    if engine.same_engine:
        lines.append("  identical files: same answers and same times")
    elif accuracy is not None and accuracy.how == "same files":
        lines.append("  identical files: same answers")
    elif accuracy is not None:
        lines += _accuracy_lines(accuracy)
    for ratio in engine.ratios:
        change = f"{bench.ratio_text(ratio, 3)}: {ratio.difference if ratio.decided else ratio.reason}"
        lines.append(f"  {ratio.metric:<11} candidate / baseline {change}")
    if engine.flags:
        lines.append(f"  flags       {' '.join(engine.flags)}")
    for check in engine.checks:
        if check.status != "none":
            lines.append(f"  {check.name + ' gate':<11} {check.status}" + "".join(f"; {r}" for r in check.reasons))
    return lines


def _accuracy_lines(accuracy: comparison.AccuracyChange) -> list[str]:
    lines = []
    if accuracy.drop is not None:
        drop = f"{accuracy.drop:.2f}"
        if accuracy.drop_ci95 is not None:
            drop = values.interval(accuracy.drop, accuracy.drop_ci95)
        both = f"{accuracy.candidate or 0:.2f} %, baseline {accuracy.baseline or 0:.2f} %"
        lines.append(f"  {accuracy.metric:<11} {both}, drop {drop} points ({accuracy.how}, {accuracy.n} samples)")
    if accuracy.agreement is not None:
        agreement = values.interval(accuracy.agreement, accuracy.agreement_ci95)
        lines.append(f"  agreement   {agreement} %{values.unrelated(accuracy.control)}")
    return lines
