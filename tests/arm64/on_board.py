"""Runs on an emulated board, as an app there: a packed bundle, unpacked, loaded, and its golden images predicted.

    python3 on_board.py BUNDLE.vitb TARGET FOLDER

Prints one line of JSON. It needs vitdeploy's device zone, numpy, Pillow and one runtime.
"""

import json
import sys
from pathlib import Path

import numpy as np

from vitdeploy.bundle.read import read_bundle
from vitdeploy.runtime import load, unpack
from vitdeploy.runtime.golden import read_golden
from vitdeploy.runtime.host import emulator

packed, target, folder = sys.argv[1:]
unpack(packed, folder)
manifest = read_bundle(Path(folder))
engine = next(each for each in manifest.engines if each.target == target)
golden = read_golden(Path(folder), manifest, engine)
pixels = golden.inputs[next(iter(golden.inputs))]
with load(folder, target=target) as predictor:
    labels = [answer.top[0].index for answer in predictor.predict_tensor(pixels)]
    why = predictor.why
expected = np.argmax(next(iter(golden.outputs.values())), axis=-1).tolist()
facts = {"emulated": emulator(), "why": why, "labels": labels}
print(json.dumps({**facts, "expected": expected, "least": golden.least_same}))
