"""The stages: each a function of its inputs and config that fills a folder. None reads the store, the environment or
the command line; the pipeline and the commands call the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.compile.engine import compile_engine
from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import batches
from vitdeploy.errors import CapabilityError, CheckpointError, GraphError, TargetError
from vitdeploy.export.parity import TOLERANCE, check_parity
from vitdeploy.export.torch_onnx import export_graph
from vitdeploy.graph.io import (
    GraphMetadata,
    fixed_batch,
    get_metadata,
    graph_spec,
    load_graph,
    save_graph,
    set_metadata,
)
from vitdeploy.graph.linears import count_int8
from vitdeploy.graph.normalise import drop_unused
from vitdeploy.models.reference import TorchRunner
from vitdeploy.models.source import default_preprocess, load_original
from vitdeploy.quantize.observers import BATCH, Range, observe
from vitdeploy.quantize.placement import place
from vitdeploy.runtime.engine import make_runner
from vitdeploy.spec import TARGETS, EngineSpec, Precision, PreprocessSpec, decode, encode
from vitdeploy.verify.agreement import Agreement, compare
from vitdeploy.verify.collect import collect_logits
from vitdeploy.verify.diagnosis import diagnose

Progress = Callable[[str, int, int], None]
MODEL_FILE = "model.onnx"
# Every name that a command writes at the top of an output folder; a folder with any other name is never replaced.
OUTPUT_NAMES = (
    *(MODEL_FILE, "export.json", "placement.json", "calibration.json", "manifest.json", "labels.txt"),
    *("engines", "golden", "report.html", "report.json"),
)


def silent(text: str, done: int, total: int) -> None:
    """No progress shown."""


class Counter:
    """Turns "so many more images" into a progress report."""

    def __init__(self, progress: Progress, text: str, total: int) -> None:
        self.progress, self.text, self.total, self.done = progress, text, total, 0
        progress(text, 0, total)

    def __call__(self, images: int) -> None:
        self.done += images
        self.progress(self.text, self.done, self.total)


# --- export -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportConfig:
    """What is exported and how; `preprocess` None takes the architecture's own, `batch` None is dynamic."""

    model: str
    name: str
    preprocess: PreprocessSpec | None
    opset: int
    batch: int | None
    in_graph: bool


def export(config: ExportConfig, checkpoint: Path | None, out: Path, progress: Progress = silent) -> dict[str, Any]:
    """Writes model.onnx and export.json (what the export is, and its parity)."""
    progress("load the model", 0, 3)
    original = load_original(config.model, checkpoint)
    preprocess = config.preprocess or default_preprocess(original.config)
    if preprocess.crop != original.config.image_size or preprocess.channels != original.config.in_channels:
        raise CheckpointError(
            f"the preprocessing does not fit {config.model}",
            found=f"crop {preprocess.crop[0]}x{preprocess.crop[1]}, {preprocess.channels} channels",
            wanted=f"crop {original.config.image_size[0]}x{original.config.image_size[1]}, "
            f"{original.config.in_channels} channels",
            fix="change preprocess.crop, mean and std, or choose the model of that size",
        )
    progress("export to ONNX", 1, 3)
    graph = export_graph(
        original.module,
        name=config.name,
        preprocess=preprocess,
        image_size=original.config.image_size,
        opset=config.opset,
        batch=config.batch,
        in_graph=config.in_graph,
    )
    save_graph(graph, out / MODEL_FILE)
    progress("compare with PyTorch", 2, 3)
    with TorchRunner(original) as reference:
        parity = check_parity(out / MODEL_FILE, reference, preprocess, fixed_batch=config.batch)
    facts = {
        "model": {
            "source": config.model,
            "parameters": original.parameters,
            "image_size": list(original.config.image_size),
            "channels": original.config.in_channels,
            "classes": original.config.num_classes,
        },
        "opset": config.opset,
        "ir_version": graph.ir_version,
        "bytes": (out / MODEL_FILE).stat().st_size,
        "parity": [asdict(row) for row in parity],
        "tolerance": TOLERANCE,
    }
    write_json(out / "export.json", facts)
    progress("compare with PyTorch", 3, 3)
    return facts


# --- calibrate and place ----------------------------------------------------------------------------------------------


