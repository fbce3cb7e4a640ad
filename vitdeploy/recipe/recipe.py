"""The recipe: its sections, and the rules between them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    field_validator,
    model_validator,
)

from vitdeploy import spec
from vitdeploy.backends import TARGETS, near_target
from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.compilation.backend import BuildOptions, default_batches
from vitdeploy.errors import RecipeError
from vitdeploy.known_bad.entries import table
from vitdeploy.runtime.profiles import Batches

# --- The base of every section of a recipe ----------------------------------------------------------------------------


Positive = Annotated[int, Field(ge=1)]
Batch = Annotated[int, Field(ge=1, le=spec.MAX_BATCH)]
# Maximum length of a text: the longest path on Linux. A longer one names nothing, and errors would quote it.
MAX_TEXT = 4096


class Section(BaseModel):
    """A frozen value without unknown fields and without type coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, str_max_length=MAX_TEXT)


# --- The sections of a recipe -----------------------------------------------------------------------------------------
# If a section stands for a value with a class, such as `spec.Budget`, that class defines the fields and their defaults,
# and the section bounds them.


FUNCTION = "function"  # key of the validation context: the model named on the command line

PerChannel = Annotated[tuple[float, ...], Field(min_length=1, max_length=3)]
Share = Annotated[float, Field(ge=0, le=1)]
Side = Positive | Annotated[tuple[Positive, Positive], Field(strict=False)]


def height_width(side: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width); one side stands for a square."""
    return (side, side) if isinstance(side, int) else side


def _known_task(value: object, ours: ValidatorFunctionWrapHandler) -> Any:
    """A task of another package, or one of ours."""
    return value if isinstance(value, str) and value in spec.task_names() else ours(value)


TaskName = Annotated[spec.Task, WrapValidator(_known_task)]


class SourceSection(Section):
    """The source of the model; see `models.source` for the values of `model`.

    `task`: the task, if the outputs do not identify it. `image_size`: one side or [height, width], by default the
    checkpoint's. `image_sizes`: several sizes, each with its own graphs and engines in one bundle. `heads`: number of
    attention heads, for a bare state dict. `labels`: a file with one class name per line. `text_features`: see
    `models.zero_shot`. `normal`: the folder of images of good parts, for the task anomaly. `bind`: by name, for each
    further input of an ONNX file or of your own module (--model), a number, numbers, a .npy or .npz file, or "input" if
    each image brings its own value.
    """

    model: str | None = None
    checkpoint: str | None = None
    task: TaskName | None = None
    image_size: Side | None = None
    image_sizes: Annotated[tuple[Side, ...], Field(min_length=1, strict=False)] | None = None
    heads: Positive | None = None
    labels: str | None = None
    text_features: str | None = None
    normal: str | None = None
    bind: dict[str, float | Annotated[tuple[float, ...], Field(strict=False)] | str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _named(self, info: ValidationInfo) -> SourceSection:
        function = (info.context or {}).get(FUNCTION)
        if function is None and self.model is None and self.checkpoint is None:
            raise ValueError("needs a model or a checkpoint; pass your own module with --model")
        if function is not None and self.model is not None:
            raise ValueError(f"names the model {self.model}, and --model {function}: leave one of them out")
        if function is not None and self.heads is not None:
            raise ValueError(f"heads does not apply to your own module, --model {function}")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> SourceSection:
        if self.image_size is not None and self.image_sizes is not None:
            raise ValueError("has both image_size and image_sizes; leave one of them out")
        sizes = [height_width(size) for size in self.image_sizes or ()]
        if len(set(sizes)) != len(sizes):
            raise ValueError("image_sizes repeats a size")
        return self


class PreprocessSection(Section):
    """See `spec.PreprocessSpec`; `resize` is the short side or [height, width], `crop` may be the side of a square."""

    resize: Side
    crop: Side
    interpolation: spec.Interpolation = spec.PreprocessSpec.interpolation
    mean: Annotated[PerChannel, Field(strict=False)]
    std: Annotated[PerChannel, Field(strict=False)]
    fit: spec.Fit = spec.PreprocessSpec.fit
    crop_rounding: spec.CropRounding = spec.PreprocessSpec.crop_rounding
    fill: int | None = None
    channel_order: spec.ChannelOrder = "rgb"

    @model_validator(mode="after")
    def _channels(self) -> PreprocessSection:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}; expected 1 or 3 of each")
        if min(self.std) <= 0:
            raise ValueError("std must be above 0")
        return self

    def to_spec(self) -> spec.PreprocessSpec:
        return spec.PreprocessSpec(**{**self.model_dump(), "crop": height_width(self.crop)})


class CalibrationSection(Section):
    images: Positive | Literal["auto"] = "auto"


class EvaluationSection(Section):
    images: Positive | Literal["all"] = "all"


class DataSection(Section):
    """A folder of images, or an .npz of token arrays.

    `labels`: class folders (`folders`), none, or the kind of `annotations`: a folder of YOLO files (`yolo`), COCO
    instances or key points JSON (`coco`), COCO panoptic JSON with its folder of PNGs (`panoptic`), a folder of PNGs of
    class indices (`masks`), of measured depth (`depth`) or of target pictures (`targets`), by the names of the images;
    a JSON file of points and boxes with the masks of the objects (`prompts`); a JSON list of file_name and text
    (`texts`); or MVTec AD folders of good and defective parts (`mvtec`).
    For models that take texts: `texts` is a file with one text per line, `template` turns the name of a class folder
    into a text. For models with a `bind` input that each image brings: `inputs` is the folder with NAME/STEM.npy or
    .png.
    """

    path: str
    labels: spec.LabelKind = "folders"
    annotations: str | None = None
    texts: str | None = None
    template: str | None = None
    inputs: str | None = None
    calibration: CalibrationSection = CalibrationSection()
    evaluation: EvaluationSection = EvaluationSection()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class ExportSection(Section):
    """`name`: the name of the graph inside its file; None: the recipe's name. Recipes with equal exports share them.
    `batch` auto: dynamic, or the fixed batch of an ONNX file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    opset: Literal[18, 19, 20] = 20
    batch: Literal["auto", "dynamic"] | Batch = "auto"
    preprocess: bool = True


