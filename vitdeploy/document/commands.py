"""What single commands print as JSON: `explain`, `versions`, and the self-test of a target."""

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.benchmark.summary import Ratio
from vitdeploy.compilation.backend import Finding
from vitdeploy.document.bench import Bench, ErrorFacts
from vitdeploy.document.verified import Verified
from vitdeploy.spec import SPARSE, Task

# --- A bundle on a series of a runtime's releases ---------------------------------------------------------------------


@dataclass(frozen=True)
class AnswersFacts:
    """The golden answers of an engine: `same` of `inputs` are the original's, where `least_same` must be; `difference`
    is the largest from when the bundle was made, of the largest output, where `tolerance` is allowed. `kernels`:
    linears and convolutions by precision, of an engine that was compiled again."""

    ok: bool
    inputs: int
    same: int
    least_same: int
    difference: float | None
    tolerance: float
    kernels: dict[str, int] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class ReleaseFacts:
    """One engine on one release: what it answers and the time that it takes, as a ratio to the release that the bundle
    was made with, or the `error` that ended it. `changed`: what is other than with the release before, "answers" or
    "time"."""

    version: str
    artifact: str
    answers: AnswersFacts | None = field(default=None, metadata=SPARSE)
    time: Ratio | None = field(default=None, metadata=SPARSE)
    error: ErrorFacts | None = field(default=None, metadata=SPARSE)
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionsDocument:
    """The releases of `runtime` in `asked`: `releases` in order, an entry for each engine; `skipped` by release, with
    the reason why it is not installed here. `own`: by engine, the release that the bundle was made with. `rebuilt`:
    whether each release compiled the engine's graph, instead of loading the engine as it is."""

    bundle: str
    runtime: str
    asked: str
    own: dict[str, str]
    rebuilt: bool
    releases: tuple[ReleaseFacts, ...]
    skipped: dict[str, str]


# --- `explain`: where a model looks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """The picture at `path` of where a model looks in `image`: its `size` (width, height) in pixels, the `grid` (rows,
    columns) of patches, whose attention was read, and the titles of the maps."""

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


# --- The self-test of a target: each of its steps ---------------------------------------------------------------------


StepStatus = Literal["done", "failed", "not run"]


@dataclass(frozen=True)
class StepFacts:
    """One step of one model; `log`: the file of a failure."""

    model: str
    step: str
    status: StepStatus
    seconds: float
    detail: str = ""
    log: str = ""
    error: ErrorFacts | None = None


@dataclass(frozen=True)
class SelftestEngine:
    """One engine: see `EngineSpec`; `bytes` of what the runtime loads."""

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
    """`trained`: its accuracy means something."""

    name: str
    trained: bool
    engines: tuple[SelftestEngine, ...] = ()
    bench: Bench | None = None

    @property
    def artifacts(self) -> list[str]:
        """The one that the others are compared with first, where there is one."""
        timed = [row.artifact for row in self.bench.results] if self.bench else []
        return list(dict.fromkeys([*timed, *(engine.artifact for engine in self.engines)]))


@dataclass(frozen=True)
class SelftestDocument:
    """The whole document; `doctor`: what the target needs of this machine."""

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
