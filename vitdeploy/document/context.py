"""`context` of a bench: the rates of the machine, and where the time of each artifact goes."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.benchmark.context import Memory


@dataclass(frozen=True)
class RateFacts:
    """The best rate of matrix products: operations a second, a multiplication and an addition each, by products of
    `rows` x `width` x `width`; `kernel` is the runtime's own name of what computed it."""

    target: str
    precision: str
    flops_per_second: float
    rows: int
    width: int
    kernel: str


@dataclass(frozen=True)
class Omission:
    """Something that is missing, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class WorkFacts:
    """The work of one query, see `graph.work.Work`; `bytes` are those of weights, inputs and outputs together."""

    batch: int
    flops: dict[str, int]
    weight_bytes: int
    input_bytes: int
    output_bytes: int
    bytes: int


@dataclass(frozen=True)
class Roof:
    """The least milliseconds of computing and of moving bytes, and the share of the latency that each is.

    `memory_ms`, `memory_share`: None if the bytes fit in a cache. `flops`, `rates`: by precision, of the work and of
    the machine. `copy_rate`: bytes per second that the memory copies; None if it was not measured, and then
    `fits_in_cache` too.
    """

    compute_ms: float
    compute_share: float
    memory_ms: float | None
    memory_share: float | None
    fits_in_cache: bool | None
    flops_per_second: float
    bytes_per_second: float
    flops: dict[str, int]
    rates: dict[str, float]
    copy_rate: float | None


@dataclass(frozen=True)
class TimeShares:
    """The parts of the time, in milliseconds and as shares of the latency at that moment (or of the layers' sum, if
    larger). `products`: layers that multiply matrices, by precision; `others`: by kind."""

    latency_ms: float
    layers_ms: float
    outside_ms: float
    outside_share: float
    by_precision_ms: dict[str, float]
    products: dict[str, float]
    others: dict[str, float]


@dataclass(frozen=True)
class LayerTime:
    """One layer as the runtime ran it; `share` of all layers, `fuses` the nodes of the graph that it does the work
    of."""

    name: str
    kind: str
    precision: str
    ms: float
    share: float
    product: bool
    fuses: tuple[str, ...]


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose names differ in the number of their block only, summed up."""

    name: str
    kind: str
    precision: str
    count: int
    ms: float
    share: float


@dataclass(frozen=True)
class ProfileFacts:
    """How the layers were timed; see `benchmark.context.Profile`."""

    runs: int
    per_layer_ms: float


@dataclass(frozen=True)
class ArtifactContext:
    """One artifact against the machine. `bound`: what the largest part of the time is; `line`: the same in a sentence,
    None if nothing is known. `work_unknown`: why there is no `work`."""

    artifact: str
    batch: int
    latency_ms: float | None
    work: WorkFacts | None
    work_unknown: str | None
    roof: Roof | None
    time: TimeShares | None
    layers: tuple[LayerTime, ...]
    groups: tuple[LayerGroup, ...]
    profile: ProfileFacts | None
    bound: str | None
    line: str | None


@dataclass(frozen=True)
class ContextFacts:
    """`machine`: its rates in a line, empty where none is known. `left_out`: what could not be measured."""

    machine: str
    rates: tuple[RateFacts, ...]
    memory: Memory | None
    left_out: tuple[Omission, ...]
    artifacts: tuple[ArtifactContext, ...]
