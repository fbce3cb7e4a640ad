"""Peak memory of exporting a model, in units of its weights; the goal is at most 2.5. One process a model.

python benchmarks/export_memory.py [NAME ...]                        (default: vit_huge_patch14_224)
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEFAULT = ("vit_huge_patch14_224",)
CHILD = "--child"


def child(name: str) -> None:
    """Prints the weights' bytes, the peak after the imports and at the end (kB), the seconds, the graph's bytes."""
    from vitdeploy.models.source import Source
    from vitdeploy.stages.export import ExportConfig, export
    from vitdeploy.stages.reference_model import find_reference_model

    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        reference_model = find_reference_model(Source(model=name))
        facts = export(reference_model, ExportConfig(name, 20, None, True), out)
        size = sum(path.stat().st_size for path in out.iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worst = max(row["max_relative_difference"] for row in facts["parity"])
    print(4 * reference_model.parameters, 1024 * idle, 1024 * peak, time.perf_counter() - start, size, worst)


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == CHILD:
        child(sys.argv[2])
        return
    for name in sys.argv[1:] or DEFAULT:
        done = subprocess.run([sys.executable, __file__, CHILD, name], check=True, stdout=subprocess.PIPE, text=True)
        weights, idle, peak, seconds, size, worst = (float(word) for word in done.stdout.split())
        print(
            f"{name}: weights {weights / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB = {peak / weights:.2f} x weights "
            f"({idle / 1e9:.2f} GB of it before the model), {seconds:.0f} s, {size / 1e9:.2f} GB written, "
            f"largest difference {worst:.1e}"
        )


if __name__ == "__main__":
    main()
