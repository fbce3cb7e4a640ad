"""Write a bundle folder. Nothing here is atomic: the caller passes a temporary folder and publishes it as a whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.bundle.read import (
    MANIFEST_FILE,
    MONITOR_FILE,
    SIZES_FOLDER,
    file_sha256,
    files_of,
    read_bundle,
    verify_files,
)
from vitdeploy.errors import TargetError
from vitdeploy.spec import (
    MANIFEST_FORMAT,
    EngineSpec,
    FileEntry,
    GateStatus,
    GoldenEngine,
    GoldenSpec,
    Grade,
    GraphSpec,
    Manifest,
    Postprocess,
    PreprocessSpec,
    Task,
    encode,
    tokenizer_file,
)

LABELS_FILE, BOM_FILE = "labels.txt", "bom.cdx.json"
WEIGHTS_SUFFIX = ".onnx.data"
# Panoptic masks are large: such a model gets fewer golden inputs, to keep them small compared to the engines.
GOLDEN_BYTES = 16 << 20


@dataclass(frozen=True)
class Golden:
    """The golden inputs, the original's outputs and those of each engine; arrays by tensor name. `tolerance`, by
    target, applies to engines without golden outputs, which are compared with the original's."""

    inputs: Mapping[str, npt.NDArray[Any]]
    outputs: Mapping[str, npt.NDArray[Any]]
    engines: Mapping[str, GoldenAnswers]
    tolerance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GoldenAnswers:
    """The outputs of one engine for the golden inputs; see `spec.GoldenEngine`."""

    outputs: Mapping[str, npt.NDArray[Any]]
    tolerance: float
    least_same: int
    proves_nothing: str | None = None


def write_bundle(
    out: Path,
    *,
    name: str,
    task: Task,
    graphs: Mapping[str, tuple[Path, GraphSpec]],
    preprocess: PreprocessSpec | None,
    postprocess: Postprocess | None = None,
    engines: Sequence[tuple[EngineSpec, Path]],
    labels: Sequence[str] = (),
    tokenizer: Path | None = None,
    golden: Golden | None = None,
    monitor: str | None = None,
    documents: Mapping[str, str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    sizes: Sequence[str] = (),
    gates: Mapping[str, GateStatus] | None = None,
    recommended: str | None = None,
    grade: Grade | None = None,
    rivals: Sequence[str] = (),
    bom: Callable[[Manifest], str] | None = None,
) -> Manifest:
    """Fill the folder `out` with a bundle and return its manifest, read back and verified.

    Args:
        graphs: the float ONNX graphs by name, one called "model" for most tasks.
        engines: each with the folder of its files, in the order in which an app tries them. The first engine of a
            target is stored in `engines/<target>/`, further ones in `engines/<artifact>/`.
        tokenizer: the tokenizer file of a model that reads or writes text.
        monitor: the text of the reference that a monitor compares with (`runtime.monitor_reference`).
        documents: further text files by name, such as report.html.
        gates, recommended, grade, rivals: see `spec.Manifest`.
        bom: makes the text of the bill of materials (`pipeline.bom`) from the manifest of all other files.
        sizes: further image sizes, whose bundles are already in `out/sizes/`; `out` is otherwise empty.
    """
    for graph, _ in graphs.values():
        for path in with_weights(graph):
            shutil.copyfile(path, out / path.name)
    if labels:
        (out / LABELS_FILE).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    if tokenizer is not None and (own := tokenizer_file(postprocess)) is not None:
        shutil.copyfile(tokenizer, out / own)
    if monitor is not None:
        (out / MONITOR_FILE).write_text(monitor, encoding="utf-8")
    for file, text in (documents or {}).items():
        (out / file).write_text(text, encoding="utf-8")
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        name=name,
        task=task,
        graphs={key: dataclasses.replace(spec, file=graph.name) for key, (graph, spec) in graphs.items()},
        preprocess=preprocess,
        postprocess=postprocess,
        labels=LABELS_FILE if labels else None,
        engines=tuple(
            _copy_engine(out, engine, folder, home)
            for (engine, folder), home in zip(engines, _homes([engine for engine, _ in engines]), strict=True)
        ),
        golden=_write_golden(out, golden) if golden else None,
        files=_entries(out),
        provenance=dict(provenance or {}),
        sizes=tuple(sizes),
        gates=dict(gates or {}),
        recommended=recommended,
        grade=grade,
        rivals=tuple(rivals),
        monitor=None if monitor is None else MONITOR_FILE,
    )
    if bom is not None:
        (out / BOM_FILE).write_text(bom(manifest), encoding="utf-8")
        manifest = dataclasses.replace(manifest, files=_entries(out))
    return _write_manifest(out, manifest)


