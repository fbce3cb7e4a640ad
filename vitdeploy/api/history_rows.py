"""The rows of a history of one result: what its document says, and what it leaves out of machine and model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api.bench import Benchmark
from vitdeploy.api.compare import Compared
from vitdeploy.api.deploy import Deployment
from vitdeploy.api.sweep import Swept
from vitdeploy.errors import VitdeployError

if TYPE_CHECKING:
    from vitdeploy.history.of_documents import Machine, Measured
    from vitdeploy.history.row import ResultRow

Result = Benchmark | Deployment | Compared | Swept


def rows_of(result: Result) -> list[ResultRow]:
    """The rows of a result that was measured on this machine, or on a registered device."""
    from vitdeploy.history import of_documents
    from vitdeploy.history.row import now

    if isinstance(result, Deployment):
        report = result.document
        return of_documents.rows_of_report(report, this_machine(engine.target for engine in report.engines))
    if isinstance(result, Swept):
        reports = [each.report for each in result.document.recipes if each.report is not None]
        targets = {engine.target for report in reports for engine in report.engines}
        return of_documents.rows_of_sweep(result.document, this_machine(targets))
    if isinstance(result, Compared):
        bench = result.document.bench
        machine = this_machine(row.target for row in bench.results) if bench else this_machine(())
        return of_documents.rows_of_comparison(result.document, _candidate(result), machine)
    names = {row.artifact: _named(row.artifact) for row in result.document.results}
    return of_documents.rows_of_bench(result.document, names, _machine_of(result), now())


def _machine_of(found: Benchmark) -> Machine:
    """The machine of a benchmark run: this one, or the device that ran it."""
    from vitdeploy import __version__
    from vitdeploy.document.bench import DeviceBench
    from vitdeploy.history.of_documents import Machine

    if not isinstance(found.document, DeviceBench):
        return this_machine(row.target for row in found.document.results)
    engines = found.document.engines.values()
    # What runs there is this vitdeploy, which was sent.
    return Machine(
        {"vitdeploy": __version__, **found.document.host},
        {engine.target: engine.device for engine in engines},
        found.device,
    )


def this_machine(targets: Iterable[str]) -> Machine:
    """This machine, with what these targets run on."""
    from vitdeploy import __version__
    from vitdeploy.backends import TARGETS
    from vitdeploy.history.of_documents import Machine
    from vitdeploy.runtime.backend import RUNTIME
    from vitdeploy.runtime.host import describe_host
    from vitdeploy.stages.tools import package_versions

    known = sorted({target for target in targets if target in TARGETS})
    devices: dict[str, Mapping[str, str]] = {}
    for target in known:
        with contextlib.suppress(VitdeployError):
            devices[target] = RUNTIME[target].describe_device()
    versions = package_versions(["torch", *(TARGETS[target].package for target in known)])
    return Machine({**describe_host(), "vitdeploy": __version__, **versions}, devices)


def _named(text: str) -> Measured:
    """What a name of an artifact in a bench stands for: FOLDER:ENGINE of a bundle, a graph, or a model. One that was
    given twice has a number behind it."""
    from vitdeploy.bundle.read import file_sha256
    from vitdeploy.history.of_documents import Measured
    from vitdeploy.paths import is_file
    from vitdeploy.stages.files import find_graph

    name = re.sub(r" \([0-9]+\)$", "", text)
    folder, _, engine = name.rpartition(":")
    if folder and (found := _of_bundle(Path(folder), engine)) is not None:
        return found
    path = Path(name)
    with contextlib.suppress(VitdeployError, OSError):
        return Measured(path.stem, path.name, file_sha256(path if is_file(path) else find_graph(path)))
    return Measured(path.name or name, path.name or name)


def named_engine(bundle: Path, engine: str) -> Measured:
    """An engine of a bundle, which may be one that cannot be read."""
    from vitdeploy.history.of_documents import Measured

    return _of_bundle(bundle, engine) or Measured(bundle.name, engine)


def graph_of(bundle: Path, engine: str) -> dict[str, object] | None:
    """The operators and the opset of the graph of an engine, for whoever looks for what its runtime does wrong; None
    where it cannot be read."""
    from vitdeploy.bundle.read import read_bundle

    try:
        from vitdeploy.graph.io.files import load_graph

        found = next(each for each in read_bundle(bundle).engines if each.artifact == engine)
        model = load_graph(bundle / found.graph)
    except (VitdeployError, ModuleNotFoundError, StopIteration):
        return None
    names = sorted({node.op_type for node in model.graph if node.domain in ("", "ai.onnx")})
    return {"operators": names, "opset": model.opset_imports.get("", 0)}


def _of_bundle(folder: Path, engine: str) -> Measured | None:
    """An engine of a bundle; None if there is no bundle that can be read."""
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.document.report import Provenance
    from vitdeploy.history.of_documents import Measured, digest_of
    from vitdeploy.spec import DecodeError, decode

    try:
        manifest = read_bundle(folder)
    except VitdeployError:
        return None
    try:
        files = decode(Provenance, manifest.provenance).source.sha256
    except DecodeError:  # a bundle of something else than `run`
        graphs = {each.graph for each in manifest.engines}
        files = {entry.path: entry.sha256 for entry in manifest.files if entry.path in graphs}
    return Measured(manifest.name, engine, digest_of(files))


def _candidate(found: Compared) -> Measured:
    """What a comparison judged: a bundle, or a report."""
    from vitdeploy.document.read import read_report
    from vitdeploy.history.of_documents import Measured, digest_of
    from vitdeploy.paths import is_dir
    from vitdeploy.pipeline.early import REPORT_FILE

    path = Path(found.document.candidate)
    if (of_bundle := _of_bundle(path, "") if is_dir(path) else None) is not None:
        return of_bundle
    with contextlib.suppress(VitdeployError):
        report = read_report(path / REPORT_FILE if is_dir(path) else path)
        return Measured(report.name, "", digest_of(report.provenance.source.sha256))
    return Measured(path.name, "")
