"""Parse content types, headers, forms and query parameters of requests."""

import base64
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import unquote

import orjson
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitdeploy.runtime.tasks.prompted import MaskForm
from vitdeploy.serve.protocol import HEADER_LENGTH, Refusal, load_json

TOP, MAX_TOP = 5, 1000
MAX_FIELDS = 8
IMAGE = ("file", "image")
MASK_FORMS = get_args(MaskForm)
OTHER_THAN_BASE64 = re.compile("[^A-Za-z0-9+/]")
URL_SAFE = str.maketrans("-_", "+/")
IMAGE_ID = re.compile(r"sha256:[0-9a-f]{64}")


def header_length(headers: Mapping[str, str]) -> int | None:
    """Return the bytes of the JSON part of a message with binary data; None without binary data.

    Raises:
        Refusal: 400, or 415 for an unsupported body.
    """
    _require_plain(headers)
    found = headers.get(HEADER_LENGTH)
    kind = _content_type(headers)
    expected = ("", "application/json") if found is None else ("", "application/json", "application/octet-stream")
    if kind not in expected:
        raise Refusal(415, f"content type {kind}: expected {expected[-1]} (curl -H 'Content-Type: {expected[-1]}')")
    if found is None:
        return None
    if not found.isascii() or not found.isdigit():
        raise Refusal(400, f"{HEADER_LENGTH} {found[:40]!r} is not a number")
    return int(found[:20])


def top_of(query: Mapping[str, str]) -> int:
    """Return the number of classes in a classification's answer: ?top=N."""
    found = query.get("top", str(TOP))
    if not (found.isascii() and found.isdigit() and len(found) < 5 and 1 <= int(found) <= MAX_TOP):
        raise Refusal(400, f"top {found[:40]!r}: expected a number from 1 to {MAX_TOP}")
    return int(found)


@dataclass(frozen=True)
class PredictRequest:
    """A request: an image file, or the `image_id` of a cached image, and its options.

    `inputs`: files of further inputs. `given`: the names of the fields in the request.
    """

    image: bytes | None = None
    image_id: str | None = None
    prompts: Any = None
    multimask: bool | None = None
    masks: MaskForm = "png"
    texts: Any = None
    inputs: Mapping[str, bytes] | None = None

    @property
    def given(self) -> list[str]:
        return [name for name in FIELDS if getattr(self, name) != getattr(PredictRequest, name)]


async def asked_of(request: Request) -> PredictRequest:
    """Read the image and the options of a request: from its body, a multipart form with the file, or JSON with the file
    in Base64. Options that are not in the body may be in the query.

    Raises:
        Refusal: 400, or 415 for an unsupported body.
    """
    _require_plain(request.headers)
    kind, query = _content_type(request.headers), request.query_params
    image: bytes | None
    values: dict[str, Any] = {}
    if kind == "multipart/form-data":
        image, texts, files = await _form(request)
        values = {name: READ[name](name, text) for name, text in texts.items()}
        if files:
            values["inputs"] = files
    elif kind == "application/json":
        values = load_json(await request.body())
        image = _from_base64(values.pop("image", None))
        if unknown := [name for name in values if name not in FIELDS]:
            raise Refusal(400, f"unknown fields {', '.join(unknown)[:80]}: expected image, {', '.join(FIELDS)}")
    elif kind in ("", "application/octet-stream") or kind.startswith("image/"):
        image = await request.body()
        image = None if "image_id" in query and not image else image
    else:
        raise Refusal(415, f"content type {kind}: expected an image file (curl -F file=@IMAGE), image/* or JSON")
    for name, text in query.multi_items():
        if name in FIELDS:
            if name in values:
                raise Refusal(400, f"duplicate field {name}")
            values[name] = READ[name](name, text)
    missing = f"{'the form' if kind == 'multipart/form-data' else 'the body'} has no file (curl -F file=@IMAGE)"
    return _checked(image, {name: value for name, value in values.items() if value is not None}, missing)


