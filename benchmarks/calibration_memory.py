"""Peak memory of calibrating with few and with many images: one process each; the goal is no growth.

python benchmarks/calibration_memory.py GRAPH.onnx IMAGE_FOLDER      (images are repeated to reach 1,024)
"""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
from pathlib import Path

COUNTS = (64, 1024)


def child(graph: Path, folder: Path, count: int) -> None:
    from vitdeploy.data.folder import scan
    from vitdeploy.data.pixels import batches
    from vitdeploy.graph.io import get_metadata, load_graph
    from vitdeploy.quantize.observers import BATCH, observe

    model = load_graph(graph)
    preprocess = get_metadata(model, str(graph)).preprocess
    samples, _ = scan(folder, "folders")
    repeated = list(itertools.islice(itertools.cycle(samples), count))
    observe(model, batches(repeated, preprocess, BATCH), preprocess)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # kB on Linux


def main() -> None:
    if len(sys.argv) == 4:
        child(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
        return
    peaks = []
    for count in COUNTS:
        argv = [sys.executable, __file__, *sys.argv[1:3], str(count)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout.split()[-1]) / 1000)
        print(f"{count:>5} images: {peaks[-1]:.0f} MB")
    print(f"ratio {peaks[1] / peaks[0]:.3f}")


if __name__ == "__main__":
    main()
