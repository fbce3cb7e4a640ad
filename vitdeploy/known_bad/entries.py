"""The table of runtimes known to be wrong: `table.json` of this package, read and checked.

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

# What vitdeploy does about it: refuse to compile; refuse what the runtime itself would refuse, with the way out; say it
# where it is asked, as the pattern alone makes no answer wrong; nothing, as its own engines are compiled in a way that
# avoids it.
Action = Literal["refuse", "unreadable", "note", "avoided"]
DONE: dict[Action, str] = {
    "refuse": "refused", "unreadable": "refused", "note": "noted", "avoided": "avoided"
}  # fmt: skip
REFUSED: tuple[Action, ...] = ("refuse", "unreadable")
Device = Literal["CPU", "GPU", "NPU", "any"]
# The functions of `matchers.py`, for patterns that data cannot say.
Matcher = Literal[
    "antialiased_reduction", "attention_over_free_lengths", "auto_pad_of_free_size", "constant_keys_or_values",
    "mean_over_axes_of_an_input", "rotary_attention", "scaled_queries_and_keys", "tokens_as_many_as_heads",
    "unequal_axis_pads", "vector_behind_scores", "windowed_attention",
]  # fmt: skip


@dataclass(frozen=True)
class AttributeRule:
    """What an attribute of a node must be. One that the node does not have matches `absent` alone."""

    values: tuple[int | str, ...] = ()
    at_least: int | None = None
    present: bool = False
    absent: bool = False

    def __post_init__(self) -> None:
        if sum((bool(self.values), self.at_least is not None, self.present, self.absent)) != 1:
            raise ValueError("expected one of values, at_least, present and absent")


@dataclass(frozen=True)
class Pattern:
    """What a graph must hold to be computed wrongly.

    Either `matcher`, or nodes of an operator of `operators` in `domain` whose attributes are as in `attributes`, in a
    graph of at least `opset` that has every operator of `beside` too.
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
    """One way in which a runtime is wrong.

    runtime: the package of a target in `backends.TARGETS`; device: where it computes, "any" where it is not what
    computes that is wrong.
    versions: its releases, as a PEP 440 specifier; "" for all.
    isa, without: instruction sets (or a GPU's "sm_120") that the machine has all of, and none of.
    precisions: of the engine; () for all.
    wrong, way_out: what goes wrong, and what to do instead; a sentence each.
    sources: addresses of what says so.
    reproduced: where it was seen by us, or why it was not tried.
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
            raise ValueError(f"versions {self.versions!r} is no version specifier of PEP 440") from None
        if not self.sources:
            raise ValueError(f"{self.id} has no source")


@dataclass(frozen=True)
class KnownBadTable:
    """`format` is TABLE_FORMAT; no two `entries` have one id."""

    format: Literal[1]
    entries: tuple[KnownBadEntry, ...]

    def __post_init__(self) -> None:
        ids = [entry.id for entry in self.entries]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"there are two entries {', '.join(twice)}")


@functools.cache
def table() -> tuple[KnownBadEntry, ...]:
    """The entries of the table that comes with vitdeploy; errors as `read_table`."""
    return read_table(TABLE_FILE)


def digest_of(runtime: str) -> str:
    """SHA-256 of the entries about a runtime that refuse it: what an engine of it depends on."""
    found = [encode(entry) for entry in table() if entry.runtime == runtime and entry.action in REFUSED]
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def read_table(file: Path) -> tuple[KnownBadEntry, ...]:
    """The entries of a table.

    Raises:
        KnownBadTableError: it is not there, is no JSON, or breaks a rule: an unreadable table could let a wrong engine
            pass.
    """
    try:
        return decode(KnownBadTable, json.loads(file.read_text(encoding="utf-8"))).entries
    except DecodeError as error:
        found = "; ".join(error.problems[:3])
    except (OSError, ValueError) as error:
        found = str(error)
    raise KnownBadTableError(
        "the table of runtimes known to be wrong cannot be read",
        found=f"{file}: {found}",
        expected=f"a table of format {TABLE_FORMAT}",
        fix="pip install --force-reinstall vitdeploy",
    )
