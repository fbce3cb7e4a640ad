"""Executors: local processes, or a Ray cluster."""

import contextlib
import importlib
import ipaddress
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar
from urllib.parse import urlsplit

from vitdeploy.document.bench import ErrorFacts
from vitdeploy.errors import InputError, MissingPackageError, VitdeployError, WorkerError, error_with_code
from vitdeploy.stages.workers import STARTS, Executor, Piece, Pool
from vitdeploy.store.key import code_version
from vitdeploy.store.store import SHARED_VARIABLE

# --- Run independent pieces of work in several local processes --------------------------------------------------------


T = TypeVar("T")
R = TypeVar("R")


class Processes(Executor):
    """Runs several pieces in parallel, each in a local process."""

    def __init__(self, count: int) -> None:
        self.count = count

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """As `Executor.pool`; leaving it waits for running pieces."""
        pool = _ProcessPool(self.count)
        try:
            yield pool
        finally:
            pool.close()


class _ProcessPool(Pool):
    """Each process is a pool of its own, so that a dead process identifies its piece and ends no other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._running: dict[Future[object], tuple[Piece, ProcessPoolExecutor]] = {}
        self._idle: list[ProcessPoolExecutor] = []

    def next(self) -> tuple[object, object] | None:
        while True:
            while self._waiting and len(self._running) < self._count:
                self._start(self._waiting.pop(0))
            if not self._running:
                return None
            (future, *_), _ = wait(self._running, return_when=FIRST_COMPLETED)
            piece, process = self._running.pop(future)
            if not isinstance(future.exception(), BrokenProcessPool):
                self._idle.append(process)
                return piece.ticket, error_of(future.result())
            process.shutdown()
            if piece.starts >= STARTS:
                return piece.ticket, died(piece, "its process was killed or crashed in a library")
            self._waiting.append(piece)

    def _start(self, piece: Piece) -> None:
        piece.starts += 1
        while self._idle:
            process = self._idle.pop()
            with contextlib.suppress(BrokenProcessPool):  # killed while idle
                self._running[process.submit(guarded, piece.function, piece.item)] = piece, process
                return
        # Spawned, not forked: a fork of a process whose runtimes have threads may hang.
        context = multiprocessing.get_context("spawn")
        process = ProcessPoolExecutor(1, context, initializer=_end_at_interrupt)
        self._running[process.submit(guarded, piece.function, piece.item)] = piece, process

    def close(self) -> None:
        for process in [*self._idle, *(process for _, process in self._running.values())]:
            process.shutdown(cancel_futures=True)


def _end_at_interrupt() -> None:
    """Ctrl-C reaches all processes: only the main one reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def guarded(function: Callable[[T], R], item: T) -> R | ErrorFacts:
    """Call a function; return vitdeploy errors as plain data, as not all of their classes can be pickled."""
    try:
        return function(item)
    except VitdeployError as error:
        return ErrorFacts.of(error)


def error_of(value: R | ErrorFacts) -> R | VitdeployError:
    """The result of `guarded`, with plain data turned back into an error."""
    if isinstance(value, ErrorFacts):
        return error_with_code(value.code, value.message, found=value.found, expected=value.expected, fix=value.fix)
    return value


def died(piece: Piece, found: str) -> WorkerError:
    """The error of a piece that is not restarted."""
    return WorkerError(
        f"{piece.named} died {piece.starts} times",
        found=found,
        fix="often too little memory: run fewer workers (--jobs 1), or use larger nodes",
    )


# --- Pieces of work as tasks of a connected Ray cluster (docs.ray.io, "Ray Core", "Tasks") ----------------------------
# Work that measures runs alone on a node that was started with the resource `DEVICE` (docs.ray.io, "Resources"): the
# task claims all of this resource, and all of the node's CPUs. So it waits until other tasks there have ended, and none
# starts before it ends.


# The custom resource of a node that measures: ray start --resources='{"vitdeploy_device": 1}'.
DEVICE = "vitdeploy_device"
# Ray sets a task's threads to its number of CPUs, but measured engines use their runtime's default.
THREADS = "OMP_NUM_THREADS"
# Tasks queued for a CPU, so that an autoscaling cluster sees demand.
SPARE_TASKS = 4


