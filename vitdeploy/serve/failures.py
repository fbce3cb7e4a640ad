"""From exceptions to answers in the protocol's form, {"error": "..."}."""

from __future__ import annotations

import re
from typing import cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from vitdeploy.errors import InputError
from vitdeploy.serve.guard import CLIENT_GONE, Record, refused
from vitdeploy.serve.refusal import ClientGone, Refusal

# How Python shows objects: an address is nobody's business.
OBJECT = re.compile(r"\s*<[^<>]* at 0x[0-9a-f]+>")


async def on_refusal(request: Request, error: Exception) -> Response:
    refusal = cast(Refusal, error)
    return refused(_record(request), refusal.status, refusal.message, refusal.headers)


async def on_input_error(request: Request, error: Exception) -> Response:
    """An input error of the runtime."""
    return refused(_record(request), 400, in_words(cast(InputError, error)))


def in_words(wrong: InputError) -> str:
    """An input error for a client, in a line. `fix` is left out: it is for users of the commands."""
    details = [f"{name}: {OBJECT.sub('', text)}" for name in ("found", "wanted") if (text := getattr(wrong, name))]
    return "; ".join([wrong.message, *details])


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or another method."""
    wrong = cast(HTTPException, error)
    return refused(_record(request), wrong.status_code, wrong.detail, dict(wrong.headers or {}))


async def on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def on_bug(request: Request, error: Exception) -> Response:
    """An unexpected error: the log has the details under an id, the client gets only the id."""
    record = _record(request)
    record.bug = error
    return refused(record, 500, f"internal error {record.id}: the server's log says more")


def _record(request: Request) -> Record:
    return cast(Record, request.scope["vitdeploy"])


HANDLERS = {
    Refusal: on_refusal,
    InputError: on_input_error,
    HTTPException: on_http_exception,
    ClientGone: on_client_gone,
    Exception: on_bug,
}
