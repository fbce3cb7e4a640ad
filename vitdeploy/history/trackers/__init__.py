"""Results for trackers of experiments, and for Bencher: what is sent, and one file for each place that takes it."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.errors import InputError
from vitdeploy.history.trackers.bencher import Bencher
from vitdeploy.history.trackers.trackers import Tracker

WANTED = "mlflow[:URI], wandb[:[ENTITY/]PROJECT] or bencher:FILE"


def open_tracker(text: str) -> Tracker:
    """The tracker of a text such as "mlflow:http://localhost:5000".

    Raises:
        InputError: no tracker that is known. MissingPackageError: its client is not installed. HostError: it cannot be
            opened.
    """
    kind, _, place = text.partition(":")
    if kind == "mlflow":
        from vitdeploy.history.trackers.mlflow import Mlflow

        return Mlflow(place)
    if kind == "wandb":
        from vitdeploy.history.trackers.wandb import Wandb

        return Wandb(place)
    if kind == "bencher" and place:
        return Bencher(Path(place))
    raise InputError(
        "no tracker of this name", found="bencher without a file" if kind == "bencher" else kind[:40], wanted=WANTED
    )
