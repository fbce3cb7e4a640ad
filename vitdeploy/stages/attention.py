"""Attention rollout of the original and of quantized engines on a few images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from vitdeploy.attention import Floats, run_instrumented
from vitdeploy.errors import EngineError, GraphError
from vitdeploy.graph.analysis.attention import AttentionViews, token_views
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import load_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.spec import PreprocessSpec, encode
from vitdeploy.stages import step
from vitdeploy.stages.answers import read_answers
from vitdeploy.tasks.adapter import Data, ImageAdapter
from vitdeploy.tasks.examples import choose

# Images that attention is drawn for.
IMAGES = 4
FACTS_FILE, MAPS_FILE = "attention.json", "attention.npz"


def find_attention(
    original: Path,
    placements: Mapping[str, Path],
    images: Mapping[int, Pixels],
    preprocess: PreprocessSpec,
    out: Path,
    progress: Progress = silent,
) -> None:
    """Write attention.json, and attention.npz with float32 [images, rows, columns] for each readable graph.

    Engines fuse attention and do not expose its weights. This function instead runs the placement of each engine (the
    graph that it was compiled from) in ONNX Runtime with the weights as outputs, which prevents the fusion.

    Args:
        original: the exported graph before optimization. placements: the engines' graphs, by artifact.
        images: by their index among the evaluation samples.
    """
    facts: dict[str, Any] = {"images": list(images), "left_out": {}}
    maps: dict[str, np.ndarray] = {}
    blocks = 0
    for done, (name, file) in enumerate({step.ORIGINAL: original, **placements}.items()):
        progress("draw attention maps", done, 1 + len(placements))
        try:
            model, views = _views(file, canonical=name == step.ORIGINAL)
            if name == step.ORIGINAL:
                blocks = len(views.blocks)
                facts |= {"grid": list(views.grid), "reader": views.reader, "blocks": blocks}
            elif (len(views.blocks), list(views.grid)) != (blocks, facts["grid"]):
                raise GraphError(f"{len(views.blocks)} of its {blocks} attention blocks can be read")
            found: list[Floats] = [
                outputs.flow_map(views) for outputs in run_instrumented(model, views, images.values(), preprocess)
            ]
            maps[name] = np.stack(found).astype(np.float32)
        except (GraphError, EngineError) as error:
            facts["left_out"][name] = error.message
            if name == step.ORIGINAL:
                break
    progress("draw attention maps", 1 + len(placements), 1 + len(placements))
    np.savez(out / MAPS_FILE, **maps)  # type: ignore[arg-type]
    step.write_json(out / FACTS_FILE, facts)


def _views(file: Path, canonical: bool) -> tuple[ir.Model, AttentionViews]:
    """A graph and its attention. Placements are canonical except for their quantization, which must be kept."""
    model = load_graph(file)
    if canonical:
        normalise(model)
    return model, token_views(model, file.name)


def read_attention(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read what `find_attention` wrote: facts, and maps by artifact."""
    with np.load(folder / MAPS_FILE, allow_pickle=False) as file:
        return step.read_json(folder / FACTS_FILE), {name: file[name] for name in file.files}


def shared(ours: Floats, reference: Floats) -> float:
    """The overlap of two maps, 0..1: sum(min(p, q)), each normalised to sum 1."""
    p, q = (each / max(float(each.sum()), 1e-12) for each in (ours, reference))
    return float(np.minimum(p, q).sum())


def attention_step(adapter: ImageAdapter, data: Data, contenders: Sequence[step.Candidate]) -> step.Step:
    """The step for the attention of the original and of the shipped INT8 engines, on the report's first examples."""
    preprocess = adapter.setting.images
    shown = [c for c in contenders if c.shipped and c.precision in ("int8", "mixed")]

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        reference = read_answers(folders[step.REFERENCE].path)
        answers = {c.artifact: read_answers(folders[c.step("verify")].path) for c in contenders}
        numbers = [each.index for each in choose(adapter, reference, answers, data)[:IMAGES]]
        pixels = adapter.pixels(data)
        images = {number: pixels[number][0] for number in numbers}
        placements = {c.artifact: folders[c.step("place")].path / step.MODEL_FILE for c in shown}
        find_attention(folders[step.EXPORT].path / step.MODEL_FILE, placements, images, preprocess, out, progress)

    return step.Step(
        step.ATTENTION,
        "attention",
        write,
        {"preprocess": encode(preprocess), "images": IMAGES},
        (step.EXPORT, step.REFERENCE, *(c.step("place") for c in shown), *(c.step("verify") for c in contenders)),
        {"samples": data.evaluation_digest},
        step.package_versions(("onnx", "onnx-ir", "onnxruntime", "numpy", "pillow")),
    )
