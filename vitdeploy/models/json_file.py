"""JSON files that other programs write: configs, indices of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.paths import is_file

MAX_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in a config file.

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
        f"{path} is not a config file", found=found, wanted="a JSON object", fix="correct it, or download it again"
    )
