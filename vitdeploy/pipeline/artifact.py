"""Tell what an argument names (a bundle, a graph that vitdeploy wrote, or a model), and read the first two."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vitdeploy.bundle.read import is_bundle, read_bundle, verify_files
from vitdeploy.bundle.sign import signed_by
from vitdeploy.models.model_folder.hub import is_hub_name
from vitdeploy.paths import exists, is_file
from vitdeploy.runtime.values import read_labels
from vitdeploy.spec import Manifest
from vitdeploy.stages.step import find_graph, is_ours

DEFAULT_TARGET = "onnxruntime-cpu"


def form_of(text: str) -> Literal["bundle", "hub", "path", "name"]:
    """The kind that an argument looks like; no file is read."""
    path = Path(text)
    if is_bundle(path):
        return "bundle"
    if is_hub_name(text):
        return "hub"
    return "path" if exists(path) or path.suffix == ".onnx" or "/" in text else "name"


def kind_of(text: str) -> Literal["bundle", "graph", "model"]:
    """The kind of artifact that an argument names. A graph that vitdeploy did not write counts as an original; a path
    where nothing exists counts as a graph, because the errors for graphs say what is missing."""
    form, path = form_of(text), Path(text)
    if form == "bundle":
        return "bundle"
    foreign = path.suffix == ".onnx" and is_file(path) and not is_ours(path)
    return "graph" if form == "path" and not foreign else "model"


def open_bundle(folder: Path, trust: Path | None = None) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest and the labels of a bundle that is intact, and signed by `trust` where that is given. Errors of
    `read_bundle`, `verify_files`, `signed_by` and `read_labels` propagate."""
    manifest = read_bundle(folder)
    verify_files(folder, manifest)
    signed_by(folder, trust)
    return manifest, tuple(read_labels(folder, manifest) or ())


def float_graph(text: str) -> Path | None:
    """The float graph at a path, None if there is none."""
    from vitdeploy.graph.io.files import admitted_metadata

    path = Path(text)
    if not exists(path) or (is_file(path) and not is_ours(path)):
        return None
    file = find_graph(path)
    return file if admitted_metadata(file).precision is None else None


def default_target(file: Path) -> str:
    """The target that a graph is compiled for if the user names none."""
    from vitdeploy.graph.io.files import admitted_metadata

    return admitted_metadata(file).target or DEFAULT_TARGET


def new_folder(work: Path, name: str) -> Path:
    """A new folder in `work`, whose name begins so."""
    folder = work / f"{name}{len(list(work.iterdir()))}"
    folder.mkdir()
    return folder
