"""The report of a bundle, as dataclasses."""

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

# --- report.json: what a run found, of every engine and of the verdict; the page is made of nothing else --------------


FORMAT: Literal[1] = 1
# The name of the original among the artifacts; a report may not ask the pipeline for it.
ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True)
class VerdictFacts:
    """The verdict on a run or a search.

    `recommended`: an artifact, or the original; None if nothing is decided. `grade`: how surely, None of a
    search; `rivals`: what may be as fast as the recommended or leading artifact. `gate`: the gate of the
    requested engines, with the reasons of all of them.
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
        """The artifact whose numbers stand for the whole in a table."""
        return self.recommended


@dataclass(frozen=True, kw_only=True)
class RunVerdict(VerdictFacts):
    """`leading`: what stands for the run in a table; `ships`: the engines of the bundle, in its order; `budget`: in
    words."""

    leading: str | None = None
    ships: tuple[str, ...] = ()
    budget: str = ""

    @property
    def stands_for_all(self) -> str | None:
        return self.recommended or self.leading


@dataclass(frozen=True)
class ModelFacts:
    """`image_size`: (height, width), zeros where the model takes no images, as then `channels`. `classes`: how many.
    `checkpoint`: the name of its file."""

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
    """`bytes` of all graphs; `tolerance`: the largest relative difference that is taken; `tokenizer`: what a model's
    tokenizer was compared with."""

    opset: int
    ir_version: int
    bytes: int
    parity: tuple[ParityRow, ...]
    tolerance: float
    tokenizer: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class MergingFacts:
    """Token merging in one graph. `tokens` without it; `remaining`: by block, how many are behind its attention."""

    tokens: int
    remaining: dict[str, int]


@dataclass(frozen=True)
class PruningFacts:
    """Pruning of one graph. `share` of its MACs that went. `kept`: by the linear that reads them, "channels" or
    "heads", how many there were, and how many stay."""

    share: float
    kept: dict[str, tuple[str, int, int]]


@dataclass(frozen=True)
class OptimizeFacts:
    """By graph: in how many places each rewrite changed it, its nodes before and after, and the largest relative
    difference that the exact rewrites make. `unproven`: as of `ParityRow`, by graph."""

    rewrites: dict[str, dict[str, int]]
    nodes: dict[str, tuple[int, int]]
    difference: dict[str, float]
    token_merging: dict[str, MergingFacts] | None = field(default=None, metadata=SPARSE)
    pruning: dict[str, PruningFacts] | None = field(default=None, metadata=SPARSE)
    unproven: dict[str, tuple[str, ...]] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class CalibrationFacts:
    """`distinct` of the images; `memory`: bytes estimated, by what they are for; `digest` of the images."""

    images: int
    digest: str | None
    distinct: int | None = None
    memory: dict[str, int] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataFacts:
    """`noun`: what a sample is called. `unannotated`: images of an annotated set without annotations.
    `copies`: images of the same bytes, each counted once in `evaluation_images`. `remarks`: lines on
    what was assumed of the data, left out, or read in another way than it is written."""

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
        """What samples are called, as a title has it."""
        return f"{self.noun.capitalize()}s"


@dataclass(frozen=True)
class SourceDigests:
    """The files that the model was read from: sha256 by file name."""

    model: str | None
    revision: str | None
    sha256: dict[str, str]


@dataclass(frozen=True)
class DataDigests:
    """Digests of the samples of each part, their files and labels; None without calibration."""

    calibration: str | None
    evaluation: str


@dataclass(frozen=True)
class Provenance:
    """`tools`: versions by package. `files`: the exported graph and all that engines were compiled to."""

    recipe: dict[str, object]
    source: SourceDigests
    data: DataDigests
    tools: dict[str, str]
    files: tuple[FileEntry, ...]

    def of_engine(self, artifact: str) -> dict[str, str]:
        """The digests of what an engine was compiled to, by path."""
        return {each.path: each.sha256 for each in self.files if each.path.startswith(f"compile/{artifact}/")}


@dataclass(frozen=True)
class SizeRow:
    """One image size: what to ship there, and the leading artifact in numbers. `path`: of its bundle inside of this
    one, empty of the first."""

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

    `created`: ISO date and time. `environment` describes the machine, with the versions of tools. `bench`: None where
    it was not run. `warnings`: reasons to doubt all numbers.
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
        """The facts about an engine; None for the original, or if there are none."""
        return next((engine for engine in self.engines if engine.artifact == artifact), None)

    @property
    def results(self) -> dict[str, Row]:
        """The bench results by artifact; empty if there was no bench."""
        return {row.artifact: row for row in self.bench.results} if self.bench else {}

    @property
    def artifacts(self) -> list[str]:
        """The original first, then the engines in the order of the report, then what was only benched."""
        return list(dict.fromkeys([ORIGINAL, *(engine.artifact for engine in self.engines), *self.results]))

    @property
    def undecided(self) -> Mapping[str, str]:
        """The artifacts whose speed is not decided, with the reasons."""
        return self.bench.undecided if self.bench else {}

    @property
    def starred(self) -> str | None:
        """The recommended artifact, if decided: its gate does not fail, and its speed is known."""
        name, engine = self.verdict.recommended, self.engine(self.verdict.recommended)
        if engine is not None and engine.gate.status in ("fail", "undecided"):
            return None
        return None if self.verdict.grade is None and name in self.undecided else name

    @property
    def focus(self) -> list[str]:
        """The engines that a reader cares for: the leading one, then those that are shipped; else all."""
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
        """What a reader must know before trusting the numbers of an artifact."""
        engine, result = self.engine(artifact), self.results.get(artifact)
        return [*([] if engine is None or engine.shipped else ["not shipped"]), *(result.flags if result else ())]

    @property
    def flags(self) -> list[str]:
        """Those of all artifacts, one after the other."""
        return [flag for name in self.artifacts for flag in self.flags_of(name)]


@dataclass(frozen=True, kw_only=True)
class Report(Judgement):
    """report.json. `sizes`: of a bundle with several image sizes."""

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
    """One artifact against another on the same samples. `skipped`: files that could not be read. `warnings`: what makes
    all numbers doubtful. `copies`: images of the same bytes, None where there are none."""

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
        """JSON values, with those of the comparison beside the others."""
        found = encode(self)
        return {"artifact": found.pop("artifact"), "against": found.pop("against"), **found.pop("verified"), **found}


# --- Reading a report.json that may come from anywhere: nothing in it is trusted --------------------------------------


MAX_BYTES = 64 << 20


def read_report(path: Path) -> Report:
    """The report in `path`.

    Raises:
        MissingFileError: there is none.
        InputError: it is no report, or not one of this format.
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
            f"{path} is no report of vitdeploy",
            found="; ".join(problems)[:300],
            expected="a report.json of format 1, as `vitdeploy run` writes it",
        )
    return report


def _impossible(report: Report) -> list[str]:
    """Numbers that nothing can be computed with."""
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
