"""The `bench` part of a report: the protocol, a row per artifact, the ratios of pairs, and the context of the times."""

from __future__ import annotations

from dataclasses import dataclass, field

from vitdeploy.benchmark.context import Memory, RateFacts
from vitdeploy.benchmark.summary import Metric, Ratio, Row
from vitdeploy.errors import VitdeployError
from vitdeploy.spec import SPARSE, EngineSpec, decode


@dataclass(frozen=True)
class ErrorFacts:
    """An error: its stable code, the exit code of the command, and the parts of its message."""

    code: str
    message: str
    exit_code: int
    found: str
    expected: str
    fix: str

    @classmethod
    def of(cls, error: VitdeployError) -> ErrorFacts:
        return decode(cls, error.to_dict())


# --- `context`: the machine's peak rates, and the parts of each artifact's time ---------------------------------------


@dataclass(frozen=True)
class Omission:
    """Something that was left out, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class WorkFacts:
    """The work of one query, see `graph.work.Work`; `bytes`: the bytes of weights, inputs and outputs together."""

    batch: int
    flops: dict[str, int]
    weight_bytes: int
    input_bytes: int
    output_bytes: int
    bytes: int


@dataclass(frozen=True)
class Roof:
    """The roofline: the least milliseconds for computing and for moving bytes at peak rates, and their shares of the
    latency.

    `memory_ms`, `memory_share`: None if the bytes fit in a cache. `flops`, `rates`: the operations of the work and the
    peak rates of the machine, by precision. `copy_rate`: bytes per second that the memory copies; None if it was not
    measured, and `fits_in_cache` then too.
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
    """The parts of the time, in milliseconds and as shares of the latency in the same run (or of the layers' sum, if
    larger). `products`: layers that multiply matrices, by precision; `others`: other layers, by kind."""

    latency_ms: float
    layers_ms: float
    outside_ms: float
    outside_share: float
    by_precision_ms: dict[str, float]
    products: dict[str, float]
    others: dict[str, float]


@dataclass(frozen=True)
class LayerTime:
    """One layer as the runtime ran it. `share`: its share of the time of all layers; `fuses`: the nodes of the graph
    that it computes."""

    name: str
    kind: str
    precision: str
    ms: float
    share: float
    product: bool
    fuses: tuple[str, ...]


@dataclass(frozen=True)
class LayerGroup:
    """The totals of layers whose names differ only in the block number."""

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
    """One artifact relative to the machine's peak rates. `bound`: the largest part of the time; `line`: a sentence on
    it, None if unknown. `work_unknown`: why `work` is None."""

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
    """The context of a bench. `machine`: its rates in a line, empty if none is known. `left_out`: failed
    measurements."""

    machine: str
    rates: tuple[RateFacts, ...]
    memory: Memory | None
    left_out: tuple[Omission, ...]
    artifacts: tuple[ArtifactContext, ...]


# --- The bench itself -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProtocolFacts:
    """The protocol of a bench. `rounds`: by scenario; `batch`: the batch size of all scenarios, or a second one for
    "offline"; `threads`: 0 for each runtime's own choice; `processes`: the number of processes of each artifact."""

    rounds: dict[str, int]
    block_seconds: float
    scenarios: tuple[str, ...]
    batch: tuple[int, ...]
    threads: int
    processes: int | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class Bench:
    """The results of a bench. `undecided`: by artifact, why its times are unreliable. `samples_ms`: a sample of each
    artifact's latencies, evenly spread over time. `block_medians_ms`: the median of each round that counts. `context`:
    None if it was not measured."""

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
    """The document of `bench --json`. `remarks`: remarks on the artifacts on this machine."""

    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceBench(BenchDocument):
    """The document of `bench --on --json` for a device. `host`: its description; `engines`: the engines compiled there;
    `left_out`: the errors of engines that could not be compiled."""

    host: dict[str, str]
    engines: dict[str, EngineSpec]
    left_out: tuple[ErrorFacts, ...]