def calibrate(graph: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Writes ranges.json: the range of every layer's input over the samples."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.precision is not None:
        raise GraphError(
            f"{graph} is quantized or placed already",
            found=f"{metadata.precision} for {metadata.target}",
            wanted="the float graph written by `vitdeploy export`",
        )
    count = Counter(progress, "calibrate", len(samples))
    size = fixed_batch(graph_spec(model, MODEL_FILE)) or BATCH
    pixels = batches(samples, metadata.images, size)
    ranges = observe(model, _whole(pixels, size, len(samples)) if size != BATCH else pixels, metadata.images, count)
    write_json(out / "ranges.json", {name: asdict(found) for name, found in sorted(ranges.items())})


def _whole(pixels: Any, size: int, total: int) -> Any:
    """Only whole batches, for a graph with a fixed one."""
    if total < size:
        raise GraphError(
            f"the graph has the fixed batch {size}", found=f"{total} calibration images", wanted=f"at least {size}"
        )
    return (batch for batch in pixels if len(batch) == size)


@dataclass(frozen=True)
class PlaceConfig:
    target: str
    precision: Precision
    ignore: tuple[str, ...] = ()


def place_graph(config: PlaceConfig, graph: Path, ranges: Path | None, out: Path) -> dict[str, Any]:
    """Writes model.onnx, the graph for one target in one precision, and placement.json."""
    check_precision(config.target, config.precision)
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    placed: dict[str, Any] = {"target": config.target, "int8": (), "float": {}}
    if config.precision == "int8":
        if ranges is None:
            raise GraphError("INT8 needs calibration", wanted="images", fix="--data DIR")
        observed = {name: Range(**values) for name, values in read_json(ranges).items()}
        placed = asdict(place(model, observed, config.target, config.ignore))
        drop_unused(model)
    set_metadata(model, replace(metadata, target=config.target, precision=config.precision))
    save_graph(model, out / MODEL_FILE)
    write_json(out / "placement.json", placed)
    return placed


def check_precision(target: str, precision: str) -> None:
    """Raise what `compile` would, before any work is done."""
    if target not in TARGETS:
        raise TargetError(f"no target is called {target!r}", wanted=", ".join(TARGETS))
    if precision not in TARGETS[target].precisions:
        raise CapabilityError(
            f"{target} cannot run {precision}",
            found=precision,
            wanted=", ".join(TARGETS[target].precisions),
            fix="choose one of these, or another target",
        )


# --- compile ----------------------------------------------------------------------------------------------------------


def compile_graph(graph: Path, target: str, batch: int, out: Path) -> EngineSpec:
    """Writes graph.onnx, the engine's files and engine.json. The graph's own metadata says its precision."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.target not in (None, target):
        raise TargetError(
            f"{graph} was placed for another target",
            found=str(metadata.target),
            wanted=target,
            fix=f"vitdeploy quantize FLOAT_GRAPH --target {target} -o DIR, or --target {metadata.target}",
        )
    fixed = fixed_batch(graph_spec(model, MODEL_FILE))
    if fixed is not None and fixed != batch:
        raise TargetError(
            f"{graph} has the fixed batch {fixed}",
            found=f"--batch {batch}",
            wanted=f"batch {fixed}",
            fix="export with a dynamic batch",
        )
    engine = compile_engine(
        graph, out, target=target, precision=metadata.precision or "fp32", batch=batch, placed=count_int8(model)
    )
    write_json(out / "engine.json", encode(engine))
    return engine


def read_engine(folder: Path) -> EngineSpec:
    return decode(EngineSpec, read_json(folder / "engine.json"))


# --- reference and verify ---------------------------------------------------------------------------------------------


def run_reference(
    model: str,
    checkpoint: Path | None,
    preprocess: PreprocessSpec,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
) -> None:
    """Writes logits.npy: the original's float32 [n, classes] for the samples."""
    runner = TorchRunner(load_original(model, checkpoint))
    count = Counter(progress, "original on the evaluation images", len(samples))
    np.save(out / "logits.npy", collect_logits(runner, [s.path for s in samples], preprocess, count))


def run_engine(
    engine: EngineSpec,
    folder: Path,
    preprocess: PreprocessSpec,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
) -> None:
    """Writes logits.npy: an engine's float32 [n, classes] for the samples."""
    count = Counter(progress, f"{engine.artifact} on the evaluation images", len(samples))
    logits = collect_logits(make_runner(folder, engine), [s.path for s in samples], preprocess, count)
    np.save(out / "logits.npy", logits)


def agreement_of(
    logits: np.ndarray,
    reference: np.ndarray,
    samples: Sequence[Sample],
    precision: str,
    ours: PreprocessSpec,
    theirs: PreprocessSpec,
    reference_on_our_tensor: np.ndarray | None = None,
) -> dict[str, Any]:
    """What `verify` says of one artifact: on the same image, on the same tensor, and why they differ."""
    labels = None if samples[0].label is None else np.array([s.label for s in samples], np.int64)
    image: Agreement = compare(logits, reference, labels)
    tensor = image if reference_on_our_tensor is None else compare(logits, reference_on_our_tensor, labels)
    return {
        **asdict(image),
        "same_tensor": {"agreement": tensor.agreement, "kl": tensor.kl, "max_difference": tensor.max_difference},
        "diagnosis": diagnose(tensor, image, ours, theirs, precision),
    }


# --- files ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
