"""Interpretation and early checks of command arguments, before PyTorch, ONNX or a runtime is imported.

Each check calls the same function as the stages, and so raises the same error. Inputs that pass can still be wrong: the
checks read no file contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import is_bundle, read_bundle, verify_files
from vitdeploy.bundle.sign import signed_by
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.data import label_file, tokens
from vitdeploy.data.containers.find import find_containers
from vitdeploy.data.folder import scan
from vitdeploy.errors import CapabilityError, MissingFileError
from vitdeploy.models import json_file, names
from vitdeploy.models.model_folder.hub import is_hub_name, local_folder
from vitdeploy.paths import exists, is_dir, is_file
from vitdeploy.runtime import host, preprocess, values
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.spec import Manifest
from vitdeploy.stages import step

if TYPE_CHECKING:
    from vitdeploy.recipe.recipe import Recipe

DEFAULT_TARGET = "onnxruntime-cpu"
REPORT_FILE = "report.json"

# --- The kind of an argument: a bundle, a graph that vitdeploy wrote, or a model --------------------------------------


def form_of(text: str) -> Literal["bundle", "hub", "path", "name"]:
    """The kind of an argument by its text and by which paths exist; no file is read."""
    path = Path(text)
    if is_bundle(path):
        return "bundle"
    if is_hub_name(text):
        return "hub"
    return "path" if exists(path) or path.suffix == ".onnx" or "/" in text else "name"


def kind_of(text: str) -> Literal["bundle", "graph", "model"]:
    """The kind of artifact that an argument names. A graph from another exporter counts as a model; a missing path
    counts as a graph, because the errors for graphs name what is missing."""
    form, path = form_of(text), Path(text)
    if form == "bundle":
        return "bundle"
    foreign = path.suffix == ".onnx" and is_file(path) and not step.is_ours(path)
    return "graph" if form == "path" and not foreign else "model"


def open_bundle(folder: Path, trust: Path | None = None) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest and the labels of a bundle after checks of its files and, with `trust`, of its signature. Errors of
    `read_bundle`, `verify_files`, `signed_by` and `read_labels` propagate."""
    manifest = read_bundle(folder)
    verify_files(folder, manifest)
    signed_by(folder, trust)
    return manifest, tuple(values.read_labels(folder, manifest) or ())


def float_graph(text: str) -> Path | None:
    """The float graph at a path; None if the path has no float graph."""
    from vitdeploy.graph.io.files import admitted_metadata

    path = Path(text)
    if not exists(path) or (is_file(path) and not step.is_ours(path)):
        return None
    file = step.find_graph(path)
    return file if admitted_metadata(file).precision is None else None


def default_target(file: Path) -> str:
    """The target of a graph for which the user names none."""
    from vitdeploy.graph.io.files import admitted_metadata

    return admitted_metadata(file).target or DEFAULT_TARGET


def new_folder(work: Path, name: str) -> Path:
    """A new folder in `work`, whose name begins with `name`."""
    folder = work / f"{name}{len(list(work.iterdir()))}"
    folder.mkdir()
    return folder


# --- Checks of targets on this machine: the runtime is installed and supports the precision ---------------------------


def check_placed(target: str, precision: str) -> None:
    """Check that a target has a precision in the graph; some targets have half precision only as a runtime setting.

    Raises:
        TargetError, CapabilityError, MissingPackageError: as `require_target`, or the precision is a runtime setting.
    """
    step.check_target(target)
    row = TARGETS[target]
    if precision in ("fp16", "bf16") and not row.typed and precision in row.precisions:
        require_runtime(target)  # the fix (compile) works only if this machine has the precision
        COMPILE[target].require_precision(precision)
        raise CapabilityError(
            f"{target} has {precision} as a runtime setting, not as a precision of the graph",
            found=f"--precision {precision}",
            expected=", ".join(name for name in step.QUANTIZED if name in row.precisions),
            fix=f"compile the float graph: vitdeploy compile DIR --target {target} --precision {precision} -o OUT",
        )
    step.check_precision(target, precision)


