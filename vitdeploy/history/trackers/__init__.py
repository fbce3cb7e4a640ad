"""Results for trackers of experiments, and for Bencher: what is sent, and one file for each place that takes it."""

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

# --- A result as trackers of experiments have it ----------------------------------------------------------------------
# one run, whose parameters and metrics say which engine they are of.
#
# A name is ENGINE/WHAT, as in "openvino-cpu-int8/p50_ms": trackers sort such names into groups, and the latencies of
# one engine over all runs have one name. Times that are not decided are called ENGINE/undecided/WHAT, so that no plot
# or query of the others takes them for more than they are.


# Columns of rows that are measured times, with their intervals; and those that are counted.
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
# What no tracker takes in a name: MLflow allows the fewest characters.
_ODD = re.compile(r"[^A-Za-z0-9_\-. :]")


@dataclass(frozen=True)
class Attached:
    """What goes with a result: `files` by name, and what its document adds to the parameters."""

    files: dict[str, bytes] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackedResult:
    """The rows of one result that are about one model; at least one. `attach`: reads what goes with it, when it is
    sent. `bundle`: a folder that goes with it too."""

    rows: tuple[ResultRow, ...]
    attach: Callable[[], Attached] = field(default=Attached, repr=False, compare=False)
    bundle: Path | None = None

    @property
    def id(self) -> str:
        """The same whenever this result is sent, so that it is there once: 32 hexadecimal digits."""
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
        """Whether a row is of a recipe that failed, or of an engine that did not give its golden answers."""
        return any(row.error for row in self.rows)

    @property
    def tags(self) -> dict[str, str]:
        """Few and short: what runs are searched by."""
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
        """What was measured, where, and with what; texts that are not empty."""
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
        """What was measured and counted; times that are not decided under names that say so."""
        found: dict[str, float | None] = {}
        for name, row in self._named():
            mark = () if row.decided else ("undecided",)
            found |= {_joined(name, *mark, each): getattr(row, each) for each in _TIMES}
            found |= {_joined(name, each): getattr(row, each) for each in _COUNTED}
            if row.metric is not None:
                found |= {
                    _joined(name, row.metric): row.value,
                    _joined(name, f"original {row.metric}"): row.reference_value,
                }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _named(self) -> list[tuple[str, ResultRow]]:
        """Each row with a name that no other has: its artifact, with a number behind it where there are several."""
        found: dict[str, ResultRow] = {}
        for row in self.rows:
            name, number = row.artifact, 1
            while name in found:
                number += 1
                name = f"{row.artifact} {number}"
            found[name] = row
        return list(found.items())


def outcomes_of(rows: Sequence[ResultRow]) -> list[tuple[ResultRow, ...]]:
    """Rows of a history, in its order, as those of one result and one model each."""
    found: dict[tuple[str, str, str | None], list[ResultRow]] = {}
    for row in rows:
        found.setdefault((row.run, row.model, row.model_digest), []).append(row)
    return [tuple(each) for each in found.values()]


def _joined(*parts: str) -> str:
    """A name of its parts, in characters that every tracker takes; an empty one is left out."""
    return "/".join(_ODD.sub("_", part)[:80].strip(". ") for part in parts if part)


def flat(values: object, name: str) -> dict[str, str]:
    """Nested values of JSON as texts, by the path of each: {"recipe.source.model": "vit"}."""
    if isinstance(values, dict) and values:
        return {found: text for key, each in values.items() for found, text in flat(each, f"{name}.{key}").items()}
    if values is None or values == {} or values == []:
        return {}
    return {_joined(name): values if isinstance(values, str) else json.dumps(values)}


# --- What takes results, and how its answers are waited for -----------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class Sent:
    """What became of results at a tracker called `where`: how many are `new` there, and how many were there `already`.
    `left_out`: what it has no place for, with the reason."""

    where: str
    new: int
    already: int
    left_out: tuple[Omission, ...] = ()

    @property
    def sentence(self) -> str:
        already = f", {self.already} there already" if self.already else ""
        return f"{self.where}: {self.new} result{'' if self.new == 1 else 's'} sent{already}"


class Tracker(ABC):
    """`name` is what messages call it; no credentials are in it. `environment`: variables that its client is used with,
    where they are not set."""

    name: str
    environment: Mapping[str, str] = {}

    @abstractmethod
    def prepare(self) -> None:
        """Raise if nothing can be sent there: so it is told before anything is measured."""

    @abstractmethod
    def send(self, outcomes: Sequence[TrackedResult], progress: Progress) -> Sent:
        """Send what is not there yet; a result that was sent in part goes on.

        Raises:
            HostError: no answer in time, a refusal, or no credentials. OutputError, StorageError: of a file.
        """

    def told(self, error: Exception) -> VitdeployError:
        """What an error of its client means; its text is not repeated, as secrets may be in it."""
        return HostError(f"{self.name} cannot be used", found=type(error).__name__)

    def ask(self, question: Callable[[], T], size: int = 0) -> T:
        """What its service answers, in the time that so many bytes may take; errors as `told`.

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
                fix="look at the network and the address; sending again goes on where this ended",
            ) from None
        except ImportError as error:
            raise MissingPackageError(error.name or "that its client asks for", "", self.name) from None
        except Exception as error:  # each client has its own
            raise self.told(error) from None


@contextlib.contextmanager
def set_where_unset(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment with these, where they are not set; as it was behind the block."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def folder_bytes(folder: Path) -> int:
    """The size of all its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- Trackers by their names on the command line ----------------------------------------------------------------------


# By its module.
TRACKERS = {"mlflow": "Mlflow", "wandb": "Wandb", "bencher": "Bencher"}
EXPECTED = "mlflow[:URI], wandb[:[ENTITY/]PROJECT] or bencher:FILE"


def open_tracker(text: str) -> Tracker:
    """The tracker of a text such as "mlflow:http://localhost:5000".

    Raises:
        InputError: no tracker that is known. MissingPackageError: its client is not installed. HostError: it cannot be
            opened.
    """
    kind, _, place = text.partition(":")
    if kind in TRACKERS and (place or kind != "bencher"):
        tracker: Tracker = getattr(importlib.import_module(f"{__name__}.{kind}"), TRACKERS[kind])(place)
        return tracker
    raise InputError(
        "no tracker of this name", found="bencher without a file" if kind == "bencher" else kind[:40], expected=EXPECTED
    )
