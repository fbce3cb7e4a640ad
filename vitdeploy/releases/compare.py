"""Compare releases of a runtime, each in its own environment."""

import dataclasses
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import run, summary
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import read_bundle
from vitdeploy.document.bench import ErrorFacts
from vitdeploy.document.commands import AnswersFacts, ReleaseFacts, VersionsDocument
from vitdeploy.errors import InputError, VitdeployError
from vitdeploy.known_bad.platform import platform_of
from vitdeploy.pipeline.measure import ratios
from vitdeploy.progress import Progress
from vitdeploy.releases.environments import Environment, Environments, NotInstalled
from vitdeploy.runtime.golden import no_golden, read_golden
from vitdeploy.spec import EngineSpec, Manifest, decode

# --- Parse ranges of releases: "openvino==2025.2..2026.4", or any PEP 508 requirement ---------------------------------


RUNTIMES = ("openvino", "onnxruntime")
EXAMPLE = "openvino==2025.2..2026.4"
_SERIES = re.compile(r"\s*([A-Za-z][\w.-]*?)\s*==\s*(\d+(?:\.\d+)*)\s*\.\.\s*(\d+(?:\.\d+)*)\s*")


@dataclass(frozen=True)
class Releases:
    """The releases of the package `runtime` in `specifier`, up to `last` and all releases that begin with it."""

    runtime: str
    specifier: SpecifierSet
    last: tuple[int, ...] | None
    text: str

    def has(self, version: Version) -> bool:
        """Whether a release is in the range; pre-releases only if the specifier names one."""
        if version.is_prerelease and not self.specifier.prereleases:
            return False
        below = self.last is None or version.release[: len(self.last)] <= self.last
        return below and self.specifier.contains(version, prereleases=True)

    def of(self, versions: Iterable[Version]) -> list[Version]:
        """Return the versions in the range, sorted."""
        return sorted(version for version in versions if self.has(version))


def parse_releases(text: str) -> Releases:
    """Parse a range of releases.

    Raises:
        InputError: the range is invalid or empty, or the runtime is not supported.
    """
    series = _SERIES.fullmatch(text)
    if series is not None:
        name, first, last = series.groups()
        if Version(first) > Version(last) and Version(first).release[: last.count(".") + 1] > Version(last).release:
            raise _no_range(text, "the first release is newer than the last")
        releases = Releases(name, SpecifierSet(f">={first}"), Version(last).release, text)
    else:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise _no_range(text, str(error).splitlines()[0]) from None
        if not requirement.specifier or requirement.url or requirement.extras or requirement.marker:
            why = "more than a name and releases" if requirement.specifier else "no releases"
            raise _no_range(text, why)
        releases = Releases(requirement.name, requirement.specifier, None, text)
    if releases.runtime not in RUNTIMES:
        raise InputError(
            f"cannot compare releases of {releases.runtime}",
            found=text,
            expected=f"one of {', '.join(RUNTIMES)}",
            fix="rebuild with `vitdeploy compile`: a TensorRT plan works with one release only"
            if releases.runtime == "tensorrt"
            else f"--runtime '{EXAMPLE}'",
        )
    return releases


def _no_range(text: str, why: str) -> InputError:
    return InputError(
        f"{text!r} is not a range of releases",
        found=why,
        expected=f"NAME==FIRST..LAST, such as {EXAMPLE}, or a requirement such as 'onnxruntime>=1.20,<1.32'",
    )


# --- Run a bundle's engines on releases of their runtime --------------------------------------------------------------
# Check the golden answers, and measure times relative to the engine's own release.


CHECK = "vitdeploy.devices.agent.golden"
BENCH = "vitdeploy.benchmark.worker"
CHECK_SECONDS = 600.0
OWN = "own release"

Note = Callable[[str], None]


def compare_versions(
    folder: Path, text: str, protocol: Protocol, *, rebuild: bool, progress: Progress, note: Note
) -> VersionsDocument:
    """Run the bundle in `folder` on a range of releases such as "openvino==2025.2..2026.4".

    Raises:
        InputError: an invalid range, a range without releases, a runtime that no engine of the bundle uses, or a bundle
            without golden answers. HubError: pip finds no releases. Errors of reading the bundle propagate.
    """
    requested = parse_releases(text)
    manifest = read_bundle(folder)
    engines = _engines(folder, manifest, requested)
    environments = Environments()
    progress(f"releases of {requested.runtime}", 0, 1)
    released = environments.released(requested.runtime)
    chosen = requested.of(released)
    elsewhere = _elsewhere(environments, requested, released)
    skipped = {str(version): "not available for this Python and system" for version in elsewhere}
    if not chosen:
        raise InputError(
            f"no release in {text} can be installed here",
            found=f"available here: {released[0]} to {released[-1]}"
            + (f"; on other systems: {', '.join(skipped)}" if skipped else ""),
            expected="a range with at least one available release",
        )
    found = {}
    for index, version in enumerate(chosen):
        progress(f"install {requested.runtime} {version}", index, len(chosen))
        try:
            found[version] = environments.of(requested.runtime, version)
        except NotInstalled as error:
            skipped[str(version)] = str(error)
    own = {engine.artifact: platform_of(engine).version or "" for engine in engines}
    releases: list[ReleaseFacts] = []
    for engine in engines:
        base = _own_environment(environments, requested.runtime, own[engine.artifact], found, note)
        comparison = _Comparison(folder.resolve(), manifest, engine, base, protocol, rebuild, progress)
        releases += _with_changes([comparison.release(version, each) for version, each in found.items()])
    order = {str(version): index for index, version in enumerate(found)}
    releases.sort(key=lambda each: order[each.version])
    return VersionsDocument(str(folder), requested.runtime, text, own, rebuild, tuple(releases), skipped)


