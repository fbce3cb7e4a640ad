"""The rate at which memory is copied here, by as many threads as a benchmark run uses.

It copies between two arrays well beyond the last-level cache; each thread has its part. It counts bytes read and bytes
written as STREAM does (McCalpin 1995), without what a cache reads before it writes.
"""

from __future__ import annotations

import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from vitdeploy.benchmark.context import Memory
from vitdeploy.benchmark.machine import ROOT, read_text
from vitdeploy.errors import CapabilityError

# An array is this many times the last-level cache; if that is unknown, it has LEAST_BYTES.
TIMES_CACHE, LEAST_BYTES = 4, 64 << 20
# The share of free memory for both arrays.
MEMORY_SHARE = 0.5
LEAST_RUNS = 5
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def copy_rate(threads: int, seconds: float, root: Path = ROOT) -> Memory:
    """Bytes a second of the median copy, within about `seconds`.

    Raises:
        CapabilityError: too little memory is free for arrays beyond the cache.
    """
    cache = last_level_cache(root)
    size = max(LEAST_BYTES, TIMES_CACHE * (cache or 0))
    free = _available(root)
    if free is not None and 2 * size > MEMORY_SHARE * free:
        raise CapabilityError(
            "too little memory is free for two arrays beyond the cache",
            found=f"{free:,} bytes",
            wanted=f"{round(2 * size / MEMORY_SHARE):,} bytes",
        )
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    bounds = [size * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    times: list[float] = []
    with ThreadPoolExecutor(threads) as pool:  # numpy copies without the interpreter's lock
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or len(times) <= LEAST_RUNS:
            begin = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))
            times.append(time.perf_counter() - begin)
    return Memory(2 * size / statistics.median(times[1:]), size, cache, threads)


def last_level_cache(root: Path = ROOT) -> int | None:
    """The bytes of the largest cache of the first CPU; None if the kernel does not report it.

    Source: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu (size in kB, as "36608K").
    """
    texts = (read_text(path) or "" for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"))
    found = [re.fullmatch(r"(\d+)([KMG]?)", text.strip()) for text in texts]
    return max((int(match[1]) * UNITS[match[2]] for match in found if match), default=None)


def _available(root: Path) -> int | None:
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None
