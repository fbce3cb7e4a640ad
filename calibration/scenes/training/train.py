"""Train a model, save its folder, and write what it measures on the evaluation scenes beside it."""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from calibration.scenes.training.loop import Kind, Metric, drawn, fit

FOLDER = Path(__file__).resolve().parent.parent / "models"
# In the order of worth: `make train-scenes` trains them one after the other.
MODELS = (
    *("detection", "dual", "prompted", "depth", "keypoints", "text", "semantic", "foreground"),
    *("digits", "seven", "counts", "embedding", "heads"),
)
# Part of the recipe, as the order of float sums depends on it. One, as the models are too small to share out.
THREADS = 1
METRICS = "metrics.json"


def kind_of(name: str) -> Kind:
    return importlib.import_module(f"calibration.scenes.training.{name}").KIND


def shown(metrics: dict[str, Metric]) -> str:
    return "  ".join(
        f"{name} {m.value:.4g} [{m.low:.4g}, {m.high:.4g}] of {m.count} {m.of}" for name, m in metrics.items()
    )


def train(name: str, folder: Path, *, hold_out: bool, steps: int | None = None) -> dict[str, Metric]:
    """Train the model `name`, write `folder`/`name` with its metrics, and return these.

    The hold-out, scenes of the calibration split, is measured first: hyper-parameters are chosen by it. With `hold_out`
    that is all, and nothing is written. `steps` shortens the training, for a look at a part of it.
    """
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    kind = kind_of(name)
    model = kind.build()
    print(f"{name}: {sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    fit(model, kind, drawn(kind, "training", kind.recipe.scenes), steps)
    if not hold_out:
        save(model, kind, folder / name)
    metrics = kind.measure(model, drawn(kind, "calibration", kind.evaluated))
    print(f"{name}, hold-out: {shown(metrics)}", flush=True)
    if not hold_out:
        metrics = kind.measure(model, drawn(kind, "evaluation", kind.evaluated))
        print(f"{name}, evaluation: {shown(metrics)}", flush=True)
        document = {key: asdict(metric) for key, metric in metrics.items()}
        (folder / name / METRICS).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return metrics


def save(model: torch.nn.Module, kind: Kind, folder: Path) -> None:
    """Write the folder anew, aside first, so that no reader meets half of it."""
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    for each in (model, *kind.processors()):
        each.save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
