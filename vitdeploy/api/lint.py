"""Run the linter on graphs, for `vitdeploy inspect --target`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.errors import TargetError

if TYPE_CHECKING:
    from vitdeploy.lint.findings import Finding

TARGET = "tensorrt"
# Nodes that are named for one rule; all are in the JSON document.
SHOWN_NODES = 4


def lint_graphs(path: Path, target: str, version: str | None) -> tuple[dict[str, Any], list[str], list[Finding]]:
    """(document, lines, findings of all graphs) for a graph, a folder of graphs or a bundle, whose digests are checked.

    Raises:
        TargetError: a target or version whose rules are not known. Errors of reading propagate.
    """
    from vitdeploy.spec import encode
    from vitdeploy.stages.capability import check_target

    check_target(target)
    if target != TARGET:
        raise TargetError(
            f"what {target} takes of a graph is not known without asking it",
            found=f"--target {target}",
            wanted=f"--target {TARGET}",
            fix=f"this asks it: {shlex.join(['vitdeploy', 'compile', str(path), '--target', target, '-o', 'DIR'])}",
        )

    from vitdeploy.graph.io.files import load_graph
    from vitdeploy.known_bad.lint import known_findings
    from vitdeploy.lint.linter import SEVERITIES, counts, lint
    from vitdeploy.lint.support import VERSIONS

    versions = VERSIONS if version is None else (version,)
    lines, every, graphs = [], [], {}
    for name, file in _graphs(path).items():
        model = load_graph(file)
        findings = [*lint(model, versions), *known_findings(model, versions)]
        findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        number = counts(findings)
        graphs[name] = {"file": str(file), "counts": number, "findings": encode(findings)}
        told = ", ".join(
            f"{count} {severity}s" if count != 1 else f"1 {severity}" for severity, count in number.items()
        )
        lines += [f"{file} for TensorRT {', '.join(versions)}: {told}", *_lines(findings, versions)]
        every += findings
    lines.append("judged by what is documented of TensorRT; none was asked")
    return {"path": str(path), "target": target, "versions": list(versions), "graphs": graphs}, lines, every


def _graphs(path: Path) -> dict[str, Path]:
    """The graphs that TensorRT would be given: those placed for it in a bundle, or else the float graphs."""
    from vitdeploy.bundle.read import is_bundle, read_bundle, verify_files
    from vitdeploy.stages.files import find_graph, graphs_in

    if not is_bundle(path):
        file = find_graph(path)
        return (graphs_in(path) if path.is_dir() else {}) or {"model": file}
    manifest = read_bundle(path)
    verify_files(path, manifest)
    engines = [engine for engine in manifest.engines if engine.target == TARGET]
    placed = {part.part: path / part.graph for engine in engines[:1] for part in engine.parts or (engine,)}
    return placed or {name: path / graph.file for name, graph in manifest.graphs.items()}


def _lines(findings: Sequence[Finding], versions: Sequence[str]) -> list[str]:
    """One paragraph for each rule and fix: what was found at which nodes, what is wanted, the fix."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.wanted, finding.fix, *finding.versions)
        groups.setdefault(key, []).append(finding)
    lines = []
    for (rule, severity, wanted, fix, *names), group in groups.items():
        where = f" ({', '.join(names)})" if len(names) < len(versions) else ""
        rest = [f"and {len(group) - SHOWN_NODES} more"] if len(group) > SHOWN_NODES else []
        found = [*(f"{finding.node}: {finding.found}" for finding in group[:SHOWN_NODES]), *rest]
        lines.append(f"{rule}  {severity}{where}")
        lines += [f"        {'found:' if not index else '':<8}{text}" for index, text in enumerate(found)]
        lines += [f"        wanted: {wanted}", f"        fix:    {fix}"]
    return lines
