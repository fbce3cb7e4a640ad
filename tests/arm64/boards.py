"""The emulated machines: one sshd of this machine, whose logins land in the arm64 root, each port on another CPU.

All of it lies in namespaces of its own: no mount is seen outside, and all processes end with the server. Only the
kernel's table of who runs which programs is common; our row there is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.arm64.root import Root, Unable
from tests.ssh_server import server_options

BINFMT = Path("/proc/sys/fs/binfmt_misc")
# Of the ELF header: 64 bits, little end first, a program or a shared object (the mask has its last bit free), AArch64.
MAGIC = r"\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00"
MASK = r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff"
# As a folder below one that anybody may write to, such as /tmp, is no root for sshd.
ENTRY = "/mnt"
MOUNTS = f"""
set -e
mount --make-rprivate /
mount --bind "$1" {ENTRY}
mount -t proc proc {ENTRY}/proc
mount --bind /sys {ENTRY}/sys
mount -o remount,bind,ro {ENTRY}/sys
mount --rbind /dev {ENTRY}/dev
mount -t tmpfs tmpfs {ENTRY}/tmp
shift
exec "$@"
"""  # noqa: S108  # in the namespace


@dataclass(frozen=True)
class Boards:
    """`folder` has the keys and the configurations; each name of `ports` is a host of `config`, with a home folder of
    that name in the root."""

    root: Root
    folder: Path
    ports: dict[str, int]

    @property
    def config(self) -> Path:
        return self.folder / "config"

    def home(self, name: str) -> Path:
        """What the logins of a board call $HOME."""
        return self.root.folder / "home" / name

    def run(self, name: str, *argv: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """A command on a board."""
        words = " ".join(argv)
        ssh = ("ssh", "-F", self.config, name, words)
        return subprocess.run(ssh, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def started(root: Root, cpus: Sequence[str], folder: Path) -> Iterator[Boards]:
    """Boards with these of QEMU's CPU models, by their names.

    Raises:
        Unable: the kernel or sshd does not take part.
    """
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        raise Unable("install openssh-server and openssh-client")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    boards = Boards(root, folder, dict(zip(cpus, _free_ports(len(cpus)), strict=True)))
    _write_configurations(boards)
    with _emulated(root), _server(sshd, boards):
        yield boards


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _write_configurations(boards: Boards) -> None:
    folder, key = boards.folder, (boards.folder / "host.pub").read_text().split()[:2]
    server = {**server_options(folder), "ChrootDirectory": ENTRY}
    lines = [
        *(f"{name} {value}" for name, value in server.items()),
        *(f"Port {port}" for port in boards.ports.values()),
    ]
    known, client = [], []
    for cpu, port in boards.ports.items():
        (boards.home(cpu) / "scratch").mkdir(parents=True, exist_ok=True)
        lines += [f"Match LocalPort {port}", f"  SetEnv HOME=/home/{cpu} TMPDIR=/home/{cpu}/scratch QEMU_CPU={cpu}"]
        known.append(f"[127.0.0.1]:{port} {' '.join(key)}\n")
        client += [f"Host {cpu}", "  HostName 127.0.0.1", f"  Port {port}", "  User root"]
    client += ["Host *", f"  IdentityFile {folder / 'user'}", "  IdentitiesOnly yes"]
    client += [f"  UserKnownHostsFile {folder / 'known_hosts'}", "  GlobalKnownHostsFile /dev/null"]
    (folder / "sshd_config").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (folder / "known_hosts").write_text("".join(known), encoding="utf-8")
    boards.config.write_text("\n".join([*client, ""]), encoding="utf-8")


@contextlib.contextmanager
def _emulated(root: Root) -> Iterator[None]:
    """While it lasts, the kernel runs arm64 programs in QEMU. F: it opens QEMU now, so that a root needs no copy."""
    if not (BINFMT / "register").exists():
        done = subprocess.run(["mount", "-t", "binfmt_misc", "none", BINFMT], capture_output=True, text=True)
        if done.returncode:
            raise Unable(f"the kernel's binfmt_misc cannot be mounted: {done.stderr.strip()[-200:]}")
    for left in BINFMT.glob("vitdeploy-aarch64-*"):  # by a run that was killed
        if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
            left.write_text("-1", encoding="ascii")
    row = BINFMT / f"vitdeploy-aarch64-{os.getpid()}"
    try:
        (BINFMT / "register").write_text(f":{row.name}:M::{MAGIC}:{MASK}:{root.qemu.resolve()}:F", encoding="ascii")
    except OSError as error:
        raise Unable(f"the kernel takes no interpreter for arm64 programs: {error.strerror}") from None
    try:
        yield
    finally:
        row.write_text("-1", encoding="ascii")


@contextlib.contextmanager
def _server(sshd: str, boards: Boards) -> Iterator[None]:
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's, which only a service of the system makes
    # Each ends with what started it, so that nothing is left of a run that was killed.
    unshare = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
    inside = ("sh", "-c", MOUNTS, "sh", boards.root.folder)
    with (boards.folder / "log").open("w") as log:
        server = (sshd, "-D", "-e", "-f", boards.folder / "sshd_config")
        process = subprocess.Popen([*unshare, *inside, *server], stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while socket.socket().connect_ex(("127.0.0.1", next(iter(boards.ports.values())))):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (boards.folder / "log").read_text(encoding="utf-8", errors="replace").strip()
                raise Unable(f"no sshd in the other root: {said[-300:]}")
            time.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)  # the namespace's first process goes too, and so all of them
        process.wait()
