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
from pathlib import Path
import vitdeploy as vd
from tests.golden_bundle import with_golden_answers
from vitdeploy.workflows.placement import compile_bundle
vd.export(model, folder, progress=False)
compile_bundle(Path(folder) / "model.onnx", target, None, None, Path(compiled))
with_golden_answers(Path(compiled), Path(home), Path(bundle), channels=3)
"""
IMAGES = 4


@dataclass(frozen=True)
class Small:
    """`graph` is a folder of `vitdeploy export`, `images` one of images without labels; `bundle` has golden answers."""

    graph: Path
    images: Path
    bundle: Path


def make_small(folder: Path) -> Small:
    """Exported in a process of its own, which has PyTorch loaded already."""
    small = Small(folder / "graph", folder / "images", folder / "bundle")
    folders = {name: folder / name for name in ("compiled", "home", "bundle")}
    for each in folders.values():
        each.mkdir()
    names = {"folder": str(small.graph), "model": MODEL, "target": TARGET}
    process = start(exec, EXPORT, {**names, **{name: str(each) for name, each in folders.items()}})
    process.join(120)
    small.images.mkdir()
    for source in sorted((DIGITS / "evaluation" / "0").glob("*.png"))[:IMAGES]:
        shutil.copy(source, small.images)
    if not (small.bundle / "manifest.json").is_file():
        raise RuntimeError("the small model was not exported, or not compiled")
    return small
