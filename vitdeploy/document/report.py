"""The report of a bundle (report.json) as dataclasses, and its reader."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vitdeploy.benchmark.summary import Latency, Ratio, Row
from vitdeploy.document.bench import Bench
from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.verified import Verified
from vitdeploy.errors import InputError, MissingFileError
from vitdeploy.exporter.parity import ParityRow
from vitdeploy.spec import SPARSE, DecodeError, FileEntry, GateStatus, Grade, Task, decode, encode
from vitdeploy.tasks.answers import AnswerFacts, AttentionFacts, Copies, ExampleFacts, MappingFacts
from vitdeploy.verification.gate import Gate

# --- report.json: the results of a run for every engine, and the verdict; the page shows nothing more -----------------


FORMAT: Literal[1] = 1
# The original's name among the artifacts; defined here too, because reports must not import the pipeline.
ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True)
class VerdictFacts:
    """The verdict on a run or a search.

    `recommended`: an artifact, or the original; None if nothing is decided. `grade`: how certain it is, None for a
    search; `rivals`: artifacts that may be as fast as the recommended or leading one. `gate`: the gate of the requested
    engines; `reasons`: those of all of them.
    """

    sentence: str
    remarks: tuple[str, ...]
    recommended: str | None = None
    grade: Grade | None = field(default=None, metadata=SPARSE)
    rivals: tuple[str, ...] = ()
    gate: GateStatus
    reasons: tuple[str, ...]

    @property
    def stands_for_all(self) -> str | None:
        """The artifact whose numbers represent the whole."""
        return self.recommended


@dataclass(frozen=True, kw_only=True)
class RunVerdict(VerdictFacts):
    """The verdict on a run. `leading`: the artifact that represents the run; `ships`: the engines of the bundle, in its
    order; `budget`: in words."""

    leading: str | None = None
    ships: tuple[str, ...] = ()
    budget: str = ""

    @property
    def stands_for_all(self) -> str | None:
        return self.recommended or self.leading


@dataclass(frozen=True)
class ModelFacts:
    """The model. `image_size`: (height, width); zeros, like `channels`, if the model takes no images. `classes`: the
    number of classes. `checkpoint`: the name of its file."""

    source: str
    family: str | None
    task: Task
    parameters: int | None
    image_size: tuple[int, int]
    channels: int
    classes: int | None
    revision: str | None
    notes: tuple[str, ...]
    checkpoint: str | None
    checkpoint_sha256: str | None


@dataclass(frozen=True)
class ExportFacts:
    """The export. `bytes`: the size of all graphs; `tolerance`: the largest accepted relative difference; `tokenizer`:
    what the model's tokenizer was compared with."""

    opset: int
    ir_version: int
    bytes: int
    parity: tuple[ParityRow, ...]
    tolerance: float
    tokenizer: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class MergingFacts:
    """Token merging in one graph. `tokens`: the number without it; `remaining`: by block, the number after its
    attention."""

    tokens: int
    remaining: dict[str, int]


@dataclass(frozen=True)
class PruningFacts:
    """Pruning of one graph. `share`: the pruned share of its MACs. `kept`: by the linear that reads them, "channels" or
    "heads", their number before, and their number after."""

    share: float
    kept: dict[str, tuple[str, int, int]]


