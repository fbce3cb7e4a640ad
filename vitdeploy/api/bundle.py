"""Engines: a graph compiled for one target, in a bundle that an app loads."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitdeploy.api.folders import filling, home_of
from vitdeploy.api.graph import GraphLike, graph_file
from vitdeploy.api.reporter import Reporter, reporting
from vitdeploy.api.shown import Shown
from vitdeploy.api.tables import Line
from vitdeploy.backends import TARGETS

if TYPE_CHECKING:
    from vitdeploy.compilation.build_options import BuildOptions
    from vitdeploy.runtime.predictor import Predictor
    from vitdeploy.spec import EngineSpec, Manifest
    from vitdeploy.workflows.seeded import AnswersTold


@dataclass(frozen=True, repr=False)
class Bundle(Shown):
    """A folder with engines that `vitdeploy.load`, every command and every app can load."""

    folder: Path
    document: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, ...] = ()

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The bundle's manifest; raises ManifestError if it breaks a rule of the format."""
        from vitdeploy.bundle.read import read_bundle

        return read_bundle(self.folder)

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """Its engines, the recommended one first."""
        return self.manifest.engines

    def load(self, target: str = "auto", **options: Any) -> Predictor:
        """A predictor of its first engine that works here, or of the one for `target`; options and errors as
        `vitdeploy.load`."""
        from vitdeploy.runtime.load import load

        return load(self.folder, target=target, **options)

    def lines(self) -> list[Line]:
        return [*self.text, str(self.folder)]


def compile(
    graph: GraphLike,
    target: str,
    folder: str | Path | None = None,
    *,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
    batch: int | None = None,
    build: BuildOptions | None = None,
    on: str | None = None,
    accept_known_bad: Sequence[str] = (),
    split_rows: Literal["auto", "none"] | Sequence[int] = "auto",
    progress: bool | Reporter = True,
) -> Bundle:
    """Compile a graph to an engine for one target.

    Args:
        graph: of `export` or `quantize`, its folder, or its model.onnx.
        target: such as "openvino-cpu"; `vitdeploy doctor` lists them.
        folder: as for `export`.
        precision: of a float graph; None: fp32, or what the graph was placed for.
        batch: the batch to compile at; None: the graph's own, or 1.
        build: how TensorRT builds.
        on: the name of a registered device, which compiles the engine; it is fetched.
        accept_known_bad: ids of the table of runtimes known to be wrong that are no reason to refuse.
        split_rows: the parts in which an INT8 engine for openvino-cpu computes the rows of its tokens, such as
            (192, 5), or more rows, such as (200,); "auto": what is measured to be faster on this machine, or on the
            device.
        progress: as for `export`.

    Raises:
        TargetError: the graph was placed for another target, or has a fixed batch.
        KnownBadError: this release of the runtime is known to compute such a graph wrongly.
        CapabilityError: the target cannot do the precision or the task, or the engine did not run as placed.
        MissingPackageError, EngineError: of the runtime.
        GraphError: parts for a graph of other rows.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> [engine] = vd.compile(graph, "onnxruntime-cpu", progress=False).engines
    >>> engine.artifact
    'onnxruntime-cpu-fp32'
    """
    from vitdeploy.pipeline.available import require_target
    from vitdeploy.stages.capability import check_precision
    from vitdeploy.stages.files import OUTPUT_NAMES

    if on is None:
        require_target(target, precision or "fp32")
    else:
        check_precision(target, precision or "fp32")
    file, home, reporter = graph_file(graph), home_of(folder, "bundle", OUTPUT_NAMES), reporting(progress)

    from vitdeploy.known_bad.engine import engine_matches
    from vitdeploy.known_bad.find import check_ids
    from vitdeploy.known_bad.words import described, match_lines
    from vitdeploy.workflows.placement import compile_bundle
    from vitdeploy.workflows.seeded import answers_told, require_seeded, seeded_answers

    check_ids(accept_known_bad)
    with reporter, filling(home, OUTPUT_NAMES) as work:
        reporter.progress(f"compile for {target}", 0, 1)
        if on is None:
            manifest = compile_bundle(
                file, target, batch, precision, work, reporter.progress, build, accept_known_bad, split_rows
            )
            engine = manifest.engines[0]
            seeded = seeded_answers(work / engine.graph, target)
            compared = answers_told(seeded, require_seeded(seeded, engine, work), bool(engine.accepted))
        else:
            manifest, compared = _compile_on(
                on, file, target, batch, precision, work, build, accept_known_bad, split_rows, reporter
            )
            engine = manifest.engines[0]
        reporter.progress(f"compile for {target}", 1, 1)
    document = {
        "artifact": engine.artifact,
        "target": engine.target,
        "precision": engine.precision,
        "provider": engine.provider,
        "batch": engine.batch,
        "kernels": engine.kernels,
        **({"row_parts": list(engine.row_parts)} if engine.row_parts else {}),
        **({"float_rest": engine.float_rest} if engine.float_rest else {}),
        "answers": compared.facts,
        "path": str(home),
    }
    known = [match for match in engine_matches(engine, home) if match.entry.action != "avoided"]
    if known:
        document["known_bad"] = [described(match) for match in known]
    taken = engine.accepted or ()
    told = [line for each in known for line in match_lines(each, "accepted" if each.entry.id in taken else "")]
    return Bundle(home, document, (_ran(engine), *told, compared.line))


