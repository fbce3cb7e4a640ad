"""Names of model folders, local or on the Hugging Face hub (which needs a network).

    hf:FOLDER            a folder with config.json and model.safetensors; never needs the network
    hf:OWNER/NAME[@REV]  a repository of the hub; REV is a branch, tag or commit
    timm:NAME[.TAG]      the repository timm/NAME.TAG, where timm keeps its weights

The commit is recorded, so that a second run uses the same files.
"""

import contextlib
import textwrap
from pathlib import Path

from vitdeploy.errors import HubError, MissingFileError, MissingPackageError
from vitdeploy.models.json_file import INDEX
from vitdeploy.models.model_folder.folder import (
    CONFIG,
    OPEN_CLIP,
    OPEN_CLIP_WEIGHTS,
    PICKLED,
    PREPROCESSOR,
    PROCESSOR,
    SAFETENSORS,
    ModelFolder,
    model_config,
)
from vitdeploy.models.model_folder.tokenizer import TOKENIZER, TOKENIZER_CONFIG
from vitdeploy.paths import is_dir, is_file

EXPECTED = [
    *(CONFIG, OPEN_CLIP, PREPROCESSOR, PROCESSOR, TOKENIZER, TOKENIZER_CONFIG),
    *(SAFETENSORS, INDEX, "model-*-of-*.safetensors"),
]


def is_hub_name(model: str) -> bool:
    """Whether a name refers to a model folder, local or on the hub, not to a path or a built-in model."""
    return model.startswith(("hf:", "timm:"))


def locate(model: str) -> ModelFolder:
    """Return the folder of `hf:...` or `timm:...`, downloaded if necessary.

    Raises:
        MissingFileError: a path that is not a folder.
        MissingPackageError: huggingface_hub is not installed.
        HubError: the hub cannot be reached, or has no such repository.
    """
    library, _, name = model.partition(":")
    repository, _, revision = name.partition("@")
    folder = local_folder(model)
    if folder is not None:
        return ModelFolder(folder)
    return _download(f"timm/{_tagged(repository)}" if library == "timm" else repository, revision or None)


def local_folder(model: str) -> Path | None:
    """Return the local folder that `hf:...` names; None if it is on the hub.

    Raises:
        MissingFileError: a path that is not a folder, or has no config. CheckpointError: an invalid config.
    """
    library, _, name = model.partition(":")
    folder = Path(name)
    with contextlib.suppress(RuntimeError):  # the home of an unknown user
        folder = folder.expanduser()
    if library != "hf":
        return None
    if is_dir(folder):
        if not ModelFolder(folder).is_open_clip:
            model_config(folder / CONFIG)
        return folder
    if name.startswith((".", "/", "~")) or name.partition("@")[0].count("/") != 1:
        raise MissingFileError(
            f"no folder at {name}",
            expected="hf:FOLDER with config.json and model.safetensors, or hf:OWNER/NAME on the Hugging Face hub",
            fix="check the path",
        )
    return None


def _tagged(name: str) -> str:
    """Return timm's architecture name with the tag of its default weights, as in the repository's name.

    The name stays unchanged if timm is not installed, or has no tag for it.
    """
    if "." in name:
        return name
    try:
        from timm.models import get_pretrained_cfg
    except Exception:  # not installed, or incompatible with the installed torch: use the name as it is
        return name
    config = get_pretrained_cfg(name, allow_unregistered=True)
    return f"{name}.{config.tag}" if config is not None and config.tag else name


def _untagged(repository: str) -> str:
    return "; timm's are named NAME.TAG" if repository.startswith("timm/") and "." not in repository else ""


def _download(repository: str, revision: str | None) -> ModelFolder:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        raise MissingPackageError("huggingface_hub", "export", f"downloading {repository}", error=error) from None
    try:
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=EXPECTED))
        if not any(path.glob("*.safetensors")):
            # Old repositories. Others have both formats; fetching one saves half of the bytes.
            snapshot_download(repository, revision=path.name, allow_patterns=[PICKLED])
        for name in OPEN_CLIP_WEIGHTS[:2]:
            if ModelFolder(path).is_open_clip and not any(is_file(path / each) for each in OPEN_CLIP_WEIGHTS):
                snapshot_download(repository, revision=path.name, allow_patterns=[name])
    except HFValidationError as error:
        raise HubError(f"{repository!r} is not a valid repository name", found=str(error)[:200]) from None
    except Exception as error:  # errors of huggingface_hub, of its HTTP client, of its storage's client, of the disk
        raise HubError(
            f"{repository} cannot be downloaded from the Hugging Face hub",
            found=textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__,
            expected="a network connection, and a repository of that name"
            + (f" at {revision}" if revision else "")
            + _untagged(repository),
            fix=f"on a machine with a network: hf download {repository} --local-dir DIR; copy DIR here, then hf:DIR",
        ) from None
    return ModelFolder(path, repository, path.name)


def pinned(model: str, folder: ModelFolder) -> str:
    """Return `model` unchanged for a local folder, else the repository at its commit, which gives the same files."""
    return model if folder.repository is None else f"hf:{folder.repository}@{folder.revision}"
