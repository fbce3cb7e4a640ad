"""From JPEG files to labels: images per second of our ways and of the peers', on the same files and the same graph.

    python benchmarks/whole_path.py BUNDLE --data DIR --peers-python PEERS/bin/python -o whole_path.md

BUNDLE classifies images and has an engine openvino-cpu-int8 (`vitdeploy run`); DIR holds JPEG files. All ways run the
INT8 graph of that engine with its options, so the paths are compared and not the networks, each in a separate process,
in alternating blocks. The table also counts the answers that equal the reference's (`Predictor.predict`): a path with
different answers is not a faster path to the same result. Peers need a separate environment, with

    openvino (the version that vitdeploy has), pillow, opencv-python-headless, openvino-model-api
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ratios import log_ratio
from vitdeploy.bundle.read import read_bundle
from vitdeploy.runtime.host import describe_host, usable_cores

WORKER = Path(__file__).with_name("whole_path_worker.py")


@dataclass(frozen=True)
class Entry:
    """A way of the worker. `ours` runs here, a peer under its own interpreter."""

    name: str
    way: str
    ours: bool = False


REFERENCE = "vitdeploy, one by one"
ENTRIES = (
    Entry(REFERENCE, "one by one", ours=True),
    Entry("vitdeploy, `stream`", "streaming", ours=True),
    Entry("Pillow and OpenVINO, one by one", "pillow"),
    Entry("Pillow and OpenVINO's AsyncInferQueue", "pillow, queued"),
    Entry("OpenCV (bilinear) and OpenVINO, one by one", "opencv"),
    Entry("OpenCV (bilinear) and OpenVINO's AsyncInferQueue", "opencv, queued"),
    Entry("OpenVINO Model API, one by one", "model api"),
    Entry("OpenVINO Model API, AsyncPipeline", "model api, pipeline"),
)


class Process:
    """One way in its process; a way that dies is named with the end of what it printed."""

    def __init__(self, entry: Entry, python: str, payload: dict[str, Any], log: Path) -> None:
        self.entry, self.log = entry, log
        self.images_per_second: list[float] = []
        self.classes: list[int] = []
        argv = [python if not entry.ours else sys.executable, str(WORKER)]
        told = json.dumps({**payload, "way": entry.way})
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*argv, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def block(self, images: int) -> tuple[float, list[int]]:
        """Images per second, and the classes answered, for the next `images` files."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{images}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.entry.name} has ended: {self.log.read_text(encoding='utf-8')[-600:]}")
        found = json.loads(line)
        return images / found["seconds"], found["classes"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of JPEG files, searched through")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter of the peers' environment")
    parser.add_argument("--images", type=int, default=1000, help="maximum number of files, spread over the folder")
    parser.add_argument("--block", type=int, default=100, help="images of a block")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each way")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the table, Markdown; FILE.json has every block")
    options = parser.parse_args()
    files = chosen(options.data, options.images)
    processes = start(options, files)
    measure(processes, len(files), options.block, options.rounds)
    text = table(processes, len(files), options)
    options.out.write_text(text, encoding="utf-8")
    raw = {each.entry.name: each.images_per_second for each in processes}
    options.out.with_suffix(".json").write_text(json.dumps(raw), encoding="utf-8")
    print(text)


def chosen(folder: Path, most: int) -> list[str]:
    files = sorted(str(file) for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{folder} holds no JPEG files")
    return [files[i * len(files) // min(most, len(files))] for i in range(min(most, len(files)))]


def start(options: argparse.Namespace, files: Sequence[str]) -> list[Process]:
    manifest = read_bundle(options.bundle)
    engine = next((each for each in manifest.engines if each.artifact == "openvino-cpu-int8"), None)
    spec = manifest.preprocess
    square = spec is not None and isinstance(spec.resize, int) and spec.crop[0] == spec.crop[1]
    if engine is None or spec is None or not square or spec.fit != "stretch":
        raise SystemExit(f"{options.bundle} has no engine openvino-cpu-int8 for the centre of an image")
    payload = {
        "bundle": str(options.bundle),
        "target": engine.artifact,
        "graph": str(options.bundle / engine.files[0]),
        "options": dict(engine.options),
        "files": list(files),
        "threads": usable_cores(),
        "resize": spec.resize,
        "crop": spec.crop[0],
        "interpolation": spec.interpolation,
    }
    logs = options.out.parent
    return [
        Process(entry, options.peers_python, payload, logs / f"{options.out.stem}.{number}.log")
        for number, entry in enumerate(ENTRIES)
    ]


def measure(processes: Sequence[Process], files: int, block: int, rounds: int) -> None:
    """All files once, for the answers and to warm up; then alternating blocks, in changing order."""
    for process in processes:
        process.classes = process.block(files)[1]
        print(f"{process.entry.name}: {files} images answered", file=sys.stderr)
    for number in range(rounds):
        shift = number % len(processes)
        for process in [*processes[shift:], *processes[:shift]]:
            process.images_per_second.append(process.block(block)[0])
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    for process in processes:
        process.close()


def table(processes: Sequence[Process], files: int, options: argparse.Namespace) -> str:
    """A table in Markdown. Ratios come from alternating blocks, with 95 % intervals, to the reference's one by one."""
    host = describe_host()
    reference = next(each for each in processes if each.entry.name == REFERENCE)
    lines = [
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{host['cpu']} ({host['isa']}), {usable_cores()} threads; {files} files, {options.rounds} blocks of "
        f"{options.block} images each.",
        "",
        "| | images/s | times the first row [95 %] | answers that are the first row's |",
        "|---|---|---|---|",
    ]
    for each in processes:
        speed = sorted(each.images_per_second)[len(each.images_per_second) // 2]
        ratio, low, high = log_ratio(each.images_per_second, reference.images_per_second)
        equal = sum(a == b for a, b in zip(each.classes, reference.classes, strict=True))
        share = f"{equal} of {files} ({100 * equal / files:.1f} %)"
        lines.append(f"| {each.entry.name} | {speed:.0f} | {ratio:.2f} [{low:.2f}, {high:.2f}] | {share} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