class OptimizeSection(Section):
    """Graph rewrites: see `graph.passes.optimize.OptimizeOptions`. All are exact except `token_merging` and `prune`.
    `token_merging`: none, or by block the number of tokens kept after its attention, such as {1: 192, 6: 128}.
    `split_rows`: none; the parts of the token rows in INT8 engines, such as [192, 5]; a padded number of rows, such as
    [200]; or auto: the fastest by layer costs (OpenVINO on the CPU). `float_rest`: the precision of the float operators
    of INT8 engines, or auto: bf16 if it is faster by layer costs and accurate enough (OpenVINO, on CPUs with AMX), else
    fp32. `prune`: none, or the minimum share of all MACs to remove with hidden channels and heads, see
    `search.pruning`."""

    fold_layer_scale: bool = True
    rotate_residual: bool = False
    fold_attention_scale: bool = True
    drop_key_bias: bool = True
    fold_value_bias: bool = True
    fold_image_normalisation: bool = True
    class_token_only: bool = True
    qkv: Literal["keep", "merged", "separate"] = "keep"
    token_merging: Literal["none"] | dict[int, int] = "none"
    split_rows: Literal["auto", "none"] | Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] = "auto"
    float_rest: Literal["auto", "fp32", "bf16"] = "auto"
    prune: Literal["none"] | Annotated[float, Field(gt=0, lt=1)] = "none"

    @field_validator("token_merging", mode="before")
    @classmethod
    def _schedule(cls, value: Any) -> Any:
        if value == "none":
            return value
        numbers = [*value, *value.values()] if isinstance(value, dict) else []
        if not numbers or not all(type(number) is int for number in numbers):
            raise ValueError("input should be none, or block: tokens to keep, such as {1: 192, 6: 128}")
        remaining = [value[block] for block in sorted(value)]
        if min(value) < 0 or min(remaining) < 1:
            raise ValueError("blocks count from 0, and at least one token must remain")
        if any(after >= before for before, after in itertools.pairwise(remaining)):
            raise ValueError("a later block must leave fewer tokens than an earlier one")
        return value