def _write_manifest(out: Path, manifest: Manifest) -> Manifest:
    text = json.dumps(encode(manifest), indent=1, sort_keys=False, allow_nan=False)
    (out / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
    written = read_bundle(out)
    verify_files(out, written)
    return written


def slim_bundle(folder: Path, target: str, out: Path, *, rebuilt: bool = False) -> tuple[Manifest, list[str]]:
    """Fill the new folder `out` with the files that a device needs to run a bundle on one target: the target's engines,
    golden answers, labels, tokenizer and monitor reference. The new manifest records the SHA-256 of the full bundle's
    manifest.

    Args:
        rebuilt: whether a device may have to rebuild the engines from their placements.

    Returns:
        The manifest, and the paths in `folder` that were not copied.

    Raises:
        MissingFileError, ManifestError, DigestError: not a bundle, or not an intact one.
        TargetError: the bundle has no engine for this target.
    """
    manifest = read_bundle(folder)
    engines = tuple(_slim(engine, rebuilt) for engine in manifest.engines if engine.target == target)
    if not engines:
        targets = sorted({engine.target for engine in manifest.engines})
        raise TargetError(
            f"{folder} has no engine for {target}", found=", ".join(targets), expected="a target of the bundle"
        )
    names = {engine.artifact for engine in engines}
    golden = manifest.golden
    if golden is not None:
        answers = {name: own for name, own in golden.engines.items() if name in names}
        tolerance = {name: own for name, own in golden.tolerance.items() if name == target}
        golden = dataclasses.replace(golden, engines=answers, tolerance=tolerance)
    tokenizer = tokenizer_file(manifest.postprocess)
    kept = {name for engine in engines for name in files_of(engine)}
    kept |= {golden.inputs, golden.outputs, *(each.outputs for each in golden.engines.values())} if golden else set()
    kept |= {name for name in (manifest.labels, tokenizer, manifest.monitor) if name is not None}
    kept |= {entry.path for entry in manifest.files if entry.path == BOM_FILE}
    verify_files(folder, manifest, sorted(kept))
    for name in sorted(kept):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, out / name)
    left_out = sorted(
        name for name in {entry.path for entry in manifest.files} - kept if not name.startswith(f"{SIZES_FOLDER}/")
    )
    for size in manifest.sizes:
        place = f"{SIZES_FOLDER}/{size}"
        (out / place).mkdir(parents=True)
        left_out += [f"{place}/{name}" for name in slim_bundle(folder / place, target, out / place, rebuilt=rebuilt)[1]]
    first = manifest.recommended if manifest.recommended in names else None
    slim = dataclasses.replace(
        manifest,
        graphs={},
        engines=engines,
        golden=golden,
        gates={name: gate for name, gate in manifest.gates.items() if name in names},
        recommended=first,
        grade=manifest.grade if first else None,
        rivals=tuple(name for name in manifest.rivals if name in names) if first else (),
        files=_entries(out),
        provenance={**manifest.provenance, "slim_of": file_sha256(folder / MANIFEST_FILE)},
    )
    return _write_manifest(out, slim), left_out


def _slim(engine: EngineSpec, rebuilt: bool) -> EngineSpec:
    """The engine without its placement, unless the runtime loads that itself or the engine is `rebuilt` from it."""
    graph = engine.graph if rebuilt or engine.graph in engine.files else ""
    return dataclasses.replace(engine, graph=graph, parts=tuple(_slim(part, rebuilt) for part in engine.parts))


def _homes(engines: Sequence[EngineSpec]) -> list[str]:
    targets = [engine.target for engine in engines]
    return [
        f"engines/{engine.target if engine.target not in targets[:i] else engine.artifact}"
        for i, engine in enumerate(engines)
    ]


def _copy_engine(out: Path, engine: EngineSpec, folder: Path, home: str) -> EngineSpec:
    placements = {engine.graph, *(part.graph for part in engine.parts)}
    files = {path.relative_to(folder).as_posix() for graph in placements for path in with_weights(folder / graph)}
    for file in sorted({*files, *engine.files}):
        (out / home / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / file, out / home / file)
    return _below(engine, home)


def _below(engine: EngineSpec, home: str) -> EngineSpec:
    """The engine with its paths below the folder `home`."""
    return dataclasses.replace(
        engine,
        graph=f"{home}/{engine.graph}",
        files=tuple(f"{home}/{file}" for file in engine.files),
        parts=tuple(_below(part, home) for part in engine.parts),
    )


def with_weights(graph: Path) -> list[Path]:
    """An ONNX file and the external data next to it, if any."""
    return [graph, *sorted(graph.parent.glob(f"*{WEIGHTS_SUFFIX}"))]


def _write_golden(out: Path, golden: Golden) -> GoldenSpec:
    (out / "golden").mkdir()
    for name, arrays in (
        ("inputs", golden.inputs),
        ("outputs", golden.outputs),
        *((artifact, answers.outputs) for artifact, answers in golden.engines.items()),
    ):
        np.savez(out / f"golden/{name}.npz", **arrays)  # type: ignore[arg-type]
    engines = {
        artifact: GoldenEngine(f"golden/{artifact}.npz", answers.tolerance, answers.least_same, answers.proves_nothing)
        for artifact, answers in golden.engines.items()
    }
    return GoldenSpec("golden/inputs.npz", "golden/outputs.npz", dict(golden.tolerance), engines)


def _entries(out: Path) -> tuple[FileEntry, ...]:
    files = (path for path in sorted(out.rglob("*")) if path.is_file())
    return tuple(FileEntry(path.relative_to(out).as_posix(), path.stat().st_size, file_sha256(path)) for path in files)
