"""A job: a recipe with its data, its original and its task adapter, before any stage runs."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy import __version__
from vitdeploy.backends import TARGETS
from vitdeploy.extensions import lazy
from vitdeploy.graph.io import admit, bound
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.model_folder.image_processor import scaled
from vitdeploy.models.names import is_graph
from vitdeploy.models.source import Source
from vitdeploy.pipeline import early, setting
from vitdeploy.progress import Progress
from vitdeploy.quantization.placement_reader import reject_quantized
from vitdeploy.recipe.recipe import OptimizeSection, Recipe, height_width
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.inputs import require_image_alone
from vitdeploy.runtime.values import bits_for
from vitdeploy.spec import Budget, WeightBits
from vitdeploy.stages import place, rows, step
from vitdeploy.stages.compile import check_task
from vitdeploy.stages.reference_model import Overrides, ReferenceModel, find_reference_model, is_onnx
from vitdeploy.tasks.adapter import TEMPLATE, Data, DataChoice, TaskAdapter
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.verification.gate import with_guard

if TYPE_CHECKING:
    from vitdeploy.stages import export
else:
    export = lazy("vitdeploy.stages.export")  # needs PyTorch, which measuring and comparing do not

# --- Conversion of the sections of a recipe to the configs of stages --------------------------------------------------


def at_sizes(recipe: Recipe) -> tuple[Recipe, ...]:
    """A recipe for each of `source.image_sizes`, in their order; otherwise one for `source.image_size`, or this one."""
    source = recipe.source
    sizes = source.image_sizes or ([source.image_size] if source.image_size is not None else ())
    return tuple(at_size(recipe, height_width(size)) for size in sizes) or (recipe,)


def at_size(recipe: Recipe, size: tuple[int, int]) -> Recipe:
    """The recipe for one image size. An explicit `preprocess` applies to its own crop; for another size, it is scaled
    to crop the same share of the image."""
    source = recipe.source.model_copy(update={"image_size": size, "image_sizes": None})
    changed: dict[str, Any] = {"source": source}
    if recipe.preprocess is not None:
        spec = recipe.preprocess.to_spec()
        if spec.crop != size:
            spec = scaled(spec, spec.crop, size)
        new = {"resize": spec.resize, "crop": spec.crop, "fit": spec.fit}
        changed["preprocess"] = recipe.preprocess.model_copy(update=new)
    return recipe.model_copy(update=changed)


def source_of(recipe: Recipe) -> Source:
    """The source of a recipe. Data in the layout of MVTec AD also provides the normal images."""
    source = recipe.source
    normal = source.normal
    if normal is None and source.task == "anomaly" and recipe.data.labels == "mvtec" and not is_graph(source.model):
        normal = recipe.data.path
    return Source(
        model=source.model,
        checkpoint=Path(source.checkpoint) if source.checkpoint else None,
        image_size=height_width(source.image_size) if source.image_size is not None else None,
        heads=source.heads,
        task=source.task,
        text_features=Path(source.text_features) if source.text_features else None,
        normal=Path(normal) if normal else None,
        bind=bound.bindings(source.bind),
    )


def overrides_of(recipe: Recipe) -> Overrides:
    return Overrides(
        preprocess=recipe.preprocess.to_spec() if recipe.preprocess else None,
        postprocess=recipe.postprocess.to_spec() if recipe.postprocess else None,
        labels=Path(recipe.source.labels) if recipe.source.labels else None,
    )


def choice_of(recipe: Recipe) -> DataChoice:
    data = recipe.data
    return DataChoice(
        path=Path(data.path),
        labels=data.labels,
        annotations=Path(data.annotations) if data.annotations else None,
        calibration=None if data.calibration.images == "auto" else data.calibration.images,
        evaluation=data.evaluation.images,
        seed=data.seed,
        texts=Path(data.texts) if data.texts else None,
        template=data.template or TEMPLATE,
        inputs=Path(data.inputs) if data.inputs else None,
    )


def export_config_of(recipe: Recipe) -> "export.ExportConfig":
    """The config of the export stage, its only input besides the original."""
    return export.ExportConfig(
        name=recipe.export.name or recipe.name,
        opset=recipe.export.opset,
        batch=recipe.export.batch if isinstance(recipe.export.batch, int) else None,
        in_graph=recipe.export.preprocess,
    )


def rewrites_of(section: OptimizeSection) -> OptimizeOptions:
    merging = () if section.token_merging == "none" else tuple(sorted(section.token_merging.items()))
    return OptimizeOptions(
        **section.model_dump(exclude={"token_merging", "split_rows", "float_rest", "prune"}), token_merging=merging
    )


# --- Preparation of a recipe on this machine: read the model, read and split the data, check the runtimes -------------


@dataclass(frozen=True)
class Job:
    """Everything that a plan depends on. `prefix`: the prefix of messages, the image size if there are several."""

    recipe: Recipe
    reference_model: ReferenceModel
    adapter: TaskAdapter
    data: Data
    prefix: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The class names for answers, which the bundle includes: the model's own, or those of the data if the answers
        have the data's classes."""
        return self.reference_model.labels or (self.data.classes if self.adapter.named_by_data else ())

    @property
    def weight_bits(self) -> WeightBits:
        """Bits of INT8 weights that suit the CPU of the recipe."""
        return weight_bits(None if self.recipe.vnni == "auto" else self.recipe.vnni)

    @property
    def size(self) -> str:
        return self.reference_model.size

    @property
    def budget(self) -> Budget:
        """The budget of the engines: the recipe's, with the guard if it does not bound the loss."""
        return with_guard(self.recipe.to_budget(), self.adapter.guard)