class BudgetSection(Section):
    """See `spec.Budget`."""

    max_drop: Annotated[float, Field(ge=0)] | None = spec.Budget.max_drop
    min_agreement: Annotated[float, Field(ge=0, le=100)] | None = spec.Budget.min_agreement
    max_latency: Annotated[float, Field(gt=0)] | None = spec.Budget.max_latency
    max_size: Positive | None = spec.Budget.max_size
    max_memory: Positive | None = None


class BenchSection(Section):
    """`scenarios`: see `benchmark.protocol.parse_scenario`. `batch`: the last for `offline`, the first for the others.
    `duration`: seconds per artifact and scenario; see `benchmark.protocol.Protocol`."""

    scenarios: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = Protocol.scenarios
    batch: Annotated[tuple[Batch, ...], Field(min_length=1, max_length=2, strict=False)] = Protocol.batch
    duration: Annotated[float, Field(gt=0, le=3600)] = Protocol.duration

    @field_validator("scenarios")
    @classmethod
    def _compared(cls, scenarios: tuple[str, ...]) -> tuple[str, ...]:
        """Require a scenario with alternating rounds, by which artifacts are compared."""
        parsed = [parse_scenario(text) for text in scenarios]
        if not any(scenario.spread for scenario in parsed):
            raise ValueError("expected single or offline among them: artifacts are compared by these")
        if len(set(scenarios)) < len(scenarios):
            raise ValueError("expected each scenario once")
        return scenarios


class BundleSection(Section):
    """`include_failed`: include engines that fail the budget, as the last ones; an app can load them only with
    `load(..., allow_failed=True)`."""

    include_failed: bool = False


# --- The meaning of a model's outputs: a section for each class of `spec.Postprocess` with a choice -------------------


class PostprocessSection(Section):
    """The meaning of the outputs of a task: the fields of `outputs`, with bounds."""

    outputs: ClassVar[type[Any]]

    @model_validator(mode="after")
    def _checked(self) -> PostprocessSection:
        self.to_spec()
        return self

    def to_spec(self) -> Any:
        return self.outputs(**{name: _plain(value) for name, value in self})


def _plain(value: Any) -> Any:
    """A value of a section, with each section inside replaced by its dataclass."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.to_spec() if isinstance(value, PostprocessSection) else value


@functools.cache
def _section(outputs: Any) -> type[PostprocessSection]:
    """The section of a dataclass, without fields that only the model defines ("own" in their metadata)."""
    hints = typing.get_type_hints(outputs)
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(outputs):
        if f.metadata.get("own"):
            continue
        required = f.name in (getattr(outputs, "in_recipes", None) or ()) or f.default is dataclasses.MISSING
        fields[f.name] = (_bounded(hints[f.name], f.metadata.get("within", {})), ... if required else f.default)
    section = create_model(f"{outputs.__name__}Section", __base__=PostprocessSection, __doc__=outputs.__doc__, **fields)
    section.outputs = outputs
    return section


def _bounded(kind: Any, bounds: Mapping[str, Any]) -> Any:
    """The type with bounds for every number inside; lists are accepted for tuples."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        values: list[Any] = [each for each in args if dataclasses.is_dataclass(each)]
        if values:
            several = _tagged({f"of-{value.__name__}": _section(value) for value in values})
            return operator.getitem(typing.Union, (several, *(each for each in args if each not in values)))
        return operator.getitem(typing.Union, tuple(_bounded(each, bounds) for each in args))
    if origin is tuple:
        items = [each if each is Ellipsis else _bounded(each, bounds) for each in args]
        return Annotated[types.GenericAlias(tuple, tuple(items)), Field(strict=False)]
    if dataclasses.is_dataclass(kind):
        return _section(typing.cast(Any, kind))
    return Annotated[kind, Field(**bounds)] if kind in (int, float) and bounds else kind


