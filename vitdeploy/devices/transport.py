"""How a command gets to a device: as a child process here, or through the system's own ssh.

Nothing else is ever needed: files go over standard input and output, so that a board without sftp works too. ssh reads
the user's configuration, keys, agent, jump hosts and known_hosts; no option of ours touches host-key checking.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from vitdeploy.devices.registry import Device
from vitdeploy.errors import DeviceError

CONNECT_SECONDS = 10
SSH_FAILED = 255
# A password would be waited for; an answer to a lost connection too, without the last two (45 s).
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)


class ConnectionLost(DeviceError):
    """ssh could not connect, or its connection broke: trying again may help."""


class Unresponsive(ConnectionLost):
    """The connection stands, but the agent does not speak, or too slowly."""


def command(device: Device, arguments: Sequence[str]) -> list[str]:
    """The program here that runs `device.python ARGUMENTS` on the device."""
    if device.host is None:
        return [device.python, *arguments]
    # Every login shell takes words in single quotes; "~" is only a home folder outside of them.
    home, name = ('"$HOME"/', device.python[2:]) if device.python.startswith("~/") else ("", device.python)
    line = f"{home}{shlex.quote(name)} {shlex.join(arguments)}"
    return [*ssh(device), line]


def shell(device: Device) -> str:
    """What a person types to run its Python."""
    return shlex.join([*(("ssh", *_where(device)) if device.host is not None else ()), device.python])


def typed(device: Device, line: str, *, expand: bool = False) -> str:
    """What a person types to run a shell's line there, with a terminal, which sudo may ask for a password.

    `expand`: what the line has in `$(...)` is run here.
    """
    if device.host is None:
        return line
    quoted = f'"{line}"' if expand else shlex.quote(line)
    return f"{shlex.join(['ssh', '-t', *_where(device)])} {quoted}"


def ssh(device: Device) -> list[str]:
    """ssh and its options, up to and with the host."""
    return ["ssh", *OPTIONS, *_where(device, "--")]


def _where(device: Device, *end: str) -> list[str]:
    return [
        *(("-F", device.ssh_config) if device.ssh_config else ()),
        *(("-p", str(device.port)) if device.port else ()),
        *(("-l", device.user) if device.user else ()),
        *end,
        str(device.host),
    ]


def why(device: Device, status: int, words: str) -> DeviceError:
    """Why a command that ended with `status` never spoke, from what ssh or the device's shell wrote."""
    last = words.splitlines()[-1] if words else f"exit status {status}, and nothing was said"
    login = shlex.join(["ssh", *_where(device)])
    if status == SSH_FAILED and device.host is not None:
        return _refused(device, words, last, login)
    if status in (126, 127):
        return DeviceError(
            f"{device.name} has no Python at {device.python}",
            found=last,
            wanted="Python 3.10 or newer, with numpy, Pillow and one runtime",
            fix=f"vitdeploy devices add {device.name} {device.address} --python PATH",
        )
    return DeviceError(f"{device.name}: the agent does not start", found=last, wanted="Python 3.10 or newer on Linux")


def _refused(device: Device, words: str, last: str, login: str) -> DeviceError:
    where = f"{device.name} ({device.address})"
    if "IDENTIFICATION HAS CHANGED" in words:
        return DeviceError(
            f"{where} has another host key than the one known: it was installed again, or somebody is in between",
            found=last,
            wanted="the key in known_hosts",
            fix="ask whoever runs it; if the change is right: ssh-keygen -R HOST, then log in once by hand",
        )
    if "Host key verification failed" in words:
        return DeviceError(
            f"the host key of {where} is not known here",
            found=last,
            fix=f"log in once by hand, and look at it: {login}",
        )
    if "Permission denied" in words or "Too many authentication failures" in words:
        return DeviceError(
            f"{where} takes none of your keys",
            found=last,
            wanted="a key that needs no password to be typed",
            fix="ssh-copy-id, or ssh-add",
        )
    if "Could not resolve hostname" in words or "Bad configuration option" in words or "terminating," in words:
        return DeviceError(f"{where} cannot be reached", found=last, fix=f"check: {login}")
    return ConnectionLost(f"{where} cannot be reached", found=last, fix=f"is it on? check: {login}")
