"""Calibration by one process and by several: seconds, peak memory, and whether the files are the same byte for byte.

python benchmarks/calibration_workers.py GRAPH.onnx IMAGE_FOLDER [--images 1000] [--jobs 2]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def child(graph: Path, folder: Path, images: int, jobs: int) -> None:
    from vitdeploy.data.folder import scan
    from vitdeploy.stages.calibrate import calibrate
    from vitdeploy.stages.workers import Workers
    from vitdeploy.store.store import Store
    from vitdeploy.tasks.images import labels_in
    from vitdeploy.workflows.executors import Processes

    samples, _ = scan(folder, labels_in(folder))
    with tempfile.TemporaryDirectory() as scratch:
        out, store = Path(scratch) / "out", Store(Path(scratch) / "store")
        out.mkdir()
        begun = time.perf_counter()
        calibrate(graph, samples[:images], out, workers=Workers(Processes(jobs) if jobs else None, store))
        seconds = time.perf_counter() - begun
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(out.iterdir()))).hexdigest()
        stored = sum(file.stat().st_size for file in (Path(scratch) / "store" / "artifacts").rglob("*.npz"))
        statistics = (out / "statistics.npz").stat().st_size
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # kB
    processor = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps([seconds, processor, peaks, stored, statistics, digest]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--jobs", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--child", type=int)
    options = parser.parse_args()
    if options.child is not None:
        child(options.graph, options.folder, options.images, options.child)
        return
    digests = set()
    for jobs in options.jobs:
        argv = [sys.executable, *sys.argv, "--child", str(jobs)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        seconds, processor, (own, largest), stored, statistics, digest = json.loads(done.stdout.splitlines()[-1])
        digests.add(digest)
        megabytes = [f"{number / 1e6:.1f} MB" for number in (own * 1e3, largest * 1e3, stored, statistics)]
        print(f"{jobs or 'no'} workers: {seconds:.1f} s, {processor:.1f} s of all processors")
        print("   peak of the command {}, of a worker {}; shards stored {}, statistics {}".format(*megabytes))
    print("the same bytes" if len(digests) == 1 else "OTHER BYTES")


if __name__ == "__main__":
    main()
