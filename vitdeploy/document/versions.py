"""A bundle on a series of a runtime's releases."""

from __future__ import annotations

from dataclasses import dataclass, field

from vitdeploy.document.bench import Ratio
from vitdeploy.document.errors import ErrorFacts
from vitdeploy.spec import SPARSE


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
