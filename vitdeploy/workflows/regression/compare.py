"""What changed between two sets of bundles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import read_bundle
from vitdeploy.document.bench import Bench
from vitdeploy.document.comparison import AccuracyChange, ComparisonDocument, ComparisonLimits, DigestPair, TimeRatio
from vitdeploy.document.report import read_report
from vitdeploy.errors import InputError
from vitdeploy.models.source import Source
from vitdeploy.pipeline.early import REPORT_FILE, is_report
from vitdeploy.pipeline.measure import measure
from vitdeploy.pipeline.outcome import now
from vitdeploy.progress import Progress
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import Budget, EngineSpec, Manifest
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.verification.gate import Gate, join
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.regression.findings import Found, Pair, judge, of_bundle, of_report, pair_up, side_by_side
from vitdeploy.workflows.regression.reports import compare_reports
from vitdeploy.workflows.subjects import Finder, Subject, opened

# --- Two bundles compared on this machine -----------------------------------------------------------------------------
# both answer the same images, and both are measured in one benchmark run.
#
# Engines that are the same files need neither: they are one engine. To measure it against itself could only raise a
# false alarm.


# What is judged is the median.
PERCENTILES = (50.0,)
# Flags of a latency that say nothing of a ratio in the same rounds.
OF_ONE_SIDE = ("unstable", "contended")


def compare_bundles(
    find: Finder,
    baseline: Path,
    candidate: Path,
    choice: DataChoice | None,
    protocol: Protocol | None,
    *,
    skip_bad: bool,
    progress: Progress,
) -> tuple[list[Found], Bench | None, list[str], list[str]]:
    """Compare each pair of engines; also returns the `bench` of pairs with different files, remarks, and the targets
    that the candidate has no engine for.

    Args:
        choice: which images both sides answer; without them accuracy is not compared.
        protocol: of the bench; without it times are not compared.

    Raises:
        TargetError: there is no pair of engines. Errors of bundles, data, engines and measuring propagate.
    """
    sides = {subject.artifact: subject for subject in find(str(baseline))}
    others = {subject.artifact: subject for subject in find(str(candidate))}
    pairs, remarks, missing = pair_up(list(sides), list(others))
    manifests = read_bundle(baseline), read_bundle(candidate)
    found, measured = [], []
    for pair in pairs:
        ours, theirs = others[pair.candidate], sides[pair.baseline]
        remarks += [*ours.remarks, *theirs.remarks]
        if _same_files(pair, *manifests):
            found.append(Found(pair.name, _of_same_files(), (), same_engine=True))
        else:
            verified, said = _verified(ours, theirs, choice, skip_bad, progress) if choice is not None else (None, [])
            remarks += said
            found.append(Found(pair.name, verified, ()))
            measured.append(pair)
    bench = _bench_run(measured, sides, others, protocol, progress) if measured and protocol else None
    timed = [
        _timed(each, pair, bench) if bench and pair in measured else each
        for each, pair in zip(found, pairs, strict=True)
    ]
    return timed, bench, _once(remarks), missing


def _verified(
    ours: Subject, theirs: Subject, choice: DataChoice, skip_bad: bool, progress: Progress
) -> tuple[AccuracyChange, list[str]]:
    """The accuracy of both sides, and remarks on the data and on the baseline's accuracy."""
    found = verify_subjects(ours, theirs, choice, skip_bad=skip_bad, budget=Budget(), progress=progress)
    facts = found.verified
    said = [*found.remarks, *(f"warning: {text}" for text in found.warnings)]
    return AccuracyChange(
        how="measured",
        n=facts.n,
        metric=facts.metric,
        baseline=facts.reference_value,
        candidate=facts.value,
        drop=facts.drop,
        drop_ci95=facts.drop_ci95,
        agreement=facts.agreement,
        agreement_ci95=facts.agreement_ci95,
        control=facts.control,
    ), said


def _of_same_files() -> AccuracyChange:
    """Nothing has to be asked of engines that are the same."""
    return AccuracyChange("same files", 1, None, None, None, 0.0, (0.0, 0.0), 100.0, (100.0, 100.0))


def _same_files(pair: Pair, baseline: Manifest, candidate: Manifest) -> bool:
    """Whether both engines are the same bytes, with the same settings."""
    of_model = [(m.task, m.preprocess, m.postprocess) for m in (baseline, candidate)]
    engines = _of_engine(baseline, pair.baseline), _of_engine(candidate, pair.candidate)
    return of_model[0] == of_model[1] and engines[0] == engines[1]


def _of_engine(manifest: Manifest, artifact: str) -> tuple[EngineSpec, dict[str, str]]:
    engine = next(each for each in manifest.engines if each.artifact == artifact)
    digests = {entry.path: entry.sha256 for entry in manifest.files}
    files = [*engine.files, *(file for part in engine.parts for file in part.files)]
    return dataclasses.replace(engine, device={}), {file: digests[file] for file in files}


def _bench_run(
    pairs: list[Pair],
    sides: Mapping[str, Subject],
    others: Mapping[str, Subject],
    protocol: Protocol,
    progress: Progress,
) -> Bench:
    bench_candidates = {}  # an engine may be in two pairs
    for pair in pairs:
        old, new = _names(pair)
        bench_candidates[old] = sides[pair.baseline].bench_candidate(old)
        bench_candidates[new] = others[pair.candidate].bench_candidate(new)
    compared = [_names(pair)[::-1] for pair in pairs]
    return measure(list(bench_candidates.values()), protocol, compared, progress, PERCENTILES, context=True)


def _names(pair: Pair) -> tuple[str, str]:
    """The names of the two sides of a pair in the benchmark run."""
    return f"baseline {pair.baseline}", f"candidate {pair.candidate}"


def _timed(found: Found, pair: Pair, bench: Bench) -> Found:
    names = _names(pair)
    ratios = [TimeRatio(**vars(ratio)) for ratio in bench.ratios if (ratio.b, ratio.a) == names]
    flags = _once([flag for row in bench.results if row.artifact in names for flag in row.flags])
    # What is judged is not how well each side is known but how well their ratio is, which says so itself.
    flags = [flag for flag in flags if flag not in OF_ONE_SIDE]
    return dataclasses.replace(found, ratios=ratios, flags=flags)


def _once(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))


# --- A baseline and a candidate become one document and one gate ------------------------------------------------------


SENTENCES = {
    "pass": "The candidate keeps within the limits.",
    "fail": "The candidate does not keep within the limits.",
    "undecided": "Whether the candidate keeps within the limits is not decided.",
    "none": "No limit was set.",
}


def compare(
    baseline: Path,
    candidate: Path,
    limits: ComparisonLimits,
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
    limits: ComparisonLimits,
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


def _missing_gate(missing: list[str], limits: ComparisonLimits) -> Gate:
    """A target that has lost its engines keeps within no limit."""
    if not missing or (limits.max_drop, limits.max_slowdown) == (None, None):
        return Gate("none")
    return Gate("fail", tuple(f"the candidate has no engine for {target}" for target in missing))
