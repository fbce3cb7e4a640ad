"""The header of a safetensors file, looked at before the library builds a tensor for each of its entries.

Source: README of safetensors, "Format": 8 bytes of length, that much JSON, then the data.
"""

from __future__ import annotations

import json
from pathlib import Path

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed

# The largest models known to us have 2,000 tensors in a file, and 300 kB of header.
MAX_HEADER, MAX_TENSORS = 4 << 20, 20_000
DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"})
FLOAT_FIX = "take the float weights that it was made from: vitdeploy quantises them itself"


def check_header(path: Path) -> None:
    """Refuse a file with too many tensors, or with numbers of a type that no model here is made of. What is no header
    is left to the library, which says so.

    Raises:
        CheckpointError: such a file.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER:
            raise _too_much(path, f"a header of {size:,} bytes", f"at most {MAX_HEADER:,}")
        text = file.read(size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(header, dict):
        return
    if len(header) > MAX_TENSORS:
        raise _too_much(path, f"{len(header):,} tensors", f"at most {MAX_TENSORS:,}")
    kinds = {name: entry.get("dtype") for name, entry in header.items() if isinstance(entry, dict)}
    kinds.pop("__metadata__", None)
    foreign = [f"{name[:80]} {kind}" for name, kind in kinds.items() if isinstance(kind, str) and kind not in DTYPES]
    if foreign:
        raise CheckpointError(
            f"{path} has numbers of a type that vitdeploy does not read",
            found=listed(foreign)[:500],
            wanted=", ".join(sorted(DTYPES)),
            fix=FLOAT_FIX,
        )


def _too_much(path: Path, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{path} lists more tensors than any model has",
        found=found,
        wanted=wanted,
        fix="save the model's tensors alone; download it again if it is not yours",
    )
