"""The options that say how evaluation images are labelled, shared by the commands that take some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import DataChoice

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


def evaluation(
    data: Path, labels: str | None, annotations: Path | None, samples: int | None = None, seed: int = 0
) -> DataChoice:
    """The images, or sequences, that these options choose to evaluate on: `samples` of them, or all."""
    from vitdeploy.tasks.adapter import DataChoice
    from vitdeploy.tasks.images import labels_in

    kind = labels or ("none" if data.suffix == ".npz" else labels_in(data))
    return DataChoice(data, kind, annotations, 0, samples or "all", seed)
