"""Compare a baseline and a candidate: bundles (run here) or reports (read)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitdeploy.benchmark.evidence import PROCESS_FREEDOM, PROCESS_SPREAD, quantile
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import read_bundle
from vitdeploy.document import comparison
from vitdeploy.document.bench import Bench
from vitdeploy.document.report import Provenance, Report, read_report
from vitdeploy.errors import InputError, TargetError
from vitdeploy.pipeline import early, outcome
from vitdeploy.pipeline.measure import measure
from vitdeploy.progress import Progress
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import Budget, DecodeError, EngineSpec, Manifest, bound_words, decode
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate, accuracy_gate, drop_gate, join, slowdown_gate
from vitdeploy.verification.intervals import unpaired_difference, unpaired_log_ratio
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.subjects import Finder, Subject, opened

# --- The result of a comparison of one pair of engines, and its gates; all JSON-ready ---------------------------------


def unjudged(
    name: str,
    accuracy: comparison.AccuracyChange | None,
    ratios: Sequence[comparison.TimeRatio] = (),
    flags: Sequence[str] = (),
    *,
    same_engine: bool = False,
) -> comparison.PairFacts:
    """The result of a pair; `accuracy` is None if it was not compared."""
    return comparison.PairFacts(name, accuracy, tuple(ratios), tuple(flags), same_engine, ())


def judge(pair: comparison.PairFacts, limits: comparison.ComparisonLimits) -> tuple[comparison.PairFacts, Gate]:
    """The pair with one check for accuracy and one for each time, and the gate of all."""
    gates = {"accuracy": _accuracy_gate(pair.accuracy, limits)}
    if limits.max_slowdown is not None and pair.same_engine:
        gates["latency"] = Gate("pass")
    elif limits.max_slowdown is not None and not pair.ratios:
        gates["latency"] = Gate("undecided", ("max_slowdown needs times, but no times were measured",))
    for ratio in pair.ratios:
        gates[ratio.metric] = _time_gate(ratio, pair.flags, limits)
    judged = replace(
        pair,
        ratios=tuple(replace(ratio, difference=_difference(ratio)) for ratio in pair.ratios),
        checks=tuple(comparison.Check(name, gate.status, gate.reasons) for name, gate in gates.items()),
    )
    return judged, join([gate.named(pair.engine) for gate in gates.values()])


def _difference(ratio: comparison.TimeRatio) -> str:
    """The meaning of the interval of candidate / baseline in words, or of its bounds if it is not reliable."""
    low, high = ratio.ci95 if ratio.decided else (ratio.bounds[0] or 0.0, ratio.bounds[1] or math.inf)
    if low <= 1 <= high:
        return "no difference" if ratio.decided else "not decided"
    return "faster" if (high < 1) == (ratio.metric == "latency") else "slower"


def _accuracy_gate(facts: comparison.AccuracyChange | None, limits: comparison.ComparisonLimits) -> Gate:
    if facts is None:
        unknown = Gate("undecided", ("max_drop needs images with labels (--data)",))
        return Gate("none") if limits.max_drop is None else unknown
    if limits.max_drop is not None and facts.drop is not None and facts.drop_ci95 is None:
        return Gate("undecided", (f"recorded values of {facts.metric} have no interval: use bundles and --data",))
    if facts.how == "measured" and facts.agreement is not None and facts.agreement_ci95 is not None:
        measured = Comparison(
            n=facts.n,
            metric=facts.metric,
            value=facts.candidate,
            reference_value=facts.baseline,
            drop=facts.drop,
            drop_ci95=facts.drop_ci95,
            agreement=facts.agreement,
            agreement_ci95=facts.agreement_ci95,
            agreement_of="",
            max_difference=0.0,
            control=facts.control,
        )
        return accuracy_gate(measured, Budget(max_drop=limits.max_drop))
    return drop_gate(facts.n, facts.drop, facts.drop_ci95, limits.max_drop)


def _time_gate(ratio: comparison.TimeRatio, flags: Sequence[str], limits: comparison.ComparisonLimits) -> Gate:
    """The gate of a ratio; throughput is compared as time per image."""
    if limits.max_slowdown is not None and not ratio.decided:
        return _bound_gate(ratio, limits.max_slowdown)
    value, (low, high) = ratio.ratio, ratio.ci95
    if ratio.metric == "throughput":
        value, low, high = 1 / value, 1 / high, 1 / low
    what = "latency" if ratio.metric == "latency" else "time per image"
    return slowdown_gate(what, value, (low, high), limits.max_slowdown, flags)


def _bound_gate(ratio: comparison.TimeRatio, max_slowdown: float) -> Gate:
    """The gate of a ratio that has only bounds, not a reliable interval."""
    low, high = ratio.bounds if ratio.metric == "latency" else ratio.bounds[::-1]
    most = 1 + max_slowdown / 100 if ratio.metric == "latency" else 1 / (1 + max_slowdown / 100)
    sign = 1 if ratio.metric == "latency" else -1
    if high is not None and sign * (most - high) >= 0:
        return Gate("pass")
    text = f"{ratio.metric} {bound_words(ratio.bounds) or 'not decided'}"
    if low is not None and sign * (low - most) > 0:
        return Gate("fail", (f"{text} times the baseline's, budget {max_slowdown:+g} %",))
    return Gate("undecided", (f"{text}: {ratio.reason}",))


# --- Pair the engines of the candidate with those of the baseline -----------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """The names of two engines, usually the same."""

    baseline: str
    candidate: str

    @property
    def name(self) -> str:
        return self.candidate if self.baseline == self.candidate else f"{self.baseline} → {self.candidate}"


def pair_up(baseline: Sequence[str], candidate: Sequence[str]) -> tuple[list[Pair], list[str], list[str]]:
    """Return the pairs in the candidate's order, a remark for each engine without a partner, and the targets for which
    only the baseline has engines.

    Engines with the same name are partners. An app gets a target's first engine: if the candidate lacks the baseline's
    (it may have failed its budget), the candidate's first engine for the target is the partner. If no name is in both
    and each side has one engine, these are partners.

    Raises:
        TargetError: no pair.
    """
    pairs = [Pair(name, name) for name in candidate if name in baseline]
    first, instead = _first_of_targets(baseline), _first_of_targets(candidate)
    pairs += [Pair(first[each], instead[each]) for each in first if each in instead and first[each] not in candidate]
    if not pairs and len(baseline) == len(candidate) == 1:
        return [Pair(baseline[0], candidate[0])], [], []
    if not pairs:
        raise TargetError(
            "baseline and candidate have no engine in common",
            found=f"{', '.join(baseline) or 'none'} against {', '.join(candidate) or 'none'}",
            expected="engines for the same target on both sides, or one engine on each side",
            fix="choose the target with --target",
        )
    left = [f"{name} is only in the baseline" for name in baseline if name not in [p.baseline for p in pairs]]
    left += [f"{name} is only in the candidate" for name in candidate if name not in [p.candidate for p in pairs]]
    return pairs, left, [target for target in first if target not in instead]


def _first_of_targets(artifacts: Sequence[str]) -> dict[str, str]:
    """The first engine of each target; the name of an artifact is its target and its precision."""
    return {artifact.rpartition("-")[0]: artifact for artifact in reversed(artifacts)}


# --- Every digest of the two sides of a comparison, side by side ------------------------------------------------------


def of_bundle(manifest: Manifest) -> dict[str, str]:
    """The sha256 of every file of a bundle, and of its sources if recorded."""
    files = {entry.path: entry.sha256 for entry in manifest.files}
    try:
        return {**_inputs(decode(Provenance, manifest.provenance)), **files}
    except DecodeError:  # a bundle not made by `run`
        return files


def of_report(report: Report) -> dict[str, str]:
    """The digests in a report: its sources, the exported graph, and the compiled engines."""
    return {**_inputs(report.provenance), **{file.path: file.sha256 for file in report.provenance.files}}


def _inputs(provenance: Provenance) -> dict[str, str]:
    data = {"calibration data": provenance.data.calibration, "evaluation data": provenance.data.evaluation}
    return {**provenance.source.sha256, **{name: digest for name, digest in data.items() if digest}}


def side_by_side(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> tuple[comparison.DigestPair, ...]:
    """A row for each name, in the baseline's order."""
    names = dict.fromkeys([*baseline, *candidate])
    return tuple(comparison.DigestPair(name, baseline.get(name), candidate.get(name)) for name in names)


