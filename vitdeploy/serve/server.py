"""From a bundle to a running server, and to its end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn

from vitdeploy.errors import HostError
from vitdeploy.serve.app import Service
from vitdeploy.serve.connection import Connection
from vitdeploy.serve.logs import LOGGER

BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """A socket of its own on an address; it listens, so clients may connect and wait. Port 0 takes a free one.

    Raises:
        HostError: the address cannot be taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _no_address(host, port, error, "--host 127.0.0.1, or another address of this machine") from None
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(BACKLOG)
    except OSError as error:
        taken.close()
        fix = "--port 0 takes a free port; `ss -ltnp` says who has this one"
        raise _no_address(host, port, error, fix) from None
    return taken


def _no_address(host: str, port: int, error: OSError, fix: str) -> HostError:
    return HostError(f"cannot listen at {host} port {port}", found=error.strerror or str(error), fix=fix)


def address_of(taken: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if taken.family == socket.AF_INET6 else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Uvicorn's server of a service. On SIGTERM or SIGINT it takes no more, answers what it has accepted, and ends."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.service = service
        super().__init__(
            uvicorn.Config(
                service.app,
                http=partial(Connection, settings),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=int(settings.keep_alive),
                timeout_graceful_shutdown=int(settings.grace),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn raises the signal again at its end, which would end the process with another code than 0."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: who runs it there stops it there
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Take no more and end when all is answered."""
        self.service.app.draining = True
        self.should_exit = True


def run(service: Service, taken: socket.socket) -> None:
    """Serve until a signal; answers what was accepted and closes the service."""
    try:
        Server(service).run(sockets=[taken])
    finally:
        service.close()
    LOGGER.info("stopped")
