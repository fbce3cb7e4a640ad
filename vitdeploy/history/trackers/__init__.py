"""Send results to experiment trackers and Bencher: the data that is sent, and one module per destination."""

import concurrent.futures
import contextlib
import datetime
import hashlib
import importlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vitdeploy.document.bench import Omission
from vitdeploy.errors import HostError, InputError, MissingPackageError, VitdeployError
from vitdeploy.history.row import ResultRow
from vitdeploy.progress import Progress
from vitdeploy.remote import PATIENCE_SECONDS as PATIENCE_SECONDS
from vitdeploy.remote import SLOWEST_BYTES, within

# --- A result as an experiment run ------------------------------------------------------------------------------------
# One run per result; the names of its parameters and metrics include the engine.
#
# A name is ENGINE/WHAT, as in "openvino-cpu-int8/p50_ms": trackers group by such names, and the latencies of one engine
# have the same name in all runs. Undecided times are called ENGINE/undecided/WHAT, so that plots and queries of the
# decided ones leave them out.


# Columns of measured times with their intervals, and columns of counts.
_TIMES = (
    *(f"{name}{bound}" for name in ("p50_ms", "p90_ms", "p99_ms") for bound in ("", "_low", "_high")),
    "mean_ms",
    *(f"throughput{bound}" for bound in ("", "_low", "_high")),
    "peak_memory_bytes",
)
_COUNTED = (
    "size_bytes",
    "samples",
    *(f"{name}{bound}" for name in ("drop", "agreement") for bound in ("", "_low", "_high")),
)
_OF_RESULT = ("model", "model_digest", "kind", "host", "cpu", "isa", "cores", "system", "python", "vitdeploy")
_OF_ENGINE = (
    *("target", "precision", "device", "provider", "driver", "batch", "offline_batch", "threads"),
    *("metric", "gate", "flags", "undecided", "error"),
)
# Characters that are not allowed in a name; MLflow is the strictest.
_ODD = re.compile(r"[^A-Za-z0-9_\-. :]")


@dataclass(frozen=True)
class Attached:
    """Attachments of a result: `files` by name, and further parameters from its document."""

    files: dict[str, bytes] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackedResult:
    """The rows (at least one) of one result for one model. `attach`: reads the attachments when it is sent. `bundle`:
    a bundle folder to attach."""

    rows: tuple[ResultRow, ...]
    attach: Callable[[], Attached] = field(default=Attached, repr=False, compare=False)
    bundle: Path | None = None

    @property
    def id(self) -> str:
        """An identifier that is the same for each sending of this result: 32 hexadecimal digits."""
        first = self.rows[0]
        known = "\n".join((first.run, first.model, first.model_digest or ""))
        return hashlib.sha256(known.encode()).hexdigest()[:32]

    @property
    def name(self) -> str:
        return f"{self.rows[0].model} {self.rows[0].kind}"

    @property
    def time(self) -> datetime.datetime:
        return self.rows[0].time

    @property
    def failed(self) -> bool:
        """Whether a row has an error: a failed recipe, or an engine that failed its golden answers."""
        return any(row.error for row in self.rows)

    @property
    def tags(self) -> dict[str, str]:
        """A few short tags to search runs by."""
        first = self.rows[0]
        undecided = [name for name, row in self._named() if row.undecided]
        return {
            "vitdeploy.result": self.id,
            "vitdeploy.run": first.run,
            "vitdeploy.kind": first.kind,
            "vitdeploy.undecided": ", ".join(undecided) or "none",
        }

    @property
    def params(self) -> dict[str, str]:
        """The artifact, the machine and the settings, as non-empty texts."""
        first = self.rows[0]
        found = {name: getattr(first, name) for name in _OF_RESULT}
        found["time"] = first.time.isoformat(timespec="seconds")
        for name, row in self._named():
            facts = {each: getattr(row, each) for each in _OF_ENGINE}
            facts["runtime"] = f"{row.runtime} {row.runtime_version}".strip()
            facts["decided"] = "yes" if row.decided else "no"
            found |= {_joined(name, each): value for each, value in facts.items()}
        return {name: str(value) for name, value in found.items() if value is not None and value != ""}

    @property
    def metrics(self) -> dict[str, float]:
        """The measured times and counts; undecided times have "undecided" in their names."""
        found: dict[str, float | None] = {}
        for name, row in self._named():
            mark = () if row.decided else ("undecided",)
            found |= {_joined(name, *mark, time): getattr(row, time) for time in _TIMES}
            found |= {_joined(name, each): getattr(row, each) for each in _COUNTED}
            if row.metric is not None:
                found |= {
                    _joined(name, row.metric): row.value,
                    _joined(name, f"original {row.metric}"): row.reference_value,
                }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _named(self) -> list[tuple[str, ResultRow]]:
        """Each row with a unique name: its artifact, with a number if there are several."""
        rows: dict[str, ResultRow] = {}
        for row in self.rows:
            name, number = row.artifact, 1
            while name in rows:
                number += 1
                name = f"{row.artifact} {number}"
            rows[name] = row
        return list(rows.items())