# --- Compare two reports by their numbers; nothing is run -------------------------------------------------------------


# Tasks whose accuracy is the share of samples with a right answer.
SHARES = ("classification", "sequence", "zero-shot")
MACHINE = ("board", "cpu", "cores", "quota", "machine", "emulated")
RUNTIMES = ("vitdeploy", "onnxruntime", "openvino", "tensorrt")
# Half width of a ratio's interval due to differences between three processes of each side, which are unknown here.
BETWEEN_PROCESSES = quantile(PROCESS_FREEDOM + 2) * PROCESS_SPREAD / math.sqrt(3)
NOT_IN_TURNS = "Baseline and candidate were measured in separate runs: the intervals do not include drift between them."


def compare_reports(
    baseline: Report, candidate: Report, target: str | None
) -> tuple[list[comparison.PairFacts], list[str], list[str]]:
    """Compare each pair of engines by the reports; return the results, remarks, and the targets that the candidate
    lacks.

    Raises:
        TargetError: the reports have no engine in common.
    """
    names = [[e.artifact for e in report.engines if _is_of(e.artifact, target)] for report in (baseline, candidate)]
    pairs, remarks, missing = pair_up(*names)
    hindered = "" if _machine(baseline) == _machine(candidate) else _other_machine(baseline, candidate)
    facts = [_recorded(baseline, candidate, pair, hindered) for pair in pairs]
    if any(fact.ratios for fact in facts):
        remarks.append(hindered or NOT_IN_TURNS)
    if baseline.provenance.data.evaluation != candidate.provenance.data.evaluation:
        remarks.append("Accuracy is not compared: baseline and candidate were evaluated on different images.")
    return facts, remarks, missing


