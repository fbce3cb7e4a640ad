"""What a name on the command line stands for: a bundle, a graph, or a built-in model; each can be run and benched."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.bench.contest import Contestant
from vitdeploy.bundle.read import is_bundle, read_bundle, verify_files
from vitdeploy.bundle.write import write_bundle
from vitdeploy.errors import MissingFileError, TargetError
from vitdeploy.graph.io import (
    GraphMetadata,
    fixed_batch,
    get_metadata,
    graph_spec,
    load_graph,
    save_graph,
    set_metadata,
)
from vitdeploy.models.reference import TorchRunner
from vitdeploy.models.source import load_original
from vitdeploy.pipeline.measure import engine_contestant, original_contestant
from vitdeploy.pipeline.stages import MODEL_FILE, check_precision, compile_graph, read_engine
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.predictor import select_engines
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec, Manifest, Precision, PreprocessSpec

DEFAULT_TARGET = "onnxruntime-cpu"


@dataclass(frozen=True)
class Subject:
    """One artifact to verify or bench. `preprocess` None: it takes the other side's."""

    name: str
    precision: str
    preprocess: PreprocessSpec | None
    runner: Callable[[], Runner]
    contestant: Callable[[str], Contestant]


Finder = Callable[[str], list[Subject]]


@contextlib.contextmanager
def opened(*, target: str | None, checkpoint: Path | None) -> Iterator[Finder]:
    """A finder of subjects by what the user typed; graphs are compiled into a folder that goes at the end."""
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        work = Path(folder)
        yield lambda text: find_subjects(text, target=target, checkpoint=checkpoint, work=work)


def find_subjects(text: str, *, target: str | None, checkpoint: Path | None, work: Path) -> list[Subject]:
    """The subjects of an argument: every engine of a bundle (or the one for `target`), a graph, or a built-in model.

    Raises:
        UnknownModelError: neither a path nor a built-in model. Errors of reading and compiling come through.
    """
    path = Path(text)
    if path.is_dir() and is_bundle(path):
        return _bundle_subjects(path, target)
    if path.exists() or path.suffix == ".onnx" or "/" in text:
        compiled = work / f"graph{len(list(work.iterdir()))}"
        compiled.mkdir()
        file = find_graph(path)
        chosen = target or graph_metadata(file).target or DEFAULT_TARGET
        compile_bundle(file, chosen, None, None, compiled)
        return [dataclasses.replace(s, name=str(path)) for s in _bundle_subjects(compiled, None)]
    original = load_original(text, checkpoint)
    return [
        Subject(
            text, "fp32", None, lambda: TorchRunner(original), lambda name: original_contestant(text, checkpoint, name)
        )
    ]


def _bundle_subjects(folder: Path, target: str | None) -> list[Subject]:
    manifest = read_bundle(folder)
    verify_files(folder, manifest)
    return [_engine_subject(folder, manifest, engine) for engine in select_engines(manifest, target or "auto")]


def _engine_subject(folder: Path, manifest: Manifest, engine: EngineSpec) -> Subject:
    return Subject(
        f"{folder}:{engine.artifact}",
        engine.precision,
        manifest.preprocess,
        lambda: make_runner(folder, engine),
        lambda name: engine_contestant(engine, folder, name),
    )


def find_graph(path: Path) -> Path:
    """The ONNX file of a folder that holds model.onnx, or the file itself.

    Raises:
        MissingFileError: neither.
    """
    file = path / MODEL_FILE if path.is_dir() else path
    if not file.is_file():
        raise MissingFileError(
            f"no graph at {path}",
            found=f"no {MODEL_FILE} in the folder" if path.is_dir() else "no such file",
            wanted="a folder that holds model.onnx, or an .onnx file",
            fix="vitdeploy export MODEL --checkpoint FILE -o DIR",
        )
    return file


def graph_metadata(file: Path) -> GraphMetadata:
    return get_metadata(load_graph(file), str(file))


def compile_bundle(file: Path, target: str, batch: int | None, precision: str | None, out: Path) -> Manifest:
    """Compile one graph for `target` into the empty folder `out`, as a bundle with one engine.

    Raises:
        TargetError: the graph was placed for another target or precision.
    """
    model = load_graph(file)
    metadata = get_metadata(model, str(file))
    if precision is not None and metadata.precision not in (None, precision):
        raise TargetError(
            f"{file} is placed in {metadata.precision}",
            found=f"--precision {precision}",
            wanted=str(metadata.precision),
            fix="give the float graph, or leave --precision out",
        )
    chosen: Precision = metadata.precision or precision or "fp32"  # type: ignore[assignment]
    if metadata.target not in (None, target):
        raise TargetError(
            f"{file} was placed for another target",
            found=str(metadata.target),
            wanted=target,
            fix=f"quantize the float graph for {target}, or compile with --target {metadata.target}",
        )
    check_precision(target, chosen)
    spec = graph_spec(model, MODEL_FILE)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        work = Path(folder)
        placed = work / "placed.onnx"
        set_metadata(model, dataclasses.replace(metadata, target=target, precision=chosen))
        save_graph(model, placed)
        (work / "engine").mkdir()
        compile_graph(placed, target, batch or fixed_batch(spec) or 1, work / "engine")
        return write_bundle(
            out,
            name=metadata.name if _is_name(metadata.name) else "model",
            graph=file,
            graph_spec=spec,
            preprocess=metadata.preprocess,
            engines=[(read_engine(work / "engine"), work / "engine")],
        )


def _is_name(name: str) -> bool:
    return bool(name) and len(name) <= 64
