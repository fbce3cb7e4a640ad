"""Long runs of a predictor: every answer the same, bit for bit, and nothing that grows.

The digits model in float32 on each runtime, in a process of its own: some images, in turns as a path, as bytes and as
an array, with a monitor. After a warm-up of a tenth nothing may grow: descriptors and threads stay as many, and the
resident set at the end is at most 1 % or 2 MiB above that at the begin, whichever is more (medians of tenths): 10,000
predictions that lose 210 bytes each are found. Loads and closes: as many descriptors and threads after the last one as
after the first third, and at most 2 % or 8 MiB more memory.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.gate import Row

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "calibration" / "digits"
TARGETS = ("onnxruntime-cpu", "openvino-cpu", "tensorrt")
PREDICTIONS, LOADS = {True: 10_000, False: 500}, {True: 60, False: 6}
IMAGES = 20
PLACES = {"descriptors": "fd", "threads": "task"}
MIB = 1 << 20
GROWTH, LEAST = 0.01, 2 * MIB
LOADS_GROWTH, LOADS_LEAST = 0.02, 8 * MIB


def run(full: bool, work: Path) -> list[Row]:
    graph = _export(work)
    return [row for target in TARGETS for row in _rows(target, graph, PREDICTIONS[full], LOADS[full], work)]


def _rows(target: str, graph: Path, count: int, loads: int, work: Path) -> list[Row]:
    started = time.monotonic()
    predictions = Row(f"{count:,} predictions, {target}: equal, memory and descriptors flat", count + 3)
    closes = Row(f"{loads} loads and closes, {target}", loads + 3)
    bundle = work / target
    if (missing := _compile(graph, target, bundle)) is not None:
        predictions.missing = closes.missing = missing
        predictions.seconds = closes.seconds = time.monotonic() - started
        return [predictions, closes]
    words = [sys.executable, "-m", "tests.faults.predictions", str(bundle), str(count), str(loads)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(work / "cache")}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        predictions.add("the process", "crash", note=f"exit status {done.returncode}: {done.stderr[-500:]}")
        return [predictions, closes]
    found = json.loads(done.stdout)
    for number, (seconds, equal) in enumerate(found["predictions"]):
        predictions.add(str(number), "accepted" if equal else "wrong", seconds, note="" if equal else "another answer")
    for number, (seconds, equal) in enumerate(found["loads"]):
        closes.add(str(number), "accepted" if equal else "wrong", seconds, note="" if equal else "another answer")
    for row, flat in ((predictions, found["flat"]), (closes, found["flat loads"])):
        for name, (before, after, most) in flat.items():
            row.add(name, "clean" if after <= most else "wrong", note=f"{before:,} became {after:,}, allowed {most:,}")
        row.cases[-1] = replace(row.cases[-1], peak_mb=found["peak"] / 1e6)
    predictions.seconds = time.monotonic() - started
    closes.seconds = sum(case.seconds for case in closes.cases)
    return [predictions, closes]


def _export(work: Path) -> Path:
    """The float graph of the digits model."""
    from vitdeploy.models.source import Source
    from vitdeploy.spec import PreprocessSpec
    from vitdeploy.stages.export import ExportConfig, export
    from vitdeploy.stages.reference_model import Overrides, find_reference_model

    preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
    source = Source("vit_w192d4h3_patch4_32", DIGITS / "vit_digits.safetensors")
    out = work / "export"
    out.mkdir()
    export(
        find_reference_model(source, Overrides(preprocess)),
        ExportConfig("digits", opset=20, batch=None, in_graph=True),
        out,
    )
    return out / "model.onnx"


def _compile(graph: Path, target: str, out: Path) -> str | None:
    """Make the bundle of a target; or say why it cannot be made here."""
    from vitdeploy.errors import HostError
    from vitdeploy.workflows.placement import compile_bundle

    out.mkdir()
    try:
        compile_bundle(graph, target, None, None, out)
    except HostError as error:
        return f"not run: {error.message}"
    return None


# --- in the process that predicts -------------------------------------------------------------------------------------


def _long_run(bundle: Path, count: int, loads: int) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    from vitdeploy.runtime import Monitor, Predictor, load

    files = sorted((DIGITS / "evaluation").rglob("*.png"))
    files = files[:: len(files) // IMAGES][:IMAGES]
    forms: list[Any] = list(files)
    forms += [file.read_bytes() for file in files]
    forms += [np.asarray(Image.open(file).convert("L"))[:, :, None] for file in files]

    def answer(predictor: Predictor, number: int) -> tuple[bytes, dict[str, Any]]:
        tensor, size = predictor.prepare(forms[number % len(forms)])
        outputs = predictor.run(tensor)
        said = predictor.answer({name: each[0] for name, each in outputs.items()}, size)
        return b"".join(each.tobytes() for each in outputs.values()), said.to_dict()

    def timed(predictor: Predictor, number: int, first: list[Any]) -> tuple[float, bool]:
        start = time.perf_counter()
        found = answer(predictor, number)
        return time.perf_counter() - start, found == first[number % IMAGES]

    with load(bundle, threads=1) as predictor:
        first = [answer(predictor, number) for number in range(IMAGES)]
    # Every form of every image, and the growth of caches that do not grow any more later.
    watched = load(bundle, threads=1, monitor=Monitor(every=50, on_event=lambda event: None))
    with watched as predictor:
        warm = max(3 * IMAGES, count // 10)
        for number in range(warm):
            timed(predictor, number, first)
        answers = np.ones((count, 2))  # there from the begin on: what grows is not this list
        memory, before = [], _facts()
        for number in range(count):
            answers[number] = timed(predictor, number, first)
            if number % max(1, count // 100) == 0:
                memory.append(_resident())
        flat = {
            "resident memory": _bounded(memory[: len(memory) // 10], memory[-len(memory) // 10 :], GROWTH, LEAST),
            **{name: (value, _facts()[name], value) for name, value in before.items()},
        }
    closes, resident, facts = [], [], []
    for number in range(loads):
        start = time.perf_counter()
        with load(bundle, threads=1) as predictor:
            equal = timed(predictor, number, first)[1]
        closes.append((time.perf_counter() - start, equal))
        gc.collect()
        resident.append(_resident())
        facts.append(_facts())
    third = max(1, loads // 3)
    flat_loads = {
        "resident memory": _bounded(resident[third - 1 : third + 1], resident[-2:], LOADS_GROWTH, LOADS_LEAST),
        **{name: (facts[third][name], facts[-1][name], facts[third][name]) for name in facts[0]},
    }
    peak = _status("VmHWM")
    return {"predictions": answers.tolist(), "loads": closes, "flat": flat, "flat loads": flat_loads, "peak": peak}


def _bounded(begin: list[int], end: list[int], share: float, least: int) -> tuple[int, int, int]:
    """The medians at the begin and at the end, and the most that the latter may be."""
    before, after = int(statistics.median(begin)), int(statistics.median(end))
    return before, after, before + max(int(share * before), least)


def _facts() -> dict[str, int]:
    return {name: sum(1 for _ in Path("/proc/self", place).iterdir()) for name, place in PLACES.items()}


def _resident() -> int:
    return _status("VmRSS")


def _status(name: str) -> int:
    """Bytes of this process."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:"))


if __name__ == "__main__":
    print(json.dumps(_long_run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
