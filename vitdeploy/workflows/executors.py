"""Executors: processes of this machine, or a Ray cluster."""

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

# --- Run independent pieces of work in several processes of this machine; `ray_cluster` does it on more machines ------


T = TypeVar("T")
R = TypeVar("R")


class Processes(Executor):
    """So many at a time, each in a process of this machine."""

    def __init__(self, count: int) -> None:
        self.count = count

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """As `Executor.pool`; leaving it waits for what runs."""
        pool = _ProcessPool(self.count)
        try:
            yield pool
        finally:
            pool.close()


class _ProcessPool(Pool):
    """Each process is a pool of one, so that the death of one says which piece it did, and ends no other."""

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
                return piece.ticket, died(piece, "its process was killed, or crashed in a library")
            self._waiting.append(piece)

    def _start(self, piece: Piece) -> None:
        piece.starts += 1
        while self._idle:
            process = self._idle.pop()
            with contextlib.suppress(BrokenProcessPool):  # it was killed while it had nothing to do
                self._running[process.submit(guarded, piece.function, piece.item)] = piece, process
                return
        # Started again, not forked: a fork of a process whose runtimes have threads may hang.
        context = multiprocessing.get_context("spawn")
        process = ProcessPoolExecutor(1, context, initializer=_end_at_interrupt)
        self._running[process.submit(guarded, piece.function, piece.item)] = piece, process

    def close(self) -> None:
        for process in [*self._idle, *(process for _, process in self._running.values())]:
            process.shutdown(cancel_futures=True)


def _end_at_interrupt() -> None:
    """Ctrl-C reaches all processes: the first one says so, these go without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def guarded(function: Callable[[T], R], item: T) -> R | ErrorFacts:
    """Errors of ours as plain data: not all of their classes can be pickled."""
    try:
        return function(item)
    except VitdeployError as error:
        return ErrorFacts.of(error)


def error_of(value: R | ErrorFacts) -> R | VitdeployError:
    """What `guarded` gave, with an error in its class again."""
    if isinstance(value, ErrorFacts):
        return error_with_code(value.code, value.message, found=value.found, expected=value.expected, fix=value.fix)
    return value


def died(piece: Piece, found: str) -> WorkerError:
    """The error of a piece that is not started again."""
    return WorkerError(
        f"{piece.named} died {piece.starts} times",
        found=found,
        fix="often too little memory: do fewer at a time (--jobs 1), or take larger nodes",
    )


# --- Pieces of work as tasks of a Ray cluster that this process is connected to (docs.ray.io --------------------------
# "Ray Core", "Tasks").
#
# Work that measures has a node for itself: one that was started with the resource `DEVICE` (docs.ray.io, "Resources"),
# of which such a task claims all, together with all of the node's CPUs. So it waits until other tasks there have ended,
# and none begins before it ends.


# The custom resource of a node that measures: ray start --resources='{"vitdeploy_device": 1}'.
DEVICE = "vitdeploy_device"
# Ray gives a task as many threads as CPUs, but what is measured has those of its runtime's own choice.
THREADS = "OMP_NUM_THREADS"
# Tasks that wait for a CPU, so that a cluster that grows by demand sees some.
SPARE_TASKS = 4


class _RayPool(Pool):
    """`at_a_time`: how many pieces run at once; None: as many as the cluster has CPUs for."""

    def __init__(self, ray: ModuleType, at_a_time: int | None) -> None:
        super().__init__()
        self._ray, self._at_a_time = ray, at_a_time
        # By Ray's reference: the piece, and the node that it has for itself.
        self._running: dict[object, tuple[Piece, str | None]] = {}

    @property
    def lonely(self) -> int:
        return len(self._devices())

    def next(self) -> tuple[object, object] | None:
        while True:
            self._start_waiting()
            if not self._running:  # what waits is for a node of its own, and none is there
                return (self._waiting.pop(0).ticket, _no_device()) if self._waiting else None
            (done, *_), _ = self._ray.wait(list(self._running), num_returns=1)
            piece, _ = self._running.pop(done)
            found = self._result(piece, done)
            if found is not None:
                return piece.ticket, found[0]
            self._waiting.insert(0, piece)

    def close(self) -> None:
        """End what runs."""
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
        """The CPUs of each node that measures, by the node's number."""
        return {
            node["NodeID"]: node["Resources"].get("CPU", 0)
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get(DEVICE, 0) >= 1
        }

    def _result(self, piece: Piece, reference: object) -> tuple[object] | None:
        """What a piece came to; None if it is to be started again on some node for itself."""
        try:
            return (error_of(self._ray.get(reference)),)
        except self._ray.exceptions.RayTaskError:
            raise  # an error of ours that nobody expected, as in this process
        except self._ray.exceptions.RayError as error:
            if piece.alone and piece.starts < STARTS:
                return None
            return (died(piece, str(error).splitlines()[0][:200] or type(error).__name__),)


