"""Write a bundle folder. The caller gives a folder that is published whole; nothing here is atomic by itself."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, read_bundle, verify_files
from vitdeploy.spec import (
    MANIFEST_FORMAT,
    EngineSpec,
    FileEntry,
    GoldenSpec,
    GraphSpec,
    Manifest,
    PreprocessSpec,
    encode,
)

GRAPH_FILE, LABELS_FILE = "model.onnx", "labels.txt"


@dataclass(frozen=True)
class Golden:
    """uint8 [n, height, width, channels] images, float32 [n, classes] logits of the original, tolerance a target."""

    inputs: npt.NDArray[np.uint8]
    outputs: npt.NDArray[np.float32]
    tolerance: dict[str, float]


def write_bundle(
    out: Path,
    *,
    name: str,
    graph: Path,
    graph_spec: GraphSpec,
    preprocess: PreprocessSpec,
    engines: Sequence[tuple[EngineSpec, Path]],
    labels: Sequence[str] = (),
    golden: Golden | None = None,
    documents: Mapping[str, str] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Manifest:
    """Fill the empty folder `out` with a bundle and return its manifest, read back and verified.

    Args:
        graph: the float ONNX graph. `engines`: each with the folder that holds its files; the recommended one first.
        documents: further text files by name, such as report.html.
    """
    shutil.copyfile(graph, out / GRAPH_FILE)
    if labels:
        (out / LABELS_FILE).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    for file, text in (documents or {}).items():
        (out / file).write_text(text, encoding="utf-8")
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        name=name,
        task="classification",
        graphs={"model": dataclasses.replace(graph_spec, file=GRAPH_FILE)},
        preprocess=preprocess,
        labels=LABELS_FILE if labels else None,
        engines=tuple(_copy_engine(out, engine, folder) for engine, folder in engines),
        golden=_write_golden(out, golden) if golden else None,
        files=_entries(out),
        provenance=dict(provenance or {}),
    )
    text = json.dumps(encode(manifest), indent=1, sort_keys=False, allow_nan=False)
    (out / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
    written = read_bundle(out)
    verify_files(out, written)
    return written


def _copy_engine(out: Path, engine: EngineSpec, folder: Path) -> EngineSpec:
    home = f"engines/{engine.target}"
    (out / home).mkdir(parents=True)
    for file in sorted({engine.graph, *engine.files}):
        shutil.copyfile(folder / file, out / home / file)
    return dataclasses.replace(
        engine, graph=f"{home}/{engine.graph}", files=tuple(f"{home}/{file}" for file in engine.files)
    )


def _write_golden(out: Path, golden: Golden) -> GoldenSpec:
    (out / "golden").mkdir()
    np.save(out / "golden/inputs.npy", golden.inputs, allow_pickle=False)
    np.save(out / "golden/outputs.npy", golden.outputs, allow_pickle=False)
    return GoldenSpec("golden/inputs.npy", "golden/outputs.npy", golden.tolerance)


def _entries(out: Path) -> tuple[FileEntry, ...]:
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return tuple(FileEntry(path.relative_to(out).as_posix(), path.stat().st_size, file_sha256(path)) for path in files)
