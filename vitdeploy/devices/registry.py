"""Devices and fleets by name."""

import difflib
import getpass
import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from vitdeploy.devices.agent.documents import DEPLOYMENT
from vitdeploy.errors import InputError, StorageError, UnknownDeviceError, quoted
from vitdeploy.runtime.trust import write_atomic
from vitdeploy.spec import DecodeError, decode, encode

# --- The devices that this user has named: one JSON file in the user's configuration folder, for this user's eyes -----


FORMAT = 1
LOCAL, LABEL = "local", "label:"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
# Neither can begin with "-", which ssh would take for an option, and none has a character that a shell knows.
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
PYTHON = re.compile(r"(~/)?[A-Za-z0-9_./+-]{1,240}")
EXPECTED_ADDRESS = "ssh://[USER@]HOST[:PORT], where HOST may be a Host of ~/.ssh/config"


@dataclass(frozen=True)
class Device:
    """`host` None is this machine. `user`, `port` and `ssh_config` None leave it to the configuration of ssh."""

    name: str
    host: str | None = None
    user: str | None = None
    port: int | None = None
    python: str = "python3"
    labels: tuple[str, ...] = ()
    ssh_config: str | None = None

    @property
    def address(self) -> str:
        if self.host is None:
            return "this machine"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"


@dataclass(frozen=True)
class _File:
    format: int
    devices: tuple[Device, ...]


def this_machine() -> Device:
    return Device(LOCAL, python=sys.executable)


def new_device(name: str, address: str, python: str, labels: Sequence[str], ssh_config: Path | None) -> Device:
    """A device of what the user typed.

    Raises:
        UnknownDeviceError: a name or an address that is none, or that ssh could take for something else.
    """
    if name == LOCAL or not NAME.fullmatch(name):
        raise UnknownDeviceError(
            f"{name!r} is no name for a device",
            expected="letters, digits, . _ -, at most 32 of them"
            if name != LOCAL
            else f"not {LOCAL}: it is this machine",
        )
    for label in labels:
        if not NAME.fullmatch(label):
            raise UnknownDeviceError(f"{label!r} is no label", expected="letters, digits, . _ -, at most 32 of them")
    if not PYTHON.fullmatch(python) or python.startswith("-"):
        raise UnknownDeviceError(
            f"{python!r} is no path of a Python on a device", expected="such as python3.12 or ~/venv/bin/python"
        )
    if ssh_config is not None and not ssh_config.is_file():
        raise UnknownDeviceError(f"no file {ssh_config}", fix="check --ssh-config")
    host, user, port = _parse(address)
    config = str(ssh_config.absolute()) if ssh_config is not None else None
    return Device(name, host, user, port, python, tuple(labels), config)


def _parse(address: str) -> tuple[str, str | None, int | None]:
    """Host, user and port of an address."""
    try:
        parts = urlsplit(address)
        host, user, port = parts.hostname or "", parts.username, parts.port
    except ValueError:
        raise _no_address(address) from None
    rest = (parts.path.strip("/"), parts.query, parts.fragment)
    if parts.scheme != "ssh" or any(rest) or parts.password is not None:
        raise _no_address(address)
    if ":" not in host:
        host = parts.netloc.rpartition("@")[2].partition(":")[0]  # a Host of a configuration has capital letters
    if not (_is_ipv6(host) or HOST.fullmatch(host)) or (user is not None and not USER.fullmatch(user)) or port == 0:
        raise _no_address(address)
    return host, user, port


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _no_address(address: str) -> UnknownDeviceError:
    return UnknownDeviceError(
        f"{address!r} is no address of a device",
        expected=EXPECTED_ADDRESS,
        fix="vitdeploy devices add NAME ssh://USER@HOST",
    )


