"""What FP16 does to a model whose residual stream is made too large for it: with the range pass, and without.

vitdeploy export vit_large_patch16_224 -o float && vitdeploy optimize float -o large
python benchmarks/half_precision.py --data IMAGE_FOLDER [--times 32768] [--images 16] large/model.onnx ...

The residual stream is multiplied by --times, which changes no answer: norms divide it out again. The graph is then
typed as it is, and with the range pass on one half of the images; both are evaluated on the other half, with FP16
storage and FP32 accumulation, and compared with FP32. With --times 1 the model stays as it is. One process a model,
which must be a classifier.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def child(graph: Path, folder: Path, times: float, count: int) -> dict[str, Any]:
    from vitdeploy.data.folder import scan
    from vitdeploy.graph.half.half import scale_residual
    from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph
    from vitdeploy.stages.place import PlaceConfig
    from vitdeploy.stages.typed import RangeImages, place_typed

    found, _ = scan(folder, "none")
    samples = list(itertools.islice(itertools.cycle(found), count))
    calibration, evaluation = samples[: count // 2], samples[count // 2 :]
    with tempfile.TemporaryDirectory() as work:
        large, out = Path(work) / "model.onnx", Path(work) / "placed"
        out.mkdir()
        model = load_graph(graph)
        pixels = list(RangeImages(evaluation, get_metadata(model, str(graph)).images).batches(model))
        expected = answers(graph, pixels)
        scaled = scale_residual(model, -round(math.log2(times)))
        save_graph(model, large)
        unaided = compared(answers(plain, pixels), expected) if (plain := typed_as_it_is(large)) else None
        facts = place_typed(PlaceConfig("tensorrt", "fp16"), large, None, calibration, out)["half"]
        return {
            "scaled": scaled,
            "exponent": facts["residual_exponent"],
            "fallback": len(facts["float32"]),
            "float32": facts["macs"]["float32"] / sum(facts["macs"].values()),
            "without": unaided,
            "with": compared(answers(out / "model.onnx", pixels), expected),
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        }


def typed_as_it_is(graph: Path) -> Path | None:
    """The graph in FP16 without the range pass; None where a constant alone is beyond the range."""
    from vitdeploy.errors import GraphError
    from vitdeploy.graph.half.half import type_graph
    from vitdeploy.graph.io.files import load_graph, save_graph
    from vitdeploy.quantization.half import lift_masks

    model, out = load_graph(graph), graph.with_name("plain.onnx")
    lift_masks(model)
    try:
        type_graph(model, "fp16", {})
    except GraphError:
        return None
    save_graph(model, out)
    return out


def answers(graph: Path, pixels: list[np.ndarray]) -> list[np.ndarray]:
    """Every output for all images, flattened to [images, numbers], in float32 or as its types would give them."""
    from vitdeploy.graph.half.half import emulate
    from vitdeploy.graph.io.files import load_graph, save_graph
    from vitdeploy.runtime.ort import OnnxRuntimeRunner

    with tempfile.TemporaryDirectory() as work:
        emulated = Path(work) / "emulated.onnx"
        save_graph(emulate(load_graph(graph)), emulated)
        return asked(OnnxRuntimeRunner(emulated, name="graph", as_written=True), pixels)


def asked(runner: Any, pixels: list[np.ndarray]) -> list[np.ndarray]:
    with runner:
        batches = [runner.infer({runner.inputs[0].name: batch}) for batch in pixels]
    return [np.concatenate([b[t.name].reshape(len(b[t.name]), -1) for b in batches]) for t in runner.outputs]


def compared(found: list[np.ndarray], expected: list[np.ndarray]) -> dict[str, float]:
    """The share of numbers that are finite, the same largest number in a row, and the largest relative difference."""
    finite = min(float(np.isfinite(array).mean()) for array in found)
    same = float(np.mean(np.nan_to_num(found[0]).argmax(1) == expected[0].argmax(1)))
    worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))
    return {"finite": finite, "same": same, "difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--times", type=float, default=32768)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(Path(args.graphs[0]), Path(args.data), args.times, args.images)))
        return
    print(f"{'graph':<40}{'2^-k':>5}{'fallback':>9}{'float32':>9}{'peak GB':>9}   FP16 as it is; with the range pass")
    for graph in args.graphs:
        options = ["--data", args.data, "--times", str(args.times), "--images", str(args.images), "--child"]
        done = subprocess.run([sys.executable, __file__, graph, *options], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        row = f"{graph:<40}{found['exponent']:>5}{found['fallback']:>9}{found['float32']:>9.2%}{found['peak']:>9.1f}"
        for key in ("without", "with"):
            each = found[key]
            text = "a constant is too large" if each is None else "{finite:.0%} finite, {same:.0%} same".format(**each)
            row += f"   {text}" if each is None or each["finite"] < 1 else f"   {text}, off by {each['difference']:.2g}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
