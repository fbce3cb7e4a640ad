"""Decodes an image wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitdeploy.data.containers.held import Container, Held, Part
from vitdeploy.data.containers.listing import TableRow
from vitdeploy.data.containers.uris import Uri
from vitdeploy.runtime.preprocess import Pixels, load_image
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import PreprocessSpec

Size = tuple[int, int]


def read_written(document: Any) -> Held | None:
    """What `Held.written` wrote; None of None."""
    if document is None:
        return None
    kind, *rest = document
    if kind == "uri":
        return Uri(*rest)
    container = Container(*rest[0])
    return Part(container, *rest[1:]) if kind == "part" else TableRow(container, *rest[1:])


def load_held(path: Path, held: Held | None, spec: PreprocessSpec, box: Box | None, name: str) -> tuple[Pixels, Size]:
    """As `load_image`, of the file at `path`, or of what is `held` elsewhere and called `name`; errors of both."""
    if held is None:
        return load_image(path, spec, box)
    return load_image(held.read(name), spec, box, name)
