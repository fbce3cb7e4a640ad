"""ASGI middleware around all requests: limits of bodies, the log line and the metrics of each request.

The limits apply where the body is read, so that no endpoint can omit them and nothing larger is held in memory, also
without a Content-Length.
"""

import asyncio
import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitdeploy.errors import InputError
from vitdeploy.serve.metrics import Metrics
from vitdeploy.serve.protocol import ClientGone, Refusal, busy, stopping
from vitdeploy.serve.settings import LOGGER, ServerSettings

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLIENT_GONE = 499  # only in the log and the metrics: the client is gone


@dataclass
class RequestRecord:
    """A request's log entry; endpoints add `fields`. `bug`: an unexpected error."""

    id: str
    fields: dict[str, Any] = field(default_factory=dict)
    bug: Exception | None = None


class Guard:
    """Wraps the application. `draining`: the server is stopping and refuses new requests."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self.buffered = 0
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()


class _Exchange:
    """One request and its answer."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._settings = guard, guard.settings
        self._scope, self._receive, self._send = scope, receive, send
        self._headers = Headers(scope=scope)
        self._started = time.perf_counter()
        self._held = 0
        self._status = 0
        length = self._headers.get("content-length", "0")
        self._length = int(length) if length.isdecimal() else 0
        self._body_left = self._length > 0 or "transfer-encoding" in self._headers
        proposed = self._headers.get("x-request-id", "")
        self._record = RequestRecord(proposed if REQUEST_ID.fullmatch(proposed) else secrets.token_hex(8))
        scope["vitdeploy"] = self._record

    async def run(self) -> None:
        try:
            if self._guard.draining:
                raise stopping()
            if self._length > self._settings.max_body:
                raise self._too_large()
            await self._guard.app(self._scope, self.receive, self.send)
        except Refusal as refusal:  # raised here; refusals by endpoints are already answered
            await refused(self._record, refusal.status, refusal.message, refusal.headers)(
                self._scope, self._receive, self.send
            )
        except ClientGone:
            self._status = CLIENT_GONE
        except Exception as error:
            if error is not self._record.bug:  # already answered; Starlette raises it again
                raise
        finally:
            self._guard.buffered -= self._held
            self._tell()

    async def receive(self) -> Message:
        """Return the next part of the body.

        Raises:
            Refusal: 408, 413 or 429.
            ClientGone: the client disconnected before the end of the body.
        """
        if not self._body_left:
            return await self._receive()
        left = self._started + self._settings.body_time - time.perf_counter()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, left))
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body was not received within {self._settings.body_time:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        count = len(message.get("body", b""))
        self._held += count
        self._guard.buffered += count
        if self._held > self._settings.max_body:
            raise self._too_large()
        if self._guard.buffered > self._settings.buffered:
            raise busy("too many large requests at once")
        self._body_left = message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._record.id
            if self._body_left or self._guard.draining:
                headers["connection"] = "close"
        elif self._body_left and not message.get("more_body", False):
            # The connection is closed after the last part. If data of the client is still in transit, that causes a
            # reset, which can overtake the answer.
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _linger(self) -> None:
        end = time.perf_counter() + self._settings.linger
        more = True
        while more and (left := end - time.perf_counter()) > 0:
            try:
                message = await asyncio.wait_for(self._receive(), left)
            except asyncio.TimeoutError:
                return
            more = message["type"] == "http.request" and message.get("more_body", False)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._settings.max_body} bytes")

    def _tell(self) -> None:
        seconds = time.perf_counter() - self._started
        record, status = self._record, self._status
        endpoint = getattr(self._scope.get("endpoint"), "__name__", "none")
        self._guard.metrics.answered(endpoint, status, seconds)
        level = logging.ERROR if status >= 500 and status != 503 else logging.INFO
        if not LOGGER.isEnabledFor(level):
            return
        fields = {
            "id": record.id,
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": status,
            "ms": round(seconds * 1e3, 2),
            **record.fields,
        }
        LOGGER.log(level, "request", extra={"fields": fields}, exc_info=record.bug)


def refused(record: RequestRecord, status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error in the protocol's form, and add it to the log entry."""
    record.fields["error"] = message
    return JSONResponse({"error": message}, status, headers)


# --- From exceptions to answers in the protocol's form, {"error": "..."} ----------------------------------------------


# Python's representation of objects, with their addresses, which clients must not see.
OBJECT = re.compile(r"\s*<[^<>]* at 0x[0-9a-f]+>")


async def on_refusal(request: Request, error: Exception) -> Response:
    refusal = cast(Refusal, error)
    return refused(_record(request), refusal.status, refusal.message, refusal.headers)


async def on_input_error(request: Request, error: Exception) -> Response:
    """Answer an input error of the runtime."""
    return refused(_record(request), 400, in_words(cast(InputError, error)))


def in_words(wrong: InputError) -> str:
    """Return an input error as one line for a client, without `fix`, which is for users of the commands."""
    details = [f"{name}: {OBJECT.sub('', text)}" for name in ("found", "expected") if (text := getattr(wrong, name))]
    return "; ".join([wrong.message, *details])


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer an unknown path or an unsupported method with what is here."""
    wrong = cast(HTTPException, error)
    message, headers = wrong.detail, dict(wrong.headers or {})
    if wrong.status_code == 404:
        here = [f"{'POST' if 'POST' in route.methods else 'GET'} {route.path}" for route in request.app.routes]
        message = f"nothing is at this path; here: {', '.join(here)}"
    elif wrong.status_code == 405:
        image = " with an image (curl -F file=@IMAGE)" if request.url.path == "/predict" else ""
        message = f"this path takes {headers['Allow']}{image}, not {request.method}"
    return refused(_record(request), wrong.status_code, message, headers)


async def on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected error: the log has the details under an id, the client gets only the id."""
    record = _record(request)
    record.bug = error
    return refused(record, 500, f"internal error {record.id}: see the server's log")


def _record(request: Request) -> RequestRecord:
    return cast(RequestRecord, request.scope["vitdeploy"])


HANDLERS = {
    Refusal: on_refusal,
    InputError: on_input_error,
    HTTPException: on_http_exception,
    ClientGone: on_client_gone,
    Exception: on_bug,
}
