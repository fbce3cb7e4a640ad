"""Does `bench --on DEVICE` say what `bench` says, where the device is this very machine?

    vitdeploy devices add loopback ssh://localhost --python PATH
    python benchmarks/bench_on.py BUNDLE loopback [--runs 10] [--duration 4]

Both alternate, in changing order, so that a disturbance of the machine for a minute affects either; the ratio is that
of the medians of neighbouring runs, trimmed by 20 % and with its t-interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.ratios import paired_ratio, student


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("device")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--duration", type=float, default=4)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"here": [], "there": []}
    ways = {"here": [], "there": ["--on", args.device]}
    for number in range(args.runs):
        for way in list(ways) if number % 2 == 0 else [*ways][::-1]:
            found[way].append(median_ms(args.bundle, args.duration, ways[way]))
        print(f"{number + 1}: here {found['here'][-1]:.2f} ms, there {found['there'][-1]:.2f} ms", flush=True)
    paired = paired_ratio(found["there"], found["here"])
    ratio, low, high = student(paired.log, paired.error, paired.freedom)
    medians = {way: statistics.median(values) for way, values in found.items()}
    print(
        f"p50 here {medians['here']:.2f} ms, on {args.device} {medians['there']:.2f} ms; "
        f"there / here {ratio:.3f} [{low:.3f}, {high:.3f}]"
    )


def median_ms(bundle: str, duration: float, options: list[str]) -> float:
    """p50 of the bundle's one engine."""
    command = [sys.executable, "-m", "vitdeploy.cli.main", "bench", bundle, "--scenario", "single", "--json"]
    done = subprocess.run(
        [*command, "--duration", str(duration), *options], stdout=subprocess.PIPE, text=True, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    if options:
        (document,) = document["devices"]
    (row,) = document["results"]
    return float(row["latency_ms"]["p50"])


if __name__ == "__main__":
    main()
