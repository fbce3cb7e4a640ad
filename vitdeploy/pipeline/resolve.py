"""Convert the sections of a recipe to the configs of the parts that they configure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitdeploy.graph.io.bound import bindings
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.names import is_graph
from vitdeploy.models.source import Source
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.recipe.sections import OptimizeSection, height_width
from vitdeploy.stages.export import ExportConfig
from vitdeploy.stages.reference_model import Overrides
from vitdeploy.tasks.adapter import TEMPLATE, DataChoice


def at_sizes(recipe: Recipe) -> tuple[Recipe, ...]:
    """A recipe for each of `source.image_sizes`, in their order; the one of `source.image_size`, or this one."""
    source = recipe.source
    sizes = source.image_sizes or ([source.image_size] if source.image_size is not None else ())
    return tuple(at_size(recipe, height_width(size)) for size in sizes) or (recipe,)


def at_size(recipe: Recipe, size: tuple[int, int]) -> Recipe:
    """The recipe for one image size. A `preprocess` that is given holds for its own crop; for another size the same
    share of the image is cropped."""
    source = recipe.source.model_copy(update={"image_size": size, "image_sizes": None})
    changed: dict[str, Any] = {"source": source}
    if recipe.preprocess is not None:
        spec = recipe.preprocess.to_spec()
        if spec.crop != size:
            from vitdeploy.models.load import scaled  # PyTorch with it

            spec = scaled(spec, spec.crop, size)
        new = {"resize": spec.resize, "crop": spec.crop, "fit": spec.fit}
        changed["preprocess"] = recipe.preprocess.model_copy(update=new)
    return recipe.model_copy(update=changed)


def source_of(recipe: Recipe) -> Source:
    """The source of a recipe. Where images of good parts lie as in MVTec AD, they are the normal ones."""
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
        bind=bindings(source.bind),
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
    )


def export_config_of(recipe: Recipe) -> ExportConfig:
    """The config of the export stage, its only input besides the original."""
    return ExportConfig(
        name=recipe.export.name or recipe.name,
        opset=recipe.export.opset,
        batch=recipe.export.batch if isinstance(recipe.export.batch, int) else None,
        in_graph=recipe.export.preprocess,
    )


def rewrites_of(section: OptimizeSection) -> OptimizeOptions:
    merging = () if section.token_merging == "none" else tuple(sorted(section.token_merging.items()))
    return OptimizeOptions(
        **section.model_dump(exclude={"token_merging", "align_rows", "split_rows", "float_rest", "prune"}),
        token_merging=merging,
        align_rows=None if section.align_rows == "none" else section.align_rows,
    )
