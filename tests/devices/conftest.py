"""A real OpenSSH server on loopback, whose logins see a home folder of their own: that is the device."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.held import held
from tests.ssh_server import server_options
from vitdeploy.devices.client import Client
from vitdeploy.devices.registry import Device
from vitdeploy.devices.shipment import make_job, placed_shipment
from vitdeploy.workflows.placement import place_graphs


@dataclass
class Board:
    """The device: `folder` has the keys and configurations, `home` is what its logins call $HOME."""

    folder: Path
    home: Path
    port: int
    server: subprocess.Popen

    @property
    def agent(self) -> Path:
        return self.home / ".cache" / "vitdeploy-agent"

    @property
    def jobs(self) -> list[Path]:
        return sorted((self.agent / "jobs").glob("*"))

    def device(self, **changes) -> Device:
        facts = {"name": "board", "host": "board", "python": sys.executable, "ssh_config": str(self.config())}
        return Device(**{**facts, **changes})

    def config(self, **options) -> Path:
        """An ssh configuration that knows the host "board"; `options` over the right ones, FOLDER in them is ours."""
        right = {
            "HostName": "127.0.0.1",
            "Port": self.port,
            "User": subprocess.check_output(["id", "-un"], text=True).strip(),
            "IdentityFile": self.folder / "user",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
        }
        lines = [f"  {key} {value}".replace("FOLDER", str(self.folder)) for key, value in {**right, **options}.items()]
        path = self.folder / f"config-{abs(hash(tuple(lines)))}"
        if not path.exists():  # a running ssh may be reading it
            path.write_text("\n".join(["Host board", *lines, ""]), encoding="utf-8")
        return path

    def python(self, name: str, lines: str) -> str:
        """A "Python" of the device that does something first; `$@` are its arguments."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    def changed_python(self, name: str, lines: str, path: str = "", python: str = sys.executable) -> str:
        """A "Python" of the device that runs `lines` when it starts, as all that it starts do; `path` is a folder of
        programs that it finds first."""
        folder = self.folder / f"{name}-site"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(lines, encoding="utf-8")
        return self.python(name, f'export PYTHONPATH={folder} PATH={path}:"$PATH"; exec {python} "$@"')

    def drop_connections(self) -> int:
        """Kill the server's processes of all connections; how many there were."""
        killed = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.server.pid:
                    os.kill(int(process.name), signal.SIGKILL)
                    killed += 1
        return killed

    def lock(self) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Somebody else's hold on the device, who did not start what runs there: the tests started the server."""
        return held(self.home / "tmp")


def make_keys(folder: Path) -> None:
    """The keys of a server and its users in a new folder, where OpenSSH is installed."""
    if sshd_program() is None or shutil.which("ssh") is None:
        pytest.skip("install openssh-server and openssh-client")
    folder.mkdir(exist_ok=True)
    for name in ("host", "user", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's, which only a service of the system makes


def sshd_program() -> str | None:
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


def start_board(folder: Path, keys: Path, temporary: Path | None = None, port: int = 0) -> Board:
    """A server in `folder` that has started; `temporary`: the folder of the device for temporary files, by default one
    of its own. `port`: that of a server that was there before.

    The caller waits until it answers, and ends it.
    """
    home = folder / "home"
    temporary = temporary or home / "tmp"
    for each in (home, temporary):
        each.mkdir(parents=True, exist_ok=True)
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    options = {"Port": port, **server_options(keys), "SetEnv": f"HOME={home} TMPDIR={temporary}"}
    (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in options.items()))
    key = (keys / "host.pub").read_text().split()[:2]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {' '.join(key)}\n")
    if keys != folder and not (folder / "user").exists():
        (folder / "user").symlink_to(keys / "user")
    program = sshd_program()
    assert program is not None
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    return Board(folder, home, port, process)


def await_board(board: Board) -> None:
    deadline = time.monotonic() + 10
    while socket.socket().connect_ex(("127.0.0.1", board.port)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if board.server.poll() is not None:
        pytest.skip(f"sshd does not start: {(board.folder / 'log').read_text().strip()[-200:]}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    folder = tmp_path_factory.mktemp("sshd")
    make_keys(folder)
    board = start_board(folder, folder)
    try:
        await_board(board)
        yield board
    finally:
        board.server.terminate()
        board.server.wait()


@pytest.fixture
def board(server: Board) -> Iterator[Board]:
    """The device with no job on it; what a test leaves there is ended."""
    yield server
    for job in server.jobs:
        if (job / "status.json").exists():
            Client(server.device()).ask_status("stop", job.name)
        shutil.rmtree(job, ignore_errors=True)


@pytest.fixture(scope="session")
def compile_job(tmp_path_factory: pytest.TempPathFactory, small_export: Path):
    """A job that compiles the small model for ONNX Runtime, and where its files lie."""
    folder = tmp_path_factory.mktemp("placed")
    graphs = place_graphs(small_export / "model.onnx", "onnxruntime-cpu", None, folder)
    return make_job("compile", [placed_shipment("small", graphs, 1)])
