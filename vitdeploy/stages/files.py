"""The files that stages write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vitdeploy.bundle.read import MONITOR_FILE
from vitdeploy.bundle.sign import SIGNATURE_FILE
from vitdeploy.data.label_file import read_labels
from vitdeploy.errors import GraphError, MissingFileError, VitdeployError, quoted
from vitdeploy.paths import is_dir, is_file
from vitdeploy.runtime.flows import PARTS
from vitdeploy.spec import encode

if TYPE_CHECKING:
    from vitdeploy.graph.io.files import GraphMetadata

# What a stage says of its work, as JSON values.
Facts: TypeAlias = dict[str, Any]

MODEL_FILE = "model.onnx"
LABELS_FILE, TOKENIZER_FILE = "labels.txt", "tokenizer.json"
STATISTICS_FILE, MIXED_FILE, HIGH_PRECISION_FILE = "statistics.npz", "mixed.json", "high_precision.json"
# Every name that a command writes at the top of an output folder; a folder with any other name is never replaced.
OUTPUT_NAMES = (
    *(
        MODEL_FILE,
        "model.onnx.data",
        LABELS_FILE,
        TOKENIZER_FILE,
        *(f"{part}.onnx" for parts in PARTS for part in parts),
    ),
    *("export.json", "optimize.json", "placement.json", "calibration.json", "manifest.json"),
    *("sensitivity.json", "sensitivity.html", "latency.json", MIXED_FILE, HIGH_PRECISION_FILE),
    *("engines", "golden", "sizes", "report.html", "report.json", MONITOR_FILE, SIGNATURE_FILE),
)
# The same of `vitdeploy tune`.
RECIPE_FILE = "recipe.yaml"
TUNED_NAMES = ("tune.json", "tune.html", RECIPE_FILE)
_WEIGHTS = ("a checkpoint", "vitdeploy export --checkpoint {} -o DIR")
_RECIPE = ("a recipe", "vitdeploy run {}")
# Files that are given in the place of a graph: what they are, and the command that takes them.
_OTHERS = {
    **dict.fromkeys((".safetensors", ".pt", ".pth", ".bin", ".npz", ".ckpt"), _WEIGHTS),
    **dict.fromkeys((".yaml", ".yml"), _RECIPE),
    ".json": ("a report, or other JSON", "vitdeploy compare {} OTHER_REPORT.json, or open report.html beside it"),
    ".html": ("a page", "open it in a browser, and give the bundle's folder here"),
}


def graphs_in(folder: Path) -> dict[str, Path]:
    """The graphs of a stage's folder by name: {"model": ...}, or those of a flow, such as {"encoder": ...,
    "decoder_step": ...}."""
    if is_file(folder / MODEL_FILE):
        return {"model": folder / MODEL_FILE}
    found = [{part: folder / f"{part}.onnx" for part in parts} for parts in PARTS]
    return max(({part: file for part, file in each.items() if is_file(file)} for each in found), key=len)


def statistics_file(name: str) -> str:
    """The file of a graph's statistics in the folder of a calibration."""
    return STATISTICS_FILE if name == "model" else f"{name}.{STATISTICS_FILE}"


def find_graph(path: Path) -> Path:
    """The ONNX file of a folder that holds model.onnx (or encoder.onnx), or the file itself.

    Raises:
        MissingFileError: neither.
    """
    file = next(iter(graphs_in(path).values()), path / MODEL_FILE) if is_dir(path) else path
    if not is_file(file):
        raise MissingFileError(
            f"no graph at {path}",
            found=f"no {MODEL_FILE} in the folder" if is_dir(path) else "no such file",
            wanted="a folder that holds model.onnx, or an .onnx file",
            fix="vitdeploy export MODEL --checkpoint FILE -o DIR",
        )
    if file.suffix.lower() in _OTHERS:
        what, command = _OTHERS[file.suffix.lower()]
        raise GraphError(
            f"{path} is no graph",
            found=what,
            wanted="a folder that holds model.onnx, or an .onnx file",
            fix=command.format(quoted(path)),
        )
    return file


def require_onnx_file(path: Path) -> None:
    if not is_file(path):
        raise MissingFileError(f"no ONNX file at {path}", fix="check the path")


def require_label_file(path: Path) -> None:
    if not is_file(path):
        raise MissingFileError(
            f"no label file at {path}", wanted="a text file with one class name a line", fix="check the path"
        )


def is_ours(file: Path) -> bool:
    """Whether an ONNX file claims that vitdeploy wrote it; False if it cannot be parsed."""
    # Where the names of files are all that is wanted, nothing is to wait for onnx.
    from vitdeploy.graph.io.admit import metadata_keys
    from vitdeploy.graph.io.files import METADATA_KEY

    try:
        return METADATA_KEY in metadata_keys(file)
    except VitdeployError:
        return False


def labels_beside(graph: Path) -> tuple[str, ...]:
    """The class names in the file next to a graph, () without one.

    Raises:
        DataError: it is not UTF-8.
    """
    file = graph.parent / LABELS_FILE
    return read_labels(file) if is_file(file) else ()


def known_labels(graph: Path, metadata: GraphMetadata) -> tuple[str, ...]:
    """The class names of a graph: its own, or those in the file next to it.

    Raises:
        GraphError: both exist, and differ.
        DataError: as in `labels_beside`.
    """
    file, beside = graph.parent / LABELS_FILE, labels_beside(graph)
    if beside and metadata.labels and beside != metadata.labels:
        differ = next((i for i, (a, b) in enumerate(zip(beside, metadata.labels, strict=False)) if a != b), None)
        at = f"{len(beside)} lines" if differ is None else f"line {differ + 1}: {beside[differ]!r}"
        wanted = f"{len(metadata.labels)}" if differ is None else repr(metadata.labels[differ])
        raise GraphError(
            f"{file} has other class names than {graph.name} beside it",
            found=at,
            wanted=f"{wanted}, as in {graph.name}",
            fix=f"remove {file}; or, for other names: vitdeploy export {quoted(graph)} --labels FILE -o DIR",
        )
    return metadata.labels or beside


def copy_labels(source: Path, out: Path) -> None:
    """Copy the file of class names, and that of a tokenizer, along with a graph."""
    for name in (LABELS_FILE, TOKENIZER_FILE):
        if is_file(source / name):
            shutil.copyfile(source / name, out / name)


def json_text(value: object) -> str:
    """The text of JSON values, or of dataclasses of them."""
    return json.dumps(encode(value), indent=1, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: object) -> None:
    """As `json_text`, into a folder that appears whole."""
    path.write_text(json_text(value), encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
