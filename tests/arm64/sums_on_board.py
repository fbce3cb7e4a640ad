"""Runs on an emulated board: the graphs of `sums.py`, and how far their sums are from the exact ones.

    python3 sums_on_board.py FOLDER

FOLDER has `<target>-<zero point>.onnx` and weights.npy. Prints one line of JSON: the largest difference, by file.
"""

import json
import sys
from pathlib import Path

import numpy as np

from vitdeploy.runtime.openvino import PRECISION_HINTS, OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner

folder, step = Path(sys.argv[1]), 0.5
weights = np.load(folder / "weights.npy").astype(np.float64)
found = {}
for file in sorted(folder.glob("*.onnx")):
    target, _, zero_point = file.stem.rpartition("-")
    pixels = np.random.default_rng(1).choice([0.0, 255.0], (1, 8, len(weights)))
    pixels[0, 0], pixels[0, 1] = 255, 0
    pixels -= int(zero_point)
    # As every engine of ours has it. Left to itself, the plugin writes such sums in FP16 where an Arm CPU has that.
    options = {"INFERENCE_PRECISION_HINT": PRECISION_HINTS["int8"]}
    with (
        OpenVinoRunner(file, name=target, options=options)
        if target == "openvino-cpu"
        else OnnxRuntimeRunner(file, name=target)
    ) as runner:
        [sums] = runner.infer({"x": pixels.astype(np.float32)}).values()
    found[file.stem] = float(np.abs(sums - pixels @ weights * step).max())
print(json.dumps(found))
