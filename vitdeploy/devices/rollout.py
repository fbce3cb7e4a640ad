"""Roll-outs of a release to many devices."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.api.values import Column, Line, Reporter, Table
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle import read, sign
from vitdeploy.devices import call, on_devices, registry, results, shipment
from vitdeploy.devices.agent.documents import Deployed, Kind, ReleaseOptions
from vitdeploy.devices.agent.stream import message
from vitdeploy.devices.client import Client
from vitdeploy.devices.registry import Device, Fleet, FleetMember, check_deployment, now, read_fleet, write_fleet
from vitdeploy.errors import (
    DeviceError,
    GateError,
    InputError,
    SignatureError,
    StorageError,
    TargetError,
    VitdeployError,
)
from vitdeploy.pipeline.early import open_bundle
from vitdeploy.runtime.choice import select_engines, usable_engines
from vitdeploy.runtime.golden import has_golden, no_golden
from vitdeploy.spec import EngineSpec, FileEntry, Manifest, encode

# --- Roll out a release in stages -------------------------------------------------------------------------------------
# Devices try the release next to the current one, then switch to it; a failure stops the roll-out.
#
# This works without a daemon: each command reads the state from the devices, and the same command continues an
# interrupted roll-out, or serves devices that were off.


SENT = "release"
STAGES = "1,10%,all"
# A device that is off or full does not fail a release: it is skipped, and can be served by the same command later.
AWAY = (call.ConnectionLost, StorageError)
# The share of a stage's devices that may become unreachable while they switch; more means that the release failed.
LOST_SHARE = 0.5


@dataclass(frozen=True)
class RolloutStage:
    """The number of devices with the release after a stage: absolute, or a percentage of all devices."""

    text: str
    number: int = 0
    percent: float = 0.0

    def count(self, every: int) -> int:
        return min(every, max(self.number, math.ceil(round(every * self.percent / 100, 6))))


def parse_stages(text: str) -> tuple[RolloutStage, ...]:
    """Parse stages such as "1,10%,all".

    Raises:
        InputError: a stage is invalid.
    """
    found = []
    for each in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})|([0-9]{1,3}(?:\.[0-9]{1,3})?)%|all", each.strip())
        number, percent = (match[1] or "0", match[2] or ("0" if match[1] else "100")) if match else ("0", "0")
        if int(number) + float(percent) <= 0 or float(percent) > 100:
            raise InputError(
                f"{each.strip()[:40]!r} is not a stage",
                expected=f"numbers of devices, percentages or all, separated by commas: {STAGES}",
                fix=f"--canary {STAGES}",
            )
        found.append(RolloutStage(each.strip(), int(number), float(percent)))
    return tuple(found)


@dataclass(frozen=True)
class RollOut:
    """The outcome of a roll-out: the deployment, the devices of the command, and the errors. `error`: a failed release,
    or else the worst error. `stages`: the completed stages, as text."""

    fleet: Fleet
    devices: tuple[str, ...]
    errors: tuple[VitdeployError, ...]
    stages: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @property
    def members(self) -> list[FleetMember]:
        return [self.fleet.member(device) for device in self.devices]

    @property
    def error(self) -> VitdeployError | None:
        gates = [error for error in self.errors if isinstance(error, GateError)]
        return gates[0] if gates else on_devices.worst(self.errors) if self.errors else None

    @property
    def document(self) -> dict[str, Any]:
        return {
            **_facts(self.fleet, self.members),
            "stages": list(self.stages),
            "undecided": list(self.undecided),
            "errors": [error.to_dict() for error in self.errors],
        }

    def lines(self) -> list[Line]:
        return [*_lines(self.fleet, self.members), *self.stages, *(f"undecided: {text}" for text in self.undecided)]


class _Stopped(Exception):
    """The release failed on a device, or its outcome there is unknown."""

    def __init__(self, error: VitdeployError) -> None:
        super().__init__(str(error))
        self.error = error


def roll_out(
    release: Release, devices: Sequence[Device], stages: Sequence[RolloutStage], reporter: Reporter
) -> RollOut:
    """Roll out a release to devices, stage by stage. Devices that already have it count. If it fails on a device, all
    devices of that stage return to their old release, and no further device is changed.

    Raises:
        StorageError: the outcome cannot be recorded here.
    """
    return _RollOut(release, devices, reporter).run(stages)


class _RollOut:
    def __init__(self, release: Release, devices: Sequence[Device], reporter: Reporter) -> None:
        self.release, self.devices, self.reporter = release, devices, reporter
        known = read_fleet(release.deployment)
        self.again = known.release == release.digest
        self.fleet = dataclasses.replace(
            known,
            release=release.digest,
            bundle=release.manifest.name,
            progress="partial",
            reason="",
        )
        self.errors: list[VitdeployError] = []
        self.stages: list[str] = []
        self.undecided: dict[str, str] = {}

    def run(self, stages: Sequence[RolloutStage]) -> RollOut:
        there = self._ask()
        done = [device for device in self.devices if device.name in there and self._runs(there[device.name])]
        left = [device for device in self.devices if device.name in there and device not in done]
        progress: registry.RolloutProgress = "complete"
        try:
            for step in stages:
                needed = step.count(len(self.devices)) - len(done)
                served = self._stage(step, needed, left, there) if needed > 0 else []
                done += served
        except _Stopped as stopped:
            self.errors.append(stopped.error)
            self.fleet = dataclasses.replace(self.fleet, reason=stopped.error.message)
            progress = "stopped"
        if progress == "complete" and self.errors:
            progress = "partial"
        self.fleet = dataclasses.replace(self.fleet, progress=progress)
        self._save()
        names = tuple(device.name for device in self.devices)
        return RollOut(self.fleet, names, tuple(self.errors), tuple(self.stages), tuple(self.undecided.values()))

    def _runs(self, deployed: Deployed) -> bool:
        return deployed.current == self.release.digest

    # --- the state of the devices -------------------------------------------------------------------------------------

    def _ask(self) -> dict[str, Deployed]:
        """Return the state of this deployment on each device; record and skip unreachable devices."""
        there = {}
        for outcome in ask_all(self.devices, self.reporter):
            name = outcome.device.name
            if outcome.found is None:
                self._away(name, outcome.error)
                continue
            there[name] = outcome.found.get(self.release.deployment, Deployed(self.release.deployment))
            member = self.fleet.member(name)
            failed = self.again and member.state == "failed"
            state = "current" if self._runs(there[name]) else "failed" if failed else "behind"
            self._put(seen(member, there[name]), state=state)
        self._save()
        return there

    def _away(self, name: str, error: VitdeployError | None) -> None:
        assert error is not None
        self.errors.append(error)
        self._put(self.fleet.member(name), state="off", reason=error.message)

    def _put(self, member: FleetMember, **changes: object) -> None:
        self.fleet = with_member(self.fleet, member, **changes)

    def _save(self) -> None:
        write_fleet(self.fleet)

    # --- a stage ------------------------------------------------------------------------------------------------------

    def _stage(self, step: RolloutStage, needed: int, left: list[Device], there: dict[str, Deployed]) -> list[Device]:
        """Serve `needed` of the devices that are `left`; return those that now have the release.

        Raises:
            _Stopped: it failed on one of them.
        """
        tried: list[Device] = []
        while left and len(tried) < needed:
            batch = left[: needed - len(tried)]
            del left[: len(batch)]
            tried += self._try(batch, there)
        if not tried:
            return []
        switched, failed = self._switch(tried, there)
        if failed is not None:
            self._take_back(switched, there)
            raise _Stopped(failed)
        self.stages.append(f"stage {step.text}: {', '.join(device.name for device in switched)}")
        return switched

    def _try(self, devices: Sequence[Device], there: Mapping[str, Deployed]) -> list[Device]:
        """Install the release on devices and try it next to the current one; return the devices where it passed."""
        passed, failure = [], None

        def work(client: Client) -> results.ReleaseTrial:
            return self._bring(client, there[client.device.name])

        for outcome in on_devices.on_all(devices, work, self.reporter):
            name = outcome.device.name
            if isinstance(outcome.error, AWAY):
                self._away(name, outcome.error)
                continue
            error = self._judged(name, outcome)
            failure = failure or error
            if error is None:
                passed.append(outcome.device)
        self._save()
        if failure is not None:
            raise _Stopped(failure)
        return passed

    def _judged(self, name: str, outcome: on_devices.DeviceOutcome[results.ReleaseTrial]) -> VitdeployError | None:
        """Record the outcome on a device; return the error if the release failed there, or did not run."""
        trial, member = outcome.found, self.fleet.member(name)
        if trial is None:
            assert outcome.error is not None
            self._put(member, state="failed", reason=outcome.error.message)
            return outcome.error
        ratio = trial.tail.ratio if trial.tail is not None else None
        facts = {"engine": trial.engine, "p99_ms": trial.p99_ms, "ratio": ratio, "reason": trial.failed}
        self._put(member, **facts, **({"state": "failed"} if trial.failed else {}))
        if open_ := trial.undecided or (trial.alone if member.release else ""):
            self.undecided[name] = f"{name}: {open_}"
        if not trial.failed:
            return None
        golden = not trial.golden.ok
        why = (
            "its answers are wrong"
            if golden
            else "it is slower"
            if trial.tail is not None
            else "the device reverted it"
        )
        return GateError(
            f"{self.release.manifest.name} failed on {name}: {why}",
            found=trial.failed,
            expected="the golden answers of the bundle"
            if golden
            else f"a p99 of at most {1 + self.release.worse:.3g} times that of the current release",
            fix=f"vitdeploy inspect BUNDLE --check, or vitdeploy bench BUNDLE OLD_BUNDLE --on {name}",
        )

    def _switch(
        self, devices: Sequence[Device], there: dict[str, Deployed]
    ) -> tuple[list[Device], VitdeployError | None]:
        """Move the links; return the devices whose link now points to the release, and the first error."""
        switched, failure = [], None

        def work(client: Client) -> results.ReleaseTrial:
            return _job(client, "switch", self._options(there[client.device.name]), self.release)

        outcomes = on_devices.on_all(devices, work, self.reporter)
        lost = [outcome for outcome in outcomes if isinstance(outcome.error, call.ConnectionLost)]
        for outcome in outcomes:
            name = outcome.device.name
            if outcome in lost and len(lost) <= LOST_SHARE * len(devices):
                self._away(name, outcome.error)
                continue
            error = self._judged(name, outcome)
            failure = failure or error
            if error is not None:
                continue
            before = there[name]
            there[name] = Deployed(before.name, self.release.digest, before.current, before.counter + 1)
            self._put(seen(self.fleet.member(name), there[name]), state="current", since=now(), reason="")
            switched.append(outcome.device)
        self._save()
        return switched, failure

    def _take_back(self, devices: Sequence[Device], there: dict[str, Deployed]) -> None:
        """Move the links of a failed stage back; devices without a previous release keep this one."""
        back = [device for device in devices if there[device.name].previous]
        changes: dict[str, object] = {"reason": "its stage was reverted"}
        self.fleet, errors = move_back(back, there, self.release.target, self.fleet, changes, self.reporter)
        self.errors += errors
        self._save()

    # --- on a device --------------------------------------------------------------------------------------------------

    def _bring(self, client: Client, deployed: Deployed) -> results.ReleaseTrial:
        release, device = self.release, client.device.name
        listed = message(encode(list(release.files)))
        answer = client.ask(tuple[str, ...], "missing", release.deployment, send=listed)
        missing = results.check_missing(device, answer, [entry.path for entry in release.files])
        sent = {entry: path for entry, path in release.files.items() if entry.path in missing}
        files = {dataclasses.replace(entry, path=f"{SENT}/{entry.path}"): path for entry, path in sent.items()}
        return _job(client, "stage", self._options(deployed, tuple(release.files)), release, files)

    def _options(self, deployed: Deployed, files: tuple[FileEntry, ...] = ()) -> ReleaseOptions:
        release, before = self.release, (deployed.current, deployed.counter)
        return ReleaseOptions(release.deployment, release.digest, *before, release.target, release.worse, files)


def _job(
    client: Client,
    kind: Kind,
    options: ReleaseOptions,
    release: Release | None,
    files: Mapping[FileEntry, Path] | None = None,
) -> results.ReleaseTrial:
    """Try a release on a device. `release`: None if its manifest is not here."""
    protocol = None if release is None else release.protocol
    job, paths = shipment.make_job(kind, (), files, protocol=protocol, release=options)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        result = client.run(job, paths, Path(folder))
    return results.judge(client.device.name, result, job, None if release is None else release.manifest)


def ask_all(devices: Sequence[Device], reporter: Reporter) -> list[on_devices.DeviceOutcome[dict[str, Deployed]]]:
    """Return the deployments of each device, by name. Devices first undo moves interrupted by a power cut."""

    def work(client: Client) -> dict[str, Deployed]:
        return results.check_deployments(client.device.name, client.ask(tuple[Deployed, ...], "deployed"))

    return on_devices.on_all(devices, work, reporter)


def seen(member: FleetMember, deployed: Deployed) -> FleetMember:
    """Return the member with the device's present state."""
    facts = {"release": deployed.current, "previous": deployed.previous, "counter": deployed.counter, "seen": now()}
    # Not the release that this machine knew: another user deployed it, or it was reverted.
    since = member.since if member.release == deployed.current else ""
    return dataclasses.replace(member, **facts, since=since)  # type: ignore[arg-type]


