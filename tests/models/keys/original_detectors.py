"""What was recorded of the original repositories of RT-DETR (lyuwenyu/RT-DETR at 068dfde6), D-FINE (Peterande/D-FINE at
4a1f73a8) and RF-DETR (roboflow/rf-detr at 35ac6ab6), built from their configurations: names and shapes of state dicts,
and answers with the weights of `seeded`.

`original_detectors.json.gz` has the names: `{model: {key: shape}}`, with `num_points_scale` as numbers.
`original_detectors.npz` has, for some models, the first queries of the two seeded images of `images`, computed by the
repositories in float64, with their tables of positions and anchors in float64, too; but the frequencies of RF-DETR's
query positions are in float32, as transformers has them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
SIDE = 320
QUERIES, CLASSES = 25, 8  # of each answer, as recorded


def recorded_names() -> dict[str, dict[str, list]]:
    return json.loads(gzip.decompress((HERE / "original_detectors.json.gz").read_bytes()))


def recorded_answers() -> dict[str, np.ndarray]:
    with np.load(HERE / "original_detectors.npz") as found:
        return dict(found)


def images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).random((2, 3, SIDE, SIDE)))


def seeded(key: str, shape: list[int]) -> torch.Tensor:
    """A weight, told by its name alone, that keeps the spread of what it is applied to."""
    noise = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(shape)
    if key.endswith("running_var"):
        values = 1 + 0.3 * np.abs(noise)
    elif key.endswith("scale") or (len(shape) == 1 and key.endswith("weight")):
        values = 1 + 0.1 * noise
    elif len(shape) <= 1:
        values = 0.05 * noise
    else:
        values = noise / np.prod(shape[1:]) ** 0.5
    return torch.from_numpy(values.astype(np.float32))


def checkpoint(names: dict[str, list], *, weights: bool = True) -> dict[str, torch.Tensor]:
    """A state dict as the repositories save it; without `weights`, tensors that are shapes alone."""
    state = {}
    for key, shape in names.items():
        if key.endswith("num_points_scale"):
            state[key] = torch.tensor(shape)
        elif key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(7)
        elif key in ("decoder.up", "decoder.decoder.up"):
            state[key] = torch.tensor([0.5])
        elif key in ("decoder.reg_scale", "decoder.decoder.reg_scale"):
            state[key] = torch.tensor([4])
        elif not weights or key in ("decoder.anchors", "decoder.valid_mask"):
            state[key] = torch.zeros(1).expand(shape)
        else:
            state[key] = seeded(key, shape)
    return state
