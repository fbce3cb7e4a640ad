"""Static linter for TensorRT: finds what its parser and builder would reject, run slowly or leave unfused, with fixes.

It does not use TensorRT: the facts are in `support.py` and in the rules. A graph without findings can still fail to
build; a graph with an error is documented to fail.
"""

from collections import Counter
from collections.abc import Sequence

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.lint import attention, operators, quantizers, tensors
from vitdeploy.lint.support import VERSIONS, support_of
from vitdeploy.lint.view import LintFinding, Rule, prepare
from vitdeploy.runtime.profiles import Profile

_MODULES = (operators, tensors, quantizers, attention)
_DECORATED = (row for module in _MODULES for row in vars(module).values() if isinstance(row, Rule))
RULES: tuple[Rule, ...] = tuple(sorted((*_DECORATED, *attention.RULES), key=lambda row: row.code))
SEVERITIES = ("error", "warning", "note")
# The number of findings that `refuse` shows.
SHOWN_FINDINGS = 5


def lint(
    model: ir.Model, versions: Sequence[str] = VERSIONS, profiles: Sequence[Profile] | None = None
) -> list[LintFinding]:
    """Return all findings, errors first, then in the order of the rules and of the graph. The model is not modified.

    Args:
        model: a graph as loaded from its file; weights are read only where a rule checks their values.
        versions: releases of TensorRT from `VERSIONS`; `nearest_version` maps an installed release to one of them.
        profiles: the optimisation profiles of the engine build; None skips the rules on them.

    Raises:
        TargetError: a version without facts in `support.py`.
    """
    view = prepare(model, profiles)
    found: dict[tuple[Rule, str, str, str, str], list[str]] = {}
    supports = [support_of(version) for version in versions]
    for rule in RULES:
        for support in supports if rule.by_release else supports[:1]:
            names = [support.name] if rule.by_release else list(versions)
            for hit in rule.check(view, support):
                key = (rule, hit.node, hit.found, hit.expected or rule.expected, hit.fix or rule.fix)
                found.setdefault(key, []).extend(name for name in names if name not in found[key])
    findings = [
        LintFinding(rule.code, rule.severity, node, what, expected, fix, tuple(names))
        for (rule, node, what, expected, fix), names in found.items()
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def refuse(findings: Sequence[LintFinding], name: str = "the graph") -> None:
    """Raise GraphError if the findings of the graph called `name` include an error.

    Raises:
        GraphError: with the first errors: rule, node and fix of each.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    rest = len(errors) - SHOWN_FINDINGS
    raise GraphError(
        f"TensorRT would reject {name} or compute it wrongly",
        found="; ".join(f"{finding.rule} {finding.node}: {finding.found}" for finding in errors[:SHOWN_FINDINGS])
        + (f"; and {rest} more" if rest > 0 else ""),
        expected="; ".join(dict.fromkeys(finding.expected for finding in errors[:SHOWN_FINDINGS])),
        fix="; ".join(dict.fromkeys(finding.fix for finding in errors[:SHOWN_FINDINGS])),
    )


def counts(findings: Sequence[LintFinding]) -> dict[str, int]:
    """Return the number of findings of each severity."""
    counter = Counter(finding.severity for finding in findings)
    return {severity: counter[severity] for severity in SEVERITIES}  # type: ignore[index]
