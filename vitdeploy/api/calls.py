"""Functions of options: their signatures, and the checks made before anything heavy is imported.

`cli.options.call` checks names, paths and targets before it imports the implementation; `takes` before the work.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from vitdeploy.api.artifacts import ArtifactLike, Bundle, artifact_name, graph_file
from vitdeploy.api.images import ImagesLike, images
from vitdeploy.api.option import Chosen, Options, described
from vitdeploy.api.options import (
    Bench,
    Bisect,
    Compare,
    Compile,
    Optimize,
    Quantize,
    Run,
    Sweep,
    TuneRecipe,
    VerifyOn,
    VersionsOptions,
)
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.sign import require_pem
from vitdeploy.errors import InputError
from vitdeploy.pipeline import early
from vitdeploy.pipeline.early import check_placed, require_target
from vitdeploy.publish import check_replaceable
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.stages.step import OUTPUT_NAMES, TUNED_NAMES, check_engine, check_precision, check_target
from vitdeploy.workflows.executors import executor_of

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def takes(options: Callable[P, Chosen]) -> Callable[[Callable[[Chosen], R]], Callable[P, R]]:
    """Let a function of options be called with their fields: keywords, defaults, ranges and documentation come from the
    class. The attribute `of` is the function itself."""

    def decorate(function: Callable[[Chosen], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def by_keywords(*args: P.args, **kwargs: P.kwargs) -> R:
            chosen = options(*args, **kwargs)
            check_early(chosen)
            return function(chosen)

        by_keywords.of = function  # type: ignore[attr-defined]
        return documented(cast("type[Options]", options))(by_keywords)

    return decorate


def takes_after(
    options: Callable[P, Chosen],
) -> Callable[[Callable[[str, Chosen], R]], Callable[Concatenate[str, P], R]]:
    """`takes` for a function that takes `on` before its options."""

    def decorate(function: Callable[[str, Chosen], R]) -> Callable[Concatenate[str, P], R]:
        @functools.wraps(function)
        def by_keywords(on: str, *args: P.args, **kwargs: P.kwargs) -> R:
            chosen = options(*args, **kwargs)
            check_early(chosen)
            return function(on, chosen)

        by_keywords.of = function  # type: ignore[attr-defined]
        described_function = documented(cast("type[Options]", options), first="on")(by_keywords)
        return cast("Callable[Concatenate[str, P], R]", described_function)

    return decorate


def documented(options: type[Options], many: str = "", first: str = "") -> Callable[[F], F]:
    """Give a function the signature and the documentation of its options. `many`: the field passed as `*many`; `first`:
    a parameter before the options."""

    def decorate(function: F) -> F:
        kinds = inspect.Parameter
        parameters = [kinds(first, kinds.POSITIONAL_OR_KEYWORD)] if first else []
        parameters += [
            each.replace(kind=kinds.VAR_POSITIONAL) if each.name == many else each
            for each in inspect.signature(options).parameters.values()
        ]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        texts = {each.name: about.doc or api_text(about.help) for each, about in described(options)}
        lines = [
            textwrap.fill(f"{name}: {text}", 116, initial_indent=" " * 8, subsequent_indent=" " * 12)
            for name, text in texts.items()
            if text
        ]
        before, raises, after = (function.__doc__ or "").partition("    Raises:")
        function.__doc__ = "\n".join([f"{before.rstrip()}\n\n    Args:", *lines, f"\n{raises}{after}"])
        return function

    return decorate


def api_text(help: str) -> str:
    """A text of the command line with option names replaced by parameter names."""
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda match: match[1].replace("-", "_"), help)


# --- Early checks -----------------------------------------------------------------------------------------------------


@functools.singledispatch
def check_early(options: Options) -> None:
    """Check names, paths and targets; errors are those of the function. Nothing heavy is imported."""


@check_early.register
def _(options: Optimize) -> None:
    graph_file(options.graph)
    _check_folder(options.folder)


@check_early.register
def _(options: Quantize) -> None:
    executor_of(options.executor, 1)
    check_placed(options.target, options.precision)
    if options.precision == "mixed":
        require_runtime(options.target)
    graph_file(options.graph)
    _check_images(options.data)
    _check_folder(options.folder)


@check_early.register
def _(options: Compile) -> None:
    if options.on is None:
        require_target(options.target, options.precision or "fp32")
    else:
        check_precision(options.target, options.precision or "fp32")
    graph_file(options.graph)
    _check_folder(options.folder)


@check_early.register(VerifyOn)
@check_early.register(Bisect)
def _(options: VerifyOn | Bisect) -> None:
    if isinstance(options, Bisect):
        require_path(options.artifact)
        require_path(options.against)
    else:
        require_pem(options.trust)
    if options.target is not None:
        check_engine(options.target)
    for artifact in (options.artifact, options.against):
        _check_artifact(artifact)
    _check_images(options.data)


@check_early.register
def _(options: Bench) -> None:
    if not options.artifacts:
        raise InputError("no artifact to measure", found="0 artifacts", expected="at least one artifact")
    if options.target is not None:
        check_engine(options.target)
    for artifact in options.artifacts:
        _check_artifact(artifact)
    require_pem(options.trust)


@check_early.register
def _(options: Compare) -> None:
    if options.target is not None:
        check_target(options.target)
    for side in (options.baseline, options.candidate):
        early.is_report(side.folder if isinstance(side, Bundle) else Path(side))
    require_pem(options.trust)
    if options.data is not None:
        _check_images(options.data)


@check_early.register
def _(options: VersionsOptions) -> None:
    read_bundle(options.bundle.folder if isinstance(options.bundle, Bundle) else Path(options.bundle))


@check_early.register(Run)
@check_early.register(TuneRecipe)
def _(options: Run | TuneRecipe) -> None:
    from vitdeploy.recipe.load import given_recipe

    recipe = given_recipe(options.recipe, options.overrides, options.function)
    _check_folder(options.folder, OUTPUT_NAMES if isinstance(options, Run) else TUNED_NAMES)
    if isinstance(options, Run):
        early.check_recipe(recipe)
    else:  # tune tries every precision
        early.check_recipe(recipe.model_copy(update={"precision": "fp32"}), options.targets or None)


@check_early.register
def _(options: Sweep) -> None:
    from vitdeploy.recipe.grid import list_recipes

    list_recipes(options.recipes, options.overrides, options.function)


def check_export(name: str | None, options: Any) -> None:
    """Check the model of `vitdeploy export`, which may be a recipe's, and the output folder."""
    _check_folder(options.folder)
    if options.normal:
        early.check_data(options.normal)
    checkpoint, labels = options.checkpoint, options.labels
    if name is not None and name.endswith((".yaml", ".yml")):
        from vitdeploy.recipe.load import load_recipe

        source = load_recipe(Path(name), (), options.function).source
        name, checkpoint, labels = source.model, checkpoint or source.checkpoint, labels or source.labels
    early.check_model(name, checkpoint, labels)


def _check_folder(folder: str | Path | None, names: tuple[str, ...] = OUTPUT_NAMES) -> None:
    if folder is not None:
        check_replaceable(Path(folder), names)


def _check_artifact(artifact: ArtifactLike) -> None:
    if (name := artifact_name(artifact)) is not None:
        early.check_artifact(name)


def _check_images(data: ImagesLike) -> None:
    chosen = images(data)
    if chosen.path is not None:
        early.check_data(chosen.path)
    early.require_annotations(chosen.annotations)


def require_path(artifact: ArtifactLike) -> str:
    name = artifact_name(artifact)
    if name is None:
        raise InputError(
            "a model in memory has no graph",
            found=str(type(artifact).__name__),
            expected="a graph or a bundle",
            fix="export it first: vitdeploy.export(...)",
        )
    return name
