"""The options that say how evaluation images are labelled, shared by the commands that take some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def label_options(function: F) -> F:
    """--labels and --annotations of the images of --data."""
    labels = click.option(
        "--labels",
        type=click.Choice(["folders", "none", "yolo", "coco", "panoptic"]),
        help="Where labels come from. Default: class folders where there are any.",
    )
    annotations = click.option(
        "--annotations", type=click.Path(path_type=Path), help="YOLO's folder, or COCO's JSON file."
    )
    return labels(annotations(function))
