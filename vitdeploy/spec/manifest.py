"""What a bundle holds: graphs, engines, golden answers, and the budget that they were judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vitdeploy.spec.coding import SPARSE
from vitdeploy.spec.preprocess import PreprocessSpec, TensorSpec
from vitdeploy.spec.tasks import FlowSpec, Postprocess, SequenceSpec, Task

MANIFEST_FORMAT = 1
# Of an engine: far above what any machine holds, and within what every runtime counts with.
MAX_BATCH = 1 << 16

# "int4": of the weights of linears; what flows between layers is float.
Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8", "mixed", "int4"]
# What an INT8 engine computes its float operators in.
FloatRest = Literal["fp32", "bf16"]
# Of INT8 weights, whose largest is 2^(bits - 1) - 1: 127, or 63 for CPUs on which products of more bits saturate.
WeightBits = Literal[7, 8]
# Whether a budget is met: proven, disproven, neither, or there is none.
GateStatus = Literal["pass", "fail", "undecided", "none"]
# How surely the first engine of a bundle is the one to ship: proven; ahead, though others may be as fast; or first in a
# fixed order, because the times do not rank them.
Grade = Literal["recommended", "leading", "no ranking"]


def bound_words(bounds: tuple[float | None, float | None]) -> str:
    """What is known of a ratio whose value is not: "at least 1.8" or "at most 0.24", with two digits, rounded towards
    the weaker claim; "" where nothing is known."""
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
    """What may be lost and what must be gained; None sets no bound.

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
    """One file of a folder: path with forward slashes relative to it, size in bytes, SHA-256 as hex."""

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
    """What one target loads, and what was seen when it ran.

    `files` are the paths that the runtime loads, `graph` is the placement they were made from ("" in a slim bundle).
    `precision` is the one that really ran: "int8" only when every linear and convolution placed in INT8 ran in an INT8
    kernel. `kernels` counts linears and convolutions by the precision they ran in. `batch` is the batch the engine is
    compiled at unless the caller asks for another (only a graph with a dynamic batch can be compiled at another).

    `weight_bits` are those of INT8 weights; None without any.

    An engine of several graphs has `parts`, each with its own files, inputs, precision and kernels; `inputs` and
    `outputs` are those of the whole. `flow` says how the parts run together, `sequence` how tokens are chosen
    where one part repeats.

    `accepted`: entries of the table of runtimes known to be wrong (`known_bad/table.json`) that are about this engine,
    and that whoever compiled it accepted by name.

    `row_parts`: the parts in which `files` compute the rows of the tokens, where they do not compute all at once, as
    `graph` does; one number: so many rows in place of one a token (`graph.passes.rows`).
    `float_rest`: what an INT8 engine computes its float operators in, where that is not fp32; on a CPU without it they
    are computed in fp32.
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
        """Which of equivalent forms it has, in words: its rows, and its float operators where they are not in fp32."""
        rest = f"float operators in {self.float_rest}" if self.float_rest is not None else ""
        return "; ".join(each for each in (self.rows_told, rest) if each)

    @property
    def rows_told(self) -> str:
        """The parts of the rows in words, "197 rows as 192 + 5"; "" where there is a row a token, all at once."""
        parts = self.row_parts or ()
        if len(parts) == 1:
            return f"{parts[0]} rows in place of one a token"
        return f"{sum(parts)} rows as {' + '.join(map(str, parts))}" if parts else ""

    @property
    def artifact(self) -> str:
        """The name of this engine in tables: target and precision."""
        return f"{self.target}-{self.precision}"


@dataclass(frozen=True)
class GoldenEngine:
    """What an engine gave for the golden inputs when the bundle was made.

    `outputs` is an .npz file; `tolerance` the largest max|a-b| / max|b| over the outputs by which the same engine may
    differ from it on another machine. At least `least_same` of its answers must be the original's.
    `proves_nothing`: why unrelated answers would pass as well; None where they would not.
    """

    outputs: str
    tolerance: float
    least_same: int
    proves_nothing: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class GoldenSpec:
    """Inputs and the original model's outputs for them, to check an engine wherever it is loaded.

    `inputs` and `outputs` are .npz files of arrays by tensor name. `engines`: by artifact. `tolerance`:
    by target, of engines that have no answers of their own and are compared with the original's.
    """

    inputs: str
    outputs: str
    tolerance: dict[str, float] = field(default_factory=dict)
    engines: dict[str, GoldenEngine] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` of a bundle, format 1. Data only: no field can name code.

    `preprocess` is None where the input is no image; `postprocess` is of the class of the task (`postprocess_of`).
    `graphs`: the float graphs by name; none in a slim bundle (`bundle.write.slim_bundle`).
    `sizes` are further image sizes of the same model, as "384x384" (height, width): `sizes/384x384` is a whole bundle.
    `gates`: by artifact, whether the engine met its budget when the bundle was made. `recommended`: the artifact that
    the verdict recommends, which is the first of `engines`; None where it recommends none of them. `grade`: of the
    verdict, None without one; `rivals`: what may be as fast as the first of `engines`.
    `monitor`: the file of what the images that the bundle was verified with are like (`runtime.monitor_reference`).
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
        """Whether an engine met its budget; "none" where it was never judged."""
        return self.gates.get(engine.artifact, "none")
