"""Run independent pieces of work as tasks of a Ray cluster (docs.ray.io, "Ray Core", "Tasks").

Ray runs what its clients send, so a cluster trusts all of them: one that is not on this machine alone is asked with its
token, and never without.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar
from urllib.parse import urlsplit

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.errors import InputError, MissingPackageError, VitdeployError, WorkerError
from vitdeploy.store.places import SHARED_VARIABLE
from vitdeploy.store.sources import source_digest
from vitdeploy.workflows.executors import error_of, guarded

T = TypeVar("T")
R = TypeVar("R")
# A task whose process or node dies is started so often.
STARTS = 3
CONNECT_SECONDS = 10.0
MODE, TOKEN = "RAY_AUTH_MODE", "token"


@dataclass(frozen=True)
class RayCluster:
    """The cluster at `address` (host:port, or ray://host:port for Ray's client), or one that is started on this machine
    for each call where it is "". `at_a_time`: how many tasks run at once; None: as many as the cluster has CPUs for."""

    address: str = ""
    at_a_time: int | None = None

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """As `Executor.map`. A task that dies is started again, `STARTS` times in all; then it is a WorkerError.

        Raises:
            InputError: an address on the network, and no token; or several machines, and no store that they share.
            MissingPackageError: Ray is not installed.
            WorkerError: the cluster does not answer, or runs another release of Python or Ray.
        """
        ray = _ray()
        with _connected(ray, self.address):
            _require_shared_store(ray)
            work = ray.remote(num_cpus=1, max_retries=STARTS - 1)(_task)
            code = _code(function)
            waiting, running = list(enumerate(items)), dict[object, int]()
            try:
                while waiting or running:
                    while waiting and len(running) < (self.at_a_time or len(items)):
                        index, item = waiting.pop(0)
                        running[work.remote(function, item, code, _environment(), str(Path.cwd()))] = index
                    (done,), _ = ray.wait(list(running), num_returns=1)
                    yield running.pop(done), _result(ray, functools.partial(ray.get, done))
            finally:
                for reference in running:
                    with contextlib.suppress(ray.exceptions.RayError):
                        ray.cancel(reference, force=True)


def _ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingPackageError("ray", "ray", "work on a Ray cluster") from None


def _environment() -> dict[str, str]:
    """Of this command, what its tasks are to be run with. Credentials are those of each node."""
    return {name: value for name, value in os.environ.items() if name.startswith("VITDEPLOY_")}


def _code(function: Callable[..., object]) -> str:
    return source_digest({function.__module__})


def _task(
    function: Callable[[T], R], item: T, code: str, environment: Mapping[str, str], folder: str
) -> R | ErrorFacts:
    """Runs on a node, with the environment and in the folder of the command."""
    if (found := _code(function)) != code:
        return ErrorFacts.of(
            WorkerError(
                f"the node {socket.gethostname()} has another vitdeploy",
                found=f"source code {found[:12]}",
                wanted=code[:12],
                fix="install the same version on all nodes",
            )
        )
    os.environ.update(environment)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)
    return guarded(function, item)


def _result(ray: ModuleType, get: Callable[[], R | ErrorFacts]) -> R | VitdeployError:
    try:
        return error_of(get())
    except ray.exceptions.RayTaskError:
        raise  # an error of ours that nobody expected, as in this process
    except ray.exceptions.RayError as error:
        return WorkerError(
            f"a task died {STARTS} times",
            found=str(error).splitlines()[0][:200] or type(error).__name__,
            fix="often too little memory: do fewer at a time (--jobs 1), or take larger nodes",
        )


@contextlib.contextmanager
def _connected(ray: ModuleType, address: str) -> Iterator[None]:
    if not address:
        os.environ.setdefault(MODE, TOKEN)  # it listens on the network too
    else:
        _require_token(address)
        _require_answer(address)
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **_local(address))
    except Exception as error:  # of many classes, by what went wrong
        raise WorkerError(
            f"the Ray cluster {address or 'of this machine'} cannot be used",
            found=" ".join(str(error).split())[:300] or type(error).__name__,
            wanted=f"a cluster of Ray {ray.__version__} that this command may use",
            fix="start it with the Ray and the Python of this environment, and the same token",
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _local(address: str) -> dict[str, bool]:
    return {} if address else {"include_dashboard": False}


def _host_and_port(address: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None


def _require_token(address: str) -> None:
    host, port = _host_and_port(address)
    if not host or port is None:
        raise InputError(
            "that is not the address of a Ray cluster", found=address, wanted="HOST:PORT, such as 10.0.0.5:6379"
        )
    if _loopback(host) or os.environ.get(MODE) == TOKEN:
        return
    raise InputError(
        f"the Ray cluster {address} is on the network, and would be asked without a token",
        found=f"{MODE}={os.environ.get(MODE, '')}",
        wanted=f"{MODE}={TOKEN} for both: without it, whoever reaches the port runs code there",
        fix=f"export {MODE}={TOKEN}, with the cluster's token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token",
    )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _require_answer(address: str) -> None:
    """Ray itself waits for minutes."""
    host, port = _host_and_port(address)
    try:
        socket.create_connection((host, port or 0), CONNECT_SECONDS).close()
    except OSError as error:
        raise WorkerError(
            f"the Ray cluster {address} does not answer",
            found=error.strerror or str(error),
            wanted="a head node that runs",
            fix="ray start --head there; look at the address, the port and the firewall",
        ) from None


def _require_shared_store(ray: ModuleType) -> None:
    machines = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(machines) > 1 and not os.environ.get(SHARED_VARIABLE):
        raise InputError(
            f"the cluster has {len(machines)} machines, which would not find each other's results",
            found=f"{SHARED_VARIABLE} is not set",
            wanted="the URL of a store that all of them reach",
            fix=f"export {SHARED_VARIABLE}=s3://BUCKET/vitdeploy, or file:///MOUNTED/FOLDER",
        )
