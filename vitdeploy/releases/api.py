"""Run a bundle on several releases of a runtime: the Python API."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.api import artifacts, calls
from vitdeploy.api.bench import ratio_text
from vitdeploy.api.options import (
    VersionsOptions,
)
from vitdeploy.api.values import Column, Line, Shown, Table, reporting
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.document.commands import ReleaseFacts, VersionsDocument
from vitdeploy.releases.compare import compare_versions


@dataclass(frozen=True, repr=False)
class Versions(Shown):
    """The answers and times of a bundle's engines on releases of their runtime; `document` is what the command line
    prints with --json."""

    document: VersionsDocument

    @property
    def wrong(self) -> tuple[str, ...]:
        """The releases on which an engine does not give the golden answers."""
        rows = self.document.releases
        return tuple(dict.fromkeys(row.version for row in rows if row.answers is not None and not row.answers.ok))

    def lines(self) -> list[Line]:
        return _versions_lines(self.document)


@calls.takes(VersionsOptions)
def versions(options: VersionsOptions) -> Versions:
    """Run a bundle's engines on several releases of a runtime, each installed in its own environment.

    Raises:
        InputError: an invalid range, a range without releases, a runtime that the bundle does not use, or a bundle
            without golden answers. HubError: pip finds no releases. HostError: Python cannot create environments here.
            Errors of reading the bundle propagate.
    """
    bundle, duration = options.bundle, options.duration
    folder = bundle.folder if isinstance(bundle, artifacts.Bundle) else Path(bundle)
    protocol = Protocol(("single",), (1,), duration, block_seconds=min(0.25, duration), processes=2, max_extension=1)
    reporter = reporting(options.progress)
    how: dict[str, Any] = {"rebuild": options.rebuild, "progress": reporter.progress, "note": reporter.note}
    with reporter:
        return Versions(compare_versions(folder, options.runtime, protocol, **how))


def _versions_lines(document: VersionsDocument) -> list[Line]:
    several = len(document.own) > 1
    columns = (
        Column(document.runtime),
        *([Column("engine", 95, left=True)] if several else []),
        Column("answers", 100, left=True),
        Column("same as original", 80),
        Column("difference", 70),
        Column("time", 90, left=True),
        Column("changed", 85, left=True),
    )
    rows = tuple(_row(row, several, document.own) for row in document.releases)
    own = [f"{name} was made with {version or 'an unknown release'}" for name, version in document.own.items()]
    how = "recompiled by each release" if document.rebuilt else "loaded unchanged"
    lines: list[Line] = [f"{document.bundle}: {', '.join(own)}; the engine is {how}", Table(columns, rows)]
    lines += [f"{version} skipped: {why}" for version, why in document.skipped.items()]
    if any(row.time is not None for row in document.releases):
        lines.append("time: query time relative to the release that the bundle was made with")
    return lines


def _row(row: ReleaseFacts, several: bool, own: Mapping[str, str]) -> tuple[str, ...]:
    head = (row.version, *([row.artifact] if several else []))
    changed = " and ".join(row.changed)
    if row.answers is None:
        assert row.error is not None
        return head[
            0
        ], f"{' '.join(head[1:])}{' ' if several else ''}does not run: {row.error.message}: {row.error.found}"
    found, time = row.answers, "" if row.time is None else ratio_text(row.time)
    difference = "NaN" if found.difference is None else f"{found.difference:.1e}"
    same = f"{found.same} of {found.inputs}"
    return (*head, "ok" if found.ok else "WRONG", same, difference, time, changed)
