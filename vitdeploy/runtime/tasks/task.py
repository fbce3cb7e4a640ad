"""What a task is at run time: a row of functions that read a model's outputs."""

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
# File names' ends, and what the files hold.
Files = Mapping[str, bytes]
# From this cosine on two models' vectors are about the same.
COSINE = 0.9
Head = TypeVar("Head", bound=OutputSpec)


class Result(Protocol):
    """The answer for one image: values for programs, lines for people."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class OutputReading:
    """How the outputs of one image are read. `size`: (width, height) of the original image, upright; `labels`: one name
    per class, or None; `top`: how many classes of a classifier; `box`: the part of the image that a top-down model was
    given, None for all of it."""

    size: tuple[int, int]
    preprocess: PreprocessSpec | None
    postprocess: Postprocess | None = None
    labels: Sequence[str] | None = None
    top: int = 5
    box: topdown.Box | None = None

    @property
    def images(self) -> PreprocessSpec:
        """How images are prepared, of a model that takes some."""
        assert self.preprocess is not None, "a manifest without it is refused when it is read"
        return self.preprocess

    def head(self, kind: type[Head]) -> Head:
        """What the outputs mean, of the class of the task."""
        assert isinstance(self.postprocess, kind), "a manifest without it is refused when it is read"
        return self.postprocess


@dataclass(frozen=True)
class DeviceTask:
    """A task's row. Outputs are those of one sample, by name, without the batch axis.

    answer: the result that they mean.
    same: whether two models' outputs for a sample mean about the same. It is coarse: it tells a wrong engine from one
        that rounds.
    bind: a runner of images alone, of one with further inputs whose values are given; None where an image is the only
        input.
    draw: files with pictures of an answer, by the ends of their names, from the upright RGB image and the answer, of a
        top-down task also those for several boxes; None of an answer that is no picture.
    predictor: "module:class" of the predictor of its bundles, imported at first use.
    takes: what a request brings besides images, or in their place.
    flow: the graphs of its models; None of a task with one graph.
    postprocess: what the outputs mean; None where that goes without saying.
    form: of the names of the outputs and what they mean, the form in which a program of `vitdeploy embed` writes an
        answer; None of a task whose answers none writes.
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
