"""A bundle on many devices: brought in stages, what runs where, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.reporter import Reporter, reporting
from vitdeploy.api.tables import Column, Line, Table
from vitdeploy.spec import encode

if TYPE_CHECKING:
    from vitdeploy.devices.fleet import Fleet, Member
    from vitdeploy.errors import VitdeployError
    from vitdeploy.workflows.rollout import RollOut

SHORT = 12
WORDS = {
    "complete": "complete",
    "stopped": "stopped",
    "partial": "not complete: the same command goes on with it",
}


@dataclass(frozen=True)
class Deployed:
    """What came of a command; `errors`, and `error`, the one that is its exit code."""

    outcome: RollOut

    @property
    def errors(self) -> Sequence[VitdeployError]:
        return self.outcome.errors

    @property
    def error(self) -> VitdeployError | None:
        return self.outcome.error

    @property
    def document(self) -> dict[str, Any]:
        fleet = self.outcome.fleet
        return {
            **_facts(fleet, self.outcome.members),
            "stages": list(self.outcome.stages),
            "undecided": list(self.outcome.undecided),
            "errors": [error.to_dict() for error in self.errors],
        }

    def lines(self) -> list[Line]:
        undecided = [f"not decided: {text}" for text in self.outcome.undecided]
        return [*_lines(self.outcome.fleet, self.outcome.members), *self.outcome.stages, *undecided]


@dataclass(frozen=True)
class Standing:
    """What runs where. `away`: devices that could not be asked, of which the last that was known is shown."""

    fleets: Sequence[Fleet]
    away: Sequence[str]

    @property
    def document(self) -> dict[str, Any]:
        return {"deployments": [_facts(each, each.members) for each in self.fleets], "away": list(self.away)}

    def lines(self) -> list[Line]:
        lines = [line for each in self.fleets for line in _lines(each, each.members)]
        away = [f"could not be asked: {', '.join(self.away)}"] if self.away else []
        return [*(lines or ["nothing is deployed on these devices"]), *away]


def roll_out(
    bundle: str | Path,
    on: str,
    *,
    name: str | None = None,
    stages: str | None = None,
    target: str = "auto",
    worse: float = 10.0,
    duration: float = 10.0,
    trust: str | Path | None = None,
    progress: bool | Reporter = True,
) -> Deployed:
    """Bring a bundle to the registered devices that `on` names, stage by stage.

    Args:
        name: of the deployment, by default the bundle's.
        stages: such as "1,10%,all", the default: how many devices have it once each stage is over.
        target: which engine, as an app that loads the bundle there asks for it.
        worse: percent by which p99 may be higher than that of the release before.
        duration: seconds that each of the two releases is measured for, before and after the switch.
        trust: the bundle must be signed by this public key or certificate (PEM).
        progress: as for `vitdeploy.export`.

    Raises:
        UnknownDeviceError: no such device or label. InputError: no such stage or name. Errors of reading the bundle.
    """
    from vitdeploy.devices.registry import find_devices
    from vitdeploy.workflows import rollout
    from vitdeploy.workflows.release import ready

    steps = rollout.parse_stages(rollout.STAGES if stages is None else stages)
    devices, reporter = find_devices(on), reporting(progress)
    with reporter:
        identity = Path(trust) if trust is not None else None
        release = ready(Path(bundle), name, trust=identity, target=target, duration=duration, worse=worse / 100)
        return Deployed(rollout.roll_out(release, devices, steps, reporter.progress, reporter.note))


def roll_back(name: str, on: str, *, target: str = "auto", progress: bool | Reporter = True) -> Deployed:
    """Let the devices that `on` names run the release again that they ran before; errors as `roll_out`."""
    from vitdeploy.devices.fleet import check_deployment
    from vitdeploy.devices.registry import find_devices
    from vitdeploy.workflows import standing

    devices, reporter = find_devices(on), reporting(progress)
    with reporter:
        check_deployment(name)
        return Deployed(standing.roll_back(name, devices, target, reporter.progress, reporter.note))


def standing(name: str | None = None, on: str | None = None, *, progress: bool | Reporter = True) -> Standing:
    """What is deployed on all registered devices, or on those that `on` names, as they say themselves now."""
    from vitdeploy.devices.fleet import check_deployment
    from vitdeploy.devices.registry import find_devices, read_devices
    from vitdeploy.workflows import standing as workflow

    devices = list(read_devices().values()) if on is None else find_devices(on)
    reporter = reporting(progress)
    with reporter:
        chosen = None if name is None else check_deployment(name)
        return Standing(*workflow.standing(devices, chosen, reporter.progress, reporter.note))


def _facts(fleet: Fleet, members: Sequence[Member]) -> dict[str, Any]:
    facts: dict[str, Any] = encode(fleet)
    return {**facts, "members": [encode(each) for each in members]}


def _lines(fleet: Fleet, members: Sequence[Member]) -> list[Line]:
    wanted = f"release {fleet.release[:SHORT]} of {fleet.bundle}, {WORDS[fleet.progress]}" if fleet.release else ""
    head = f"{fleet.name}: {wanted or 'brought by another machine'}"
    columns = (
        Column("device"),
        Column("release", 8, left=True),
        Column("state", 9, left=True),
        Column("p99 ms", 5),
        Column("of before", 4),
        Column("since", 3, left=True),
        Column("last seen", 6, left=True),
        Column("reason", 7, left=True),
    )
    return [head, Table(columns, tuple(map(_row, members)))]


def _row(member: Member) -> tuple[str, ...]:
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
