"""JSON files that other programs write: configs, indices of weights."""

import json
import re
from pathlib import Path
from typing import Any

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.paths import exists, is_dir, is_file

MAX_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a config file.

    Raises:
        MissingFileError, CheckpointError: no such file, or not a JSON object.
    """
    if not is_file(path):
        raise MissingFileError(f"no {path.name} in {path.parent}", fix="copy the whole folder of the model")
    data = any_json(path)
    if not isinstance(data, dict):
        raise _no_config(path, f"a {type(data).__name__}")
    return data


def any_json(path: Path) -> Any:
    """The content of a JSON file, of any type; a leading byte order mark is ignored.

    Raises:
        CheckpointError: it cannot be parsed.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise _no_config(path, str(error)[:200]) from None


def _no_config(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a config file", found=found, expected="a JSON object", fix="correct or re-download the file"
    )


# --- The weight files of a checkpoint: one file, or all that an index names -------------------------------------------


INDEX = "model.safetensors.index.json"
MAX_NAME, SHOWN = 255, 500
SHARD = re.compile(r".+-\d{5}-of-\d{5}\.\w+")


def shards_of(index: Path) -> tuple[Path, ...]:
    """Return the files that a weight index names, in order.

    Raises:
        MissingFileError, CheckpointError: a file is missing; not an index, or one that names other folders.
    """
    shards = _shards(index)
    missing = [name for name in shards if not is_file(index.parent / name)]
    if missing:
        raise MissingFileError(
            f"{len(missing)} of {len(shards)} weight files are missing from {index.parent}",
            found=f"no {missing[0]}",
            expected=f"all files that {index.name} names",
            fix="copy the whole folder of the model",
        )
    return tuple(index.parent / name for name in shards)


def files_of(checkpoint: Path) -> tuple[Path, ...]:
    """Return the weight files of a checkpoint: all files of the index, whether `checkpoint` is the index or a part."""
    if checkpoint.name.endswith(".index.json") and is_file(checkpoint):
        return shards_of(checkpoint)
    if SHARD.fullmatch(checkpoint.name) and is_file(checkpoint):
        for index in sorted(checkpoint.parent.glob("*.index.json")):
            if checkpoint.name in _shards(index):
                return shards_of(index)
        raise CheckpointError(
            f"{checkpoint} is one part of a sharded checkpoint without an index",
            found="no index next to it",
            expected=f"{INDEX} and all files that it names",
            fix="copy the whole folder of the model",
        )
    return (checkpoint,)


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is not a weight index", fix="download it again") from None
    if not names or not all(map(_is_name, names)):
        raise CheckpointError(
            f"{index} names files outside its folder", found=str(names)[:200], expected="names of files next to it"
        )
    return names


def _is_name(name: object) -> bool:
    """Whether `name` can be a file name in the same folder."""
    plain = isinstance(name, str) and name.isprintable() and len(name.encode("utf-8", "replace")) <= MAX_NAME
    return plain and name not in ("", "..") and Path(str(name)).name == name


def require_checkpoint(path: Path) -> None:
    """Raise MissingFileError if the path of a checkpoint does not exist, or is a pipe, which can be read only once."""
    if not is_file(path) and not is_dir(path):
        raise MissingFileError(
            f"no checkpoint at {str(path)[:SHOWN]}",
            found="no file" if exists(path) else "",
            fix="check the path of the checkpoint",
        )
