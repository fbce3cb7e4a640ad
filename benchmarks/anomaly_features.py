"""Which features find the defects of drawn parts: tokens alone or the mean around them, at which image size, how many.

    PYTHONPATH=. python benchmarks/anomaly_features.py [--model hf:calibration/scenes/models/dual] [--parts 400]

The bank is fitted on the 64 calibration scenes that recipes/scenes_anomaly.yaml has; the parts to judge by are further
scenes of the same split, so that nothing is chosen on evaluation scenes.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from calibration.scenes.parts import DEFECTS, GOOD, part
from calibration.scenes.stream import stream
from calibration.scenes.write import SIZES, render
from vitdeploy.data.folder import scan
from vitdeploy.models.load import load_features
from vitdeploy.models.memory_bank import AnomalyModel, patch_tokens
from vitdeploy.models.source import Source
from vitdeploy.progress import silent
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.tasks.anomaly import AnomalySpec, anomaly_map, image_score
from vitdeploy.stages.fit import FitOptions, distinct, fit
from vitdeploy.tasks.anomaly import auroc, auroc_of_counts, count_pixels

NORMAL, SIDE = 64, SIZES["anomaly"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:calibration/scenes/models/dual")
    parser.add_argument("--parts", type=int, default=400)
    args = parser.parse_args()
    kinds = [GOOD if index % 2 == 0 else tuple(DEFECTS)[index // 2 % len(DEFECTS)] for index in range(args.parts)]
    drawn = [part(stream("anomaly", "calibration", NORMAL + i), SIDE, kind) for i, kind in enumerate(kinds)]
    print("image  window  share  entries  image AUROC  without equation 7  pixel AUROC")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "scenes"
        render("anomaly", root, {"calibration": NORMAL})
        for size, window, share in itertools.product((64, 128), (1, 3), (0.1, 0.25)):
            source = Source(args.model, image_size=(size, size), task="anomaly")
            measured = measure(
                source, root / "train" / GOOD, FitOptions(window=window, share=share), drawn, Path(folder)
            )
            print(f"{size:5}  {window:6}  {share:5}  " + "  ".join(f"{value:.1f}" for value in measured), flush=True)


def measure(
    source: Source, normal: Path, options: FitOptions, drawn: list[tuple[np.ndarray, np.ndarray]], out: Path
) -> tuple[float, ...]:
    """Entries of the bank; AUROC in percent of images, of images by the largest distance alone, of pixels."""
    original = load_features(source)
    spec, tokens = original.preprocess, patch_tokens(original)[0]
    assert spec is not None
    bank = fit(source, spec, distinct(scan(normal, "none")[0], normal), out, silent, options=options)
    pixels = np.stack([load_pixels(Image.fromarray(image), spec) for image, _ in drawn])
    with torch.no_grad():
        outputs = [each.numpy() for each in AnomalyModel(tokens, bank)(torch.from_numpy(normalise(pixels, spec)))]
    head = AnomalySpec(bank.threshold, bank.pixel_threshold)
    rows = [dict(zip(("distances", "neighbours"), row, strict=True)) for row in zip(*outputs, strict=True)]
    defective = np.array([mask.any() for _, mask in drawn])
    scores, largest = (np.array([f(row) for row in rows]) for f in (image_score, peak))
    maps = ((anomaly_map(row, (SIDE, SIDE), spec, head), mask) for row, (_, mask) in zip(rows, drawn, strict=True))
    counts = count_pixels(maps, (float(outputs[0].min()), float(outputs[0].max())))
    [of_pixels] = auroc_of_counts(*(each.sum(axis=0)[None] for each in (counts.defective, counts.good)))
    found = (auroc(scores, defective), auroc(largest, defective), float(of_pixels))
    return len(bank.memory), *(100 * value for value in found)


def peak(row: dict[str, np.ndarray]) -> float:
    return float(row["distances"].max())


if __name__ == "__main__":
    main()
