"""The recipe: a frozen, validated value, read from YAML. No field can name code.

pydantic checks it; this file says what the fields are and turns every problem into one line with its path. What a
section stands for further on is imported where it is asked for: a misspelt field is not to wait for PyTorch.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from vitdeploy.backends import TARGETS
from vitdeploy.bench.protocol import parse_scenario
from vitdeploy.compile.tensorrt import BuildOptions, default_batches
from vitdeploy.errors import MissingFileError, RecipeError
from vitdeploy.models.names import graph_folder, is_built_in
from vitdeploy.pipeline.section import Positive, Section
from vitdeploy.pipeline.tensorrt_section import TensorRtSection
from vitdeploy.spec import Budget, CropRounding, Fit, Interpolation, PostprocessSpec, Precision, PreprocessSpec

if TYPE_CHECKING:
    from vitdeploy.graph.passes.optimize import OptimizeOptions
    from vitdeploy.models.source import Source
    from vitdeploy.pipeline.reference_model import Overrides
    from vitdeploy.pipeline.stages.export import ExportConfig
    from vitdeploy.pipeline.tasks.adapter import DataChoice

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
FUNCTION = "function"  # in the context of a validation: what the command line names as the model
# Fields that name files: relative to the recipe, so that it runs from anywhere.
PATHS = (
    *(("source", key) for key in ("model", "checkpoint", "labels", "text_features")),
    *(("data", key) for key in ("path", "annotations")),
)
# yaml's constructors let errors of int(), float(), datetime and their own look-ups through, as of `2001-13-45`.
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)

PerChannel = Annotated[tuple[float, ...], Field(min_length=1, max_length=3)]
Side = Positive | Annotated[tuple[Positive, Positive], Field(strict=False)]


def _both(side: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width); one side is that of a square."""
    return (side, side) if isinstance(side, int) else side


class SourceSection(Section):
    """Where the model comes from; see `models.load` for what `model` may name.

    `image_size`: other than the checkpoint's; one side or [height, width]. `image_sizes`: several of them, each with
    graphs and engines of its own in one bundle. `heads`: for a bare state dict that cannot say it. `labels`: a file
    with one class name a line. `text_features`: see `models.zero_shot`.
    """

    model: str | None = None
    checkpoint: str | None = None
    image_size: Side | None = None
    image_sizes: Annotated[tuple[Side, ...], Field(min_length=1, strict=False)] | None = None
    heads: Positive | None = None
    labels: str | None = None
    text_features: str | None = None

    @model_validator(mode="after")
    def _named(self, info: ValidationInfo) -> SourceSection:
        function = (info.context or {}).get(FUNCTION)
        if function is None and self.model is None and self.checkpoint is None:
            raise ValueError("names neither a model nor a checkpoint; a module of your own goes with --model")
        if function is not None and self.model is not None:
            raise ValueError(f"names the model {self.model}, and --model {function}: leave one of them out")
        if function is not None and self.heads is not None:
            raise ValueError(f"heads says nothing of your own module, --model {function}")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> SourceSection:
        if self.image_size is not None and self.image_sizes is not None:
            raise ValueError("has both image_size and image_sizes")
        sizes = [_both(size) for size in self.image_sizes or ()]
        if len(set(sizes)) != len(sizes):
            raise ValueError("image_sizes names a size twice")
        return self


class PreprocessSection(Section):
    """See `spec.PreprocessSpec`; `resize` is a short side or [height, width], `crop` may be one side of a square."""

    resize: Side
    crop: Side
    interpolation: Interpolation = "bicubic"
    mean: Annotated[PerChannel, Field(strict=False)]
    std: Annotated[PerChannel, Field(strict=False)]
    fit: Fit = "stretch"
    crop_rounding: CropRounding = "even"

    @model_validator(mode="after")
    def _channels(self) -> PreprocessSection:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}; wanted 1 or 3 of each")
        if min(self.std) <= 0:
            raise ValueError("std must be above 0")
        return self

    def to_spec(self) -> PreprocessSpec:
        return PreprocessSpec(
            self.resize, _both(self.crop), self.interpolation, self.mean, self.std, self.fit, self.crop_rounding
        )


class PostprocessSection(Section):
    """See `spec.PostprocessSpec`; for detectors and panoptic models."""

    scores: Literal["softmax", "sigmoid", "given"] = "softmax"
    boxes: Literal["cxcywh", "xyxy"] = "cxcywh"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    things: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    mask_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.8


class CalibrationSection(Section):
    images: Positive = 128


