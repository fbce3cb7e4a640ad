"""Write the handwritten digits data set as PNG files, one folder per split and, inside it, one folder per class.

What: 1,797 real handwritten digits, grey images of 8x8 pixels, ten classes.

Where from: the data set "Optical Recognition of Handwritten Digits" of the UCI Machine Learning Repository,
E. Alpaydin and C. Kaynak, 1998, doi 10.24432/C50P49, licence CC BY 4.0. The images are those of the UCI test file,
as scikit-learn (BSD-3-Clause) ships them with `sklearn.datasets.load_digits`: nothing is downloaded. The one change:
values 0..16 are rescaled to 8-bit grey, 0 background and 255 full ink.

Splits: one permutation of all images, seeded with 0, is cut into
    calibration   128 images   what a quantiser may look at
    evaluation    640 images   what accuracy is reported on
    training    1,029 images   what `train.py` fits the model to; its hold-out is taken out of these
The evaluation images are never used for any choice: not of weights, not of hyper-parameters, not of quantiser settings.

Every run writes the same pixels to the same names; with the same Pillow and zlib, also the same bytes.
numpy does not promise the stream of `default_rng` for all its versions, and files of an earlier run are not removed:
should a count below a split's folder grow after a run, empty the three folders and run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

CALIBRATION_COUNT = 128
EVALUATION_COUNT = 640
SPLIT_SEED = 0
FULL_INK = 16  # largest value in the source: inked pixels in a 4x4 cell of the original 32x32 bitmap


def to_grey(values: np.ndarray) -> np.ndarray:
    """Ink counts 0..16, any float or integer dtype, any shape -> uint8 grey 0..255, same shape."""
    return np.rint(values * 255.0 / FULL_INK).astype(np.uint8)


def split_indices(count: int) -> dict[str, np.ndarray]:
    """Split name -> int64 [images of the split], ascending indices into the data set of `count` images."""
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    calibration, evaluation, training = np.split(order, [CALIBRATION_COUNT, CALIBRATION_COUNT + EVALUATION_COUNT])
    return {"training": np.sort(training), "calibration": np.sort(calibration), "evaluation": np.sort(evaluation)}


def check_classes(splits: dict[str, np.ndarray], labels: np.ndarray) -> None:
    """Raise unless every class is in every split: class indices come from folder names, so none may be missing."""
    for split, indices in splits.items():
        missing = np.setdiff1d(labels, labels[indices])
        if missing.size:
            raise ValueError(f"split {split} has no image of the classes {missing.tolist()}")


def write_png(image: np.ndarray, path: Path) -> None:
    """Write uint8 [height, width] as an 8-bit grey PNG, making its folder when needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, format="PNG", optimize=True)  # a two-axis uint8 array is Pillow's mode "L"


def write_data_set(output: Path) -> dict[str, int]:
    """Write all splits under `output` as <split>/<digit>/<index, 4 digits>.png. Returns images written per split."""
    digits = load_digits()
    images, labels = to_grey(digits.images), digits.target  # uint8 [1797, 8, 8], int64 [1797]
    splits = split_indices(len(labels))
    check_classes(splits, labels)
    for split, indices in splits.items():
        for index in indices:
            write_png(images[index], output / split / str(labels[index]) / f"{index:04d}.png")
    return {split: len(indices) for split, indices in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the handwritten digits data set as PNG files.")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent, help="folder of the splits")
    arguments = parser.parse_args()
    for split, count in write_data_set(arguments.output).items():
        print(f"{split}: {count} images")


if __name__ == "__main__":
    main()
