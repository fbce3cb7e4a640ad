"""Peak memory of calibrating with few and with many images: one process each; it should not grow.

python benchmarks/calibration_memory.py GRAPH.onnx IMAGE_FOLDER      (images are repeated to reach 1,024)
"""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

COUNTS = (64, 1024)


def child(graph: Path, folder: Path, count: int) -> None:
    from vitdeploy.data.folder import scan
    from vitdeploy.stages.calibrate import calibrate

    samples, _ = scan(folder, "none")
    with tempfile.TemporaryDirectory() as out:
        facts = calibrate(graph, list(itertools.islice(itertools.cycle(samples), count)), Path(out))
    print(sum(facts["memory"].values()) // 1000, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # kB on Linux


def main() -> None:
    if len(sys.argv) == 4:
        child(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
        return
    peaks = []
    for count in COUNTS:
        argv = [sys.executable, __file__, *sys.argv[1:3], str(count)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        estimate, peak = (int(kilobytes) / 1000 for kilobytes in done.stdout.split()[-2:])
        peaks.append(peak)
        print(f"{count:>5} images: {peak:.0f} MB (told before the start: {estimate:.0f} MB beside the process itself)")
    print(f"growth {peaks[1] - peaks[0]:+.0f} MB")


if __name__ == "__main__":
    main()
