"""Model folders: a local one, or one of the Hugging Face hub where there is a network.

    hf:FOLDER            a folder with config.json and model.safetensors; never needs the network
    hf:OWNER/NAME[@REV]  that repository; REV a branch, tag or commit
    timm:NAME[.TAG]      the repository timm/NAME.TAG, where timm keeps its weights

What was taken is recorded as a commit, so that a second run takes the same.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import CheckpointError, HubError, MissingFileError, MissingPackageError
from vitdeploy.models.config_files import any_json, read_json

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = "model.safetensors.index.json"
# Which counts where a folder has several, as in transformers: save_pretrained leaves what an earlier save has written.
WEIGHTS = (SAFETENSORS, INDEX, PICKLED, "pytorch_model.bin.index.json")
SHARD = re.compile(r".+-\d{5}-of-\d{5}\.\w+")
WANTED = [CONFIG, PREPROCESSOR, PROCESSOR, SAFETENSORS, INDEX, "model-*-of-*.safetensors"]


@dataclass(frozen=True)
class ModelFolder:
    """`revision` is the hub's commit, None for a folder of the user's own. `given`: the weights that the user named
    instead of the folder's."""

    path: Path
    repository: str | None = None
    revision: str | None = None
    given: tuple[Path, ...] = ()

    @property
    def has_config(self) -> bool:
        """Whether it has a model's config.json; those of other programs have the same name.

        Raises:
            CheckpointError: one that cannot be parsed, so that nothing says whose it is.
        """
        path = self.path / CONFIG
        if not path.is_file():
            return False
        try:
            config = any_json(path)
        except CheckpointError as error:
            error.fix += "; or move it elsewhere, if it is another program's"
            raise
        return isinstance(config, dict) and bool({"model_type", "architecture"} & config.keys())

    @property
    def weights(self) -> tuple[Path, ...]:
        """The files that hold the weights, in order.

        Raises:
            MissingFileError: the folder has none, or not all of those that its index names.
            CheckpointError: an index that cannot be read, or names files outside of the folder.
        """
        if self.given:
            return self.given
        for name in WEIGHTS:
            if (self.path / name).is_file():
                return files_of(self.path / name)
        from vitdeploy.models.other_kinds import refuse_folder  # which reads weights by PyTorch

        refuse_folder(self.path)
        raise MissingFileError(
            f"no weights in {self.path}",
            found=", ".join(sorted(entry.name for entry in self.path.iterdir())[:8]) or "an empty folder",
            wanted=f"{SAFETENSORS} or {PICKLED}",
            fix="copy the whole folder of the model",
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the model is a function of."""
        configs = (self.path / name for name in (CONFIG, PREPROCESSOR, PROCESSOR))
        return (*(path for path in configs if path.is_file()), *self.weights)


def shards_of(index: Path) -> tuple[Path, ...]:
    """The files that an index of weights names, in order.

    Raises:
        MissingFileError, CheckpointError: not all of them are there; not an index, or one that names other folders.
    """
    shards = _shards(index)
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise MissingFileError(
            f"{len(missing)} of {len(shards)} weight files are not in {index.parent}",
            found=f"no {missing[0]}",
            wanted=f"all files that {index.name} names",
            fix="copy the whole folder of the model",
        )
    return tuple(index.parent / name for name in shards)


def files_of(checkpoint: Path) -> tuple[Path, ...]:
    """The weight files that a checkpoint file stands for: all of its index, whether the index or one part is named."""
    if checkpoint.name.endswith(".index.json") and checkpoint.is_file():
        return shards_of(checkpoint)
    if SHARD.fullmatch(checkpoint.name) and checkpoint.is_file():
        for index in sorted(checkpoint.parent.glob("*.index.json")):
            if checkpoint.name in _shards(index):
                return shards_of(index)
        raise CheckpointError(
            f"{checkpoint} is one part of several, and nothing names the others",
            found="no index beside it",
            wanted=f"{INDEX}, and all files that it names",
            fix="copy the whole folder of the model",
        )
    return (checkpoint,)


def beside(checkpoint: Path) -> ModelFolder | None:
    """The folder of a checkpoint that is in several files, or has a model's config.json beside it; else None."""
    files = files_of(checkpoint)
    folder = ModelFolder(checkpoint.parent, given=files)
    return folder if files != (checkpoint,) or (checkpoint.is_file() and folder.has_config) else None


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is not a weight index", fix="download it again") from None
    if not names or any(not isinstance(name, str) or name in ("", "..") or Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside its folder", found=str(names)[:200])
    return names


def is_hub_name(model: str) -> bool:
    """Whether a name is of a model folder, here or on the hub, and not a path or a built-in name."""
    return model.startswith(("hf:", "timm:"))


def locate(model: str) -> ModelFolder:
    """The folder of `hf:...` or `timm:...`, downloaded where it has to be.

    Raises:
        MissingFileError: a path that is no folder.
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
    """The folder of this machine that `hf:...` names; None where the hub is asked.

    Raises:
        MissingFileError: a path that is no folder.
    """
    library, _, name = model.partition(":")
    folder = Path(name).expanduser()
    if library != "hf":
        return None
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.partition("@")[0].count("/") != 1:
        raise MissingFileError(
            f"no folder at {name}",
            wanted="hf:FOLDER with config.json and model.safetensors, or hf:OWNER/NAME of the Hugging Face hub",
            fix="check the path",
        )
    return None


def _tagged(name: str) -> str:
    """timm's name of an architecture with the tag of its default weights, which the repository's name has.

    As it is where timm is not installed, or says no tag.
    """
    if "." in name:
        return name
    try:
        from timm.models import get_pretrained_cfg
    except Exception:  # not installed, or not with the torch that is: then the hub is asked for the name as it is
        return name
    config = get_pretrained_cfg(name, allow_unregistered=True)
    return f"{name}.{config.tag}" if config is not None and config.tag else name


def _untagged(repository: str) -> str:
    return "; timm's are called NAME.TAG" if repository.startswith("timm/") and "." not in repository else ""


def _download(repository: str, revision: str | None) -> ModelFolder:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:
        raise MissingPackageError("huggingface_hub", "hub", f"downloading {repository}") from None
    try:
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=WANTED))
        if not any(path.glob("*.safetensors")):
            # Old repositories. Where there is a choice, half of the bytes need not be fetched.
            snapshot_download(repository, revision=path.name, allow_patterns=[PICKLED])
    except HFValidationError as error:
        raise HubError(f"{repository!r} is not the name of a repository", found=str(error)[:200]) from None
    except Exception as error:  # errors of huggingface_hub, of its HTTP client, of its storage's client, of the disk
        raise HubError(
            f"{repository} cannot be downloaded from the Hugging Face hub",
            found=textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__,
            wanted="a network, and a repository of that name"
            + (f" at {revision}" if revision else "")
            + _untagged(repository),
            fix=f"where there is a network: hf download {repository} --local-dir DIR; copy DIR here, then hf:DIR",
        ) from None
    return ModelFolder(path, repository, path.name)


def pinned(model: str, folder: ModelFolder) -> str:
    """`model` as the user typed it where it is a folder, else the repository at its commit: the same files again."""
    return model if folder.repository is None else f"hf:{folder.repository}@{folder.revision}"
