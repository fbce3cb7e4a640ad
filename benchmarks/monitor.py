"""How often a monitor is wrong, what it finds, and what it costs.

    python benchmarks/monitor.py BUNDLE IMAGES [--window 256] [--rate 0.001] [--windows 2000]

BUNDLE is made by `vitdeploy run`, with a monitor.json; IMAGES is a folder of other images of the same kind. Windows are
drawn from the images of the reference, from IMAGES (with replacement: there are never enough), and from darkened,
blurred, noisy and otherwise changed IMAGES; the result is the share of windows that are out of their limits. The cost
is the ratio of alternating blocks of predictions with and without a monitor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from vitdeploy.bundle.checked import open_checked
from vitdeploy.runtime import Monitor, Predictor, load
from vitdeploy.runtime.monitor import Limits, columns, control_limits
from vitdeploy.runtime.monitor_reference import (
    input_statistics,
    output_statistics,
    read_reference,
    watched_outputs,
)

REFERENCES = 200
Change = Callable[[Image.Image], Image.Image]


def _noisy(sigma: float) -> Change:
    generator = np.random.default_rng(0)

    def change(image: Image.Image) -> Image.Image:
        pixels = np.asarray(image, np.float64)
        return Image.fromarray((pixels + generator.normal(0, sigma, pixels.shape)).clip(0, 255).astype(np.uint8))

    return change


CHANGES: dict[str, Change] = {
    "brightness x 0.98": lambda image: image.point(lambda value: 0.98 * value),
    "brightness x 0.95": lambda image: image.point(lambda value: 0.95 * value),
    "brightness x 0.8": lambda image: image.point(lambda value: 0.8 * value),
    "brightness x 0.5": lambda image: image.point(lambda value: 0.5 * value),
    "contrast x 0.8": lambda image: image.point(lambda value: 128 + 0.8 * (value - 128)),
    "blur, radius 0.3": lambda image: image.filter(ImageFilter.GaussianBlur(0.3)),
    "blur, radius 0.5": lambda image: image.filter(ImageFilter.GaussianBlur(0.5)),
    "blur, radius 1": lambda image: image.filter(ImageFilter.GaussianBlur(1)),
    "noise, sigma 2": _noisy(2),
    "noise, sigma 5": _noisy(5),
    "noise, sigma 10": _noisy(10),
    "inverted": lambda image: image.point(lambda value: 255 - value),
    "upside down": lambda image: image.transpose(Image.Transpose.ROTATE_180),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--windows", type=int, default=2000)
    options = parser.parse_args()
    reference = read_reference(open_checked(options.bundle))
    assert reference is not None, "a bundle with monitor.json"
    with load(options.bundle) as predictor:
        names, values, floors = columns(reference, reference.outputs[predictor.target])
        limits = control_limits(names, values, floors, options.window, options.rate)
        mode = "L" if predictor.preprocess.channels == 1 else "RGB"
        images = [Image.open(path).convert(mode) for path in sorted(options.images.rglob("*.png"))]
        counts = f"{reference.images} images of reference, {len(images)} others"
        print(f"{predictor.target}: {counts}, windows of {options.window}")
        print(f"the reference's own: {_share(limits, values, options):.4f}")
        others = _numbers(predictor, images)
        print(f"other images: {_share(limits, others, options):.4f}")
        share = _across(names, others, values, floors, options)
        print(f"references and windows of all of them, drawn anew {REFERENCES} times: {share:.4f}")
        for name, change in CHANGES.items():
            found = _numbers(predictor, [change(image) for image in images])
            print(f"{name}: {_share(limits, found, options):.3f}")
    print(f"time with a monitor: {_cost(options.bundle, images):.4f} of the time without")


def _numbers(predictor: Predictor, images: list[Image.Image]) -> np.ndarray:
    rows = []
    for image in images:
        tensor, _ = predictor.prepare(image)
        outputs = {name: each[0] for name, each in predictor.run(tensor).items()}
        seen = input_statistics(tensor[0], predictor.preprocess)
        assert seen is not None
        rows.append([*seen, *output_statistics(predictor.task, outputs, watched_outputs(outputs))])
    return np.array(rows)


def _share(limits: Limits, values: np.ndarray, options: Any) -> float:
    """The share of windows of these images that are out of their limits."""
    generator = np.random.default_rng(1)
    drawn = (values[generator.integers(0, len(values), options.window)] for _ in range(options.windows))
    return sum(bool(limits.outside(limits.clipped(each).mean(axis=0))) for each in drawn) / options.windows


def _across(names: list[str], others: np.ndarray, values: np.ndarray, floors: np.ndarray, options: Any) -> float:
    """References drawn from all images, and windows of the rest: what holds for a reference that chance chose."""
    generator, pool, alarms, windows = np.random.default_rng(2), np.concatenate([values, others]), 0, 0
    count = len(values)
    for _ in range(REFERENCES):
        order = generator.permutation(len(pool))
        limits = control_limits(names, pool[order[:count]], floors, options.window, options.rate)
        rest = pool[order[count:]]
        for _ in range(max(1, options.windows // REFERENCES)):
            windows += 1
            drawn = limits.clipped(rest[generator.integers(0, len(rest), options.window)])
            alarms += bool(limits.outside(drawn.mean(axis=0)))
    return alarms / windows


def _cost(bundle: Path, images: list[Image.Image]) -> float:
    """The median ratio of paired blocks of runs of a prepared image."""
    with load(bundle) as alone, load(bundle, monitor=Monitor(on_event=lambda event: None)) as watched:
        tensor = alone.prepare(images[0])[0]

        def block(predictor: Predictor) -> float:
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < 0.25:
                predictor.run(tensor)
                count += 1
            return (time.perf_counter() - start) / count

        block(alone), block(watched)
        ratios = []
        for turn in range(60):
            pair = [block(alone), block(watched)] if turn % 2 else [block(watched), block(alone)][::-1]
            ratios.append(pair[1] / pair[0])
        assert watched.monitor is not None
        counts = watched.monitor.counts
        print(f"looked at {counts.looked_at} of {counts.runs} runs")
    return statistics.median(ratios)


if __name__ == "__main__":
    main()