def with_member(fleet: Fleet, member: FleetMember, **changes: object) -> Fleet:
    """Return the deployment with a changed member."""
    changed = dataclasses.replace(member, **changes)  # type: ignore[arg-type]
    others = [each for each in fleet.members if each.device != changed.device]
    members = tuple(sorted([*others, changed], key=lambda each: each.device))
    return dataclasses.replace(fleet, members=members, changed=now())


def move_back(
    devices: Sequence[Device],
    there: dict[str, Deployed],
    target: str,
    fleet: Fleet,
    changes: Mapping[str, object],
    reporter: Reporter,
) -> tuple[Fleet, list[VitdeployError]]:
    """Move the links of devices to their previous release, and update `there`. Return the fleet, with `changes` in its
    members, and the errors, also of devices where the previous release fails too."""

    def work(client: Client) -> results.ReleaseTrial:
        was = there[client.device.name]
        return _job(client, "switch", ReleaseOptions(was.name, was.previous, was.current, was.counter, target), None)

    errors: list[VitdeployError] = []
    for outcome in on_devices.on_all(devices, work, reporter) if devices else []:
        device = outcome.device.name
        was, error = there[device], outcome.error
        if outcome.found is not None and outcome.found.failed:
            error = GateError(
                f"the previous release of {was.name} fails on {device}, which keeps the present one",
                found=outcome.found.failed,
                expected="the golden answers of the previous release",
                fix=f"vitdeploy devices deploy ANOTHER_BUNDLE --on {device}",
            )
        if error is not None:
            errors.append(error)
            continue
        now_there = there[device] = Deployed(was.name, was.previous, was.current, was.counter + 1)
        state: registry.State = "current" if now_there.current == fleet.release else "behind"
        fleet = with_member(fleet, seen(fleet.member(device), now_there), state=state, **changes)
    return fleet, errors


