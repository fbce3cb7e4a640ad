"""The statistics of images and outputs that a monitor uses, and their reference in a bundle: `monitor.json`.

Each image has a few statistics, from at most some 1,000 of its pixels, because a monitor may take at most 1 % of a run:

- `mean.C`, `std.C` of each channel, and `saturated`, the share of values at one of the two ends, all in 0..1;
- `contrast`: the mean difference of neighbouring pixels, which blur lowers and noise raises;
- `entropy` of a classifier's softmax, in nats, which grows with uncertainty;
- `NAME.min` and `NAME.max` of each output.

The reference has these statistics for up to 128 calibration images, so that windows of any length can be compared
(`control_limits`). Images are as the engine sees them: resized and cropped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.bundle import checked, read
from vitdeploy.errors import ManifestError
from vitdeploy.paths import is_file
from vitdeploy.runtime.postprocess import softmax
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import DecodeError, PreprocessSpec, Task, decode

Numbers = npt.NDArray[np.float64]
FORMAT = 1
# Fewer images do not show the usual range; more add little, and each costs a run of every engine when a bundle is made.
LEAST_IMAGES, MOST_IMAGES = 32, 128
# Limits for an untrusted file.
MOST_READ, MAX_BYTES = 4096, 16 << 20
# Sampled pixels per side, sampled values per output, and number of monitored outputs.
GRID, LOOKED_AT, OUTPUTS = 32, 1 << 14, 8
LOGITS = "logits"
AGAIN = "make it again with `vitdeploy run`, or `vitdeploy quantize`"


@dataclass(frozen=True)
class MonitorReference:
    """`inputs`: by statistic, one value for each of `images` images. `outputs`: the same by engine and statistic."""

    format: int
    images: int
    inputs: dict[str, npt.NDArray[np.float64]]
    outputs: dict[str, dict[str, npt.NDArray[np.float64]]] = field(default_factory=dict)


def input_names(channels: int) -> list[str]:
    return [f"{kind}.{channel}" for kind in ("mean", "std") for channel in range(channels)] + ["saturated", "contrast"]


def input_statistics(image: Array, spec: PreprocessSpec) -> list[float] | None:
    """Return the statistics of `input_names` for one image as an engine takes it: uint8 [height, width, channels], or
    normalised [channels, height, width]; None for any other array."""
    if image.ndim != 3:
        return None
    pixels = image if image.dtype == np.uint8 else image.transpose(1, 2, 0)
    if image.dtype != np.uint8 and spec.channel_order == "bgr":
        pixels = pixels[..., ::-1]
    height, width, channels = pixels.shape
    if channels != spec.channels or width < 2:
        return None
    down, across = max(1, height // GRID), max(1, width // GRID)
    seen, beside = pixels[::down, : width - 1 : across], pixels[::down, 1::across]
    if image.dtype == np.uint8:
        seen, beside = seen.astype(np.float32) / np.float32(255), beside.astype(np.float32) / np.float32(255)
    else:
        mean, std = (np.asarray(values, np.float32) for values in spec.statistics)
        seen, beside = seen.astype(np.float32) * std + mean, beside.astype(np.float32) * std + mean
    count = seen.shape[0] * seen.shape[1]
    means = seen.sum(axis=(0, 1)) / count
    squares = np.square(seen - means).sum(axis=(0, 1)) / count
    half = 0.5 / 255
    saturated = np.count_nonzero((seen < half) | (seen > 1 - half)) / seen.size
    contrast = float(np.abs(seen - beside).sum()) / seen.size
    return [*means.tolist(), *np.sqrt(squares).tolist(), saturated, contrast]


def watched_outputs(outputs: Mapping[str, Array]) -> list[str]:
    """Return the monitored outputs: the first few float outputs."""
    return [name for name, array in outputs.items() if array.dtype.kind == "f"][:OUTPUTS]


def output_names(task: Task, outputs: Sequence[str]) -> list[str]:
    named = [f"{name}.{end}" for name in outputs for end in ("min", "max")]
    return ["entropy", *named] if task == "classification" and LOGITS in outputs else named


def output_statistics(task: Task, outputs: Mapping[str, Array], names: Sequence[str]) -> list[float]:
    """Return the statistics of `output_names` for the named outputs of one sample; NaN and infinity are kept."""
    found: list[float] = []
    if task == "classification" and LOGITS in names:
        with np.errstate(invalid="ignore"):  # infinities give NaN, which the caller detects
            shares = softmax(np.asarray(outputs[LOGITS], np.float64).ravel())
        found.append(float(-(shares * np.log(np.maximum(shares, 1e-300))).sum()))
    for name in names:
        flat = outputs[name].reshape(-1)
        some = flat[:: max(1, flat.size // LOOKED_AT)]
        found += [float(some.min()), float(some.max())] if some.size else [0.0, 0.0]
    return found


def reference_text(
    inputs: Sequence[Sequence[float]], channels: int, outputs: Mapping[str, tuple[Sequence[str], Sequence[list[float]]]]
) -> str:
    """Return the text of `monitor.json`. inputs: `input_statistics` of each image; outputs: by engine the names, and
    `output_statistics` of each image."""

    def columns(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, list[float]]:
        return {name: [float(f"{row[i]:.6g}") for row in rows] for i, name in enumerate(names)}

    document = {
        "format": FORMAT,
        "images": len(inputs),
        "inputs": columns(input_names(channels), inputs),
        "outputs": {artifact: columns(names, rows) for artifact, (names, rows) in outputs.items()},
    }
    return json.dumps(document, allow_nan=False) + "\n"


def read_reference(files: checked.CheckedFiles) -> MonitorReference | None:
    """Return the monitor reference of a bundle; None without one.

    Raises:
        DigestError: the file differs from the manifest's record.
        ManifestError: the file is not a valid reference.
    """
    manifest, name = files.manifest, files.manifest.monitor
    if name is None:
        return None
    channels = 0 if manifest.preprocess is None else manifest.preprocess.channels
    return parse_reference(files.read(name, MAX_BYTES), files.folder / name, channels)


def reference_beside(folder: Path, channels: int) -> str | None:
    """Return the text of the reference in a folder made by `quantize`, for its bundle; None without one.

    Raises:
        ManifestError: the file is not a valid reference for images with this number of channels.
    """
    path = folder / read.MONITOR_FILE
    if not is_file(path):
        return None
    if (size := path.stat().st_size) > MAX_BYTES:
        raise read.too_large(path, size, MAX_BYTES)
    text = path.read_bytes()
    parse_reference(text, path, channels)
    return text.decode("utf-8")


def parse_reference(text: bytes, path: Path, channels: int) -> MonitorReference:
    """Return the reference in the bytes of a `monitor.json`, for images with `channels` channels; `path` names it in
    errors.

    Raises:
        ManifestError: the file is not a valid reference.
    """
    try:
        found = decode(MonitorReference, json.loads(text.decode("utf-8")))
    except (ValueError, RecursionError) as error:  # DecodeError is a ValueError
        shown = "; ".join(error.problems[:3]) if isinstance(error, DecodeError) else str(error)
        raise ManifestError(f"{path} is not a valid monitor reference", found=ascii(shown[:300]), fix=AGAIN) from None
    columns = [found.inputs, *found.outputs.values()]
    lengths = {len(numbers) for column in columns for numbers in column.values()}
    if (
        found.format != FORMAT
        or not LEAST_IMAGES <= found.images <= MOST_READ
        or lengths != {found.images}
        or list(found.inputs) != input_names(channels)
    ):
        raise ManifestError(
            f"{path} is not a valid monitor reference",
            found=f"format {found.format}, {found.images} images, {ascii(', '.join(found.inputs))[:200]}",
            expected=f"format {FORMAT}, {LEAST_IMAGES} to {MOST_READ} images, one value per image of "
            + ", ".join(input_names(channels)),
            fix=AGAIN,
        )
    return found