def sender() -> str:
    """Who asks, for others who wait for a device: "user@host"."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def registry_file() -> Path:
    import platformdirs

    return Path(platformdirs.user_config_dir("vitdeploy")) / "devices.json"


def read_devices() -> dict[str, Device]:
    """The named devices by name.

    Raises:
        UnknownDeviceError: the file is not what `add` writes.
    """
    path = registry_file()
    if not path.exists():
        return {}
    try:
        found = decode(_File, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, DecodeError) as error:
        raise UnknownDeviceError(
            f"{path} cannot be read", found=str(error)[:200], fix="fix it, or remove it and add the devices again"
        ) from None
    for device in found.devices:  # somebody may have written it by hand
        new_device(device.name, device.address, device.python, device.labels, None)
    return {device.name: device for device in found.devices}


def write_devices(devices: dict[str, Device]) -> None:
    """Replace the file.

    Raises:
        StorageError: it cannot be written.
    """
    _write(registry_file(), _File(FORMAT, tuple(devices[name] for name in sorted(devices))))


def _write(path: Path, value: object) -> None:
    """Replace a file of ours, for this user's eyes.

    Raises:
        StorageError: it cannot be written.
    """
    text = json.dumps(encode(value), indent=1, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, text.encode(), 0o600)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written",
            found=os.strerror(error.errno or 0),
            fix="set XDG_CONFIG_HOME to a folder of yours",
        ) from None


def find_devices(text: str) -> list[Device]:
    """The devices of `--on A,B`: names, labels (all devices that have it), and "local"; each once. "label:A" is a label
    even where a device is called so.

    Raises:
        UnknownDeviceError: one that is none of these.
    """
    known = read_devices()
    found: dict[str, Device] = {}
    for given in text.split(","):
        name = given.removeprefix(LABEL)
        chosen = [this_machine()] if given == LOCAL else [known[given]] if given in known else []
        chosen = chosen or [device for device in known.values() if name in device.labels]
        if not chosen:
            if name != given:
                labels = sorted({label for device in known.values() for label in device.labels})
                raise UnknownDeviceError(
                    f"no device has the label {name!r}",
                    expected=", ".join(labels) or "devices with labels",
                    fix=f"vitdeploy devices add NAME ssh://USER@HOST --label {name or 'LABEL'}",
                )
            names = [LOCAL, *known]
            near = difflib.get_close_matches(name, names, n=1)
            raise UnknownDeviceError(
                f"no device is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                expected=", ".join(names),
                fix=f"vitdeploy devices add {name or 'NAME'} ssh://USER@HOST",
            )
        found |= {device.name: device for device in chosen}
    return list(found.values())


# --- What this machine knows of its deployments: one JSON file each, beside the list of devices -----------------------
# The devices themselves are asked whenever anything is done; the file is for those that are off then, and says what the
# last command expected. Times are of the clock here, and are shown, never compared.


FLEET_FORMAT = 1
# "current": it runs the expected release. "behind": another one, or none. "failed": the expected one was tried there, and
# taken back. "off": it could not be asked, or could not take the files.
State = Literal["current", "behind", "failed", "off"]
# "complete": all run it, or as many as the last stage asks for. "stopped": it failed somewhere. "partial": devices were
# off, or the command was ended.
RolloutProgress = Literal["complete", "stopped", "partial"]


@dataclass(frozen=True)
class FleetMember:
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
    """A deployment: the release that is expected (the SHA-256 of a manifest), the name of its bundle."""

    name: str
    release: str = ""
    bundle: str = ""
    progress: RolloutProgress = "partial"
    reason: str = ""
    changed: str = ""
    members: tuple[FleetMember, ...] = ()
    format: int = field(default=FLEET_FORMAT)

    def member(self, device: str) -> FleetMember:
        return next((each for each in self.members if each.device == device), FleetMember(device))


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
            expected="letters, digits, . _ -, at most 64 of them",
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
    if (found.format, found.name) != (FLEET_FORMAT, name):
        raise StorageError(f"{path} is of another version or name", found=f"{found.format}, {found.name}")
    return found


def write_fleet(fleet: Fleet) -> None:
    """Replace the file of a deployment, for this user's eyes.

    Raises:
        StorageError: it cannot be written.
    """
    _write(fleet_folder() / f"{fleet.name}.json", fleet)


def now() -> str:
    """The time here, as it is shown."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