def outcomes_of(rows: Sequence[ResultRow]) -> list[tuple[ResultRow, ...]]:
    """Group a history's rows, in its order, by result and model."""
    found: dict[tuple[str, str, str | None], list[ResultRow]] = {}
    for row in rows:
        found.setdefault((row.run, row.model, row.model_digest), []).append(row)
    return [tuple(each) for each in found.values()]


def _joined(*parts: str) -> str:
    """Join the non-empty parts of a name, with only the characters that every tracker accepts."""
    return "/".join(_ODD.sub("_", part)[:80].strip(". ") for part in parts if part)


def flat(values: object, name: str) -> dict[str, str]:
    """Flatten nested JSON values to texts by path: {"recipe.source.model": "vit"}."""
    if isinstance(values, dict) and values:
        return {found: text for key, each in values.items() for found, text in flat(each, f"{name}.{key}").items()}
    if values is None or values == {} or values == []:
        return {}
    return {_joined(name): values if isinstance(values, str) else json.dumps(values)}


# --- Trackers, and requests to them with a time limit -----------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class Sent:
    """The outcome at the tracker `where`: the number of `new` results, and of those it had `already`. `left_out`:
    values that it cannot store, with the reason."""

    where: str
    new: int
    already: int
    left_out: tuple[Omission, ...] = ()

    @property
    def sentence(self) -> str:
        already = f", {self.already} already there" if self.already else ""
        return f"{self.where}: {self.new} result{'' if self.new == 1 else 's'} sent{already}"


class Tracker(ABC):
    """A destination of results. `name`: for messages, without credentials. `environment`: variables for its client,
    used unless they are already set."""

    name: str
    environment: Mapping[str, str] = {}

    @abstractmethod
    def prepare(self) -> None:
        """Raise if the tracker is not usable, so that the error comes before any measurement."""

    @abstractmethod
    def send(self, outcomes: Sequence[TrackedResult], progress: Progress) -> Sent:
        """Send the results that the tracker does not have yet; partly sent results are completed.

        Raises:
            HostError: no answer in time, a refusal, or missing credentials. OutputError, StorageError: a file cannot be
                written.
        """

    def told(self, error: Exception) -> VitdeployError:
        """Translate an error of the client, without its text, which may contain secrets."""
        return HostError(f"{self.name} cannot be used", found=type(error).__name__)

    def ask(self, question: Callable[[], T], size: int = 0) -> T:
        """Return the service's answer within a time limit for `size` bytes; errors as `told`.

        Raises:
            HostError: no answer in time.
        """
        seconds = PATIENCE_SECONDS + size / SLOWEST_BYTES
        try:
            with set_where_unset(self.environment):
                return within(seconds, question)
        except (VitdeployError, KeyboardInterrupt):
            raise
        except concurrent.futures.TimeoutError:
            raise HostError(
                f"{self.name} does not answer",
                found=f"no answer for {seconds:.0f} s",
                expected="an answer",
                fix="check the network and the address; sending again continues where this stopped",
            ) from None
        except ImportError as error:
            raise MissingPackageError(error.name or "required by its client", "", self.name) from None
        except Exception as error:  # each client has its own
            raise self.told(error) from None


@contextlib.contextmanager
def set_where_unset(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, for the duration of the block."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def folder_bytes(folder: Path) -> int:
    """Return the total size of the folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- Trackers by name -------------------------------------------------------------------------------------------------


# Module name -> class name.
TRACKERS = {"mlflow": "Mlflow", "wandb": "Wandb", "bencher": "Bencher"}
EXPECTED = "mlflow[:URI], wandb[:[ENTITY/]PROJECT] or bencher:FILE"


def open_tracker(text: str) -> Tracker:
    """Open the tracker named by a text such as "mlflow:http://localhost:5000".

    Raises:
        InputError: an unknown tracker. MissingPackageError: its client is missing. HostError: it cannot be opened.
    """
    kind, _, place = text.partition(":")
    if kind in TRACKERS and (place or kind != "bencher"):
        tracker: Tracker = getattr(importlib.import_module(f"{__name__}.{kind}"), TRACKERS[kind])(place)
        return tracker
    raise InputError(
        "unknown tracker", found="bencher without a file" if kind == "bencher" else kind[:40], expected=EXPECTED
    )
