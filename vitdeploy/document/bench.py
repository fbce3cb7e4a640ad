"""`bench` of a report: the protocol, a row for each artifact, the ratios of pairs, and where the time goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vitdeploy.benchmark.context import Memory, RateFacts
from vitdeploy.benchmark.summary import Metric, Ratio, Row
from vitdeploy.errors import VitdeployError
from vitdeploy.spec import SPARSE, EngineSpec, decode


@dataclass(frozen=True)
class ErrorFacts:
    """The stable code, the exit code of the command, and the parts of the message."""

    code: str
    message: str
    exit_code: int
    found: str
    expected: str
    fix: str

    @classmethod
    def of(cls, error: VitdeployError) -> ErrorFacts:
        return decode(cls, error.to_dict())


# --- `context`: the rates of the machine, and where the time of each artifact goes ------------------------------------


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


# --- The bench itself -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProtocolFacts:
    """`rounds` by scenario; `batch` of all scenarios and, where there are two, of "offline"; `threads` 0 is each
    runtime's own choice; `processes` that each artifact was measured in."""

    rounds: dict[str, int]
    block_seconds: float
    scenarios: tuple[str, ...]
    batch: tuple[int, ...]
    threads: int
    processes: int | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class Bench:
    """`undecided`: by artifact, why what was measured of it is not to be relied on. `samples_ms`: some latencies of
    each artifact, evenly over time. `block_medians_ms`: the median of each round that counts. `context`: None if it
    was not measured."""

    protocol: ProtocolFacts
    results: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    samples_ms: dict[str, tuple[float, ...]]
    block_medians_ms: dict[str, tuple[float, ...]]
    undecided: dict[str, str] = field(default_factory=dict)
    context: ContextFacts | None = None

    def row(self, artifact: str) -> Row | None:
        return next((row for row in self.results if row.artifact == artifact), None)

    def ratio(self, a: str, b: str, metric: Metric = "latency") -> Ratio | None:
        return next((each for each in self.ratios if (each.a, each.b, each.metric) == (a, b, metric)), None)


@dataclass(frozen=True, kw_only=True)
class BenchDocument(Bench):
    """The document of `bench --json`; `remarks`: remarks about the artifacts on this machine."""

    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceBench(BenchDocument):
    """The document of `bench --on --json` for a device: its description, the engines made there, and those that could
    not be made."""

    host: dict[str, str]
    engines: dict[str, EngineSpec]
    left_out: tuple[ErrorFacts, ...]