def _tagged(sections: Mapping[str, type[PostprocessSection]]) -> Any:
    """The union of these sections, by tags that are not field names, so that error paths omit them. The section with
    most of the given fields is used; the first of several."""

    def tag(value: Any) -> str:
        fields = set(value) if isinstance(value, dict) else set(getattr(type(value), "model_fields", ()))
        return max(sections, key=lambda each: len(fields & set(sections[each].model_fields)))

    members = tuple(Annotated[section, Tag(name)] for name, section in sections.items())
    return Annotated[operator.getitem(typing.Union, members), Discriminator(tag)]


SECTIONS: dict[str, type[PostprocessSection]] = {
    f"of-{outputs.__name__}": _section(typing.cast(Any, outputs))
    for outputs in spec.postprocess_classes(spec.DEVICE_ROWS)
    if outputs.in_recipes is not None
}


if TYPE_CHECKING:
    AnyPostprocess: TypeAlias = PostprocessSection
else:
    AnyPostprocess = _tagged(SECTIONS)


# --- TensorRT's build options in recipes and `vitdeploy compile`. The names are those of trtexec and Polygraphy -------


Profile = Annotated[tuple[Positive, Positive, Positive], Field(strict=False)]
HardwareCompatibility = Literal["none", "same-compute-capability", "ampere+"]


class TensorRtSection(Section):
    """Only for the target tensorrt; see `compilation.tensorrt.BuildOptions` for the defaults.

    `profiles`: (minimum, optimum, maximum) batch of each. `workspace`: maximum MiB of device memory.
    """

    profiles: Annotated[tuple[Profile, ...], Field(min_length=1, strict=False)] | None = None
    workspace: Positive | None = None
    builder_optimization_level: Annotated[int, Field(ge=0, le=5)] = BuildOptions.level
    hardware_compatibility_level: HardwareCompatibility = "none"
    version_compatible: bool = False

    @field_validator("profiles")
    @classmethod
    def _in_order(cls, profiles: tuple[Batches, ...] | None) -> tuple[Batches, ...] | None:
        for smallest, best, largest in profiles or ():
            if not smallest <= best <= largest:
                raise ValueError("a profile is [minimum, optimum, maximum] batch, in ascending order")
        return profiles

    def holds(self, batch: int) -> bool:
        """Whether one of the profiles covers the batch."""
        return any(smallest <= batch <= largest for smallest, _, largest in self.profiles or ())

    def to_options(self) -> BuildOptions:
        hardware = self.hardware_compatibility_level
        return BuildOptions(
            batches=self.profiles or (),
            workspace=None if self.workspace is None else self.workspace << 20,
            level=self.builder_optimization_level,
            hardware="this" if hardware == "none" else hardware,
            versions="newer" if self.version_compatible else "this",
        )


# --- The whole recipe, and the rules between its sections -------------------------------------------------------------