def _recorded(baseline: Report, candidate: Report, pair: Pair, hindered: str) -> comparison.PairFacts:
    accuracy = _accuracy(baseline, candidate, pair)
    if not hindered and _same_engine(baseline, candidate, pair):
        # As with two bundles: one engine has one latency. Two runs of it differ only by the machine.
        return unjudged(pair.name, accuracy, same_engine=True)
    flags = _flags(baseline, candidate, pair)
    reason = hindered or _undecided(baseline, candidate, pair) or _flagged(flags)
    return unjudged(pair.name, accuracy, _latency(baseline, candidate, pair, reason), flags)


def _same_engine(baseline: Report, candidate: Report, pair: Pair) -> bool:
    """Whether both are the same files, run by the same versions."""
    versions = [[report.environment.get(name) for name in RUNTIMES] for report in (baseline, candidate)]
    return _recorded_same_files(baseline, candidate, pair) and versions[0] == versions[1]


def _recorded_same_files(baseline: Report, candidate: Report, pair: Pair) -> bool:
    files = baseline.provenance.of_engine(pair.baseline)
    return bool(files) and files == candidate.provenance.of_engine(pair.candidate)


def _undecided(baseline: Report, candidate: Report, pair: Pair) -> str:
    """The recorded reason why one of the two runs decides nothing about the engine's latency."""
    for side, report, name in (("baseline", baseline, pair.baseline), ("candidate", candidate, pair.candidate)):
        if report.bench is not None and name in report.bench.undecided:
            return f"in the {side}, {report.bench.undecided[name]}"
    return ""


def _flagged(flags: Sequence[str]) -> str:
    """The reason for no decision if a latency is flagged as unreliable: the two were measured separately."""
    return f"the measurement has flags ({', '.join(flags)}): measure again" if flags else ""


def _is_of(artifact: str, target: str | None) -> bool:
    return target is None or artifact.rpartition("-")[0] == target


def _accuracy(baseline: Report, candidate: Report, pair: Pair) -> comparison.AccuracyChange | None:
    """The change of accuracy, computed as if on different images: a report has no individual answers, so the interval
    is wider than with bundles."""
    old, new = baseline.engine(pair.baseline), candidate.engine(pair.candidate)
    assert old is not None and new is not None
    a, b = _worst(old.verify, new.verify)
    if (baseline.task, a.metric, a.n) != (candidate.task, b.metric, b.n) or a.value is None or b.value is None:
        return None
    if baseline.provenance.data.evaluation != candidate.provenance.data.evaluation:
        return None
    interval: tuple[float, float] | None = None
    if baseline.task in SHARES:
        right = round(a.value * a.n / 100), round(b.value * b.n / 100)
        low, high = unpaired_difference(right[0], a.n, right[1], b.n)
        interval = (100 * low, 100 * high)
    same = _recorded_same_files(baseline, candidate, pair)
    if same:  # no loss possible
        interval = (0.0, 0.0)
    return comparison.AccuracyChange(
        how="same files" if same else "recorded",
        n=a.n,
        metric=a.metric,
        baseline=a.value,
        candidate=b.value,
        drop=a.value - b.value,
        drop_ci95=interval,
        agreement=None,
        agreement_ci95=None,
    )


