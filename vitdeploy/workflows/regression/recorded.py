"""What a report says that another may be compared with: accuracy, latency of every round, data and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitdeploy.errors import InputError, MissingFileError

MAX_BYTES = 64 << 20

Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0, le=100)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Verified(_Part):
    n: Annotated[int, Field(ge=1)]
    metric: str | None
    value: Percent | None


class RecordedEngine(_Part):
    artifact: str
    verify: Verified


class RecordedRow(_Part):
    artifact: str
    flags: list[str]


class RecordedBench(_Part):
    results: list[RecordedRow]
    block_medians_ms: dict[str, list[Milliseconds]]
    undecided: dict[str, str] = {}  # reports of before have none

    def flags(self, artifact: str) -> tuple[str, ...]:
        return next((tuple(row.flags) for row in self.results if row.artifact == artifact), ())


class RecordedData(_Part):
    evaluation: str
    calibration: str | None = None


class RecordedSource(_Part):
    sha256: dict[str, str] = {}


class RecordedFile(_Part):
    path: str
    sha256: str


class RecordedProvenance(_Part):
    data: RecordedData
    source: RecordedSource = RecordedSource()
    files: list[RecordedFile] = []

    def of_engine(self, artifact: str) -> dict[str, str]:
        """The digests of what an engine was compiled to, by path."""
        return {each.path: each.sha256 for each in self.files if each.path.startswith(f"compile/{artifact}/")}


class RecordedReport(_Part):
    """The parts of report.json that are compared; `environment` describes the machine."""

    format: Literal[1]
    name: str
    task: str
    created: str
    engines: list[RecordedEngine]
    bench: RecordedBench | None
    environment: dict[str, Any]
    provenance: RecordedProvenance

    def engine(self, artifact: str) -> RecordedEngine | None:
        return next((each for each in self.engines if each.artifact == artifact), None)


def read_report(path: Path) -> RecordedReport:
    """The report in `path`, a report.json. It may come from anywhere: nothing in it is trusted.

    Raises:
        MissingFileError: there is none.
        InputError: it is no report, or not one of this format.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise MissingFileError(
            f"no report at {path}", found=str(error.strerror), wanted="a bundle, or a report.json of `vitdeploy run`"
        ) from None
    try:
        return RecordedReport.model_validate_json(content if len(content) <= MAX_BYTES else b"")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(
            f"{path} is no report of vitdeploy",
            found=f"{where}: {first['msg']}"[:300],
            wanted="a report.json of format 1, as `vitdeploy run` writes it",
        ) from None