class EvaluationSection(Section):
    images: Positive | Literal["all"] = "all"


class DataSection(Section):
    """A folder of images, or an .npz of token arrays.

    `labels`: class folders (`folders`), none, or what lies at `annotations`: a folder of YOLO files (`yolo`), COCO's
    instances JSON (`coco`), COCO's panoptic JSON with its folder of PNGs (`panoptic`).
    """

    path: str
    labels: Literal["folders", "none", "yolo", "coco", "panoptic"] = "folders"
    annotations: str | None = None
    calibration: CalibrationSection = CalibrationSection()
    evaluation: EvaluationSection = EvaluationSection()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class ExportSection(Section):
    """`batch` auto: dynamic, or the one of an ONNX file that has a fixed one."""

    opset: Literal[18, 19, 20] = 20
    batch: Literal["auto", "dynamic"] | Positive = "auto"
    preprocess: bool = True


class OptimizeSection(Section):
    """Graph rewrites: see `graph.passes.optimize.OptimizeOptions`. All are exact but `token_merging`: none, or how many
    tokens remain behind the attention of which blocks, as {1: 192, 6: 128}. `align_rows`: none, or a number of rows."""

    fold_layer_scale: bool = True
    rotate_residual: bool = False
    fold_attention_scale: bool = True
    drop_key_bias: bool = True
    fold_value_bias: bool = True
    fold_image_normalisation: bool = True
    class_token_only: bool = True
    qkv: Literal["keep", "merged", "separate"] = "keep"
    token_merging: Literal["none"] | dict[int, int] = "none"
    align_rows: Literal["none"] | Positive = "none"

    @field_validator("token_merging", mode="before")
    @classmethod
    def _schedule(cls, value: Any) -> Any:
        if value == "none":
            return value
        numbers = [*value, *value.values()] if isinstance(value, dict) else []
        if not numbers or not all(type(number) is int for number in numbers):
            raise ValueError("input should be none, or block: tokens that remain, as {1: 192, 6: 128}")
        remaining = [value[block] for block in sorted(value)]
        if min(value) < 0 or min(remaining) < 1:
            raise ValueError("blocks count from 0, and at least one token remains")
        if any(after >= before for before, after in itertools.pairwise(remaining)):
            raise ValueError("a later block must leave fewer tokens than the one before")
        return value

    def to_options(self) -> OptimizeOptions:
        from vitdeploy.graph.passes.optimize import OptimizeOptions

        merging = () if self.token_merging == "none" else tuple(sorted(self.token_merging.items()))
        return OptimizeOptions(
            **self.model_dump(exclude={"token_merging", "align_rows"}),
            token_merging=merging,
            align_rows=None if self.align_rows == "none" else self.align_rows,
        )


class BudgetSection(Section):
    """See `spec.Budget`."""

    max_drop: Annotated[float, Field(ge=0)] | None = None
    min_agreement: Annotated[float, Field(ge=0, le=100)] | None = None
    max_latency: Annotated[float, Field(gt=0)] | None = None
    max_size: Positive | None = None


class BenchSection(Section):
    """`scenarios`: see `bench.protocol.parse_scenario`. `batch`: the last for `offline`, the first for the others.
    `duration`: seconds an artifact and scenario; see `bench.protocol.Protocol`."""

    scenarios: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("single", "offline")
    batch: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=2, strict=False)] = (1, 8)
    duration: Annotated[float, Field(gt=0, le=3600)] = 10.0

    @field_validator("scenarios")
    @classmethod
    def _compared(cls, scenarios: tuple[str, ...]) -> tuple[str, ...]:
        """Artifacts are compared by the rounds that they take in turns, which the other scenarios have not."""
        parsed = [parse_scenario(text) for text in scenarios]
        if not any(scenario.spread for scenario in parsed):
            raise ValueError("wanted single or offline among them: these are compared")
        if len(set(scenarios)) < len(scenarios):
            raise ValueError("wanted each once")
        return scenarios


class BundleSection(Section):
    """`include_failed`: engines that fail the budget are in the bundle too. They stand last, and an app gets one only
    by `load(..., allow_failed=True)`."""

    include_failed: bool = False


