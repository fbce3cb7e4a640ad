"""The client of an agent."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark.results import BenchRun
from vitdeploy.benchmark.tail import Tail, p99_ms, tail_of
from vitdeploy.devices.agent.documents import (
    DEPLOYMENT,
    MAX_JOB_BYTES,
    MAX_RESULT_BYTES,
    RELEASE,
    Deployed,
    Deployments,
    DeviceJob,
    DeviceProbe,
    GoldenResult,
    JobResult,
    Missing,
    StageOptions,
    Status,
    SwitchOptions,
    Tried,
    flat,
)
from vitdeploy.devices.agent.stream import BrokenOff, StreamError, message, read_file
from vitdeploy.devices.call import ConnectionLost, Interrupted, spelled
from vitdeploy.devices.connection import LATER, MAX_ANSWER_BYTES, AgentConnection
from vitdeploy.devices.results import MOST, check_probe, check_result, check_run, check_status, clean, parse, refuse
from vitdeploy.errors import DeviceError, StorageError, VitdeployError
from vitdeploy.runtime.choice import select_engines, usable_engines
from vitdeploy.spec import Manifest, encode

# --- Jobs on a device: sent, followed through lost connections, their results fetched; and what a device is -----------


# The states of a job that is not over.
OPEN = ("queued", "running")


class _NoRoom(StorageError):
    """A result cannot be written here: it stays on its device."""


class Client(AgentConnection):
    """One device. Whoever sets `cancelled` has to `stop` the job."""

    def probe(self) -> DeviceProbe:
        return check_probe(self.ask(DeviceProbe, "probe", within=self.patience.probe))

    def ask_status(self, verb: str, *arguments: str) -> Status:
        return check_status(self.ask(Status, verb, *arguments))

    def run(self, job: DeviceJob, files: Mapping[str, Path], folder: Path) -> JobResult:
        """Send the job, or find it there; wait until it is done; bring its result home, with its files in `folder`,
        which is new and empty. Then it is forgotten there.

        Args:
            files: where each of `job.files` lies here.

        Raises:
            DeviceError, DeviceResultError, VitdeployError: as `ask`, and what the job reports.
            StorageError: there is too little space here; the result stays there.
            Interrupted: `cancelled` was set.
        """
        name = self.device.name
        job = dataclasses.replace(job, device=f"{name}, {self.device.python}")
        status = self.ask_status("status", job.digest)
        if status.state in ("lost", "stopped"):  # of a command that nobody heard the end of
            status = self.ask_status("remove", job.digest)
        if status.state == "absent":
            self.job = job.digest
            paths = [files[entry.path] for entry in job.files]
            status = self.patiently(lambda: self._send(job, paths))
        else:
            self.tell(f"{name}: this very job is there already ({status.state}); its result is fetched", 0, 1)
        self.job = job.digest
        begun: dict[str, float] = {}
        status = self.patiently(lambda: self._watch(job, begun))
        if status.state != "done":
            self._forget(job)
            how = {"lost": "was lost", "stopped": "was stopped", "absent": "is not there any more"}[status.state]
            raise DeviceError(
                f"{name}: the job {how}",
                found=status.detail or f"the job is {status.state}",
                fix="run the command again",
            )
        keep = False
        try:
            return self.patiently(lambda: self._fetch(job, folder))
        except (ConnectionLost, _NoRoom, Interrupted):
            keep = True  # for the next command
            raise
        finally:
            if not keep:
                self._forget(job)

    def _send(self, job: DeviceJob, paths: list[Path]) -> Status:
        size = sum(entry.bytes for entry in job.files)
        sent = self._counted(message(encode(job), paths), size)
        return check_status(self.ask(Status, "submit", send=sent))

    def _counted(self, blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
        done, text = 0, f"{self.device.name}: send"
        for block in blocks:
            self.tell(text, min(done, size), max(1, size))
            yield block
            done += len(block)
        self.tell(text, 1, 1)

    def _watch(self, job: DeviceJob, begun: dict[str, float]) -> Status:
        """The status of the job once it neither waits nor runs, over one connection, which may break before that.

        One connection, since each new one takes the device a process, and time from what it measures. `begun`: when
        each state was first heard of, over whatever connection.
        """
        name, last = self.device.name, None
        with self.started("watch", job.digest) as call:
            while True:
                line = self.line(call, MAX_ANSWER_BYTES, within=self.patience.answer, talk=True)
                status = check_status(parse(name, line, Status))
                if status.state not in OPEN:
                    return status
                now = time.monotonic()
                if last is not None or status.state not in begun:
                    self.went_on = now
                last = status
                self._require_patience(job, status, now - begun.setdefault(status.state, now))
                if status.state == "queued" and status.detail:
                    most = spelled(self.patience.queue)
                    self.tell(f"{name}: waits for {status.detail}; for {most} at most", 0, 1)
                elif status.progress is not None:
                    _, done, total = status.progress
                    self.tell(f"{name}: {job.kind}", min(done, total), max(1, total))

    def _require_patience(self, job: DeviceJob, status: Status, seconds: float) -> None:
        """Raise DeviceError where a job has been in its state for longer than anybody waits. It is left there."""
        queued = status.state == "queued"
        most = self.patience.queue if queued else self.patience.work
        if seconds > most:
            raise DeviceError(
                f"{self.device.name}: the {job.kind} has {'waited' if queued else 'run'} for {spelled(most)}",
                found=f"it waits for {status.detail or 'its turn'}" if queued else "it is still running",
                wanted="its turn" if queued else "its result",
                fix=f"{LATER}; to end it: the same command, and Ctrl-C",
            )

    def _fetch(self, job: DeviceJob, folder: Path) -> JobResult:
        name, limit = self.device.name, MAX_JOB_BYTES if job.kind == "compile" else MAX_RESULT_BYTES
        try:
            with tempfile.TemporaryDirectory(dir=folder) as attempt, self.started("fetch", job.digest) as call:
                line = self.line(call, limit, within=self.patience.answer)
                result = check_result(name, parse(name, line, JobResult), job)
                self._require_room(result, folder)
                for index, entry in enumerate(result.files):
                    self.tell(f"{name}: fetch {entry.path}", index, len(result.files))
                    call.begin()
                    try:
                        read_file(call.output, entry, Path(attempt) / flat(entry.path))
                    except BrokenOff as error:
                        raise self.ended(call, str(error)) from None
                    except StreamError as error:
                        raise refuse(name, "a file that is not what its result says", error) from None
                for entry in result.files:
                    (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(attempt) / flat(entry.path)).rename(folder / entry.path)
        except OSError as error:
            raise self._no_room(folder, error.strerror or str(error), "a folder that can be written") from None
        return result

    def _require_room(self, result: JobResult, folder: Path) -> None:
        needed, free = sum(entry.bytes for entry in result.files), shutil.disk_usage(folder).free
        if free < needed:
            raise self._no_room(folder, f"{free:,} bytes free", f"{needed:,} bytes")

    def _no_room(self, folder: Path, found: str, wanted: str) -> _NoRoom:
        return _NoRoom(
            f"the result of {self.device.name} cannot be written to {folder.parent}",
            found=found,
            wanted=wanted,
            fix="free some space, or set TMPDIR to a folder with more; then the same command fetches the result",
        )

    def _forget(self, job: DeviceJob) -> None:
        """Remove a job that is over; one that cannot be removed is the oldest there some day."""
        with contextlib.suppress(VitdeployError):
            self._hurried().ask_status("remove", job.digest)
        self.job = None

    def stop(self) -> str:
        """End the job that was begun, if there is one; gives a line on what became of it."""
        digest, name = self.job, self.device.name
        if digest is None:
            return f"{name}: nothing was begun"
        self.tell(f"{name}: stop the job", 0, 1)
        hurried = self._hurried()
        try:
            hurried.ask_status("stop", digest)
            hurried.ask_status("remove", digest)
        except VitdeployError as error:
            why = "cannot be reached" if isinstance(error, ConnectionLost) else f"does not stop it ({error.message})"
            return f"{name}: {why}, so its job goes on; the same command fetches the result later"
        return f"{name}: the job was stopped"

    def _hurried(self) -> Client:
        """The same device, for the last words with it, which nothing cancels."""
        seconds = self.patience.stop
        hurry = dataclasses.replace(self.patience, greeting=seconds, silence=seconds, answer=seconds)
        return Client(self.device, tell=self.tell, patience=hurry)


# --- Reads what a device says of deployments --------------------------------------------------------------------------
# as untrusted data; and judges a release by it, by the same rule as there.


# What an agent calls the two artifacts of its comparison (agent/rollout.py, which is not imported for two words).
NEW, CURRENT = "new", "current"
MOST_DEPLOYMENTS = 1000


@dataclass(frozen=True)
class ReleaseTrial:
    """How a release did on a device. `p99_ms` None: it was not measured. `tail`: against the release before it; None
    where `alone` says why there is none. `failed`: why it may not stay there; "" for a release that may."""

    engine: str
    golden: GoldenResult
    p99_ms: float | None = None
    tail: Tail | None = None
    alone: str = ""
    failed: str = ""
    undecided: str = ""


def check_deployments(device: str, found: Deployments) -> dict[str, Deployed]:
    """By name, what is deployed on a device.

    Raises:
        DeviceResultError: it cannot be.
    """
    names = [each.name for each in found.deployed]
    if len(names) > MOST_DEPLOYMENTS or len(set(names)) < len(names) or not all(map(DEPLOYMENT.fullmatch, names)):
        raise refuse(device, "deployments of impossible names", names[:5])
    for each in found.deployed:
        for release in (each.current, each.previous, each.moving):
            if release and not RELEASE.fullmatch(release):
                raise refuse(device, "a release that is no SHA-256", release)
    return {each.name: each for each in found.deployed}


def check_missing(device: str, found: Missing, asked: Collection[str]) -> set[str]:
    """Those of the paths that a device was asked for which it has not.

    Raises:
        DeviceResultError: it names others.
    """
    odd = set(found.missing) - set(asked)
    if odd:
        raise refuse(device, "files that it was not asked for", ", ".join(sorted(odd)[:3]))
    return set(found.missing)


def judge(
    device: str, result: JobResult, options: StageOptions | SwitchOptions, manifest: Manifest | None, worse: float
) -> ReleaseTrial:
    """How a release did on a device. Its bounds are those of its manifest here, never the device's; None for a release
    of which only the device has the manifest.

    Raises:
        DeviceResultError: the answer contradicts itself, the manifest, or what was asked.
    """
    tried = result.tried
    assert tried is not None  # check_result
    if manifest is not None:
        engines = {each.artifact for each in usable_engines(manifest, select_engines(manifest, options.target))}
        if tried.engine not in engines:
            raise refuse(device, "an engine that the release has not", tried.engine, ", ".join(sorted(engines)))
        _check_bounds(device, tried, manifest)
    found = tried.golden
    if not 1 <= found.inputs <= MOST or found.same > found.inputs or (found.difference or 0.0) < 0:
        raise refuse(device, "impossible golden answers", found)
    if tried.golden.ok and options.expected == "" and not tried.alone and options.protocol is not None:
        raise refuse(device, "a comparison with a release that was not there")
    trial = _trial(device, result, tried, options, worse)
    if tried.kept and (trial.failed or isinstance(options, StageOptions)):
        raise refuse(device, "a release is kept that may not stay", trial.failed or "nothing was to be switched")
    if isinstance(options, SwitchOptions) and not tried.kept and not trial.failed:
        return dataclasses.replace(trial, failed="the device took it back")
    return trial


def _trial(
    device: str, result: JobResult, tried: Tried, options: StageOptions | SwitchOptions, worse: float
) -> ReleaseTrial:
    alone: str = clean(tried.alone)
    if not tried.golden.ok or options.protocol is None:
        if result.bench_run is not None:
            raise refuse(device, "measurements that nobody asked for")
        return ReleaseTrial(clean(tried.engine), tried.golden, failed=_wrong(tried.golden), alone=alone)
    names = [NEW] if tried.alone else [NEW, CURRENT]
    bench_run: BenchRun = check_run(device, result.bench_run, options.protocol, names)
    if tried.alone:
        return ReleaseTrial(tried.engine, tried.golden, p99_ms(bench_run, NEW), alone=alone)
    tail = tail_of(bench_run, NEW, CURRENT)
    failed = _slower(tail, worse) if tail.slower(worse) else ""
    undecided = tail.undecided(worse)
    return ReleaseTrial(tried.engine, tried.golden, tail.a_ms, tail, failed=failed, undecided=undecided)


def _slower(tail: Tail, worse: float) -> str:
    if tail.low > 1 + worse:
        what, (ratio, low, high) = "p99", (tail.ratio, tail.low, tail.high)
    else:
        what, (ratio, low, high) = "the median query", tail.median
    return (
        f"{what} takes {ratio:.2f} times as long as of the current release ({low:.2f} to {high:.2f}); "
        f"p99 is {tail.a_ms:.3g} and {tail.b_ms:.3g} ms"
    )


def _check_bounds(device: str, tried: Tried, manifest: Manifest) -> None:
    golden, found = manifest.golden, tried.golden
    assert golden is not None  # a bundle without golden answers is not deployed
    own = golden.engines.get(tried.engine)
    target = next(each.target for each in manifest.engines if each.artifact == tried.engine)
    wanted = (own.tolerance, own.least_same) if own is not None else (golden.tolerance.get(target), 0)
    if (found.tolerance, found.least_same) != wanted:
        raise refuse(device, "other bounds than the bundle's", (found.tolerance, found.least_same), wanted)


def _wrong(golden: GoldenResult) -> str:
    if golden.ok:
        return ""
    away = "no number" if golden.difference is None else f"{golden.difference:.1e} of the largest"
    return (
        f"golden answers: {golden.same} of {golden.inputs} are the original's (at least {golden.least_same} must be); "
        f"outputs are {away} from the recorded ones (allowed {golden.tolerance:.1e})"
    )