def require_target(target: str, precision: str) -> None:
    """Check that a target supports the precision, and that its runtime is installed and supports it on this machine.

    Raises:
        TargetError, CapabilityError, MissingPackageError: one of these checks failed.
    """
    step.check_precision(target, precision)
    require_runtime(target)
    if precision in ("fp16", "bf16"):
        COMPILE[target].require_precision(precision)


# --- Checks that the files of a command exist -------------------------------------------------------------------------


def check_recipe(recipe: Recipe, targets: Iterable[str] | None = None) -> None:
    """Check a recipe: its files exist, its model is known, its targets work here, and this machine is not emulated.

    Args:
        targets: targets to check instead of the recipe's.

    Raises:
        MissingFileError, DataError, UnknownModelError, TargetError, CapabilityError, MissingPackageError: a check
            failed.
    """
    host.require_real_times()
    for target in recipe.targets if targets is None else targets:
        require_target(target, recipe.precision)
    source = recipe.source
    check_model(source.model, source.checkpoint, source.labels)
    check_data(Path(recipe.data.path))
    if source.normal:
        check_data(Path(source.normal))
    require_annotations(Path(recipe.data.annotations) if recipe.data.annotations else None)
    if recipe.data.texts:
        label_file.read_texts(Path(recipe.data.texts))


def check_model(model: str | None, checkpoint: str | Path | None = None, labels: str | Path | None = None) -> None:
    """Check a model as named in a recipe or for `vitdeploy export`, and its files.

    Raises:
        MissingFileError, UnknownModelError: the model or a file does not exist.
    """
    if checkpoint is not None:
        json_file.require_checkpoint(Path(checkpoint))
    if labels is not None:
        step.require_label_file(Path(labels))
    if model is None:
        return
    if model.endswith(".onnx"):
        step.require_onnx_file(Path(model))
    elif is_hub_name(model):
        local_folder(model)
    else:
        names.check_name(model)


def check_artifact(text: str) -> None:
    """Check a bundle, a graph or a model as an argument of `verify` or `bench`.

    Raises:
        MissingFileError, UnknownModelError: it does not exist. ManifestError: a bundle with an invalid manifest.
    """
    form = form_of(text)
    if form == "hub":
        local_folder(text)
    elif form == "path":
        step.find_graph(Path(text))
    elif form == "bundle":
        read_bundle(Path(text))
    elif form == "name" and names.FUNCTION.fullmatch(text) is None:
        names.check_name(text)


def check_data(path: Path) -> None:
    """Check a path to images, or to the arrays of an .npz.

    Raises:
        MissingFileError, DataError: the path does not exist or is empty. MissingPackageError: its reader is not
            installed.
    """
    if path.suffix == ".npz":
        if not is_file(path):
            tokens.read_tokens(path)
    elif not is_dir(path):
        if find_containers(path, preprocess.SUFFIXES) is None:
            scan(path, "none")
    elif next(path.iterdir(), None) is None:
        scan(path, "none")


def require_annotations(path: Path | None) -> None:
    if path is not None and not exists(path):
        raise MissingFileError(
            f"no annotations at {path}",
            expected="a YOLO folder, a COCO JSON file, a folder of maps, or a JSON list of texts or prompts",
            fix="check the path of the annotations",
        )


def is_report(path: Path) -> bool:
    """Whether an argument is a report rather than a bundle.

    Raises:
        MissingFileError: it is neither.
    """
    if is_dir(path) and is_bundle(path):
        return False
    if (path.suffix == ".json" and is_file(path)) or is_file(path / REPORT_FILE):
        return True
    raise MissingFileError(
        f"neither a bundle nor a report at {path}",
        found="a folder without manifest.json and report.json" if is_dir(path) else "no such folder or .json file",
        expected="a bundle, or a report.json of `vitdeploy run`",
        fix="check the path",
    )