class Recipe(Section):
    """The whole pipeline, schema version 1.

    `vnni`: whether the CPU that runs INT8 has VNNI; auto: as this machine. `float_parts`: graphs (of a model of
    several) that stay in float; `ignore`: layers that stay in float, as in `quantize --ignore`: patterns with *, and
    graph/layer for a model of several graphs. `high_precision`: percent of latency that layers kept in higher precision
    may add, by layer costs, to bring the answers closer to the original's; 0 keeps all in plain INT8.
    `accept_known_bad`: entries of the known-bad runtime table that are accepted.
    """

    vitdeploy: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    source: SourceSection
    preprocess: PreprocessSection | None = None
    postprocess: AnyPostprocess | None = None
    data: DataSection
    export: ExportSection = ExportSection()
    optimize: OptimizeSection = OptimizeSection()
    precision: spec.Precision = "int8"
    vnni: Literal["auto"] | bool = "auto"
    float_parts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    ignore: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    high_precision: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 5.0
    accept_known_bad: Annotated[tuple[str, ...], Field(strict=False)] = ()
    targets: Annotated[tuple[str, ...], Field(strict=False)]
    budget: BudgetSection = BudgetSection()
    bench: BenchSection = BenchSection()
    bundle: BundleSection = BundleSection()
    tensorrt: TensorRtSection = TensorRtSection()

    @field_validator("vitdeploy", mode="before")
    @classmethod
    def _no_boolean(cls, version: Any) -> Any:
        if version is True:  # equal to 1 for pydantic's Literal
            raise ValueError("input should be 1")
        return version

    @field_validator("targets")
    @classmethod
    def _known_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets:
            raise ValueError(f"expected at least one of {', '.join(TARGETS)}")
        for target in targets:
            if target not in TARGETS:
                hint = f"; did you mean {near}?" if (near := near_target(target)) else ""
                raise ValueError(f"{target!r} is not a target; known: {', '.join(TARGETS)}{hint}")
        if len(set(targets)) != len(targets):
            raise ValueError("a target is repeated")
        return targets

    @field_validator("accept_known_bad")
    @classmethod
    def _known_entries(cls, ids: tuple[str, ...]) -> tuple[str, ...]:
        known = [entry.id for entry in table()]
        if unknown := [id_ for id_ in ids if id_ not in known]:
            raise ValueError(f"unknown entry {', '.join(unknown)}; known: {', '.join(known)}")
        return ids

    @model_validator(mode="after")
    def _batches_fit(self) -> Recipe:
        fixed = self.export.batch
        if isinstance(fixed, int) and set(self.bench.batch) != {fixed}:
            raise ValueError(f"export.batch is fixed to {fixed}, so bench.batch must be [{fixed}]")
        return self

    @model_validator(mode="after")
    def _profiles_fit(self) -> Recipe:
        if self.tensorrt.profiles is None or "tensorrt" not in self.targets:
            return self
        if isinstance(self.export.batch, int):
            raise ValueError(f"export.batch is fixed to {self.export.batch}, so tensorrt.profiles must be left out")
        lost = [str(batch) for batch in self.bench.batch if not self.tensorrt.holds(batch)]
        if lost:
            raise ValueError(f"no profile of tensorrt.profiles includes bench.batch {', '.join(lost)}")
        return self

    def at_batch(self, batch: int) -> Recipe:
        """The recipe for a model with a fixed batch, if the recipe leaves the batch open.

        Raises:
            RecipeError: the recipe requires another batch.
        """
        if "batch" in self.bench.model_fields_set and set(self.bench.batch) != {batch}:
            problem = f"$.bench.batch: {list(self.bench.batch)}, but the model has fixed batch {batch}; use [{batch}]"
            raise RecipeError("the recipe", [problem])
        if self.tensorrt.profiles is not None and "tensorrt" in self.targets:
            raise RecipeError("the recipe", [f"$.tensorrt.profiles: the model has fixed batch {batch}; leave it out"])
        export = self.export.model_copy(update={"batch": batch})
        return self.model_copy(update={"export": export, "bench": self.bench.model_copy(update={"batch": (batch,)})})

    @property
    def engine_batch(self) -> int:
        """The batch that engines are compiled for: the fixed one, or that of the single stream."""
        return self.bench.batch[0]

    def to_build(self) -> BuildOptions:
        """TensorRT build options; without explicit profiles, for all batches up to the largest one measured."""
        options = self.tensorrt.to_options()
        profiles = options.batches or default_batches(self.engine_batch, max(self.bench.batch))
        return dataclasses.replace(options, batches=profiles)

    def to_budget(self) -> spec.Budget:
        return spec.Budget(**self.budget.model_dump())
