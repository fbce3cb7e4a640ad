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

# --- The registered devices: one JSON file in the user's configuration folder, readable by this user only -------------


FORMAT = 1
LOCAL, LABEL = "local", "label:"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
# None of these can begin with "-", like an option of ssh, or contain a special character of a shell.
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
PYTHON = re.compile(r"(~/)?[A-Za-z0-9_./+-]{1,240}")
EXPECTED_ADDRESS = "ssh://[USER@]HOST[:PORT], where HOST may be a Host of ~/.ssh/config"


@dataclass(frozen=True)
class Device:
    """A device. `host`: None for this machine. `user`, `port`, `ssh_config`: None for the defaults of ssh."""

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
    """Create a device from user input.

    Raises:
        UnknownDeviceError: an invalid name or address, or one that ssh could misinterpret.
    """
    if name == LOCAL or not NAME.fullmatch(name):
        raise UnknownDeviceError(
            f"{name!r} is not a valid device name",
            expected="at most 32 letters, digits, . _ -" if name != LOCAL else f"not {LOCAL}, which is this machine",
        )
    for label in labels:
        if not NAME.fullmatch(label):
            raise UnknownDeviceError(f"{label!r} is not a valid label", expected="at most 32 letters, digits, . _ -")
    if not PYTHON.fullmatch(python) or python.startswith("-"):
        raise UnknownDeviceError(
            f"{python!r} is not a valid path of a Python", expected="a path such as python3.12 or ~/venv/bin/python"
        )
    if ssh_config is not None and not ssh_config.is_file():
        raise UnknownDeviceError(f"no file {ssh_config}", fix="check --ssh-config")
    host, user, port = _parse(address)
    config = str(ssh_config.absolute()) if ssh_config is not None else None
    return Device(name, host, user, port, python, tuple(labels), config)


def _parse(address: str) -> tuple[str, str | None, int | None]:
    """Return host, user and port of an address."""
    try:
        parts = urlsplit(address)
        host, user, port = parts.hostname or "", parts.username, parts.port
    except ValueError:
        raise _no_address(address) from None
    rest = (parts.path.strip("/"), parts.query, parts.fragment)
    if parts.scheme != "ssh" or any(rest) or parts.password is not None:
        raise _no_address(address)
    if ":" not in host:
        host = parts.netloc.rpartition("@")[2].partition(":")[0]  # case matters for a Host of ~/.ssh/config
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
        f"{address!r} is not a valid device address",
        expected=EXPECTED_ADDRESS,
        fix="vitdeploy devices add NAME ssh://USER@HOST",
    )


def sender() -> str:
    """Return "user@host", which other users see while they wait for a device."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def registry_file() -> Path:
    import platformdirs

    return Path(platformdirs.user_config_dir("vitdeploy")) / "devices.json"


def read_devices() -> dict[str, Device]:
    """Return the registered devices by name.

    Raises:
        UnknownDeviceError: the file is invalid.
    """
    path = registry_file()
    if not path.exists():
        return {}
    try:
        found = decode(_File, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, DecodeError) as error:
        raise UnknownDeviceError(
            f"{path} cannot be read", found=str(error)[:200], fix="correct it, or remove it and add the devices again"
        ) from None
    for device in found.devices:  # the file may have been edited manually
        new_device(device.name, device.address, device.python, device.labels, None)
    return {device.name: device for device in found.devices}


def write_devices(devices: dict[str, Device]) -> None:
    """Replace the file.

    Raises:
        StorageError: it cannot be written.
    """
    _write(registry_file(), _File(FORMAT, tuple(devices[name] for name in sorted(devices))))


def _write(path: Path, value: object) -> None:
    """Replace a configuration file, readable by this user only.

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
            fix="set XDG_CONFIG_HOME to a writable folder",
        ) from None


def find_devices(text: str) -> list[Device]:
    """Return the devices of `--on A,B`, each once: names, labels (all devices with the label), and "local". "label:A"
    is always a label, even if a device has the name A.

    Raises:
        UnknownDeviceError: an unknown name or label.
    """
    known = read_devices()
    devices: dict[str, Device] = {}
    for item in text.split(","):
        name = item.removeprefix(LABEL)
        chosen = [this_machine()] if item == LOCAL else [known[item]] if item in known else []
        chosen = chosen or [device for device in known.values() if name in device.labels]
        if not chosen:
            if name != item:
                labels = sorted({label for device in known.values() for label in device.labels})
                raise UnknownDeviceError(
                    f"no device has the label {name!r}",
                    expected=", ".join(labels) or "devices with labels",
                    fix=f"vitdeploy devices add NAME ssh://USER@HOST --label {name or 'LABEL'}",
                )
            names = [LOCAL, *known]
            near = difflib.get_close_matches(name, names, n=1)
            raise UnknownDeviceError(
                f"unknown device {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                expected=", ".join(names),
                fix=f"vitdeploy devices add {name or 'NAME'} ssh://USER@HOST",
            )
        devices |= {device.name: device for device in chosen}
    return list(devices.values())


# --- The last known state of deployments: one JSON file each, next to the list of devices -----------------------------
# Every command reads the state from the devices. The file is for devices that are off, and for the release that the
# last command expected. Times come from this machine's clock; they are shown, never compared.


FLEET_FORMAT = 1
# "current": runs the expected release. "behind": another release, or none. "failed": the expected release was tried and
# removed. "off": not reachable, or unable to store the files.
State = Literal["current", "behind", "failed", "off"]
# "complete": all devices run it, or as many as the last stage needs. "stopped": it failed on a device. "partial":
# devices were off, or the command was interrupted.
RolloutProgress = Literal["complete", "stopped", "partial"]


@dataclass(frozen=True)
class FleetMember:
    """A device of a deployment, as last seen at `seen` ("" for never). `since`: when this machine first saw the release
    there. `p99_ms` and `ratio` (to the previous release): from the last trial. `reason`: why it failed or was not
    reachable."""

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
    """A deployment: the expected release (the SHA-256 of a manifest), the name of its bundle, and its devices."""

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
    """Return the name of a deployment if it is valid.

    Raises:
        InputError: the name is not valid for a folder on devices.
    """
    if not DEPLOYMENT.fullmatch(name):
        raise InputError(
            f"{name[:80]!r} is not a valid deployment name",
            expected="at most 64 letters, digits, . _ -",
            fix="set another name with --name",
        )
    return name


def read_fleets() -> dict[str, Fleet]:
    """Return all deployments known on this machine, by name."""
    names = sorted(path.stem for path in fleet_folder().glob("*.json") if DEPLOYMENT.fullmatch(path.stem))
    return {name: read_fleet(name) for name in names}


def read_fleet(name: str) -> Fleet:
    """Return the last known state of a deployment; an empty one if it is unknown.

    Raises:
        StorageError: the file is invalid.
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
            fix=f"remove it (the devices still have their state): rm {quoted(path)}",
        ) from None
    if (found.format, found.name) != (FLEET_FORMAT, name):
        raise StorageError(f"{path} has a different format or name", found=f"{found.format}, {found.name}")
    return found


def write_fleet(fleet: Fleet) -> None:
    """Replace the file of a deployment.

    Raises:
        StorageError: it cannot be written.
    """
    _write(fleet_folder() / f"{fleet.name}.json", fleet)


def now() -> str:
    """Return the current time as text."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