def _ran(engine: EngineSpec) -> str:
    """What ran, in a line."""
    hidden = "as the graph is typed (this provider does not show its kernels)"
    kernels = ", ".join(f"{count} in {kind}" for kind, count in engine.kernels.items())
    kernels = kernels or (hidden if TARGETS[engine.target].typed else "none")
    form = f"; {engine.form_told}" if engine.form_told else ""
    return f"{engine.artifact} on {engine.provider}, batch {engine.batch}: linears and convolutions {kernels}{form}"


def _compile_on(
    on: str,
    file: Path,
    target: str,
    batch: int | None,
    precision: str | None,
    out: Path,
    build: BuildOptions | None,
    accepted: Sequence[str],
    split_rows: Literal["auto", "none"] | Sequence[int],
    reporter: Reporter,
) -> tuple[Manifest, AnswersTold]:
    from vitdeploy.devices.registry import find_devices
    from vitdeploy.errors import UnknownDeviceError
    from vitdeploy.workflows.on_devices import compile_on
    from vitdeploy.workflows.placement import bundle_of, chosen_row_parts, place_graphs
    from vitdeploy.workflows.rows_there import measure_row_parts_there
    from vitdeploy.workflows.seeded import compared_there, golden_folder, seeded_answers

    devices = find_devices(on)
    if len(devices) != 1:
        raise UnknownDeviceError(
            "one engine is made by one device", found=", ".join(d.name for d in devices), wanted="--on with one name"
        )
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        placed, made = Path(folder) / "placed", Path(folder) / "engine"
        placed.mkdir()
        made.mkdir()
        graphs = place_graphs(file, target, precision, placed)
        size = batch or graphs.batch
        parts = chosen_row_parts(
            graphs,
            split_rows,
            lambda: measure_row_parts_there(graphs, size, devices[0], reporter.progress, reporter.note),
        )
        seeded = seeded_answers(placed / f"{next(iter(graphs.graphs))}.onnx", target)
        golden = {} if seeded.why or accepted else golden_folder(seeded, target, Path(folder) / "golden")
        engine = compile_on(
            str(file),
            graphs,
            batch,
            devices[0],
            made,
            build=build,
            accepted=accepted,
            parts=parts,
            golden=golden,
            progress=reporter.progress,
            note=reporter.note,
        )
        return bundle_of(graphs, engine, made, out), compared_there(seeded, devices[0].name, bool(golden))
