"""The golden answers of a bundle as plain files, which every language reads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from vitdeploy.embed.source import Embedded
from vitdeploy.errors import ManifestError

ORIGINAL = "original"


def write_golden(found: Embedded, out: Path) -> None:
    """Fill the new folder `out`: inputs.u8, NAME.f32 for each output of the engine, and original/NAME.f32 for those of
    the original; float32 in little-endian order.

    Raises:
        ManifestError: an output whose name is no name for a file.
    """
    for name in found.outputs:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ManifestError(
                f"the bundle {found.manifest.name} has a golden output whose name is no name for a file",
                found=repr(name[:60]),
                wanted="letters, digits, _, - and .",
            )
    out.mkdir()
    (out / "inputs.u8").write_bytes(np.ascontiguousarray(found.pixels, np.uint8).tobytes())
    (out / ORIGINAL).mkdir()
    for folder, outputs in ((out, found.outputs), (out / ORIGINAL, found.original)):
        for name, values in outputs.items():
            (folder / f"{name}.f32").write_bytes(np.ascontiguousarray(values).astype("<f4").tobytes())
