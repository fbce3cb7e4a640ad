"""Read and check the table of known bad runtime releases: `table.json` of this package.

It needs neither onnx nor a runtime, so that `doctor` reads it on any machine.
"""

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from vitdeploy.errors import KnownBadTableError
from vitdeploy.spec import DecodeError, decode, encode

TABLE_FORMAT = 1
TABLE_FILE = Path(__file__).parent / "table.json"

# What vitdeploy does. "refuse": refuse to compile. "unreadable": the runtime would reject the graph; refuse with a fix.
# "note": report it on request, since the pattern alone does not make answers wrong. "avoided": engines are compiled so
# that it does not occur.
Action = Literal["refuse", "unreadable", "note", "avoided"]
DONE: dict[Action, str] = {
    "refuse": "refused", "unreadable": "refused", "note": "noted", "avoided": "avoided"
}  # fmt: skip
REFUSED: tuple[Action, ...] = ("refuse", "unreadable")
Device = Literal["CPU", "GPU", "NPU", "any"]
# The functions of `matchers.py`, for patterns that data cannot express.
Matcher = Literal[
    "antialiased_reduction", "attention_over_free_lengths", "auto_pad_of_free_size", "constant_keys_or_values",
    "mean_over_axes_of_an_input", "rotary_attention", "scaled_queries_and_keys", "tokens_as_many_as_heads",
    "unequal_axis_pads", "vector_behind_scores", "windowed_attention",
]  # fmt: skip


@dataclass(frozen=True)
class AttributeRule:
    """The condition on a node's attribute. A missing attribute matches only `absent`."""

    values: tuple[int | str, ...] = ()
    at_least: int | None = None
    present: bool = False
    absent: bool = False

    def __post_init__(self) -> None:
        if sum((bool(self.values), self.at_least is not None, self.present, self.absent)) != 1:
            raise ValueError("expected one of values, at_least, present and absent")


@dataclass(frozen=True)
class Pattern:
    """The pattern in a graph that is computed wrongly.

    Either `matcher`, or nodes with one of `operators` in `domain` whose attributes satisfy `attributes`, in a graph of
    at least `opset` that also contains every operator of `beside`.
    """

    matcher: Matcher | None = None
    operators: tuple[str, ...] = ()
    domain: str = ""
    attributes: dict[str, AttributeRule] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    opset: int = 0

    def __post_init__(self) -> None:
        if (self.matcher is None) == (not self.operators):
            raise ValueError("expected either matcher or operators")


@dataclass(frozen=True)
class KnownBadEntry:
    """One known defect of a runtime.

    runtime: the package of a target in `backends.TARGETS`; device: where it computes, "any" if the defect does not
    depend on the device.
    versions: the affected releases, as a PEP 440 specifier; "" for all.
    isa, without: instruction sets (or a GPU's "sm_120") that an affected machine has, and does not have.
    precisions: the affected precisions of engines; () for all.
    wrong, way_out: the defect, and the fix; a sentence each.
    sources: URLs or files that document it.
    reproduced: where we reproduced it, or why we did not try.
    """

    id: str
    runtime: str
    device: Device
    versions: str
    pattern: Pattern
    action: Action
    wrong: str
    way_out: str
    sources: tuple[str, ...]
    reproduced: str
    isa: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        try:
            SpecifierSet(self.versions)
        except InvalidSpecifier:
            raise ValueError(f"versions {self.versions!r} is not a PEP 440 version specifier") from None
        if not self.sources:
            raise ValueError(f"{self.id} has no source")


@dataclass(frozen=True)
class KnownBadTable:
    """`format` is TABLE_FORMAT; the ids of `entries` are unique."""

    format: Literal[1]
    entries: tuple[KnownBadEntry, ...]

    def __post_init__(self) -> None:
        ids = [entry.id for entry in self.entries]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"duplicate entries {', '.join(twice)}")


@functools.cache
def table() -> tuple[KnownBadEntry, ...]:
    """Return the entries of the table that is part of vitdeploy; errors as `read_table`."""
    return read_table(TABLE_FILE)


def digest_of(runtime: str) -> str:
    """Return the SHA-256 of a runtime's entries that refuse a graph; engines for the runtime depend on them."""
    found = [encode(entry) for entry in table() if entry.runtime == runtime and entry.action in REFUSED]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def read_table(file: Path) -> tuple[KnownBadEntry, ...]:
    """Return the entries of a table.

    Raises:
        KnownBadTableError: the table is missing, not JSON, or invalid. An unreadable table could let a wrong engine
            pass.
    """
    try:
        return decode(KnownBadTable, json.loads(file.read_text(encoding="utf-8"))).entries
    except DecodeError as error:
        found = "; ".join(error.problems[:3])
    except (OSError, ValueError) as error:
        found = str(error)
    raise KnownBadTableError(
        "the table of known bad runtime releases cannot be read",
        found=f"{file}: {found}",
        expected=f"a table of format {TABLE_FORMAT}",
        fix="pip install --force-reinstall vitdeploy",
    )
