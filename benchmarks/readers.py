"""Ways to read JPEG files beside the reference: how far their pixels are from its, and how much CPU time they take.

    python benchmarks/readers.py --data DIR --resize 248 --crop 224 --interpolation bicubic

`vitdeploy.runtime.geometry`, and what was tried and not kept: simplejpeg's decoding, OpenCV's resizing, and OpenVINO's
modes that follow Pillow. Wants simplejpeg and opencv-python-headless.
Grey levels, of the cropped pixels: the mean over files of each file's mean, 99th percentile and maximum. CPU time of
one thread, as a share of the reference's, alternating file by file.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from vitdeploy.runtime.geometry import decode_reduced, resize_reduced
from vitdeploy.runtime.preprocess import Pixels, crop_resized, load_pixels, resize_and_crop, resized_size
from vitdeploy.spec import PreprocessSpec

Read = Callable[[bytes, PreprocessSpec], Pixels]
REFERENCE = "pillow"


def by_reducing(content: bytes, spec: PreprocessSpec) -> Pixels:
    reduced = decode_reduced(content, spec)
    return load_pixels(content, spec) if reduced is None else resize_reduced(reduced, spec)


def by_simplejpeg(content: bytes, spec: PreprocessSpec) -> Pixels:
    return resize_and_crop(Image.fromarray(simplejpeg.decode_jpeg(content)), spec)


def by_opencv(filter_: int) -> Read:
    def read(content: bytes, spec: PreprocessSpec) -> Pixels:
        image = simplejpeg.decode_jpeg(content)
        size = resized_size(image.shape[1], image.shape[0], spec)
        return crop_resized(Image.fromarray(cv2.resize(image, size, interpolation=filter_)), spec)

    return read


@functools.lru_cache(maxsize=64)
def _resizing(size: tuple[int, int], expected: tuple[int, int], mode: str) -> Any:
    import openvino
    from openvino import opset11 as operators

    image = operators.parameter([1, size[1], size[0], 3], np.uint8)
    resized = operators.interpolate(
        image, np.array(expected[::-1], np.int32), f"{mode}_pillow", "sizes", axes=np.array([1, 2]), cube_coeff=-0.5
    )
    model = openvino.Model([operators.result(resized)], [image])
    return openvino.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1})


def by_openvino(content: bytes, spec: PreprocessSpec) -> Pixels:
    image = simplejpeg.decode_jpeg(content)
    size = image.shape[1], image.shape[0]
    resizing = _resizing(size, resized_size(*size, spec), spec.interpolation)
    return crop_resized(Image.fromarray(resizing([image[None]])[0][0]), spec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of JPEG files, searched through")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--resize", type=int, default=248, help="the short side")
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--interpolation", choices=("bilinear", "bicubic"), default="bicubic")
    parser.add_argument("--openvino", action="store_true", help="OpenVINO's resizing too, which takes long")
    options = parser.parse_args()
    half = (0.5, 0.5, 0.5)
    spec = PreprocessSpec(options.resize, (options.crop, options.crop), options.interpolation, half, half)
    ways: dict[str, Read] = {REFERENCE: load_pixels, "reduced": by_reducing, "simplejpeg": by_simplejpeg}
    filters = {"linear": cv2.INTER_LINEAR, "cubic": cv2.INTER_CUBIC, "area": cv2.INTER_AREA}
    ways |= {f"opencv, {name}": by_opencv(filter_) for name, filter_ in filters.items()}
    if options.openvino:
        ways["openvino, as pillow"] = by_openvino
    cv2.setNumThreads(1)
    files = sorted(file for file in options.data.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
    files = [files[i * len(files) // options.images] for i in range(options.images)] if files else []
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    seconds = dict.fromkeys(ways, 0.0)
    for file in files:
        content = file.read_bytes()
        pixels = {}
        for name, read in ways.items():
            start = time.process_time()
            pixels[name] = read(content, spec).astype(np.int16)
            seconds[name] += time.process_time() - start
            apart = np.abs(pixels[name] - pixels[REFERENCE])
            found[name].append((apart.mean(), np.percentile(apart, 99), apart.max()))
    print(f"{len(files)} files, {options.interpolation} to a short side of {options.resize}, crop {options.crop}\n")
    print("| | files with the reference's pixels | mean | 99th percentile | maximum | CPU time / reference |")
    print("|---|---|---|---|---|---|")
    for name, values in found.items():
        same = sum(largest == 0 for _, _, largest in values)
        mean, most, largest = np.mean(values, axis=0)
        share = seconds[name] / seconds[REFERENCE]
        print(f"| {name} | {same} of {len(files)} | {mean:.2f} | {most:.1f} | {largest:.1f} | {share:.2f} |")


if __name__ == "__main__":
    main()
