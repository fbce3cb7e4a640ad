"""Writes the measured numbers of README.md: `python -m tests.readme_numbers --demo out/digits --peers int8_peers.json`.

`--demo` is the bundle that `make demo` writes, `--peers` the results of benchmarks/int8_peers.py. Each block keeps the
version that was measured, so that a test can ask for new numbers with each minor version.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from vitdeploy import __version__
from vitdeploy.api.deploy import table_of
from vitdeploy.document.report import Report
from vitdeploy.spec import decode

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = r"<!-- numbers: {} (\S+) -->\n.*?<!-- end -->"
MODEL, NNCF = "vit_tiny_patch16_224", "nncf"
# Rows of the second table: artifacts of the benchmark, and what a reader knows them as.
ENGINES = {
    "vitdeploy-openvino-int8": "**vitdeploy, OpenVINO INT8**",
    NNCF: "NNCF, OpenVINO INT8",
    "vitdeploy-onnxruntime-int8": "**vitdeploy, ONNX Runtime INT8**",
    "ort-dynamic": "ONNX Runtime, `quantize_dynamic`",
    "ort-static": "ONNX Runtime, `quantize_static` with its defaults",
    "pytorch-pt2e": "PyTorch 2 Export, INT8",
    "pytorch": "PyTorch FP32",
}


def demo_block(bundle: Path) -> str:
    """What `make demo` ends with, and where it ran."""
    report = decode(Report, json.loads((bundle / "report.json").read_text(encoding="utf-8")))
    host = report.environment
    lines = [line.rstrip() for line in table_of(report).lines()]
    cpu = f"{host['cpu']} with {host['isa'].split()[-1]}"
    where = f"{host['cores']} cores of {cpu}, {report.data.evaluation_images} evaluation images"
    shown = "\n".join(f"    {line}" if line else "" for line in [*lines, "", report.verdict.sentence])
    return f"`make demo` ends with this table ({where}):\n\n{shown}"


def peers_block(results: dict[str, Any]) -> str:
    """ViT-Tiny beside the peers, all from one export and the same calibration images."""
    model, host = results["models"][MODEL], results["host"]
    ratios = {pair["a"]: pair for pair in model["measured"]["single"]["ratios"] if pair["b"] == NNCF}
    lines = [
        f"ViT-Tiny on {model['evaluation_images']} ImageNet photographs, batch 1, all from one export and the same "
        f"{model['calibration_images']} calibration images ({results['threads']} cores of {host['cpu']}; "
        "[all peers and intervals](docs/results/performance.md)):",
        "",
        "| engine | top-1 | same answers as PyTorch | latency / NNCF's |",
        "|---|---|---|---|",
    ]
    for name, title in ENGINES.items():
        accuracy = model["artifacts"][name].get("accuracy")
        if accuracy is None:
            continue
        ratio = ratios.get(name)
        against = "1" if name == NNCF else f"{ratio['ratio']:.2f} [{ratio['ci95'][0]:.2f}, {ratio['ci95'][1]:.2f}]"
        lines.append(f"| {title} | {accuracy['top1']:.2f} | {accuracy['agreement']:.2f} % | {against} |")
    return "\n".join(lines)


def with_block(text: str, name: str, block: str) -> str:
    """The page with another block of numbers."""
    new = f"<!-- numbers: {name} {__version__} -->\n{block}\n<!-- end -->"
    written, count = re.subn(BLOCK.format(name), lambda match: new, text, flags=re.DOTALL)
    assert count == 1, f"README.md has {count} blocks of numbers called {name}"
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path)
    parser.add_argument("--peers", type=Path)
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    if options.demo is not None:
        text = with_block(text, "demo", demo_block(options.demo))
    if options.peers is not None:
        text = with_block(text, "peers", peers_block(json.loads(options.peers.read_text(encoding="utf-8"))))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
