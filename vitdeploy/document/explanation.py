"""The document of `explain --json`."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.spec import Task


@dataclass(frozen=True)
class Explanation:
    """The picture at `path` of where a model looks in `image`: its `size` (width, height) in pixels, the `grid` (rows,
    columns) of patches, whose attention was read, and the titles of the maps."""

    path: str
    image: str
    task: Task
    size: tuple[int, int]
    grid: tuple[int, int]
    heads: int
    blocks: int
    prefix_tokens: int
    read: str
    maps: tuple[str, ...]