class Recipe(Section):
    """The whole pipeline, schema version 1.

    `vnni`: whether the CPU that runs INT8 has it; auto: as this machine.
    """

    vitdeploy: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    source: SourceSection
    preprocess: PreprocessSection | None = None
    postprocess: PostprocessSection | None = None
    data: DataSection
    export: ExportSection = ExportSection()
    optimize: OptimizeSection = OptimizeSection()
    precision: Precision = "int8"
    vnni: Literal["auto"] | bool = "auto"
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
            raise ValueError(f"wanted at least one of {', '.join(TARGETS)}")
        for target in targets:
            if target not in TARGETS:
                near = difflib.get_close_matches(target, TARGETS, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"{target!r} is not a target; there are {', '.join(TARGETS)}{hint}")
        if len(set(targets)) != len(targets):
            raise ValueError("a target is named twice")
        return targets

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
            raise ValueError(f"no profile of tensorrt.profiles holds bench.batch {', '.join(lost)}")
        return self

    def at_sizes(self) -> tuple[Recipe, ...]:
        """A recipe for each of `source.image_sizes`, in their order; this one alone where there are none."""
        return tuple(self.at_size(_both(size)) for size in self.source.image_sizes or ()) or (self,)

    def at_size(self, size: tuple[int, int]) -> Recipe:
        """The recipe for one image size. A `preprocess` that is given holds for its own crop; for another size the same
        share of the image is cropped."""
        from vitdeploy.models.load import scaled

        source = self.source.model_copy(update={"image_size": size, "image_sizes": None})
        changed: dict[str, Any] = {"source": source}
        if self.preprocess is not None:
            spec = self.preprocess.to_spec()
            spec = scaled(spec, spec.crop, size) if spec.crop != size else spec
            new = {"resize": spec.resize, "crop": spec.crop, "fit": spec.fit}
            changed["preprocess"] = self.preprocess.model_copy(update=new)
        return self.model_copy(update=changed)

    def at_batch(self, batch: int) -> Recipe:
        """The recipe of a model that runs at one batch alone, where it leaves that open.

        Raises:
            RecipeError: it asks for engines of another batch.
        """
        if "batch" in self.bench.model_fields_set and set(self.bench.batch) != {batch}:
            told = f"$.bench.batch: {list(self.bench.batch)}, and the model is of batch {batch} alone; give [{batch}]"
            raise RecipeError("the recipe", [told])
        if self.tensorrt.profiles is not None and "tensorrt" in self.targets:
            raise RecipeError("the recipe", [f"$.tensorrt.profiles: the model is of batch {batch} alone; leave it out"])
        export = self.export.model_copy(update={"batch": batch})
        return self.model_copy(update={"export": export, "bench": self.bench.model_copy(update={"batch": (batch,)})})

    @property
    def engine_batch(self) -> int:
        """The batch that engines are compiled at: the fixed one, or that of the single stream."""
        return self.bench.batch[0]

    def to_build(self) -> BuildOptions:
        """How TensorRT builds; without profiles of one's own, for all batches up to the largest that is benched."""
        options = self.tensorrt.to_options()
        profiles = options.batches or default_batches(self.engine_batch, max(self.bench.batch))
        return dataclasses.replace(options, batches=profiles)

    def to_budget(self) -> Budget:
        return Budget(**self.budget.model_dump())

    def to_source(self) -> Source:
        from vitdeploy.models.source import Source

        source = self.source
        return Source(
            model=source.model,
            checkpoint=Path(source.checkpoint) if source.checkpoint else None,
            image_size=_both(source.image_size) if source.image_size is not None else None,
            heads=source.heads,
            text_features=Path(source.text_features) if source.text_features else None,
        )

    def to_overrides(self) -> Overrides:
        from vitdeploy.pipeline.reference_model import Overrides

        return Overrides(
            preprocess=self.preprocess.to_spec() if self.preprocess else None,
            postprocess=PostprocessSpec(**self.postprocess.model_dump()) if self.postprocess else None,
            labels=Path(self.source.labels) if self.source.labels else None,
        )

    def to_choice(self) -> DataChoice:
        from vitdeploy.pipeline.tasks.adapter import DataChoice

        data = self.data
        return DataChoice(
            path=Path(data.path),
            labels=data.labels,
            annotations=Path(data.annotations) if data.annotations else None,
            calibration=data.calibration.images,
            evaluation=data.evaluation.images,
            seed=data.seed,
        )

    def to_export(self) -> ExportConfig:
        """What the export stage is a function of, beside the original."""
        from vitdeploy.pipeline.stages.export import ExportConfig

        return ExportConfig(
            name=self.name,
            opset=self.export.opset,
            batch=self.export.batch if isinstance(self.export.batch, int) else None,
            in_graph=self.export.preprocess,
        )