class _RayPool(Pool):
    """`at_a_time`: the number of parallel pieces; None: as many as the cluster has CPUs for."""

    def __init__(self, ray: ModuleType, at_a_time: int | None) -> None:
        super().__init__()
        self._ray, self._at_a_time = ray, at_a_time
        # By Ray's reference: the piece, and the node reserved for it.
        self._running: dict[object, tuple[Piece, str | None]] = {}

    @property
    def lonely(self) -> int:
        return len(self._devices())

    def next(self) -> tuple[object, object] | None:
        while True:
            self._start_waiting()
            if not self._running:  # the waiting pieces need an exclusive node, and none exists
                return (self._waiting.pop(0).ticket, _no_device()) if self._waiting else None
            (done, *_), _ = self._ray.wait(list(self._running), num_returns=1)
            piece, _ = self._running.pop(done)
            found = self._result(piece, done)
            if found is not None:
                return piece.ticket, found[0]
            self._waiting.insert(0, piece)

    def close(self) -> None:
        """Cancel running pieces."""
        for reference in self._running:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=True)

    def _start_waiting(self) -> None:
        most = self._at_a_time or int(self._ray.cluster_resources().get("CPU", 1)) + SPARE_TASKS
        taken = {node for _, node in self._running.values()}
        alone = any(piece.alone for piece in self._waiting)
        free = {node: cpus for node, cpus in self._devices().items() if node not in taken} if alone else {}
        for piece in list(self._waiting):
            if len(self._running) >= most and not free:
                break
            if piece.alone and free:
                node, cpus = free.popitem()
                piece.starts += 1
                self._start(piece, node, num_cpus=cpus, resources={DEVICE: 1}, max_retries=0)
            elif not piece.alone and len(self._running) < most:
                piece.starts = STARTS  # Ray counts them
                self._start(piece, None, num_cpus=1, max_retries=STARTS - 1)

    def _start(self, piece: Piece, node: str | None, **options: object) -> None:
        self._waiting.remove(piece)
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        work = self._ray.remote(**options)(run_task)
        code, environment = code_version(everything=True), _environment(alone=piece.alone)
        reference = work.remote(piece.function, piece.item, code, environment, str(Path.cwd()))
        self._running[reference] = piece, node

    def _devices(self) -> dict[str, float]:
        """The CPUs of each node that measures, by node ID."""
        return {
            node["NodeID"]: node["Resources"].get("CPU", 0)
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get(DEVICE, 0) >= 1
        }

    def _result(self, piece: Piece, reference: object) -> tuple[object] | None:
        """The result of a piece; None if it must be restarted on an exclusive node."""
        try:
            return (error_of(self._ray.get(reference)),)
        except self._ray.exceptions.RayTaskError:
            raise  # an unexpected error, as in this process
        except self._ray.exceptions.RayError as error:
            if piece.alone and piece.starts < STARTS:
                return None
            return (died(piece, str(error).splitlines()[0][:200] or type(error).__name__),)


def _no_device() -> WorkerError:
    return WorkerError(
        "the cluster has no measuring node left",
        found=f"no node with the resource {DEVICE}",
        expected="at least one",
        fix=f"on a node: ray start --address HEAD:6379 --resources='{{\"{DEVICE}\": 1}}'; then run the same command",
    )


def _environment(*, alone: bool) -> dict[str, str | None]:
    """The environment variables of this command for its tasks; None removes a variable. Each node uses its own
    credentials."""
    own: dict[str, str | None] = {name: value for name, value in os.environ.items() if name.startswith("VITDEPLOY_")}
    return {**own, THREADS: os.environ.get(THREADS)} if alone else own


def run_task(
    function: Callable[[T], R], item: T, code: str, environment: Mapping[str, str | None], folder: str
) -> R | ErrorFacts:
    """Run a task on a node, with the environment and in the folder of the command."""
    if (found := code_version(everything=True)) != code:
        return ErrorFacts.of(
            WorkerError(
                f"the node {socket.gethostname()} has a different version of vitdeploy",
                found=f"source code {found[:12]}",
                expected=code[:12],
                fix="install the same version on all nodes",
            )
        )
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)
    return guarded(function, item)