def prepare(
    recipe: Recipe,
    *,
    skip_bad: bool,
    progress: Progress,
    function: str | None = None,
    module: Path | None = None,
) -> tuple[Job, ...]:
    """Resolve a recipe: a job for each of its image sizes, all on the same samples.

    `function` is the user's own model, `package.module:function`, for a recipe without a model; `module` is the file of
    an in-memory module.

    Raises:
        MissingFileError, UnknownModelError, CheckpointError, DataError, ImageError: an input is missing or unusable.
        MissingPackageError, CapabilityError: a target's runtime is missing, or does not support the precision.
    """
    for target in recipe.targets:
        early.require_target(target, recipe.precision)
    recipes = at_sizes(recipe)
    reference_models, settled = [], []
    for i, each in enumerate(recipes):
        progress("load the model", i, len(recipes))
        source = dataclasses.replace(source_of(each), function=function, module=module)
        overrides = overrides_of(each)
        source = setting.fitted(source, overrides, progress, skip_bad=skip_bad)
        reference_model, batch = export.settle_batch(find_reference_model(source, overrides), each.export.batch)
        reference_models.append(reference_model)
        settled.append(each.at_batch(batch) if batch is not None and each.export.batch == "auto" else each)
    progress("load the model", len(recipes), len(recipes))
    for target in recipe.targets:
        check_task(reference_models[0].task, target, recipe.precision)
    place.check_float_parts(reference_models[0].task, recipe.float_parts)
    _require_shown(recipe, reference_models[0])
    if recipe.optimize.prune != "none":
        rows.check_prune(reference_models[0].task, reference_models[0].preprocess)
    if recipe.precision in ("int8", "mixed", "int4") and is_onnx(reference_models[0].source):
        reject_quantized(admit.admit_graph(Path(str(reference_models[0].source.model))), reference_models[0].name)
    first = make_adapter(setting.reference_setting(reference_models[0]))
    data = first.load(choice_of(recipe), skip_bad=skip_bad, progress=progress)
    for reference_model in reference_models:
        setting.refuse_known(reference_model.source, data.evaluation)
    reference_models = [setting.with_fitted(reference_model, data, progress) for reference_model in reference_models]
    adapters = [make_adapter(setting.reference_setting(reference_model)) for reference_model in reference_models]
    return tuple(
        Job(each, reference_model, adapter, data, f"{reference_model.size}: " if len(recipes) > 1 else "")
        for each, reference_model, adapter in zip(settled, reference_models, adapters, strict=True)
    )


def _require_shown(recipe: Recipe, model: ReferenceModel) -> None:
    """Raise CapabilityError if a part of the run feeds images to a model that needs further inputs."""
    section = recipe.optimize
    asked = {
        "precision: mixed": recipe.precision == "mixed",
        "optimize.prune": section.prune != "none",
        "optimize.token_merging": section.token_merging != "none",
        "optimize.split_rows": section.split_rows not in ("auto", "none"),
        "source.image_sizes": recipe.source.image_sizes is not None,
        **{
            f"precision: int8 for {target}": TARGETS[target].typed and recipe.precision == "int8"
            for target in recipe.targets
        },
    }
    for name, expected in asked.items():
        if expected:
            require_image_alone(model.name, model.inputs, name)


def weight_bits(vnni: bool | None) -> WeightBits:
    """Bits of INT8 weights for a CPU with or without VNNI; None for this machine's CPU."""
    if vnni is None:
        return bits_for(describe_host()["isa"])
    return 8 if vnni else 7


def tool_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of vitdeploy and of the named packages."""
    return {"vitdeploy": __version__, **step.package_versions(packages)}