def _checked(image: bytes | None, values: dict[str, Any], missing: str) -> PredictRequest:
    """Check the types of fields and raise Refusal; prompts and texts are checked later."""
    if not isinstance(values.get("multimask", True), bool):
        raise Refusal(400, "multimask must be true or false")
    if values.get("masks", "png") not in MASK_FORMS:
        raise Refusal(400, f"masks must be {' or '.join(MASK_FORMS)}")
    if (inputs := values.get("inputs")) is not None:
        if not isinstance(inputs, dict) or not inputs or None in inputs.values():
            raise Refusal(400, 'inputs must map input names to files in Base64, such as {"mask": "..."}')
        values["inputs"] = {
            name: each if isinstance(each, bytes) else _from_base64(each, f"the input {name[:40]!r}")
            for name, each in inputs.items()
        }
    found = values.get("image_id")
    if found is not None and (not isinstance(found, str) or not IMAGE_ID.fullmatch(found)):
        raise Refusal(400, "image_id must be the image_id of an answer: sha256: and 64 hexadecimal digits")
    if (image is None) == (found is None):
        raise Refusal(400, missing if image is None else "send either an image or an image_id, not both")
    return PredictRequest(image, **values)


async def _form(request: Request) -> tuple[bytes | None, dict[str, str], dict[str, bytes]]:
    """Return the image file of a form (None without), the texts of known fields, and the other files by name. Among
    several files, the image is the one called file or image."""
    body = await request.body()

    async def parts() -> AsyncIterator[bytes]:
        yield body
        yield b""

    most = {"max_files": MAX_FIELDS, "max_fields": MAX_FIELDS}
    parser = MultiPartParser(request.headers, parts(), **most)  # type: ignore[arg-type]
    parser.spool_max_size = len(body) + 1  # never to disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refusal(400, f"not a multipart form: {error.message[:100]}") from None
    files = [(name, value.file.read()) for name, value in form.multi_items() if isinstance(value, UploadFile)]
    images = [content for name, content in files if len(files) == 1 or name in IMAGE]
    others = [(name, content) for name, content in files if len(files) > 1 and name not in IMAGE]
    if len(images) > 1 or (files and not images) or len(dict(others)) < len(others):
        names = ", ".join(name[:40] for name, _ in files)
        raise Refusal(400, f"files {names}: expected the image as file, and each further input under its name")
    texts = [(name, value) for name, value in form.multi_items() if isinstance(value, str) and name in FIELDS]
    if len(dict(texts)) < len(texts):
        raise Refusal(400, f"duplicate field {texts[-1][0]}")
    return images[0] if images else None, dict(texts), dict(others)


def _json(name: str, text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"{name} is not valid JSON: {str(error)[:100]}") from None


def _text(name: str, text: str) -> str:
    return text


# The fields of a request, and the parsers of their text form.
READ: dict[str, Callable[[str, str], Any]] = {
    "image_id": _text,
    "prompts": _json,
    "multimask": _json,
    "masks": _text,
    "texts": _json,
    "inputs": _json,
}
FIELDS = tuple(READ)


def _from_base64(found: Any, what: str = "image") -> bytes | None:
    """Decode Base64: also with line breaks, without padding, in the URL alphabet, or as a data URL."""
    if found is None:
        return None
    if not isinstance(found, str):
        raise Refusal(400, f"{what} must be a string with a file in Base64; found: {type(found).__name__}")
    text = found
    if text[:5].lower() == "data:":
        head, _, text = text.partition(",")
        if not head.lower().endswith(";base64"):
            raise Refusal(400, f"{what} is a data URL without Base64; found: {head[:40]!r}")
        text = unquote(text)
    text = "".join(text.split()).translate(URL_SAFE).rstrip("=")
    if other := OTHER_THAN_BASE64.search(text):
        raise Refusal(400, f"{what} must be a file in Base64; found: {other[0]!r} after {other.start()} characters")
    if len(text) % 4 == 1:
        raise Refusal(400, f"{what} must be a file in Base64; found: {len(text)} characters, which is incomplete")
    return base64.b64decode(text + "=" * (-len(text) % 4))


def _content_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _require_plain(headers: Mapping[str, str]) -> None:
    if (encoding := headers.get("content-encoding", "identity").lower()) != "identity":
        raise Refusal(415, f"content encoding {encoding[:40]}: expected none")