@dataclass(frozen=True)
class OptimizeFacts:
    """By graph: the number of places of each rewrite, the nodes before and after, and the largest relative difference
    that the exact rewrites cause. `unproven`: as in `ParityRow`, by graph."""

    rewrites: dict[str, dict[str, int]]
    nodes: dict[str, tuple[int, int]]
    difference: dict[str, float]
    token_merging: dict[str, MergingFacts] | None = field(default=None, metadata=SPARSE)
    pruning: dict[str, PruningFacts] | None = field(default=None, metadata=SPARSE)
    unproven: dict[str, tuple[str, ...]] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class CalibrationFacts:
    """The calibration. `distinct`: the number of distinct images; `memory`: estimated bytes by purpose; `digest`: the
    digest of the images."""

    images: int
    digest: str | None
    distinct: int | None = None
    memory: dict[str, int] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataFacts:
    """The data. `noun`: the name of a sample, such as "image". `unannotated`: the number of images without annotations
    in an annotated set. `copies`: images with the same bytes, counted once in `evaluation_images`. `remarks`: notes on
    data that was assumed, left out, or read differently than written."""

    path: str
    labels: str
    noun: str
    evaluation_images: int
    calibration_images: int
    skipped: int
    unannotated: int | None = field(default=None, metadata=SPARSE)
    mapping: MappingFacts | None = None
    copies: Copies | None = field(default=None, metadata=SPARSE)
    remarks: tuple[str, ...] = field(default=(), metadata=SPARSE)

    @property
    def nouns(self) -> str:
        """The plural of `noun` with a capital, for titles."""
        return f"{self.noun.capitalize()}s"


@dataclass(frozen=True)
class SourceDigests:
    """The model's files: sha256 by file name."""

    model: str | None
    revision: str | None
    sha256: dict[str, str]


@dataclass(frozen=True)
class DataDigests:
    """Digests of the samples of each part, with their files and labels; None without calibration."""

    calibration: str | None
    evaluation: str


@dataclass(frozen=True)
class Provenance:
    """The provenance. `tools`: versions by package. `files`: the exported graph and all files of compiled engines."""

    recipe: dict[str, object]
    source: SourceDigests
    data: DataDigests
    tools: dict[str, str]
    files: tuple[FileEntry, ...]

    def of_engine(self, artifact: str) -> dict[str, str]:
        """The digests of an engine's compiled files, by path."""
        return {file.path: file.sha256 for file in self.files if file.path.startswith(f"compile/{artifact}/")}


