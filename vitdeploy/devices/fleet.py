"""What this machine knows of its deployments: one JSON file each, beside the list of devices.

The devices themselves are asked whenever anything is done; the file is for those that are off then, and says what the
last command wanted. Times are of the clock here, and are shown, never compared.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from vitdeploy.devices.agent.documents import DEPLOYMENT
from vitdeploy.devices.registry import registry_file
from vitdeploy.errors import InputError, StorageError, quoted
from vitdeploy.runtime.atomic import write_atomic
from vitdeploy.spec import DecodeError, decode, encode

FORMAT = 1
# "current": it runs the wanted release. "behind": another one, or none. "failed": the wanted one was tried there, and
# taken back. "off": it could not be asked, or could not take the files.
State = Literal["current", "behind", "failed", "off"]
# "complete": all run it, or as many as the last stage asks for. "stopped": it failed somewhere. "partial": devices were
# off, or the command was ended.
Progress = Literal["complete", "stopped", "partial"]


@dataclass(frozen=True)
class Member:
    """A device of a deployment, as last seen at `seen` ("" for never). `since`: when this machine saw the release begin
    there. `p99_ms` and `ratio`, against the release before, are of the last trial there; `reason` says why it failed,
    or could not be asked."""

    device: str
    state: State = "off"
    release: str = ""
    previous: str = ""
    counter: int = 0
    seen: str = ""
    since: str = ""
    engine: str = ""
    p99_ms: float | None = None
    ratio: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Fleet:
    """A deployment: the release that is wanted (the SHA-256 of a manifest), the name of its bundle."""

    name: str
    release: str = ""
    bundle: str = ""
    progress: Progress = "partial"
    reason: str = ""
    changed: str = ""
    members: tuple[Member, ...] = ()
    format: int = field(default=FORMAT)

    def member(self, device: str) -> Member:
        return next((each for each in self.members if each.device == device), Member(device))


def fleet_folder() -> Path:
    return registry_file().parent / "fleet"


def check_deployment(name: str) -> str:
    """The name of a deployment.

    Raises:
        InputError: it cannot be one, as devices call a folder so.
    """
    if not DEPLOYMENT.fullmatch(name):
        raise InputError(
            f"{name[:80]!r} is no name of a deployment",
            wanted="letters, digits, . _ -, at most 64 of them",
            fix="give one with --name",
        )
    return name


def read_fleets() -> dict[str, Fleet]:
    """All deployments that this machine knows, by name."""
    names = sorted(path.stem for path in fleet_folder().glob("*.json") if DEPLOYMENT.fullmatch(path.stem))
    return {name: read_fleet(name) for name in names}


def read_fleet(name: str) -> Fleet:
    """What is known of a deployment; an empty one of that name where nothing is.

    Raises:
        StorageError: the file is not what vitdeploy writes.
    """
    path = fleet_folder() / f"{check_deployment(name)}.json"
    try:
        found = decode(Fleet, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Fleet(name)
    except (OSError, ValueError, DecodeError) as error:
        raise StorageError(
            f"{path} cannot be read",
            found=str(error)[:200],
            fix=f"remove it: devices say themselves what they run; rm {quoted(path)}",
        ) from None
    if (found.format, found.name) != (FORMAT, name):
        raise StorageError(f"{path} is of another version or name", found=f"{found.format}, {found.name}")
    return found


def write_fleet(fleet: Fleet) -> None:
    """Replace the file of a deployment, for this user's eyes.

    Raises:
        StorageError: it cannot be written.
    """
    path = fleet_folder() / f"{fleet.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, (json.dumps(encode(fleet), indent=1, allow_nan=False) + "\n").encode(), 0o600)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written",
            found=os.strerror(error.errno or 0),
            fix="set XDG_CONFIG_HOME to a folder of yours",
        ) from None


def now() -> str:
    """The time here, as it is shown."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
