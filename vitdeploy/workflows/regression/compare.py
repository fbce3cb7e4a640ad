"""A baseline and a candidate become one document and one gate."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import read_bundle
from vitdeploy.document.bench import Bench
from vitdeploy.document.comparison import ComparisonDocument, DigestPair, Limits
from vitdeploy.document.read import read_report
from vitdeploy.errors import InputError
from vitdeploy.models.source import Source
from vitdeploy.pipeline.early import REPORT_FILE, is_report
from vitdeploy.pipeline.outcome import now
from vitdeploy.progress import Progress
from vitdeploy.runtime.host import describe_host
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.verification.gate import Gate, join
from vitdeploy.workflows.regression.digests import of_bundle, of_report, side_by_side
from vitdeploy.workflows.regression.findings import Found, judge
from vitdeploy.workflows.regression.measured import compare_bundles
from vitdeploy.workflows.regression.reports import compare_reports
from vitdeploy.workflows.subjects import opened

SENTENCES = {
    "pass": "The candidate keeps within the limits.",
    "fail": "The candidate does not keep within the limits.",
    "undecided": "Whether the candidate keeps within the limits is not decided.",
    "none": "No limit was set.",
}


def compare(
    baseline: Path,
    candidate: Path,
    limits: Limits,
    *,
    target: str | None,
    choice: DataChoice | None,
    protocol: Protocol | None,
    skip_bad: bool,
    trust: Path | None,
    progress: Progress,
) -> ComparisonDocument:
    """The comparison of two bundles, which are run here, or of two reports, which are read. `protocol`: of the bench;
    None compares answers alone.

    Raises:
        MissingFileError: an argument is neither.
        InputError: images for reports, which no image can be shown to.
        TargetError: the two have no engine in common. Errors of reading, data, engines and measuring propagate.
    """
    paths = baseline, candidate
    if not any(map(is_report, paths)):
        with opened(target=target, source=Source(), trust=trust) as find:
            found, bench, remarks, missing = compare_bundles(
                find, baseline, candidate, choice, protocol, skip_bad=skip_bad, progress=progress
            )
        digests = [of_bundle(read_bundle(path)) for path in paths]
    else:
        if choice is not None:
            raise InputError(
                "reports answer no images",
                found=f"--data beside {', '.join(map(str, filter(is_report, paths)))}",
                wanted="two bundles, or no --data",
            )
        reports = [read_report(path if path.is_file() else path / REPORT_FILE) for path in paths]
        found, remarks, missing = compare_reports(reports[0], reports[1], target)
        bench, digests = None, [of_report(report) for report in reports]
    return _document(baseline, candidate, limits, found, bench, remarks, missing, side_by_side(*digests))


def _document(
    baseline: Path,
    candidate: Path,
    limits: Limits,
    found: list[Found],
    bench: Bench | None,
    remarks: list[str],
    missing: list[str],
    digests: tuple[DigestPair, ...],
) -> ComparisonDocument:
    judged = [judge(each, limits) for each in found]
    gate = join([*(each for _, each in judged), _missing_gate(missing, limits)])
    return ComparisonDocument(
        format=1,
        created=now(),
        baseline=str(baseline),
        candidate=str(candidate),
        measured=bench is not None or any(each.accuracy and each.accuracy.how == "measured" for each in found),
        limits=limits,
        sentence=SENTENCES[gate.status],
        gate=gate,
        engines=tuple(facts for facts, _ in judged),
        remarks=tuple(remarks),
        bench=bench,
        environment=describe_host(),
        digests=digests,
    )


def _missing_gate(missing: list[str], limits: Limits) -> Gate:
    """A target that has lost its engines keeps within no limit."""
    if not missing or (limits.max_drop, limits.max_slowdown) == (None, None):
        return Gate("none")
    return Gate("fail", tuple(f"the candidate has no engine for {target}" for target in missing))