def _no_device() -> WorkerError:
    return WorkerError(
        "no node is left that measures",
        found=f"those with the resource {DEVICE} are gone",
        expected="one at least",
        fix=f"ray start --address HEAD:6379 --resources='{{\"{DEVICE}\": 1}}' there; then the same command goes on",
    )


def _environment(*, alone: bool) -> dict[str, str | None]:
    """Of this command, what its tasks are to be run with; None for what they are to be run without. Credentials are
    those of each node."""
    own: dict[str, str | None] = {name: value for name, value in os.environ.items() if name.startswith("VITDEPLOY_")}
    return {**own, THREADS: os.environ.get(THREADS)} if alone else own


def run_task(
    function: Callable[[T], R], item: T, code: str, environment: Mapping[str, str | None], folder: str
) -> R | ErrorFacts:
    """Runs on a node, with the environment and in the folder of the command."""
    if (found := code_version(everything=True)) != code:
        return ErrorFacts.of(
            WorkerError(
                f"the node {socket.gethostname()} has another vitdeploy",
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


# --- Run independent pieces of work as tasks of a Ray cluster (docs.ray.io, "Ray Core", "Tasks") ----------------------
# Ray runs what its clients send, so a cluster trusts all of them: one that is not on this machine alone is asked with
# its token, and never without.


CONNECT_SECONDS = 10.0
MODE, TOKEN = "RAY_AUTH_MODE", "token"


@dataclass(frozen=True)
class RayCluster(Executor):
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
            pool = _RayPool(ray, self.at_a_time)
            try:
                yield pool
            finally:
                pool.close()


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
                expected=f"a cluster of Ray {ray.__version__} that this command may use",
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
            "that is not the address of a Ray cluster", found=address, expected="HOST:PORT, such as 10.0.0.5:6379"
        )
    if _loopback(host) or os.environ.get(MODE) == TOKEN:
        return
    raise InputError(
        f"the Ray cluster {address} is on the network, and would be asked without a token",
        found=f"{MODE}={os.environ.get(MODE, '')}",
        expected=f"{MODE}={TOKEN} for both: without it, whoever reaches the port runs code there",
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
            expected="a head node that runs",
            fix="ray start --head there; look at the address, the port and the firewall",
        ) from None


def _require_shared_store(ray: ModuleType) -> None:
    machines = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(machines) > 1 and not os.environ.get(SHARED_VARIABLE):
        raise InputError(
            f"the cluster has {len(machines)} machines, which would not find each other's results",
            found=f"{SHARED_VARIABLE} is not set",
            expected="the URL of a store that all of them reach",
            fix=f"export {SHARED_VARIABLE}=s3://BUCKET/vitdeploy, or file:///MOUNTED/FOLDER",
        )


# --- The executor that a user names -----------------------------------------------------------------------------------


def executor_of(text: str | None, at_a_time: int) -> Executor | None:
    """What `text` names: "processes", "ray" or "ray:ADDRESS"; without it processes, or None for one at a time.

    Raises:
        InputError: it names none.
    """
    name, _, address = (text or "").partition(":")
    if name == "ray":
        return RayCluster(address, at_a_time if at_a_time > 1 else None)
    if text not in (None, "processes"):
        raise InputError(
            "nothing runs work under this name", found=f"{text!r}", expected="processes, ray or ray:HOST:PORT"
        )
    return Processes(at_a_time) if text or at_a_time > 1 else None
