"""`verify` of very many images: memory, a kill at 60 %, and what a second run costs.

    python benchmarks/large_evaluation.py work/ [--images 100000] [--from calibration/digits/evaluation]
        [--recipe recipes/digits.yaml] [-- --executor processes ...]

Images are those of a folder with class folders, again and again under other names (hard links). A graph's engine for
OpenVINO is compared with that for ONNX Runtime; without a recipe it is a tiny model's with random weights, so that what
is seen is what vitdeploy does around the engines. First a tenth of the images, then all, each in a store of its own; of
all, the command is killed when 60 % of what it leaves is stored, and is given again until the end, and once more.
Memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from vitdeploy.data.folder import cut, scan
from vitdeploy.models.catalog import find_or_raise

CLI = [sys.executable, "-c", "from vitdeploy.cli.watched import main; main()"]
KILLED_AT = 0.6
TINY = "vit_w32d2h2_patch8_32"


@dataclass(frozen=True)
class Ran:
    """One command: how long it took, the memory of its largest process in MiB, its document (None: it was killed)."""

    seconds: float
    mib: float
    document: dict[str, object] | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--from", dest="origin", type=Path, default=Path("calibration/digits/evaluation"))
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("options", nargs="*", help="further options of verify, behind --")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    ours, theirs = engines(args.work, args.recipe or tiny(args.work))
    for count in (args.images // 10, args.images):
        images = links(args.origin, args.work / f"images-{count}", count)
        store = args.work / f"store-{count}"
        shutil.rmtree(store, ignore_errors=True)
        command = ["verify", str(ours), "--against", str(theirs), "--data", str(images), "--json", *args.options]
        if count < args.images:
            report(f"{count} images", run(command, store))
            continue
        shards = len(cut(scan(images, "folders")[0].names))
        killed = run(command, store, kill_at=round(2 * KILLED_AT * shards))
        report(f"{count} images, killed at {KILLED_AT:.0%} of {shards} shards", killed)
        rest = run(command, store)
        report("the same command", rest)
        again = run(command, store)
        report("and once more", again)
        assert again.document == rest.document and rest.document is not None and rest.document["n"] == count
        print(f"the second run took {100 * again.seconds / (killed.seconds + rest.seconds):.2f} % of the first")


def tiny(work: Path) -> Path:
    """The recipe of a classifier of ten classes with 17 tokens of width 32."""
    torch.manual_seed(1)
    family, config = find_or_raise(TINY)
    model = family.build(dataclasses.replace(config, num_classes=10, in_channels=1))
    with torch.no_grad():  # a fresh model's weights are so small that all logits are nearly equal
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_file(model.state_dict(), work / "tiny.safetensors")
    recipe = work / "tiny.yaml"
    recipe.write_text(
        f"{{vitdeploy: 1, name: tiny, source: {{model: {TINY}, checkpoint: tiny.safetensors}}, data: {{path: .}},"
        " preprocess: {resize: 32, crop: 32, mean: [0.5], std: [0.5]}, targets: [onnxruntime-cpu], precision: fp32}\n"
    )
    return recipe


def engines(work: Path, recipe: Path) -> tuple[Path, Path]:
    """Two engines of the graph that a recipe exports, in FP32: for OpenVINO, and for ONNX Runtime."""
    graph, found = work / "graph", []
    if not graph.is_dir():
        subprocess.run([*CLI, "export", str(recipe), "-o", str(graph)], check=True)
    for target in ("openvino-cpu", "onnxruntime-cpu"):
        found.append(work / target)
        if not found[-1].is_dir():
            subprocess.run([*CLI, "compile", str(graph), "--target", target, "-o", str(found[-1])], check=True)
    return found[0], found[1]


def links(origin: Path, folder: Path, count: int) -> Path:
    """A folder of `count` images."""
    files = sorted(path for path in origin.rglob("*") if path.is_file())
    if not folder.is_dir():
        for i in range(count):
            path = files[i % len(files)]
            target = folder / path.relative_to(origin).with_name(f"{i // len(files):05}-{path.name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    return folder


def run(command: list[str], store: Path, kill_at: int | None = None) -> Ran:
    """Run a command to its end, or until `kill_at` artifacts are in the store."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*CLI, *command],
        env={**os.environ, "VITDEPLOY_STORE": str(store)},
        stdout=(store.parent / "out.json").open("w"),
        start_new_session=True,
    )
    while kill_at is not None and process.poll() is None:
        time.sleep(0.2)
        if len(list(store.glob("artifacts/*/*/artifact.json"))) >= kill_at:
            os.killpg(process.pid, signal.SIGKILL)
            break
    _, status, usage = os.wait4(process.pid, 0)
    document = json.loads((store.parent / "out.json").read_text()) if os.waitstatus_to_exitcode(status) == 0 else None
    return Ran(time.perf_counter() - begun, usage.ru_maxrss / 1024, document)


def report(what: str, ran: Ran) -> None:
    print(f"{what}: {ran.seconds:.1f} s, {ran.mib:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
