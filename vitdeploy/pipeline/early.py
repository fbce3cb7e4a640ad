"""Checks of a command's inputs before PyTorch, ONNX or a runtime is imported, which takes seconds.

Each check raises what the stages would raise later, by the same function. Inputs that pass can still be wrong: the
checks read no file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.bundle.read import is_bundle
from vitdeploy.data.containers.find import find_containers
from vitdeploy.data.folder import scan
from vitdeploy.data.label_file import read_texts
from vitdeploy.data.tokens import read_tokens
from vitdeploy.errors import MissingFileError
from vitdeploy.models.json_file import require_checkpoint
from vitdeploy.models.model_folder.hub import is_hub_name, local_folder
from vitdeploy.models.names import FUNCTION, check_name
from vitdeploy.paths import exists, is_dir, is_file
from vitdeploy.pipeline.artifact import form_of
from vitdeploy.pipeline.available import require_target
from vitdeploy.runtime.host import require_real_times
from vitdeploy.runtime.preprocess import SUFFIXES
from vitdeploy.stages.capability import check_engine as check_engine
from vitdeploy.stages.capability import check_target as check_target
from vitdeploy.stages.step import find_graph, require_label_file, require_onnx_file

if TYPE_CHECKING:
    from vitdeploy.recipe.recipe import Recipe

REPORT_FILE = "report.json"


def check_recipe(recipe: Recipe, targets: Iterable[str] | None = None) -> None:
    """The files that a recipe names are there, its model's name is one, its targets work here, and times are real here.

    Args:
        targets: instead of the recipe's.

    Raises:
        MissingFileError, DataError, UnknownModelError, TargetError, CapabilityError, MissingPackageError.
    """
    require_real_times()
    for target in recipe.targets if targets is None else targets:
        require_target(target, recipe.precision)
    source = recipe.source
    check_model(source.model, source.checkpoint, source.labels)
    check_data(Path(recipe.data.path))
    if source.normal:
        check_data(Path(source.normal))
    require_annotations(Path(recipe.data.annotations) if recipe.data.annotations else None)
    if recipe.data.texts:
        read_texts(Path(recipe.data.texts))


def check_model(model: str | None, checkpoint: str | Path | None = None, labels: str | Path | None = None) -> None:
    """A model as a recipe or `vitdeploy export` names it, and its files.

    Raises:
        MissingFileError, UnknownModelError: one is not there.
    """
    if checkpoint is not None:
        require_checkpoint(Path(checkpoint))
    if labels is not None:
        require_label_file(Path(labels))
    if model is None:
        return
    if model.endswith(".onnx"):
        require_onnx_file(Path(model))
    elif is_hub_name(model):
        local_folder(model)
    else:
        check_name(model)


def check_artifact(text: str) -> None:
    """A bundle, a graph or a model, as `verify` and `bench` take them.

    Raises:
        MissingFileError, UnknownModelError: it is none of these.
    """
    form = form_of(text)
    if form == "hub":
        local_folder(text)
    elif form == "path":
        find_graph(Path(text))
    elif form == "name" and FUNCTION.fullmatch(text) is None:
        check_name(text)


def check_data(path: Path) -> None:
    """Images, or the arrays of an .npz.

    Raises:
        MissingFileError, DataError: there is nothing at the path. MissingPackageError: what reads it is not installed.
    """
    if path.suffix == ".npz":
        if not is_file(path):
            read_tokens(path)
    elif not is_dir(path):
        if find_containers(path, SUFFIXES) is None:
            scan(path, "none")
    elif next(path.iterdir(), None) is None:
        scan(path, "none")


def require_annotations(path: Path | None) -> None:
    if path is not None and not exists(path):
        raise MissingFileError(
            f"no annotations at {path}",
            wanted="YOLO's folder, COCO's JSON file, the folder of maps, or the JSON list of texts or prompts",
            fix="check the path of the annotations",
        )


def is_report(path: Path) -> bool:
    """Whether an argument is a report (which is read) and not a bundle (which is run).

    Raises:
        MissingFileError: it is neither.
    """
    if is_dir(path) and is_bundle(path):
        return False
    if (path.suffix == ".json" and is_file(path)) or is_file(path / REPORT_FILE):
        return True
    raise MissingFileError(
        f"neither a bundle nor a report at {path}",
        found="no manifest.json and no report.json in it" if is_dir(path) else "no such folder, and no .json file",
        wanted="a bundle, or a report.json of `vitdeploy run`",
        fix="check the path",
    )