# --- Rollback, and the status of deployments --------------------------------------------------------------------------


def roll_back(name: str, devices: Sequence[Device], target: str, reporter: Reporter) -> RollOut:
    """Move the link of each device to its previous release, if that still gives its golden answers.

    Raises:
        StorageError: the outcome cannot be recorded here.
    """
    fleet, errors = read_fleet(name), list[VitdeployError]()
    there: dict[str, Deployed] = {}
    for outcome in ask_all(devices, reporter):
        if outcome.found is None:
            assert outcome.error is not None
            errors.append(outcome.error)
            fleet = with_member(fleet, fleet.member(outcome.device.name), state="off", reason=outcome.error.message)
            continue
        there[outcome.device.name] = outcome.found.get(name, Deployed(name))
    chosen = [device for device in devices if device.name in there]
    for device in chosen:
        if not there[device.name].previous:
            errors.append(
                DeviceError(
                    f"{device.name} has no previous release of {name}",
                    found=f"release {there[device.name].current[:12] or 'none'}, no previous one",
                    fix=f"vitdeploy devices deploy BUNDLE --on {device.name}",
                )
            )
    chosen = [device for device in chosen if there[device.name].previous]
    changes: dict[str, object] = {"since": now(), "reason": "rolled back"}
    fleet, failed = move_back(chosen, there, target, fleet, changes, reporter)
    errors += failed
    write_fleet(fleet)
    return RollOut(fleet, tuple(device.name for device in devices), tuple(errors))


