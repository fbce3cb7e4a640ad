"""Models, graphs and bundles as values. Nothing heavy is imported."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from vitdeploy.api.values import Line, Shown, placed
from vitdeploy.bundle.read import read_bundle
from vitdeploy.runtime.load import load
from vitdeploy.spec import RESIZING, EngineSpec, Manifest, PreprocessSpec, Task
from vitdeploy.stages.step import find_graph, known_labels

if TYPE_CHECKING:
    from torch import nn

    from vitdeploy.graph.io.files import GraphMetadata
    from vitdeploy.models.source import Source
    from vitdeploy.runtime.predictor import Predictor
    from vitdeploy.stages.reference_model import Overrides, ReferenceModel


@dataclass(frozen=True, repr=False)
class Model(Shown):
    """A loaded model with the preprocessing of its images: `reference`, and the user's `overrides` of it.
    `vitdeploy.model` makes one."""

    reference: ReferenceModel
    overrides: Overrides

    @property
    def source(self) -> Source:
        """The source, as a recipe or the command line would name it."""
        return self.reference.source

    @property
    def name(self) -> str:
        """The name of the model in every report."""
        return self.reference.name

    @property
    def task(self) -> Task:
        """The name of its task, such as "classification"."""
        return self.reference.task

    @property
    def labels(self) -> tuple[str, ...]:
        """Its class names in the order of its outputs, () if it has none."""
        return self.reference.labels

    @property
    def preprocess(self) -> PreprocessSpec | None:
        """The preprocessing of an image to its input; None if it takes no images."""
        return self.reference.preprocess

    def lines(self) -> list[Line]:
        reference = self.reference
        classes = f", {reference.classes} {labelled(reference.task)}" if reference.classes else ""
        first = f"{reference.name}: {reference.task}, {reference.parameters:,} parameters{classes}"
        return [first, *preprocess_lines(reference.preprocess), *reference.notes]


def labelled(task: Task) -> str:
    """The noun for the labels of a task."""
    return "points" if task == "keypoints" else "classes"


def preprocess_lines(spec: PreprocessSpec | None) -> list[str]:
    """One line on the preprocessing."""
    if spec is None:
        return []
    if isinstance(spec.resize, int):
        resize = f"resize to short side {spec.resize}"
    else:
        resize = f"{RESIZING[spec.fit]} {spec.resize[0]}x{spec.resize[1]}"
    return [f"images: {resize} ({spec.interpolation}), crop {spec.crop[0]}x{spec.crop[1]}, {spec.normalisation}"]


@dataclass(frozen=True, repr=False)
class Graph(Shown):
    """An ONNX graph in a folder of its own: `model.onnx`, or the two graphs of an encoder-decoder.

    `document` is what the command line prints with --json.
    """

    folder: Path
    document: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, ...] = ()

    @functools.cached_property
    def file(self) -> Path:
        """The ONNX file; the encoder's of an encoder-decoder."""
        return find_graph(self.folder)

    @functools.cached_property
    def metadata(self) -> GraphMetadata:
        """The metadata of the file: task, preprocessing, labels; target and precision in a placement."""
        from vitdeploy.graph.io.files import admitted_metadata

        return admitted_metadata(self.file)

    @property
    def task(self) -> Task:
        """The name of its task, such as "classification"."""
        return self.metadata.task

    @property
    def preprocess(self) -> PreprocessSpec | None:
        """The preprocessing of an image to its input; None if it takes no images."""
        return self.metadata.preprocess

    @property
    def labels(self) -> tuple[str, ...]:
        """Its class names in the order of its outputs, () if it has none."""
        return known_labels(self.file, self.metadata)

    def lines(self) -> list[Line]:
        return [*self.text, placed(self.folder)]


@dataclass(frozen=True, repr=False)
class Bundle(Shown):
    """A folder with engines that `vitdeploy.load`, every command and every app can load; `document` as for `Graph`."""

    folder: Path
    document: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, ...] = ()

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The bundle's manifest; raises ManifestError if it breaks a rule of the format."""
        return read_bundle(self.folder)

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """Its engines, the recommended one first."""
        return self.manifest.engines

    def load(self, target: str = "auto", **options: Any) -> Predictor:
        """Return a predictor for its first engine that works here, or for `target`; options and errors as
        `vitdeploy.load`."""
        return load(self.folder, target=target, **options)

    def lines(self) -> list[Line]:
        return [*self.text, placed(self.folder)]


@dataclass(frozen=True)
class Named:
    """An artifact by name, with further options of the command line: `source` is for a model."""

    text: str
    source: Source


GraphLike = Graph | str | Path
ModelLike = Union[Model, str, Path, "nn.Module"]
ArtifactLike = Union[Bundle, Graph, Model, Named, str, Path, "nn.Module"]


def graph_file(graph: GraphLike) -> Path:
    """The ONNX file of a graph, a graph's folder or a file; errors as `find_graph`."""
    return graph.file if isinstance(graph, Graph) else find_graph(Path(graph))


def artifact_name(artifact: ArtifactLike) -> str | None:
    """The path or name of an artifact; None for a model in memory."""
    if isinstance(artifact, Named):
        return artifact.text
    if isinstance(artifact, Bundle | Graph):
        return str(artifact.folder)
    return str(artifact) if isinstance(artifact, str | Path) else None