# --- Connect to a Ray cluster -----------------------------------------------------------------------------------------
# Ray runs any code that its clients send, so a cluster trusts all of them: a cluster on the network is only used with
# its token.


CONNECT_SECONDS = 10.0
MODE, TOKEN = "RAY_AUTH_MODE", "token"


@dataclass(frozen=True)
class RayCluster(Executor):
    """The cluster at `address` (host:port, or ray://host:port for Ray's client); "" starts one on this machine for each
    pool. `at_a_time`: the number of parallel tasks; None: as many as the cluster has CPUs for."""

    address: str = ""
    at_a_time: int | None = None

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """As `Executor.pool`.

        Raises:
            InputError: an address on the network without a token; or several machines without a shared store.
            MissingPackageError: Ray is not installed.
            WorkerError: the cluster does not answer, or runs another release of Python or Ray.
        """
        ray = _ray(self.address)
        with _connected(ray, self.address):
            _require_shared_store(ray)
            pool = _RayPool(ray, self.at_a_time)
            try:
                yield pool
            finally:
                pool.close()


def _ray(address: str) -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:  # a cluster started here listens on the network too
        # Before the import, which reads it: only then does Ray create a missing token.
        os.environ.setdefault(MODE, TOKEN)
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingPackageError("ray", "ray", "the executor ray") from None


@contextlib.contextmanager
def _connected(ray: ModuleType, address: str) -> Iterator[None]:
    if address:
        _require_token(address)
        _require_answer(address)
    # Ray reports dead workers on standard output, which is reserved for the result.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **_local(address))
        except Exception as error:  # many classes
            raise WorkerError(
                f"the Ray cluster {address or 'of this machine'} cannot be used",
                found=" ".join(str(error).split())[:300] or type(error).__name__,
                expected=f"a cluster with Ray {ray.__version__} that accepts this command",
                fix="start it with the same versions of Ray and Python, and the same token",
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
        raise InputError("invalid address of a Ray cluster", found=address, expected="HOST:PORT, such as 10.0.0.5:6379")
    if _loopback(host) or os.environ.get(MODE) == TOKEN:
        return
    raise InputError(
        f"the Ray cluster {address} is on the network and needs a token",
        found=f"{MODE}={os.environ.get(MODE, '')}",
        expected=f"{MODE}={TOKEN} on both sides: otherwise anyone who reaches the port can run code",
        fix=f"export {MODE}={TOKEN}, with the cluster's token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token",
    )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _require_answer(address: str) -> None:
    """Raise WorkerError soon if nothing answers at `address`: Ray itself waits for minutes."""
    host, port = _host_and_port(address)
    try:
        socket.create_connection((host, port or 0), CONNECT_SECONDS).close()
    except OSError as error:
        raise WorkerError(
            f"the Ray cluster {address} does not answer",
            found=error.strerror or str(error),
            expected="a running head node",
            fix="run `ray start --head` on it; check the address, the port and the firewall",
        ) from None


def _require_shared_store(ray: ModuleType) -> None:
    machines = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(machines) > 1 and not os.environ.get(SHARED_VARIABLE):
        raise InputError(
            f"the cluster has {len(machines)} machines but no shared store",
            found=f"{SHARED_VARIABLE} is not set",
            expected="the URL of a store that all machines can reach",
            fix=f"export {SHARED_VARIABLE}=s3://BUCKET/vitdeploy, or file:///MOUNTED/FOLDER",
        )


# --- Executors by name ------------------------------------------------------------------------------------------------


def executor_of(text: str | None, at_a_time: int) -> Executor | None:
    """Return the executor named "processes", "ray" or "ray:ADDRESS"; without a name, processes, or None for one piece
    at once.

    Raises:
        InputError: an unknown name.
    """
    name, _, address = (text or "").partition(":")
    if name == "ray":
        return RayCluster(address, at_a_time if at_a_time > 1 else None)
    if text not in (None, "processes"):
        raise InputError("unknown executor", found=f"{text!r}", expected="processes, ray or ray:HOST:PORT")
    return Processes(at_a_time) if text or at_a_time > 1 else None
