"""What the cases send: a small graph, and images for it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.forked import start

DIGITS = Path(__file__).parents[3] / "calibration" / "digits"
MODEL = "vit_w32d2h2_patch8_32"
TARGET = "onnxruntime-cpu"
EXPORT = """
import vitdeploy as vd
vd.export(model, folder, progress=False)
"""
IMAGES = 4


@dataclass(frozen=True)
class Small:
    """`graph` is a folder of `vitdeploy export`, `images` one of images without labels."""

    graph: Path
    images: Path


def make_small(folder: Path) -> Small:
    """Exported in a process of its own, which has PyTorch loaded already."""
    small = Small(folder / "graph", folder / "images")
    process = start(exec, EXPORT, {"folder": str(small.graph), "model": MODEL})
    process.join(120)
    small.images.mkdir()
    for source in sorted((DIGITS / "evaluation" / "0").glob("*.png"))[:IMAGES]:
        shutil.copy(source, small.images)
    if not (small.graph / "model.onnx").is_file():
        raise RuntimeError("the small model was not exported")
    return small