def _worst(old: Comparison, new: Comparison) -> tuple[Comparison, Comparison]:
    """Both comparisons; for models with several heads, those of the head that loses most from old to new, or of a head
    that is missing or has another metric on one side: such heads are not compared."""
    pairs = [(each, new.by_head.get(name, old)) for name, each in old.by_head.items()]
    pairs += [(old, each) for name, each in new.by_head.items() if name not in old.by_head]

    def lost(pair: tuple[Comparison, Comparison]) -> float:
        a, b = pair
        known = a.metric == b.metric and a.value is not None and b.value is not None
        return (a.value or 0.0) - (b.value or 0.0) if known else math.inf

    return max(pairs, key=lost, default=(old, new))


def _latency(baseline: Report, candidate: Report, pair: Pair, hindered: str) -> list[comparison.TimeRatio]:
    """The ratio by the rounds of both, if recorded; undecided if `hindered` has a reason."""
    if baseline.bench is None or candidate.bench is None:
        return []
    old = baseline.bench.block_medians_ms.get(pair.baseline, ())
    new = candidate.bench.block_medians_ms.get(pair.candidate, ())
    if min(len(old), len(new)) < 2:
        return []
    ratio, low, high = unpaired_log_ratio(new, old)
    # The blocks of a report do not show the common effects of its processes.
    wider = math.exp(math.hypot(math.log(high / low) / 2, BETWEEN_PROCESSES))
    return [comparison.TimeRatio("latency", ratio, (ratio / wider, ratio * wider), not hindered, hindered)]


def _flags(baseline: Report, candidate: Report, pair: Pair) -> list[str]:
    """The flags of both, without "short": few queries affect high percentiles, and the median is compared here."""
    benches = (baseline.bench, pair.baseline), (candidate.bench, pair.candidate)
    rows = [bench.row(name) for bench, name in benches if bench is not None]
    found = dict.fromkeys(flag for row in rows if row is not None for flag in row.flags)
    return [flag for flag in found if flag != "short"]


def _machine(report: Report) -> dict[str, str]:
    """The machine of a report; only newer reports of Arm machines name the board."""
    return {key: report.environment[key] for key in MACHINE if key in report.environment}


def _other_machine(baseline: Report, candidate: Report) -> str:
    texts = (", ".join(f"{value}" for value in _machine(report).values()) for report in (baseline, candidate))
    return f"Baseline and candidate were measured on different machines: {' and '.join(texts)}."


# --- Compare two bundles on this machine ------------------------------------------------------------------------------
# Both answer the same images, and both are measured in one benchmark run.
#
# Engines with identical files need neither: measuring an engine against itself could only raise a false alarm.


# The result for identical engines, without a run.
SAME_FILES = comparison.AccuracyChange("same files", 1, None, None, None, 0.0, (0.0, 0.0), 100.0, (100.0, 100.0))
# The gate uses the median.
PERCENTILES = (50.0,)
# Flags of a latency that do not affect a ratio in the same rounds.
OF_ONE_SIDE = ("unstable", "contended")


def compare_bundles(
    finder: Finder,
    baseline: Path,
    candidate: Path,
    choice: DataChoice | None,
    protocol: Protocol | None,
    *,
    skip_bad: bool,
    progress: Progress,
) -> tuple[list[comparison.PairFacts], Bench | None, list[str], list[str]]:
    """Compare each pair of engines; also return the `bench` of pairs with different files, remarks, and the targets
    that the candidate has no engine for.

    Args:
        choice: the images for both sides; None: accuracy is not compared.
        protocol: the protocol of the bench; None: times are not compared.

    Raises:
        TargetError: no pair of engines. Errors of bundles, data, engines and measuring propagate.
    """
    sides = {subject.artifact: subject for subject in finder.find(str(baseline))}
    others = {subject.artifact: subject for subject in finder.find(str(candidate))}
    pairs, remarks, missing = pair_up(list(sides), list(others))
    manifests = read_bundle(baseline), read_bundle(candidate)
    found, measured = [], []
    for pair in pairs:
        ours, theirs = others[pair.candidate], sides[pair.baseline]
        remarks += [*ours.remarks, *theirs.remarks]
        if _same_files(pair, *manifests):
            found.append(unjudged(pair.name, SAME_FILES, same_engine=True))
        else:
            verified, said = _verified(ours, theirs, choice, skip_bad, progress) if choice is not None else (None, [])
            remarks += said
            found.append(unjudged(pair.name, verified))
            measured.append(pair)
    bench = _bench_run(measured, sides, others, protocol, progress) if measured and protocol else None
    timed = [
        _timed(each, pair, bench) if bench and pair in measured else each
        for each, pair in zip(found, pairs, strict=True)
    ]
    return timed, bench, _once(remarks), missing