@dataclass(frozen=True)
class Standing:
    """The status of deployments. `away`: unreachable devices, shown with their last known state."""

    fleets: Sequence[Fleet]
    away: Sequence[str]

    @property
    def document(self) -> dict[str, Any]:
        return {"deployments": [_facts(fleet, fleet.members) for fleet in self.fleets], "away": list(self.away)}

    def lines(self) -> list[Line]:
        lines = [line for fleet in self.fleets for line in _lines(fleet, fleet.members)]
        away = [f"not reachable: {', '.join(self.away)}"] if self.away else []
        return [*(lines or ["no deployments on these devices"]), *away]


def standing(devices: Sequence[Device], name: str | None, reporter: Reporter) -> Standing:
    """Return all deployments (or the one called `name`) on these devices, by their own report or as last known, and the
    unreachable devices.

    Raises:
        StorageError: the last known state cannot be read.
    """
    known = registry.read_fleets()
    names = {device.name for device in devices}
    away: list[str] = []
    for outcome in ask_all(devices, reporter) if devices else []:
        device = outcome.device.name
        if outcome.error is not None:
            away.append(device)
            for each in known.values():
                if any(member.device == device for member in each.members):
                    known[each.name] = with_member(each, each.member(device), state="off", reason=outcome.error.message)
            continue
        found = outcome.found or {}
        mentioned = {each.name for each in known.values() if any(m.device == device for m in each.members)}
        for deployment in sorted({*found, *mentioned}):
            fleet, there = known.get(deployment, Fleet(deployment)), found.get(deployment, Deployed(deployment))
            member = fleet.member(device)
            failed = member.state == "failed" and there.current != fleet.release
            state: registry.State = "failed" if failed else "current" if there.current == fleet.release else "behind"
            known[deployment] = with_member(fleet, seen(member, there), state=state)
    chosen = [each for each in known.values() if name in (None, each.name)]
    shown = [
        dataclasses.replace(each, members=tuple(m for m in each.members if m.device in names or not devices))
        for each in chosen
    ]
    return Standing([each for each in shown if each.members], away)