def load_recipe(path: Path, overrides: Sequence[str] = (), function: str | None = None) -> Recipe:
    """Read, override and validate. Paths in the file are relative to it; paths in overrides to the working folder.

    Args:
        overrides: "a.b=value" each, the value in YAML.
        function: the user's own model, which the command line names. The recipe names none then, and no code ever.

    Raises:
        MissingFileError: no such file.
        RecipeError: not YAML, or anything that does not fit: all problems at once.
    """
    if not path.is_file():
        raise MissingFileError(f"no recipe at {path}", fix="check the path; `vitdeploy run --help` shows a recipe")
    data = _parse(path)
    _anchor(data, path.parent)
    for override in overrides:
        _set(data, override, str(path))
    if function is not None:
        data.setdefault("source", {})
    return validate(data, str(path), function)


def validate(data: Any, source: str, function: str | None = None) -> Recipe:
    """The recipe that these YAML values are; raises RecipeError with every problem. `function` as for `load_recipe`."""
    try:
        return Recipe.model_validate(data, context={FUNCTION: function})
    except ValidationError as error:
        raise RecipeError(source, [_problem(e) for e in error.errors()]) from None


def _parse(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_BYTES:
        raise RecipeError(str(path), [f"$: {path.stat().st_size:,} bytes, wanted at most {MAX_BYTES:,}"])
    try:
        data = _read_yaml(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(str(path), [f"$: not UTF-8 at byte {error.start}"]) from None
    except _NOT_YAML as error:
        raise RecipeError(str(path), ["$: not YAML: " + " ".join(str(error).split())[:300]]) from None
    if not isinstance(data, dict):
        raise RecipeError(str(path), [f"$: found {type(data).__name__}, wanted a mapping of fields"])
    return data


def _read_yaml(text: str) -> Any:
    """The values of one YAML document; raises one of _NOT_YAML."""
    _refuse_deep(text)
    return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506, TID251 - a SafeLoader that also refuses duplicate keys


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, without duplicate keys and without aliases (an alias bomb grows exponentially)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = collections.Counter(str(self.construct_object(key, deep=True)) for key, _ in node.value)
        repeated = sorted(key for key, count in keys.items() if count > 1)
        if repeated:
            raise yaml.YAMLError(f"duplicate key {', '.join(repeated)} in line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _refuse_deep(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH}")


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Make the recipe's own paths relative to the recipe, so that it runs from anywhere."""
    for section, key in PATHS:
        values = data.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str):
            if key == "model":
                values[key] = _anchored_model(values[key], folder)
                continue
            with contextlib.suppress(RuntimeError):  # the home of a user that there is not
                values[key] = str(Path(values[key]).expanduser())
            values[key] = str(folder / values[key])


def _anchored_model(model: str, folder: Path) -> str:
    """A model is a path where it is an ONNX file, the folder of one, or a folder after `hf:` that is there."""
    path = model
    with contextlib.suppress(RuntimeError):  # as above
        path = str(folder / Path(model).expanduser())
    if model.endswith(".onnx") or (not is_built_in(model) and graph_folder(path) is not None):
        return path
    name = model.removeprefix("hf:")
    if name != model and (folder / name).is_dir():
        return f"hf:{folder / name}"
    return model


def _set(data: dict[str, Any], override: str, source: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.split(".")
    if not separator or not all(keys):
        raise RecipeError(source, [f"--set {override!r}: wanted a.b=value"])
    at = data
    for key in keys[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise RecipeError(source, [f"--set {override!r}: $.{key} is not a mapping"])
    try:
        at[keys[-1]] = _read_yaml(text)
    except _NOT_YAML as error:
        raise RecipeError(source, [f"--set {override!r}: " + " ".join(str(error).split())[:200]]) from None


def _problem(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        name, siblings = str(error["loc"][-1]), _fields_at(error["loc"][:-1])
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
        path = _path(error["loc"][:-1]) + "." + (name if name.isidentifier() else ascii(name))
        return f"{path}: unknown field; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(siblings)}")
    path = _path(error["loc"])
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{path}: {message[:1].lower()}{message[1:]} (found {str(error['input'])[:60]!r})"


def _path(location: tuple[int | str, ...]) -> str:
    """`$.a.b[0]`. pydantic adds the name of the union's member to a location; it is no part of the recipe."""
    parts = (
        part
        for part in location
        if isinstance(part, int) or (part.isidentifier() and part not in ("int", "bool", "constrained", "tuple"))
    )
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in location:
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return list(model.model_fields)
