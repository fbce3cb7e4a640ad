"""selftest.json: whether a target works on a machine, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitdeploy.compilation.finding import Finding
from vitdeploy.document.bench import Bench
from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.verified import Verified

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
