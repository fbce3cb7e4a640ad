"""A model's folder: config.json and weights, as timm and transformers save them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.checkpoints.shards import INDEX, files_of
from vitdeploy.models.checkpoints.unsupported import refuse_folder
from vitdeploy.models.json_file import any_json
from vitdeploy.paths import is_file

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
OPEN_CLIP = "open_clip_config.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
# Which counts where a folder has several, as in transformers: save_pretrained leaves what an earlier save has written.
WEIGHTS = (SAFETENSORS, INDEX, PICKLED, "pytorch_model.bin.index.json")
# The same of OpenCLIP's layout; the last is what other programs that train such models write.
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", SAFETENSORS, PICKLED)


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
        """Whether it has a model's config.json, or OpenCLIP's; other programs use the first file name, too.

        Raises:
            CheckpointError: it cannot be parsed, so its origin is unknown.
        """
        path = self.path / CONFIG
        if not is_file(path):
            return self.is_open_clip
        try:
            config = any_json(path)
        except CheckpointError as error:
            error.fix += "; or move it elsewhere, if it is another program's"
            raise
        return isinstance(config, dict) and bool({"model_type", "architecture"} & config.keys())

    @property
    def is_open_clip(self) -> bool:
        """Whether it is in OpenCLIP's layout; with a config.json it is read as transformers' or timm's."""
        return is_file(self.path / OPEN_CLIP) and not is_file(self.path / CONFIG)

    @property
    def weights(self) -> tuple[Path, ...]:
        """The files that hold the weights, in order.

        Raises:
            MissingFileError: the folder has none, or not all of those that its index names.
            CheckpointError: an index that cannot be read, or names files outside of the folder.
        """
        if self.given:
            return self.given
        for name in OPEN_CLIP_WEIGHTS if self.is_open_clip else WEIGHTS:
            if is_file(self.path / name):
                return files_of(self.path / name)
        refuse_folder(self.path)
        raise MissingFileError(
            f"no weights in {self.path}",
            found=", ".join(sorted(entry.name for entry in self.path.iterdir())[:8]) or "an empty folder",
            wanted=" or ".join(OPEN_CLIP_WEIGHTS[:2] if self.is_open_clip else (SAFETENSORS, PICKLED)),
            fix="copy the whole folder of the model",
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the model is a function of."""
        names = (OPEN_CLIP,) if self.is_open_clip else (CONFIG, PREPROCESSOR, PROCESSOR)
        configs = (self.path / name for name in names)
        return (*(path for path in configs if is_file(path)), *self.weights)


def beside(checkpoint: Path) -> ModelFolder | None:
    """The folder of a checkpoint that is in several files, or lies next to a model's config.json; else None."""
    files = files_of(checkpoint)
    folder = ModelFolder(checkpoint.parent, given=files)
    return folder if files != (checkpoint,) or (is_file(checkpoint) and folder.has_config) else None