# --- Deployments as text ----------------------------------------------------------------------------------------------


SHORT = 12
WORDS = {
    "complete": "complete",
    "stopped": "stopped",
    "partial": "incomplete; run the same command again to continue",
}


def _facts(fleet: Fleet, members: Sequence[FleetMember]) -> dict[str, Any]:
    facts: dict[str, Any] = encode(fleet)
    return {**facts, "members": [encode(member) for member in members]}


def _lines(fleet: Fleet, members: Sequence[FleetMember]) -> list[Line]:
    expected = f"release {fleet.release[:SHORT]} of {fleet.bundle}, {WORDS[fleet.progress]}" if fleet.release else ""
    head = f"{fleet.name}: {expected or 'deployed by another machine'}"
    columns = (
        Column("device"),
        Column("release", 8, left=True),
        Column("state", 9, left=True),
        Column("p99 ms", 5),
        Column("vs previous", 4),
        Column("since", 3, left=True),
        Column("last seen", 6, left=True),
        Column("reason", 7, left=True),
    )
    return [head, Table(columns, tuple(map(_row, members)))]


def _row(member: FleetMember) -> tuple[str, ...]:
    return (
        member.device,
        member.release[:SHORT] or "none",
        member.state,
        "" if member.p99_ms is None else f"{member.p99_ms:.3g}",
        "" if member.ratio is None else f"{member.ratio:.2f}",
        member.since,
        member.seen or "never",
        member.reason,
    )