def _engines(folder: Path, manifest: Manifest, requested: Releases) -> list[EngineSpec]:
    """Return the engines for a runtime on the CPU, with golden answers."""
    targets = {name for name, row in TARGETS.items() if row.package == requested.runtime and row.device == "CPU"}
    engines = [engine for engine in manifest.engines if engine.target in targets]
    if not engines:
        raise InputError(
            f"{folder} has no engine for {requested.runtime} on the CPU",
            found=", ".join(engine.artifact for engine in manifest.engines),
            expected=f"releases of {' or '.join(sorted({TARGETS[each.target].package for each in manifest.engines}))}",
        )
    for engine in engines:
        if read_golden(folder, manifest, engine) is None:
            raise no_golden(manifest, engine.artifact)
    return engines


def _elsewhere(environments: Environments, requested: Releases, released: Sequence[Version]) -> list[Version]:
    return requested.of(version for version in environments.elsewhere(requested.runtime) if version not in released)


def _own_environment(
    environments: Environments, runtime: str, own: str, found: Mapping[Version, Environment], note: Note
) -> Environment | None:
    """Return the environment of the release that an engine was made with; None, with a note, if not available."""
    if not own:
        note("the bundle does not record the release it was made with: no relative times")
        return None
    try:
        return found.get(Version(own)) or environments.of(runtime, Version(own))
    except NotInstalled as error:
        note(f"{runtime} {own}, used for the bundle, cannot be installed here ({error}): no relative times")
        return None


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """One engine of a bundle, and the environment of its own release."""

    folder: Path
    manifest: Manifest
    engine: EngineSpec
    base: Environment | None
    protocol: Protocol
    rebuild: bool
    progress: Progress

    def release(self, version: Version, there: Environment) -> ReleaseFacts:
        """Run the engine on one release; its errors are part of the result."""
        facts, step = ReleaseFacts(str(version), self.engine.artifact), f"{self.engine.artifact} on {version}"
        self.progress(step, 0, 1)
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as work:
            try:
                answers, candidate = self._checked(there, Path(work) / "engine")
                facts = dataclasses.replace(facts, answers=answers)
                if answers.ok:  # times of wrong answers are meaningless
                    facts = dataclasses.replace(facts, time=self._time(candidate, step))
            except VitdeployError as error:
                return dataclasses.replace(facts, error=ErrorFacts.of(error))
        return facts

    def _checked(self, there: Environment, rebuilt: Path) -> tuple[AnswersFacts, run.BenchCandidate]:
        """Check the golden answers in an environment; return them with the engine, ready to be measured."""
        rebuilt.mkdir()
        command = {
            "do": "check",
            "folder": str(self.folder),
            "artifact": self.engine.artifact,
            "rebuild": str(rebuilt) if self.rebuild else "",
        }
        with run.started({self.engine.artifact: there.argv(CHECK)}) as [worker]:
            found = worker.ask(command, CHECK_SECONDS)
            worker.ask({"do": "close"}, CHECK_SECONDS)
        engine = decode(EngineSpec, found["engine"])
        difference = found["difference"] if math.isfinite(found["difference"]) else None
        answers = AnswersFacts(
            found["ok"],
            found["inputs"],
            found["same"],
            found["least_same"],
            difference,
            found["tolerance"],
            engine.kernels if self.rebuild else None,
        )
        candidate = run.engine_candidate(engine, Path(found["home"]))
        return answers, dataclasses.replace(candidate, argv=there.argv(BENCH))

    def _time(self, candidate: run.BenchCandidate, step: str) -> summary.Ratio | None:
        """Return the query time, relative to the bundle's engine on its own release."""

        def tell(text: str, done: int, total: int) -> None:
            self.progress(text if total == 1 else step, done, total)  # a total of 1: a text about waiting

        if self.base is None:
            return None
        own = dataclasses.replace(run.engine_candidate(self.engine, self.folder, OWN), argv=self.base.argv(BENCH))
        pairs = [(candidate.artifact, OWN)]
        measured = run.run_benchmark([candidate, own], self.protocol, tell, pairs=pairs)
        return next(ratio for ratio in ratios(measured, pairs) if ratio.metric == "latency")


def _with_changes(releases: Sequence[ReleaseFacts]) -> list[ReleaseFacts]:
    """Return the releases in order, each with its changes from the one before."""
    changed = [(), *(_changes(before, after) for before, after in itertools.pairwise(releases))]
    return [dataclasses.replace(each, changed=what) for each, what in zip(releases, changed, strict=True)]


def _changes(before: ReleaseFacts, after: ReleaseFacts) -> tuple[str, ...]:
    answers = _verdict(before) != _verdict(after)
    a, b = before.time, after.time
    apart = a is not None and b is not None and (a.ci95[1] < b.ci95[0] or b.ci95[1] < a.ci95[0])
    decided = a is not None and b is not None and a.decided and b.decided
    return (*(["answers"] if answers else []), *(["time"] if apart and decided else []))


def _verdict(release: ReleaseFacts) -> tuple[bool, int] | str:
    if release.answers is None:
        return release.error.code if release.error is not None else ""
    return release.answers.ok, release.answers.same