def _verified(
    ours: Subject, theirs: Subject, choice: DataChoice, skip_bad: bool, progress: Progress
) -> tuple[comparison.AccuracyChange, list[str]]:
    """The accuracy of both sides, and remarks on the data and on the baseline's accuracy."""
    document = verify_subjects(ours, theirs, choice, skip_bad=skip_bad, budget=Budget(), progress=progress)
    facts = document.verified
    said = [*document.remarks, *(f"warning: {text}" for text in document.warnings)]
    return comparison.AccuracyChange(
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


def _same_files(pair: Pair, baseline: Manifest, candidate: Manifest) -> bool:
    """Whether both engines have identical files and settings."""
    of_model = [(m.task, m.preprocess, m.postprocess) for m in (baseline, candidate)]
    engines = _of_engine(baseline, pair.baseline), _of_engine(candidate, pair.candidate)
    return of_model[0] == of_model[1] and engines[0] == engines[1]


def _of_engine(manifest: Manifest, artifact: str) -> tuple[EngineSpec, dict[str, str]]:
    engine = next(each for each in manifest.engines if each.artifact == artifact)
    digests = {entry.path: entry.sha256 for entry in manifest.files}
    files = [*engine.files, *(file for part in engine.parts for file in part.files)]
    return replace(engine, device={}), {file: digests[file] for file in files}


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


def _timed(facts: comparison.PairFacts, pair: Pair, bench: Bench) -> comparison.PairFacts:
    names = _names(pair)
    ratios = [comparison.TimeRatio(**vars(ratio)) for ratio in bench.ratios if (ratio.b, ratio.a) == names]
    flags = _once([flag for row in bench.results if row.artifact in names for flag in row.flags])
    # Only the precision of the ratio matters, not that of each side, and the ratio reports it.
    flags = [flag for flag in flags if flag not in OF_ONE_SIDE]
    return replace(facts, ratios=tuple(ratios), flags=tuple(flags))


def _once(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))


# --- One document and one gate for a baseline and a candidate ---------------------------------------------------------


SENTENCES = {
    "pass": "The candidate is within the limits.",
    "fail": "The candidate exceeds a limit.",
    "undecided": "Undecided: the data cannot show whether the limits are kept.",
    "none": "No limit was set.",
}


def compare(
    baseline: Path,
    candidate: Path,
    limits: comparison.ComparisonLimits,
    *,
    target: str | None,
    choice: DataChoice | None,
    protocol: Protocol | None,
    skip_bad: bool,
    trust: Path | None,
    progress: Progress,
) -> comparison.ComparisonDocument:
    """Compare two bundles (run here) or two reports (read). `protocol`: the protocol of the bench; None compares only
    answers.

    Raises:
        MissingFileError: an argument is neither a bundle nor a report.
        InputError: images given for reports.
        TargetError: the two have no engine in common. Errors of reading, data, engines and measuring propagate.
    """
    paths = baseline, candidate
    if not any(map(early.is_report, paths)):
        with opened(target=target, trust=trust) as finder:
            pairs, bench, remarks, missing = compare_bundles(
                finder, baseline, candidate, choice, protocol, skip_bad=skip_bad, progress=progress
            )
        digests = [of_bundle(read_bundle(path)) for path in paths]
    else:
        if choice is not None:
            raise InputError(
                "reports cannot be compared on images",
                found=f"--data with the report {', '.join(map(str, filter(early.is_report, paths)))}",
                expected="two bundles, or no --data",
            )
        reports = [read_report(path if path.is_file() else path / early.REPORT_FILE) for path in paths]
        pairs, remarks, missing = compare_reports(reports[0], reports[1], target)
        bench, digests = None, [of_report(report) for report in reports]
    judged = [judge(pair, limits) for pair in pairs]
    gate = join([*(each for _, each in judged), _missing_gate(missing, limits)])
    return comparison.ComparisonDocument(
        format=1,
        created=outcome.now(),
        baseline=str(baseline),
        candidate=str(candidate),
        measured=bench is not None or any(each.accuracy and each.accuracy.how == "measured" for each in pairs),
        limits=limits,
        sentence=SENTENCES[gate.status],
        gate=gate,
        engines=tuple(facts for facts, _ in judged),
        remarks=tuple(remarks),
        bench=bench,
        environment=describe_host(),
        digests=side_by_side(*digests),
    )


def _missing_gate(missing: list[str], limits: comparison.ComparisonLimits) -> Gate:
    """The gate of targets that the candidate has no engine for: failed if there is any limit."""
    if not missing or (limits.max_drop, limits.max_slowdown) == (None, None):
        return Gate("none")
    return Gate("fail", tuple(f"the candidate has no engine for {target}" for target in missing))
