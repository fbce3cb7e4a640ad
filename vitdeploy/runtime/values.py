"""Values that runners and predictors share: tensors, batches, timings, labels."""

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
    """What a user is told where the outputs are of no task, and which tasks would take them if asked."""
    told = "the outputs are of no task that vitdeploy knows: they are compared as numbers (the task tensors)"
    if not others:
        return f"{told}; a task of its own would add answers in words, labels and a metric"
    named = " or ".join(f"--task {task}" for task in others)
    return f"{told}; {named} would read them, and adds answers in words, labels and a metric"


# --- Runs more images than an engine takes at once, or fewer ----------------------------------------------------------


Feeds = Mapping[str, BatchesArray]


def run_batches(
    chunks: Iterable[Feeds], batch: int | None, infer: Callable[[Feeds], Mapping[str, BatchesArray]]
) -> dict[str, BatchesArray]:
    """Every output, [n, ...], for all rows of the chunks, of which there is at least one.

    A chunk has each input, [at most `batch`, ...]; a shorter one is padded with its last row, and the padding's outputs
    are dropped. `batch` None means an engine that takes any number.
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


# --- Where a predictor's time went: the stages of its images, summed over all threads ---------------------------------


STAGES = ("decode", "preprocess", "infer", "postprocess")


@dataclass(frozen=True)
class Timings:
    """Milliseconds per image, means over `images`; all 0 before the first.

    decode: file to pixels. preprocess: resize, crop, and what the graph does not do itself. infer: host to host, with
    the wait for other threads' turns. postprocess: outputs to the answer.
    """

    images: int
    decode: float
    preprocess: float
    infer: float
    postprocess: float

    def to_dict(self) -> dict[str, Any]:
        return {"images": self.images, **{stage: getattr(self, stage) for stage in STAGES}}


class Stopwatch:
    """Adds up how long stages take; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = runner.forkable_lock()
        self._images = 0
        self._ns = dict.fromkeys(STAGES, 0)

    def add(self, stage: str, start: int) -> int:
        """A stage that began at `start`, of time.perf_counter_ns(), ends; its nanoseconds. (A context manager would
        take four times as long, which shows with a small model.)"""
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
# 8, or 7 on CPUs where products of 8-bit weights saturate (`host.saturates`).
#
# 255 * 63 * 2 is less than 2^15, so that weights of 7 bits give right answers everywhere.


def bits_for(isa: str) -> WeightBits:
    """The most that give right answers on a CPU with these instruction sets."""
    return 7 if host.saturates(isa) else 8


def bits_of(engine: EngineSpec) -> WeightBits | None:
    """The bits of an engine's INT8 weights; None for an engine in float."""
    return (engine.weight_bits or 8) if engine.precision in ("int8", "mixed") else None


def saturation_warning(bits: WeightBits | None, isa: str) -> str:
    """The problem with weights of this many bits on this CPU; "" if there is none."""
    if bits != 8 or not host.saturates(isa):
        return ""
    return (
        "weights of 8 bits saturate on this CPU, which has no VNNI: answers may be wrong; "
        "vitdeploy quantize --no-vnni makes weights of 7"
    )


def int8_instructions(isa: str) -> str:
    """What a CPU with these instruction sets has for INT8, as a line of the doctor; "" for an unknown one."""
    found = set(isa.split())
    if host.saturates(isa):
        return "missing  VNNI: INT8 weights are made with 7 bits, as products of 8 would saturate"
    if host.VNNI & found:
        return "works    VNNI: INT8 weights are made with 8 bits"
    if host.DOT_PRODUCT & found:
        return "works    dot products: INT8 weights are made with 8 bits"
    if "asimd" in found:
        return "missing  dot products: INT8 is right with 8 bits, by slower instructions: bench says whether it pays"
    return ""


def weight_remarks(engine: EngineSpec, isa: str) -> list[str]:
    """Remarks, with the engine's name, on running it on a CPU that its weights are not made for."""
    bits, warning = bits_of(engine), saturation_warning(bits_of(engine), isa)
    if warning:
        return [f"warning: {engine.artifact}: {warning}"]
    if bits == 7 and not host.saturates(isa):
        made = (
            "for CPUs without VNNI, which this one has" if host.VNNI & set(isa.split()) else "for x86 CPUs without VNNI"
        )
        return [
            f"note: {engine.artifact} is made {made}: weights of 8 bits would be nearer to the original here, and what "
            "is measured here is not that CPU"
        ]
    return []


# --- The names of a bundle's classes ----------------------------------------------------------------------------------


def read_labels(folder: Path, manifest: Manifest, files: CheckedFiles | None = None) -> list[str] | None:
    """One label per class, or None if the bundle has none. `files`: the bundle's, where it is being loaded.

    Raises:
        DigestError, ManifestError: the file is not the recorded one, or has not one line a class.
    """
    if manifest.labels is None:
        return None
    data = (files or CheckedFiles(folder, manifest)).read(manifest.labels)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(f"{folder / manifest.labels} is not UTF-8", found=str(error)[:200]) from None
    # Not splitlines(): a label may hold other characters that it takes for the end of a line.
    labels = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    for engine in manifest.engines:
        classes = number_of_classes(engine.outputs, manifest.postprocess)
        if classes is not None and classes != len(labels):
            raise ManifestError(
                f"{folder / manifest.labels} does not fit the engine {engine.artifact}",
                found=f"{len(labels)} labels",
                expected=f"one per class: {classes}",
            )
    return labels


def number_of_classes(outputs: Sequence[TensorSpec], postprocess: Postprocess | None) -> int | None:
    """How many classes the outputs are of; None if they do not say."""
    return last_axis(outputs, "logits") if postprocess is None else postprocess.number_of_classes(outputs)
