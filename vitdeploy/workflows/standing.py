"""What runs where, and the way back: deployments as devices say they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vitdeploy.devices.agent.documents import Deployed
from vitdeploy.devices.client import Client
from vitdeploy.devices.deployed import Trial
from vitdeploy.devices.fleet import Fleet, State, now, read_fleet, read_fleets, write_fleet
from vitdeploy.devices.registry import Device
from vitdeploy.errors import DeviceError, VitdeployError
from vitdeploy.progress import Progress as Tell
from vitdeploy.workflows.on_devices import Note, on_all
from vitdeploy.workflows.rollout import RollOut, ask_all, move_back, not_back, seen, with_member


def roll_back(name: str, devices: Sequence[Device], target: str, tell: Tell, note: Note) -> RollOut:
    """Move the link of each device to the release that it was at before, if that still gives its golden answers.

    Raises:
        StorageError: what came of it cannot be noted here.
    """
    fleet, errors = read_fleet(name), list[VitdeployError]()
    there: dict[str, Deployed] = {}
    for outcome in ask_all(devices, tell, note):
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
                    f"{device.name} has no release of {name} to go back to",
                    found=f"release {there[device.name].current[:12] or 'none'}, and none before it",
                    fix="vitdeploy devices deploy BUNDLE --on " + device.name,
                )
            )
    chosen = [device for device in chosen if there[device.name].previous]

    def work(client: Client) -> Trial:
        return move_back(client, there[client.device.name], target)

    for moved in on_all(chosen, work, tell, note) if chosen else []:
        was = there[moved.device.name]
        error = moved.error or not_back(moved, name)
        if error is not None:
            errors.append(error)
            continue
        found = Deployed(name, was.previous, was.current, was.counter + 1)
        state: State = "current" if found.current == fleet.release else "behind"
        member = seen(fleet.member(moved.device.name), found)
        fleet = with_member(fleet, member, state=state, since=now(), reason="rolled back")
    write_fleet(fleet)
    return RollOut(fleet, tuple(device.name for device in devices), tuple(errors))


def standing(devices: Sequence[Device], name: str | None, tell: Tell, note: Note) -> tuple[list[Fleet], list[str]]:
    """Every deployment that these devices have, or that this machine knows of them, or the one of that name; and the
    devices that could not be asked.

    Raises:
        StorageError: what is known of one cannot be read.
    """
    known = read_fleets()
    names = {device.name for device in devices}
    away: list[str] = []
    for outcome in ask_all(devices, tell, note) if devices else []:
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
            state: State = "failed" if failed else "current" if there.current == fleet.release else "behind"
            known[deployment] = with_member(fleet, seen(member, there), state=state)
    chosen = [each for each in known.values() if name in (None, each.name)]
    shown = [
        dataclasses.replace(each, members=tuple(m for m in each.members if m.device in names or not devices))
        for each in chosen
    ]
    return [each for each in shown if each.members], away
