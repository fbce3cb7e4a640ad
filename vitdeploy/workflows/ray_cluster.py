"""Run independent pieces of work as tasks of a Ray cluster (docs.ray.io, "Ray Core", "Tasks").

Ray runs what its clients send, so a cluster trusts all of them: one that is not on this machine alone is asked with its
token, and never without.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar
from urllib.parse import urlsplit

from vitdeploy.errors import InputError, MissingPackageError, VitdeployError, WorkerError
from vitdeploy.stages.workers import Pool
from vitdeploy.store.places import SHARED_VARIABLE
from vitdeploy.workflows.executors import mapped
from vitdeploy.workflows.ray_pool import RayPool

T = TypeVar("T")
R = TypeVar("R")
CONNECT_SECONDS = 10.0
MODE, TOKEN = "RAY_AUTH_MODE", "token"


@dataclass(frozen=True)
class RayCluster:
    """The cluster at `address` (host:port, or ray://host:port for Ray's client), or one that is started on this machine
    for each pool where it is "". `at_a_time`: how many tasks run at once; None: as many as the cluster has CPUs for."""

    address: str = ""
    at_a_time: int | None = None

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """As `Executor.pool`.

        Raises:
            InputError: an address on the network, and no token; or several machines, and no store that they share.
            MissingPackageError: Ray is not installed.
            WorkerError: the cluster does not answer, or runs another release of Python or Ray.
        """
        ray = _ray(self.address)
        with _connected(ray, self.address):
            _require_shared_store(ray)
            pool = RayPool(ray, self.at_a_time)
            try:
                yield pool
            finally:
                pool.close()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """As `Executor.map`; errors as those of `pool`."""
        with self.pool() as pool:
            yield from mapped(pool, function, items)


def _ray(address: str) -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:  # a cluster that is started here listens on the network too
        # Before the import, which reads it: Ray makes a token where there is none only if it knows by then.
        os.environ.setdefault(MODE, TOKEN)
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingPackageError("ray", "ray", "work on a Ray cluster") from None


@contextlib.contextmanager
def _connected(ray: ModuleType, address: str) -> Iterator[None]:
    if address:
        _require_token(address)
        _require_answer(address)
    # Ray tells on standard output that a worker has died, and that is where the result goes.
    with contextlib.redirect_stdout(sys.stderr):
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
