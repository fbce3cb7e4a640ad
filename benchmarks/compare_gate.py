"""Does `vitdeploy compare` find what was planted, and nothing in what is the same?

python benchmarks/compare_gate.py WORK [--times 5] [--target openvino-cpu]

Pairs of bundles: a model against the same one with some weights changed in their last digits, so that it is another
file that takes the same time; against one with a tenth more blocks (ViT of width 192 with seeded weights, 20 against
22); the digits model against itself with a bias that costs it a point, and with weights changed like the first. Each
pair is compared as a CI would: --max-slowdown 5, or --max-drop 0.5.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "calibration" / "digits" / "evaluation"
SHORT, LONG = "vit_w192d20h3_patch16_224", "vit_w192d22h3_patch16_224"
POINTS, CLASS, BIASES = 1.0, 3, np.arange(0, 20, 0.02)


def vitdeploy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vitdeploy.cli.main", *map(str, arguments)], capture_output=True, text=True
    )


def made(folder: Path, source: tuple[object, ...], target: str) -> Path:
    """The bundle of an exported model in FP32."""
    if not (folder / "manifest.json").is_file():
        graph = folder.with_name(f"{folder.name}.graph")
        for step in (("export", *source, "-o", graph), ("compile", graph, "--target", target, "-o", folder)):
            vitdeploy(*step).check_returncode()
    return folder


def spoilt(bundle: Path, out: Path, target: str) -> Path:
    """The digits model with the bias of one class raised until it is right a point less often."""
    from vitdeploy.data.folder import scan
    from vitdeploy.runtime import load
    from vitdeploy.runtime.tasks.classification import Classification

    samples, _ = scan(IMAGES, "folders")
    with load(bundle) as predictor:
        answers = predictor.predict_batch([sample.path for sample in samples], top=10)
    # Probabilities do for logits: a bias adds to their logarithms.
    ranked = [answer.top for answer in answers if isinstance(answer, Classification)]
    logits = np.log([[score.score for score in sorted(top, key=lambda score: score.index)] for top in ranked])
    truth = np.array([sample.label for sample in samples])
    raise_by = np.eye(10)[CLASS]
    lost = [
        100 * np.mean(logits.argmax(1) == truth) - 100 * np.mean((logits + b * raise_by).argmax(1) == truth)
        for b in BIASES
    ]
    bias = next(b for b, points in zip(BIASES, lost, strict=True) if points >= POINTS)
    return changed(bundle, out, target, bias=bias * raise_by)


def changed(bundle: Path, out: Path, target: str, bias: float | Values = 0.0) -> Path:
    """A model with other weights in its head, in their last digits, and a higher bias."""
    from vitdeploy.graph.edit import Editor
    from vitdeploy.graph.io.files import load_graph, save_graph

    if (out / "manifest.json").is_file():
        return out
    model = load_graph(bundle.with_name(f"{bundle.name}.graph") / "model.onnx")
    editor = Editor(model)
    head = editor.linears[-1]
    editor.set_linear(head, head.weight * (1 + 1e-6), None if head.bias is None else head.bias + bias)
    save_graph(model, out.with_suffix(".onnx"))
    vitdeploy("compile", out.with_suffix(".onnx"), "--target", target, "-o", out).check_returncode()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--target", default="openvino-cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    short = made(args.work / "short", (SHORT,), args.target)
    again = changed(short, args.work / "again", args.target)
    slow = made(args.work / "long", (LONG,), args.target)
    digits = made(args.work / "digits", (ROOT / "recipes" / "digits.yaml",), args.target)
    lossy = spoilt(digits, args.work / "lossy", args.target)
    kept = changed(digits, args.work / "kept", args.target)
    images = ("--data", IMAGES, "--max-drop", 0.5)
    pairs = {
        "the same": (short, again, ("--max-slowdown", 5)),
        "a tenth slower": (short, slow, ("--max-slowdown", 5)),
        "a point lost": (digits, lossy, images),
        "nothing lost": (digits, kept, images),
    }
    for name, (old, new, options) in pairs.items():
        found = collections.Counter[str]()
        for _ in range(args.times if "--max-slowdown" in options else 1):
            done = vitdeploy("compare", old, new, *options, "--json")
            document = json.loads(done.stdout)
            found[document["gate"]["status"]] += 1
            ratios = {each["metric"]: round(each["ratio"], 3) for each in document["engines"][0]["ratios"]}
            print(f"{name:<16} exit {done.returncode}  {ratios}  {'; '.join(document['gate']['reasons'])}", flush=True)
        print(f"{name:<16} {dict(found)}", flush=True)


if __name__ == "__main__":
    main()
