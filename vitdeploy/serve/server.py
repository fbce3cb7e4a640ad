"""The HTTP server: connections, limits, start and stop."""

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vitdeploy.errors import HostError
from vitdeploy.serve.app import Service
from vitdeploy.serve.settings import LOGGER, ServerSettings

# --- Connections: their number, and the time limits for request heads -------------------------------------------------
# Uvicorn limits only the time between requests. It waits forever for the first byte of a connection, for the rest of a
# head of any length, and for a client that does not read its answer.


OFFERS = (b"upgrade", b"http2-settings")


class HttpConnection(HttpToolsProtocol):
    """Uvicorn's httptools protocol, with limits. `settings` comes first, as uvicorn passes the rest."""

    def __init__(self, settings: ServerSettings, **given: Any) -> None:
        super().__init__(**given)
        self._settings = settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._too_long = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.connections:
            self._end(503, "too many connections")
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._feed(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > self._settings.max_head:
            self._head_is_long()
        elif self._head_timer is None:
            self._expect_head()

    def _feed(self, data: bytes) -> None:
        """Feed the parser as uvicorn does, but decline offered upgrades: the JDK's client offers HTTP/2 with every
        plain request. The parser stops after such a head, so it gets the head again without the offer, then the body.
        """
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("CONNECT is for proxies")
            else:
                self._feed(self._head_without_upgrade() + data[offered.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in OFFERS)
            if value and name not in OFFERS:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Check the length of a head that came in one part, not counted yet; an error leads to `send_400_response`."""
        length = len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        if length > self._settings.max_head:
            self._too_long = True
            raise ValueError("the head is too long")
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._too_long:
            self._head_is_long()
        else:
            self._end(400, msg)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._settings.write_time, self.transport.abort)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.header_time, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._end(408, f"no complete request head within {self._settings.header_time:g} s")

    def _head_is_long(self) -> None:
        self._end(431, f"the head of the request is longer than {self._settings.max_head} bytes")

    def _end(self, status: int, message: str) -> None:
        """Send an error outside any request, and close the connection."""
        self._stop_timer()
        body = json.dumps({"error": message}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


# --- Start and stop the server ----------------------------------------------------------------------------------------


BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """Return a new listening socket; clients can connect and wait. Port 0 selects a free port.

    Raises:
        HostError: the address is not available.
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
        fix = "--port 0 selects a free port; `ss -ltnp` shows which process uses this one"
        raise _no_address(host, port, error, fix) from None
    return taken


def _no_address(host: str, port: int, error: OSError, fix: str) -> HostError:
    return HostError(f"cannot listen on {host} port {port}", found=error.strerror or str(error), fix=fix)


def address_of(taken: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if taken.family == socket.AF_INET6 else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Uvicorn server for a service. On SIGTERM or SIGINT it stops accepting, answers accepted requests, and exits."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.service = service
        super().__init__(
            uvicorn.Config(
                service.app,
                http=partial(HttpConnection, settings),  # type: ignore[arg-type]
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
        """Replace uvicorn's handler, which raises the signal again at exit, so that the exit code would not be 0."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: the caller stops the server
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
        """Stop accepting requests, and exit when all are answered."""
        self.service.app.draining = True
        self.should_exit = True


def run(service: Service, taken: socket.socket) -> None:
    """Serve until a signal, answer the accepted requests, and close the service."""
    try:
        HttpServer(service).run(sockets=[taken])
    finally:
        service.close()
    LOGGER.info("stopped")
