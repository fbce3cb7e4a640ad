"""Findings of the linter, one per node (or tensor) and rule; a rule is a pure function over a prepared graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitdeploy.lint.support import Support
from vitdeploy.lint.view import View

# error: TensorRT would refuse the graph, or compute something else; warning: slower, or unfused; note: good to know.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """`rule` is its stable code, `node` the name of a node or tensor, `versions` the releases that it holds for."""

    rule: str
    severity: Severity
    node: str
    found: str
    wanted: str
    fix: str
    versions: tuple[str, ...]


class Hit(NamedTuple):
    """A rule's finding at one node or tensor. `wanted` and `fix` are more specific than those of the rule."""

    node: str
    found: str
    wanted: str = ""
    fix: str = ""


Check = Callable[[View, Support], Iterable[Hit]]


@dataclass(frozen=True)
class Rule:
    """A rule that `check` applies to a graph. `wanted` and `fix` are the defaults of its findings.

    `by_release`: whether the releases differ in it; if not, `check` is called once for all.
    """

    code: str
    severity: Severity
    wanted: str
    fix: str
    check: Check
    by_release: bool = False


def rule(code: str, severity: Severity, wanted: str, fix: str, *, by_release: bool = False) -> Callable[[Check], Rule]:
    """Makes a rule of the check that it decorates."""
    return lambda check: Rule(code, severity, wanted, fix, check, by_release)
