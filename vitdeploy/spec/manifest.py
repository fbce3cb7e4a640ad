"""The content of a bundle: graphs, engines, golden answers, and the budget that they were tested against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vitdeploy.spec.coding import SPARSE
from vitdeploy.spec.preprocess import PreprocessSpec, TensorSpec
from vitdeploy.spec.tasks import FlowSpec, Postprocess, SequenceSpec, Task

MANIFEST_FORMAT = 1
# Maximum batch of an engine: far above the memory of any machine, and within the integers of every runtime.
MAX_BATCH = 1 << 16

# "int4": only the weights of linears; activations are float.
Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8", "mixed", "int4"]
# The precision of the float operators of an INT8 engine.
FloatRest = Literal["fp32", "bf16"]
# Bits of INT8 weights, with maximum 2^(bits - 1) - 1: 127, or 63 for CPUs on which larger products saturate.
WeightBits = Literal[7, 8]
# Whether a budget is met: proven, disproven, neither, or no budget.
GateStatus = Literal["pass", "fail", "undecided", "none"]
# Certainty that the first engine of a bundle is the best: proven; ahead, though others may be as fast; or first in a
# fixed order, because the times do not rank them.
Grade = Literal["recommended", "leading", "no ranking"]


def bound_words(bounds: tuple[float | None, float | None]) -> str:
    """The bound of a ratio without a decided value: "at least 1.8" or "at most 0.24", with two digits, rounded to the
    weaker claim; "" without bounds."""
    low, high = bounds
    known = low if high is None else high
    if known is None:
        return ""
    scale = 10.0 ** max(0, 1 - math.floor(math.log10(known)))
    digits = round(math.log10(scale))
    if high is None:
        return f"at least {math.floor(known * scale) / scale:.{digits}f}"
    return f"at most {math.ceil(known * scale) / scale:.{digits}f}"


@dataclass(frozen=True)
class Budget:
    """Bounds on accuracy, speed, size and memory; None sets no bound.

    `max_drop` in points of top-1, `min_agreement` in percent of images with the original's top-1 answer,
    `max_latency` in milliseconds (p50 of a single stream), `max_size` in bytes of the engine's files, `max_memory` in
    bytes: the largest resident set of a process that has loaded the engine and answered once, as `bench` measures it.
    """

    max_drop: float | None = None
    min_agreement: float | None = None
    max_latency: float | None = None
    max_size: int | None = None
    max_memory: int | None = field(default=None, metadata=SPARSE)

    def __str__(self) -> str:
        bounds = [
            f"{name} {bound:g}" if isinstance(bound, float) else f"{name} {bound}"
            for name, bound in vars(self).items()
            if bound is not None
        ]
        return ", ".join(bounds) or "no bound"


@dataclass(frozen=True)
class FileEntry:
    """One file of a folder: path relative to it with forward slashes, size in bytes, SHA-256 as hex."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class GraphSpec:
    """One named ONNX graph with its inputs and outputs."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class EngineSpec:
    """The files and facts of one engine, as observed when it ran.

    `files` are the paths that the runtime loads, `graph` is the placement they were compiled from, "" in a slim bundle.
    `precision` is the one that ran: "int8" only if every linear and convolution placed in INT8 ran in an INT8 kernel.
    `kernels` counts linears and convolutions by the precision they ran in. `batch` is the batch the engine is compiled
    for by default (only a graph with a dynamic batch can be compiled for another).

    `weight_bits` are the bits of INT8 weights; None without INT8 weights.

    An engine of several graphs has `parts`, each with its own files, inputs, precision and kernels; `inputs` and
    `outputs` are those of the whole model. `flow` describes how the parts run together, `sequence` how tokens are
    chosen if one part repeats.

    `accepted`: entries of the known-bad runtime table (`known_bad/table.json`) that match this engine and that the user
    accepted by name when compiling it.

    `row_parts`: the parts in which `files` compute the token rows, if not all at once as in `graph`; a single number is
    the padded number of rows (`graph.passes.rows`).
    `float_rest`: the precision of the float operators of an INT8 engine, if not fp32; a CPU without it computes them in
    fp32.
    """

    target: str
    precision: str
    graph: str
    files: tuple[str, ...]
    batch: int
    dynamic_batch: bool
    provider: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kernels: dict[str, int] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    device: dict[str, str] = field(default_factory=dict)
    part: str = "model"
    parts: tuple[EngineSpec, ...] = ()
    sequence: SequenceSpec | None = None
    weight_bits: WeightBits | None = None
    flow: FlowSpec | None = field(default=None, metadata=SPARSE)
    accepted: tuple[str, ...] | None = field(default=None, metadata=SPARSE)
    row_parts: tuple[int, ...] | None = field(default=None, metadata=SPARSE)
    float_rest: FloatRest | None = field(default=None, metadata=SPARSE)

    @property
    def form_told(self) -> str:
        """The form of the engine in words: its rows, and the precision of its float operators if not fp32."""
        rest = f"float operators in {self.float_rest}" if self.float_rest is not None else ""
        return "; ".join(each for each in (self.rows_told, rest) if each)

    @property
    def rows_told(self) -> str:
        """The parts of the rows in words, such as "197 rows as 192 + 5"; "" for one row per token, all at once."""
        parts = self.row_parts or ()
        if len(parts) == 1:
            return f"padded to {parts[0]} rows"
        return f"{sum(parts)} rows as {' + '.join(map(str, parts))}" if parts else ""

    @property
    def artifact(self) -> str:
        """The name of this engine in tables: target and precision."""
        return f"{self.target}-{self.precision}"


@dataclass(frozen=True)
class GoldenEngine:
    """The outputs of an engine for the golden inputs when the bundle was built.

    `outputs` is an .npz file; `tolerance` is the maximum max|a-b| / max|b| over the outputs by which the same engine
    may differ from it on another machine. At least `least_same` of its answers must equal the original's.
    `proves_nothing`: the reason why unrelated answers would pass as well; None if they would not.
    """

    outputs: str
    tolerance: float
    least_same: int
    proves_nothing: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class GoldenSpec:
    """Inputs and the original model's outputs for them, to check an engine wherever it is loaded.

    `inputs` and `outputs` are .npz files of arrays by tensor name. `engines`: by artifact. `tolerance`: by target, for
    engines without recorded answers, which are compared with the original's.
    """

    inputs: str
    outputs: str
    tolerance: dict[str, float] = field(default_factory=dict)
    engines: dict[str, GoldenEngine] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` of a bundle, format 1. Data only: no field can name code.

    `preprocess` is None if the input is not an image; `postprocess` has the class of the task (`postprocess_of`).
    `graphs`: the float graphs by name; none in a slim bundle (`bundle.write.slim_bundle`).
    `sizes` are further image sizes of the same model, as "384x384" (height, width): `sizes/384x384` is a whole bundle.
    `gates`: by artifact, whether the engine met its budget when the bundle was built. `recommended`: the artifact that
    the verdict recommends, which is the first of `engines`; None without a recommendation. `grade`: the grade of the
    verdict, None without one; `rivals`: artifacts that may be as fast as the first of `engines`.
    `monitor`: the file with the statistics of the images that the bundle was verified with
    (`runtime.monitor_reference`).
    """

    format: int
    name: str
    task: Task
    graphs: dict[str, GraphSpec]
    preprocess: PreprocessSpec | None
    labels: str | None
    engines: tuple[EngineSpec, ...]
    golden: GoldenSpec | None
    files: tuple[FileEntry, ...]
    provenance: dict[str, Any] = field(default_factory=dict)
    postprocess: Postprocess | None = None
    sizes: tuple[str, ...] = ()
    gates: dict[str, GateStatus] = field(default_factory=dict)
    recommended: str | None = None
    grade: Grade | None = field(default=None, metadata=SPARSE)
    rivals: tuple[str, ...] = ()
    monitor: str | None = field(default=None, metadata=SPARSE)

    def gate(self, engine: EngineSpec) -> GateStatus:
        """Whether an engine met its budget; "none" if it was never tested."""
        return self.gates.get(engine.artifact, "none")
