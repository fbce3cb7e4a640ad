"""The JSON documents of `explain`, `versions`, and the self-test of a target."""

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.benchmark.summary import Ratio
from vitdeploy.compilation.backend import Finding
from vitdeploy.document.bench import Bench, ErrorFacts
from vitdeploy.document.verified import Verified
from vitdeploy.spec import SPARSE, Task

# --- `versions`: a bundle on a series of a runtime's releases ---------------------------------------------------------


@dataclass(frozen=True)
class AnswersFacts:
    """The golden answers of an engine: `same` of `inputs` equal the original's, and at least `least_same` must;
    `difference`: the largest difference from the outputs when the bundle was made, relative to the largest output, with
    the limit `tolerance`. `kernels`: linears and convolutions by precision, for an engine that was compiled again."""

    ok: bool
    inputs: int
    same: int
    least_same: int
    difference: float | None
    tolerance: float
    kernels: dict[str, int] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class ReleaseFacts:
    """One engine on one release: its answers, and its time as a ratio to the release that the bundle was made with, or
    its `error`. `changed`: what differs from the previous release, "answers" or "time"."""

    version: str
    artifact: str
    answers: AnswersFacts | None = field(default=None, metadata=SPARSE)
    time: Ratio | None = field(default=None, metadata=SPARSE)
    error: ErrorFacts | None = field(default=None, metadata=SPARSE)
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionsDocument:
    """The releases of `runtime` in the range `asked`. `releases`: in order, an entry per engine; `skipped`: by release,
    the reason why it is not installed. `own`: by engine, the release that the bundle was made with. `rebuilt`: whether
    each release compiled the engine's graph instead of loading the existing engine."""

    bundle: str
    runtime: str
    asked: str
    own: dict[str, str]
    rebuilt: bool
    releases: tuple[ReleaseFacts, ...]
    skipped: dict[str, str]


# --- `explain`: the attention of a model ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """The picture at `path` of a model's attention in `image`. `size`: (width, height) in pixels; `grid`: (rows,
    columns) of patches; `read`: the token whose attention was read; `maps`: the titles of the maps."""

    path: str
    image: str
    task: Task
    size: tuple[int, int]
    grid: tuple[int, int]
    heads: int
    blocks: int
    prefix_tokens: int
    read: str
    maps: tuple[str, ...]


# --- The self-test of a target ----------------------------------------------------------------------------------------


StepStatus = Literal["done", "failed", "not run"]


@dataclass(frozen=True)
class StepFacts:
    """One step of the self-test for one model. `log`: the log file of a failure."""

    model: str
    step: str
    status: StepStatus
    seconds: float
    detail: str = ""
    log: str = ""
    error: ErrorFacts | None = None


@dataclass(frozen=True)
class SelftestEngine:
    """One engine: see `EngineSpec`. `bytes`: the size of the files that the runtime loads."""

    artifact: str
    precision: str
    provider: str
    kernels: dict[str, int]
    options: dict[str, str]
    device: dict[str, str]
    bytes: int
    verify: Verified


@dataclass(frozen=True)
class SelftestModel:
    """One model of the self-test. `trained`: whether its accuracy is meaningful."""

    name: str
    trained: bool
    engines: tuple[SelftestEngine, ...] = ()
    bench: Bench | None = None

    @property
    def artifacts(self) -> list[str]:
        """The artifacts in the order of the bench (the reference first), then engines that were not measured."""
        timed = [row.artifact for row in self.bench.results] if self.bench else []
        return list(dict.fromkeys([*timed, *(engine.artifact for engine in self.engines)]))


@dataclass(frozen=True)
class SelftestDocument:
    """The whole document. `doctor`: the requirements of the target on this machine."""

    format: Literal[1]
    target: str
    created: str
    works: bool
    passed: bool
    sentence: str
    doctor: tuple[Finding, ...]
    steps: tuple[StepFacts, ...]
    models: tuple[SelftestModel, ...]
    environment: dict[str, str]