@dataclass(frozen=True)
class SizeRow:
    """One image size: its verdict, and the numbers of its leading artifact. `path`: the path of its bundle inside this
    one, "" for the first size."""

    size: str
    path: str
    sentence: str
    gate: GateStatus
    recommended: str | None
    leading: str
    value: float | None
    agreement: float | None
    latency_ms: Latency
    throughput: float
    grade: Grade | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The common part of a run and a search: every engine against the original, and the verdict.

    `created`: ISO date and time. `environment`: the machine, and the versions of tools. `bench`: None if it was not
    run. `warnings`: reasons to doubt all numbers.
    """

    format: Literal[1]
    name: str
    task: Task
    created: str
    verdict: VerdictFacts
    warnings: tuple[str, ...] = ()
    data: DataFacts
    engines: tuple[EngineFacts, ...]
    bench: Bench | None
    environment: dict[str, str]

    def engine(self, artifact: str | None) -> EngineFacts | None:
        """The facts about an engine; None for the original and for unknown artifacts."""
        return next((engine for engine in self.engines if engine.artifact == artifact), None)

    @property
    def results(self) -> dict[str, Row]:
        """The bench results by artifact; empty if there was no bench."""
        return {row.artifact: row for row in self.bench.results} if self.bench else {}

    @property
    def artifacts(self) -> list[str]:
        """The original first, then the engines in the order of the report, then artifacts that were only measured."""
        return list(dict.fromkeys([ORIGINAL, *(engine.artifact for engine in self.engines), *self.results]))

    @property
    def undecided(self) -> Mapping[str, str]:
        """The artifacts whose speed is not decided, with the reasons."""
        return self.bench.undecided if self.bench else {}

    @property
    def starred(self) -> str | None:
        """The recommended artifact, if its gate neither fails nor is undecided, and its speed is known; otherwise
        None."""
        name, engine = self.verdict.recommended, self.engine(self.verdict.recommended)
        if engine is not None and engine.gate.status in ("fail", "undecided"):
            return None
        return None if self.verdict.grade is None and name in self.undecided else name

    @property
    def focus(self) -> list[str]:
        """The most relevant engines: the leading one, then the shipped ones; otherwise all."""
        names = [engine.artifact for engine in self.engines]
        first = [name for name in names if name == self.verdict.stands_for_all]
        return list(dict.fromkeys([*first, *(each.artifact for each in self.engines if each.shipped)])) or names

    @property
    def reference_value(self) -> float | None:
        """The original's value of the task's metric, on the same samples as the engines; None without labels."""
        values = (engine.verify.reference_value for engine in self.engines)
        return next((value for value in values if value is not None and math.isfinite(value)), None)

    def ratio(self, artifact: str) -> Ratio | None:
        """The measured ratio of the latency of an artifact to that of the original."""
        return self.bench.ratio(artifact, ORIGINAL) if self.bench else None

    def flags_of(self, artifact: str) -> list[str]:
        """The flags of an artifact, which limit the trust in its numbers."""
        engine, result = self.engine(artifact), self.results.get(artifact)
        return [*([] if engine is None or engine.shipped else ["not shipped"]), *(result.flags if result else ())]

    @property
    def flags(self) -> list[str]:
        """The flags of all artifacts, in their order."""
        return [flag for name in self.artifacts for flag in self.flags_of(name)]


@dataclass(frozen=True, kw_only=True)
class Report(Judgement):
    """report.json. `sizes`: the image sizes of a bundle with several."""

    verdict: RunVerdict
    model: ModelFacts
    export: ExportFacts
    optimize: OptimizeFacts
    calibration: CalibrationFacts | None
    provenance: Provenance
    examples: tuple[ExampleFacts, ...]
    answers: AnswerFacts | None = None
    attention: AttentionFacts | None = None
    sizes: tuple[SizeRow, ...] | None = field(default=None, metadata=SPARSE)


# --- The document of `verify --json` ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyDocument:
    """One artifact against another on the same samples. `skipped`: unreadable files. `warnings`: reasons to doubt all
    numbers. `copies`: images with the same bytes, None without any."""

    artifact: str
    against: str
    verified: Verified
    mapping: MappingFacts | None
    skipped: tuple[str, ...]
    remarks: tuple[str, ...]
    warnings: tuple[str, ...]
    gate: Gate
    copies: Copies | None = None

    def document(self) -> dict[str, object]:
        """JSON values, with the fields of the comparison at the top level."""
        found = encode(self)
        return {"artifact": found.pop("artifact"), "against": found.pop("against"), **found.pop("verified"), **found}


# --- The reader of report.json, which trusts nothing in the file ------------------------------------------------------


MAX_BYTES = 64 << 20


def read_report(path: Path) -> Report:
    """The report in `path`.

    Raises:
        MissingFileError: the file does not exist.
        InputError: it is not a report of this format.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise MissingFileError(
            f"no report at {path}", found=str(error.strerror), expected="a bundle, or a report.json of `vitdeploy run`"
        ) from None
    try:
        report = decode(Report, json.loads(content if len(content) <= MAX_BYTES else b""))
        problems = _impossible(report)
    except DecodeError as error:
        problems = error.problems
    except (ValueError, RecursionError) as error:
        problems = [f"the file: {error}"]
    if problems:
        raise InputError(
            f"{path} is not a vitdeploy report",
            found="; ".join(problems)[:300],
            expected="a report.json of format 1, as `vitdeploy run` writes it",
        )
    return report


def _impossible(report: Report) -> list[str]:
    """Problems with numbers that are out of range."""
    problems = [
        f"$.engines[{index}].verify: expected samples, and a value in percent"
        for index, engine in enumerate(report.engines)
        if engine.verify.n < 1 or not 0 <= (engine.verify.value or 0) <= 100
    ]
    medians = report.bench.block_medians_ms if report.bench is not None else {}
    return problems + [
        f"$.bench.block_medians_ms.{name}: expected latencies above 0"
        for name, found in medians.items()
        if min(found, default=1.0) <= 0
    ]
