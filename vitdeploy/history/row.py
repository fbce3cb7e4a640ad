"""One row of a history: what one document says of one artifact, in flat columns."""

from __future__ import annotations

import dataclasses
import datetime
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
# Where a file says its format, in the metadata of its schema.
FORMAT_KEY = b"vitdeploy.history"
Kind = Literal["run", "bench", "compare", "sweep", "canary"]


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One artifact of one result. None is not known, or not measured; "_low" and "_high" are the bounds of 95 %
    intervals.

    The stamp of writing: `format`, `sequence` (one more than the largest in the history when this was written), `run`
    (all rows of one result have the same), `host`, its name. `time`: the wall clock of that machine, UTC.

    The machine: `cpu`, `isa`, `cores`, `system`, `python`, and `device`: the registered device or the GPU, "" for the
    CPU of this machine. The software: `vitdeploy`, `runtime` with `runtime_version`, `driver`.

    What was measured: `kind` of command, `model` (its name, or that of the recipe), `model_digest` (sha256 of the files
    that it was made of), `artifact` (the engine), `target`, `precision`, `provider`, images per query in `batch` and
    `offline_batch`, `threads` (0: the runtime's choice).

    Latencies in milliseconds per query, `throughput` in images per second. `value` and `reference_value` of `metric`
    and `agreement` in percent of `samples`, `drop` in points. `gate`: "pass", "fail", "undecided" or "none". `flags`
    with spaces between them. `decided`: the times are to be relied on; if not, `undecided` says why. `error`: of a
    recipe that failed, or of an engine that did not give its golden answers.

    `document`: the whole document as JSON, in the first row of each result alone.
    """

    kind: str
    time: datetime.datetime
    model: str
    artifact: str
    target: str
    precision: str
    format: int = FORMAT
    sequence: int = 0
    run: str = ""
    host: str = ""
    device: str = ""
    cpu: str = ""
    isa: str = ""
    cores: int | None = None
    system: str = ""
    python: str = ""
    vitdeploy: str = ""
    runtime: str = ""
    runtime_version: str = ""
    driver: str = ""
    model_digest: str | None = None
    provider: str = ""
    batch: int | None = None
    offline_batch: int | None = None
    threads: int | None = None
    p50_ms: float | None = None
    p50_ms_low: float | None = None
    p50_ms_high: float | None = None
    p90_ms: float | None = None
    p90_ms_low: float | None = None
    p90_ms_high: float | None = None
    p99_ms: float | None = None
    p99_ms_low: float | None = None
    p99_ms_high: float | None = None
    mean_ms: float | None = None
    throughput: float | None = None
    throughput_low: float | None = None
    throughput_high: float | None = None
    peak_memory_bytes: int | None = None
    size_bytes: int | None = None
    metric: str | None = None
    samples: int | None = None
    value: float | None = None
    reference_value: float | None = None
    drop: float | None = None
    drop_low: float | None = None
    drop_high: float | None = None
    agreement: float | None = None
    agreement_low: float | None = None
    agreement_high: float | None = None
    gate: str | None = None
    flags: str = ""
    decided: bool = True
    undecided: str = ""
    error: str = ""
    document: str | None = None


def schema() -> pa.Schema:
    """The columns of a history's files, in Arrow's types, with the format in the metadata."""
    import pyarrow as pa

    columns = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        datetime.datetime: pa.timestamp("us", tz="UTC"),
    }
    fields = []
    for name, hint in typing.get_type_hints(ResultRow).items():
        kinds = [each for each in typing.get_args(hint) or (hint,) if each is not type(None)]
        fields.append(pa.field(name, columns[kinds[0]], nullable=type(None) in typing.get_args(hint)))
    return pa.schema(fields, metadata={FORMAT_KEY: str(FORMAT).encode()})


def defaults() -> dict[str, Any]:
    """The values of columns that a file of an earlier vitdeploy may lack."""
    return {f.name: f.default for f in dataclasses.fields(ResultRow) if f.default is not dataclasses.MISSING}


def now() -> datetime.datetime:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc)