# --- Check that a bundle can be deployed: intact, signed if required, with golden answers -----------------------------


# The comparison with the current release measures only latency, in the given duration.
BLOCK_SECONDS = 0.5


@dataclass(frozen=True)
class Release:
    """A release of a bundle. `digest`: the SHA-256 of the manifest. `files`: all files of the bundle, by their entries.
    `worse`: the share by which p99 may exceed that of the previous release, 0.1 for a tenth."""

    deployment: str
    digest: str
    manifest: Manifest
    files: Mapping[FileEntry, Path]
    target: str
    protocol: Protocol
    worse: float


def ready(folder: Path, name: str | None, *, trust: Path | None, target: str, duration: float, worse: float) -> Release:
    """Return the release of a bundle. `name`: of the deployment, by default the bundle's.

    Raises:
        MissingFileError, ManifestError, DigestError: the bundle is missing or damaged.
        SignatureError: it is not signed by `trust`.
        TargetError, GateError: no usable engine for the target, or several with different batch sizes.
        InputError: an engine without golden answers, or an invalid deployment name.
    """
    manifest, _ = open_bundle(folder, trust)
    engines = usable_engines(manifest, select_engines(manifest, target))
    for engine in engines:
        if not has_golden(manifest, engine):
            raise no_golden(manifest, engine.artifact)
    own = [name for name in (read.MANIFEST_FILE, sign.SIGNATURE_FILE) if (folder / name).is_file()]
    entries = [FileEntry(each, (folder / each).stat().st_size, read.file_sha256(folder / each)) for each in own]
    if trust is not None:
        _require_signed([*entries[:1], *manifest.files], sign.signed_digests(folder, trust), folder, trust)
    files = {entry: folder / entry.path for entry in (*entries, *manifest.files)}
    return Release(
        check_deployment(name or manifest.name),
        entries[0].sha256,
        manifest,
        files,
        target,
        _protocol(manifest, engines, duration),
        worse,
    )


def _require_signed(entries: list[FileEntry], signed: frozenset[str], folder: Path, trust: Path) -> None:
    """Check that the files to send are the signed ones, also if the folder has changed since."""
    if any(entry.sha256 not in signed for entry in entries):
        raise SignatureError(f"{folder} changed during the signature check", expected=f"a signature by {trust}")


def _protocol(manifest: Manifest, engines: list[EngineSpec], duration: float) -> Protocol:
    batches = {1 if engine.dynamic_batch else engine.batch for engine in engines}
    if len(batches) > 1:
        raise TargetError(
            f"the engines of {manifest.name} have different batch sizes",
            found=", ".join(f"{engine.artifact}: {engine.batch}" for engine in engines),
            expected="one batch size",
            fix=f"select one engine: --target {engines[0].artifact}",
        )
    return Protocol(("single",), (batches.pop(),), duration, min(BLOCK_SECONDS, duration), max_extension=1)
