"""The parts of requests other than JSON: content types, headers, forms, the query."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitdeploy.serve.protocol import HEADER_LENGTH
from vitdeploy.serve.refusal import Refusal

TOP, MAX_TOP = 5, 1000
MAX_FIELDS = 8


def header_length(headers: Mapping[str, str]) -> int | None:
    """The bytes of the JSON part of a message with binary data; None without any.

    Raises:
        Refusal: 400, or 415 for a body that is something else.
    """
    _require_plain(headers)
    found = headers.get(HEADER_LENGTH)
    kind = _content_type(headers)
    wanted = ("", "application/json") if found is None else ("", "application/json", "application/octet-stream")
    if kind not in wanted:
        raise Refusal(415, f"content type {kind}: wanted {wanted[-1]} (curl -H 'Content-Type: {wanted[-1]}')")
    if found is None:
        return None
    if not found.isascii() or not found.isdigit():
        raise Refusal(400, f"{HEADER_LENGTH} {found[:40]!r} is no number")
    return int(found[:20])


def top_of(query: Mapping[str, str]) -> int:
    """How many classes a classification names: ?top=N."""
    found = query.get("top", str(TOP))
    if not (found.isascii() and found.isdigit() and len(found) < 5 and 1 <= int(found) <= MAX_TOP):
        raise Refusal(400, f"top {found[:40]!r}: wanted a number from 1 to {MAX_TOP}")
    return int(found)


async def image_of(request: Request) -> bytes:
    """The file of a request: its body, or the one file of a multipart form.

    Raises:
        Refusal: 400, or 415 for a body that is something else.
    """
    _require_plain(request.headers)
    kind = _content_type(request.headers)
    if kind == "multipart/form-data":
        return await _file_of_form(request)
    if kind not in ("", "application/octet-stream") and not kind.startswith("image/"):
        raise Refusal(415, f"content type {kind}: wanted an image file (curl -F file=@IMAGE) or image/*")
    return await request.body()


async def _file_of_form(request: Request) -> bytes:
    body = await request.body()

    async def parts() -> AsyncIterator[bytes]:
        yield body
        yield b""

    parser = MultiPartParser(request.headers, parts(), max_files=1, max_fields=MAX_FIELDS)  # type: ignore[arg-type]
    parser.spool_max_size = len(body) + 1  # never to disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refusal(400, f"not a multipart form: {error.message[:100]}") from None
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if len(files) != 1:
        raise Refusal(400, "the form holds no file (curl -F file=@IMAGE)")
    return files[0].file.read()


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _require_plain(headers: Mapping[str, str]) -> None:
    if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
        raise Refusal(415, f"content encoding {encoding[:40]}: wanted none")
