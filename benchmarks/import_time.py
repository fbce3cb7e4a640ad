"""What `import vitdeploy.runtime` costs beyond `import numpy`: median of alternating processes, warm bytecode."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile

ROUNDS = 15
NUMPY, RUNTIME = "import numpy", "import numpy; import vitdeploy.runtime"


def seconds(code: str, cache: str) -> float:
    """Wall time of one import, measured inside a fresh interpreter with its byte code cached under `cache`."""
    timed = f"import time; t = time.perf_counter(); exec({code!r}); print(time.perf_counter() - t)"
    done = subprocess.run(
        [sys.executable, "-X", f"pycache_prefix={cache}", "-c", timed],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    return float(done.stdout)


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        seconds(RUNTIME, cache)
        pairs = [(seconds(NUMPY, cache), seconds(RUNTIME, cache)) for _ in range(ROUNDS)]
    numpy = statistics.median(pair[0] for pair in pairs)
    added = statistics.median(pair[1] - pair[0] for pair in pairs)
    print(f"numpy {1000 * numpy:.0f} ms; vitdeploy.runtime adds {1000 * added:.0f} ms ({added / numpy:.2f} of numpy's)")


if __name__ == "__main__":
    main()
