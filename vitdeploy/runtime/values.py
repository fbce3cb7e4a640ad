"""Functions shared by runners and predictors: batches, timings, weight bits, labels."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bundle.checked import CheckedFiles
from vitdeploy.errors import ManifestError
from vitdeploy.runtime import host, runner
from vitdeploy.runtime.runner import Array as BatchesArray
from vitdeploy.spec import EngineSpec, Manifest, Postprocess, Task, TensorSpec, WeightBits, last_axis


def last_resort(others: Sequence[Task]) -> str:
    """Return the note for outputs without a known task; `others` are the tasks that could read them on request."""
    note = "the outputs fit no known task: they are compared as numbers (task tensors)"
    if not others:
        return f"{note}; a custom task would add readable answers, labels and a metric"
    named = " or ".join(f"--task {task}" for task in others)
    return f"{note}; {named} can read them and adds readable answers, labels and a metric"


# --- Runs of any number of images in batches --------------------------------------------------------------------------


Feeds = Mapping[str, BatchesArray]


def run_batches(
    chunks: Iterable[Feeds], batch: int | None, infer: Callable[[Feeds], Mapping[str, BatchesArray]]
) -> dict[str, BatchesArray]:
    """Return every output, [n, ...], for all rows of the chunks (at least one).

    A chunk has each input, [at most `batch`, ...]; a shorter one is padded with its last row, and the padding's outputs
    are dropped. `batch` None: the engine takes any number of rows.
    """
    runs = []
    for chunk in chunks:
        count = len(next(iter(chunk.values())))
        missing = 0 if batch is None else batch - count
        found = infer({name: _padded(array, missing) for name, array in chunk.items()} if missing else chunk)
        runs.append({name: output[:count] for name, output in found.items()})
    return runs[0] if len(runs) == 1 else {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}


def _padded(array: BatchesArray, missing: int) -> BatchesArray:
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


# --- Timings of a predictor by stage, summed over all threads ---------------------------------------------------------


STAGES = ("decode", "preprocess", "infer", "postprocess")


@dataclass(frozen=True)
class Timings:
    """Mean milliseconds per image over `images`; all 0 before the first.

    decode: file to pixels. preprocess: resize, crop, and normalisation outside the graph. infer: host to host,
    including waits for other threads. postprocess: outputs to the answer.
    """

    images: int
    decode: float
    preprocess: float
    infer: float
    postprocess: float

    def to_dict(self) -> dict[str, Any]:
        return {"images": self.images, **{stage: getattr(self, stage) for stage in STAGES}}


class Stopwatch:
    """Sums the durations of stages; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = runner.forkable_lock()
        self._images = 0
        self._ns = dict.fromkeys(STAGES, 0)

    def add(self, stage: str, start: int) -> int:
        """End a stage that began at `start` (time.perf_counter_ns()) and return its nanoseconds. (A context manager
        would take four times as long, which is measurable for small models.)"""
        elapsed = time.perf_counter_ns() - start
        with self._lock:
            self._ns[stage] += elapsed
        return elapsed

    def count(self, images: int) -> None:
        with self._lock:
            self._images += images

    def read(self) -> Timings:
        with self._lock:
            images, ns = self._images, dict(self._ns)
        return Timings(images, **{stage: ns[stage] / 1e6 / max(1, images) for stage in STAGES})


# --- The number of bits of INT8 weights -------------------------------------------------------------------------------
# 8 bits, or 7 on CPUs where products of 8-bit weights saturate (`host.saturates`).
#
# 255 * 63 * 2 is less than 2^15, so 7-bit weights never saturate.


def bits_for(isa: str) -> WeightBits:
    """Return the largest number of bits without saturation on a CPU with these instruction sets."""
    return 7 if host.saturates(isa) else 8


def bits_of(engine: EngineSpec) -> WeightBits | None:
    """Return the bits of an engine's INT8 weights; None for a float engine."""
    return (engine.weight_bits or 8) if engine.precision in ("int8", "mixed") else None


def saturation_warning(bits: WeightBits | None, isa: str) -> str:
    """Return a warning if weights with `bits` bits saturate on this CPU, else ""."""
    if bits != 8 or not host.saturates(isa):
        return ""
    return (
        "8-bit weights may saturate on this CPU, which has no VNNI: answers may be wrong; "
        "vitdeploy quantize --no-vnni makes 7-bit weights"
    )


def int8_instructions(isa: str) -> str:
    """Return the doctor's line on the INT8 support of a CPU with these instruction sets; "" if unknown."""
    found = set(isa.split())
    if host.saturates(isa):
        return "missing  VNNI: INT8 weights use 7 bits, because products of 8-bit weights would saturate"
    if host.VNNI & found:
        return "works    VNNI: INT8 weights use 8 bits"
    if host.DOT_PRODUCT & found:
        return "works    dot products: INT8 weights use 8 bits"
    if "asimd" in found:
        return "missing  dot products: INT8 with 8 bits is correct but slower; run bench to compare it with float"
    return ""


def weight_remarks(engine: EngineSpec, isa: str) -> list[str]:
    """Return remarks, with the engine's name, if its weights were made for another kind of CPU."""
    bits, warning = bits_of(engine), saturation_warning(bits_of(engine), isa)
    if warning:
        return [f"warning: {engine.artifact}: {warning}"]
    if bits == 7 and not host.saturates(isa):
        made = "CPUs without VNNI (this CPU has it)" if host.VNNI & set(isa.split()) else "x86 CPUs without VNNI"
        return [
            f"note: {engine.artifact} has 7-bit weights for {made}: 8-bit weights would be closer to the original "
            "here, and results here do not apply to those CPUs"
        ]
    return []


# --- The names of a bundle's classes ----------------------------------------------------------------------------------


def read_labels(folder: Path, manifest: Manifest, files: CheckedFiles | None = None) -> list[str] | None:
    """Return one label per class, or None if the bundle has none. `files`: the bundle's files while it is being loaded.

    Raises:
        DigestError, ManifestError: the file differs from the manifest's record, or does not have one line per class.
    """
    if manifest.labels is None:
        return None
    data = (files or CheckedFiles(folder, manifest)).read(manifest.labels)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{folder / manifest.labels} is not UTF-8", found=str(error)[:200]) from None
    # Not splitlines(): it also splits at other characters, which a label may contain.
    labels = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    for engine in manifest.engines:
        classes = number_of_classes(engine.outputs, manifest.postprocess)
        if classes is not None and classes != len(labels):
            raise ManifestError(
                f"{folder / manifest.labels} does not match the classes of the engine {engine.artifact}",
                found=f"{len(labels)} labels",
                expected=f"one per class: {classes}",
            )
    return labels


def number_of_classes(outputs: Sequence[TensorSpec], postprocess: Postprocess | None) -> int | None:
    """Return the number of classes in the outputs; None if they do not tell."""
    return last_axis(outputs, "logits") if postprocess is None else postprocess.number_of_classes(outputs)
