"""The table as findings of the linter, which judges graphs by releases of TensorRT."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from vitdeploy.graph.io.files import METADATA_KEY, get_metadata
from vitdeploy.known_bad.entries import REFUSED, Entry, table
from vitdeploy.known_bad.find import matches
from vitdeploy.known_bad.platform import holds_for
from vitdeploy.lint.findings import Finding, Severity

RUNTIME = "tensorrt"


def known_findings(model: ir.Model, versions: Sequence[str]) -> list[Finding]:
    """A finding for each node that shows an entry about one of these releases: an error where every engine of the graph
    would be refused, a warning where it depends on the precision or the GPU.

    Raises:
        KnownBadTableError: the table cannot be read.
    """
    releases = {entry.id: tuple(v for v in versions if holds_for(entry.versions, v)) for entry in table()}
    asked = [entry for entry in table() if entry.runtime == RUNTIME and releases[entry.id]]
    precision = _precision(model)
    return [
        Finding(
            entry.id,
            _severity(entry, precision),
            node,
            entry.wrong,
            f"a release outside of {entry.versions}",
            f"{entry.way_out} See {' '.join(entry.sources)}",
            releases[entry.id],
        )
        for entry, nodes in ((match.entry, match.nodes) for match in matches(model, asked))
        for node in nodes
    ]


def _precision(model: ir.Model) -> str | None:
    return get_metadata(model, "the graph").precision if METADATA_KEY in model.metadata_props else None


def _severity(entry: Entry, precision: str | None) -> Severity:
    sure = not entry.isa and not entry.without and (not entry.precisions or precision in entry.precisions)
    return "error" if entry.action in REFUSED and sure else "warning"
