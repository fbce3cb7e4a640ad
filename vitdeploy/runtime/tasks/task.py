"""A task at run time: the functions that read a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy.typing as npt

from vitdeploy.runtime import flows, runner, topdown
from vitdeploy.runtime.tasks import forms
from vitdeploy.spec import OutputSpec, Postprocess, PreprocessSpec

if TYPE_CHECKING:
    from PIL import Image

Outputs = Mapping[str, npt.NDArray[Any]]
# The contents of files by file name suffix.
Files = Mapping[str, bytes]
# Two models' vectors agree from this cosine on.
COSINE = 0.9
Head = TypeVar("Head", bound=OutputSpec)


class Result(Protocol):
    """The answer for one image: values for programs, lines for people."""

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as values for JSON."""


@dataclass(frozen=True)
class OutputReading:
    """The context for reading the outputs of one image. `size`: (width, height) of the original image, upright;
    `labels`: one name per class, or None; `top`: number of classes that a classifier returns; `box`: the part of the
    image that a top-down model saw, None for all of it."""

    size: tuple[int, int]
    preprocess: PreprocessSpec | None
    postprocess: Postprocess | None = None
    labels: Sequence[str] | None = None
    top: int = 5
    box: topdown.Box | None = None

    @property
    def images(self) -> PreprocessSpec:
        """The preprocessing of a model that takes images."""
        assert self.preprocess is not None, "a manifest without it is refused when it is read"
        return self.preprocess

    def head(self, kind: type[Head]) -> Head:
        """Return the postprocess spec, of the task's class."""
        assert isinstance(self.postprocess, kind), "a manifest without it is refused when it is read"
        return self.postprocess


@dataclass(frozen=True)
class DeviceTask:
    """A task's row. Outputs are those of one sample, by name, without the batch axis.

    answer: the result from the outputs.
    same: whether two models' outputs for a sample roughly agree. The test is coarse: it separates a wrong engine from
        one that rounds.
    bind: makes a runner that takes only images from one with further inputs, given their values; None if an image is
        the only input.
    draw: files with pictures of an answer, by file name suffix, from the upright RGB image and the answer (for a
        top-down task also several answers); None for answers without a picture.
    predictor: "module:class" of the predictor of its bundles, imported at first use.
    takes: the input of a request, besides or instead of images.
    flow: the graphs of its models; None for a task with one graph.
    postprocess: the class of the spec that describes the outputs; None if the task needs none.
    form: the format in which a program of `vitdeploy embed` writes an answer, from the outputs' names and the spec;
        None if not supported.
    """

    answer: Callable[[Outputs, OutputReading], Result]
    same: Callable[[Outputs, Outputs, OutputReading], bool]
    bind: Callable[[runner.Runner, Outputs, Postprocess | None], runner.Runner] | None = None
    draw: Callable[[Image.Image, Any], Files] | None = None
    predictor: str = "vitdeploy.runtime.predictor:Predictor"
    takes: Literal["images", "texts", "prompts", "tokens"] = "images"
    flow: flows.FlowRow | None = None
    postprocess: type[OutputSpec] | None = None
    form: Callable[[Collection[str], Any], forms.Form] | None = None
