"""Prepare placements and jobs to send to devices; engines built here are never sent.

Nothing is compiled here, so a target's runtime need not be installed here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, require_graphs
from vitdeploy.devices import client, registry
from vitdeploy.devices.agent.documents import FORMAT, DeviceJob, Kind, PlacedArtifact, PlacedGraph
from vitdeploy.errors import InputError, quoted
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.io.files import admitted_metadata, load_graph
from vitdeploy.pipeline.early import default_target, kind_of, new_folder, open_bundle
from vitdeploy.pipeline.setting import engine_setting, graph_setting
from vitdeploy.runtime import backend, choice
from vitdeploy.runtime.golden import golden_files
from vitdeploy.runtime.inputs import further_inputs, require_image_alone
from vitdeploy.search.rows import in_parts
from vitdeploy.spec import EngineSpec, FileEntry, Manifest, Precision
from vitdeploy.stages.step import MODEL_FILE, find_graph
from vitdeploy.tasks.adapter import Setting
from vitdeploy.workflows.placement import PlacedGraphs, place_graphs
from vitdeploy.workflows.seeded import golden_folder, seeded_answers

DATA = ".onnx.data"


@dataclass(frozen=True)
class Shipment:
    """The data to send to a device for one artifact. `files`: those of `placed`, by their paths on the device.
    `setting`: how to read inputs and outputs of an artifact that a user named. `accepted`: the accepted known-bad
    entries of a bundle's engine."""

    placed: PlacedArtifact
    files: Mapping[str, Path]
    setting: Setting | None = None
    accepted: tuple[str, ...] = ()


def find_device_artifacts(
    text: str, *, target: str | None, work: Path, trust: Path | None = None, golden: bool = False
) -> list[Shipment]:
    """Return every engine of a bundle (or the one for `target`), or a graph, placed in a new folder in `work`. With
    `golden`, an engine must give golden answers on the device: those of its bundle, or of its graph (`seeded`).

    Raises:
        InputError: an original model, which devices cannot run. Errors of reading propagate.
    """
    path, kind = Path(text), kind_of(text)
    if kind == "bundle":
        manifest, labels = open_bundle(path, trust)
        return [
            _of_engine(path, manifest, engine, labels, golden, work)
            for engine in choice.select_engines(manifest, target or "auto")
        ]
    if kind == "model":
        raise InputError(
            f"{text} is a model, which devices cannot run",
            expected="with --on: a bundle, or a graph from `vitdeploy export` or `vitdeploy quantize`",
            fix=f"vitdeploy export {quoted(text)} -o DIR, then give DIR",
        )
    file, answers = find_graph(path), dict[str, Path]()
    graphs = place_graphs(file, target or default_target(file), None, new_folder(work, "placed"))
    first, spec = next(iter(graphs.graphs.values()))
    if golden:  # of the first graph, which takes the images
        seeded = seeded_answers(graphs.folder / f"{next(iter(graphs.graphs))}.onnx", graphs.target)
        answers = {} if seeded.why else golden_folder(seeded, graphs.target, new_folder(work, "golden"))
    shipment = placed_shipment(str(path), graphs, graphs.batch, answers)
    return [dataclasses.replace(shipment, setting=graph_setting(first, graphs.metadata, spec))]


def placed_shipment(name: str, graphs: PlacedGraphs, batch: int, golden: Mapping[str, Path] | None = None) -> Shipment:
    files = {part: graphs.folder / f"{part}.onnx" for part in graphs.graphs}
    _, spec = next(iter(graphs.graphs.values()))
    if graphs.metadata.preprocess is not None:
        require_image_alone(name, further_inputs(graphs.metadata.task, spec.inputs), "a device")
    facts = {"sequence": graphs.metadata.sequence, "row_parts": graphs.row_parts}
    return _ship(name, graphs.target, batch, files, golden or {}, None, facts)


def _of_engine(
    folder: Path, manifest: Manifest, engine: EngineSpec, labels: tuple[str, ...], golden: bool, work: Path
) -> Shipment:
    """Return the shipment of a bundle's engine. An engine that is code is sent only for the device that built it."""
    require_image_alone(manifest.name, further_inputs(manifest.task, engine.inputs), "a device")
    require_graphs(folder, manifest, "a device that builds its own engine")
    files = {part.part: folder / part.graph for part in engine.parts or (engine,)}
    if engine.row_parts is not None:  # as in the bundle's files
        files = {engine.part: new_folder(work, "rows") / MODEL_FILE}
        in_parts(folder / engine.graph, engine.row_parts, files[engine.part])
    # The device compares its engine with these files; none for a bundle without golden answers.
    names = golden_files(manifest, engine) if golden else ()
    answers = {name: folder / name for name in ((MANIFEST_FILE, *names) if names else ())}
    facts = {name: getattr(engine, name) for name in ("sequence", "weight_bits", "row_parts", "float_rest")}
    built = (engine, folder) if backend.engine_is_code(engine) and not engine.parts else None
    shipment = _ship(f"{folder}:{engine.artifact}", engine.target, engine.batch, files, answers, built, facts)
    setting = engine_setting(folder, manifest, engine, labels)
    return dataclasses.replace(shipment, setting=setting, accepted=engine.accepted or ())


def _ship(
    name: str,
    target: str,
    batch: int,
    graphs: Mapping[str, Path],
    golden: Mapping[str, Path],
    plan: tuple[EngineSpec, Path] | None,
    facts: Mapping[str, Any],
) -> Shipment:
    """Return the shipment of `graphs` (by part), in the precision that they were placed for: INT8 if one of them is.

    Args:
        golden: the manifest and the golden answers of a bundle, by their paths in it.
        plan: an engine that a device built before, and the folder of its files.
        facts: further fields of the placement; `weight_bits` defaults to that of the graphs.
    """
    metadata = {part: admitted_metadata(graph) for part, graph in graphs.items()}
    own: dict[str, Precision] = {part: found.precision or "fp32" for part, found in metadata.items()}
    whole: Precision = "int8" if "int8" in own.values() else next(iter(own.values()))
    bits = next((found.weight_bits for found in metadata.values() if found.weight_bits is not None), None)
    files: dict[str, Path] = {}
    sent = []
    for part, graph in graphs.items():
        weights = sorted(graph.parent.glob(f"*{DATA}"))
        # The graph contains the name of its weights file, and compilers expect it next to the graph's own name.
        called = weights[0].name.removesuffix(".data") if len(weights) == 1 else graph.name
        files |= {f"{part}/{called}": graph, **{f"{part}/{path.name}": path for path in weights}}
        precision = own[part] if len(set(own.values())) > 1 else None
        sent.append(PlacedGraph(part, f"{part}/{called}", count_int8(load_graph(graph)), precision))
    placed = PlacedArtifact(name, target, whole, batch, tuple(sent), **{"weight_bits": bits, **facts})
    if plan is not None:
        engine, folder = plan
        renamed = {file: f"plan/{file.replace('/', '-')}" for file in engine.files}
        files |= {renamed[file]: folder / file for file in engine.files}
        placed = dataclasses.replace(placed, plan=dataclasses.replace(engine, files=tuple(renamed.values())))
    if golden:
        files |= {f"golden/{name}": path for name, path in golden.items()}
        placed = dataclasses.replace(placed, golden="golden")
    return Shipment(placed, files)


def entries(files: Mapping[str, Path]) -> dict[FileEntry, Path]:
    """Return the files of a shipment with their sizes and digests."""
    return {FileEntry(name, path.stat().st_size, file_sha256(path)): path for name, path in files.items()}


def make_job(
    kind: Kind, shipments: Sequence[Shipment] = (), more: Mapping[FileEntry, Path] | None = None, **options: Any
) -> tuple[DeviceJob, dict[str, Path]]:
    """Return one job for all shipments and `more` files, and the local path of each file. Each shipment gets its own
    folder. `options`: further fields of the job."""
    placed, files = [], dict[str, Path]()
    for index, shipment in enumerate(shipments):
        files |= {f"{index}/{name}": path for name, path in shipment.files.items()}
        placed.append(_below(shipment.placed, str(index)))
    listed = {**entries(files), **(more or {})}
    job = DeviceJob(
        FORMAT, kind, client.agent_package().digest, registry.sender(), tuple(placed), tuple(listed), **options
    )
    return job, {entry.path: path for entry, path in listed.items()}


def _below(placed: PlacedArtifact, folder: str) -> PlacedArtifact:
    graphs = tuple(dataclasses.replace(graph, file=f"{folder}/{graph.file}") for graph in placed.graphs)
    plan = placed.plan and dataclasses.replace(
        placed.plan, files=tuple(f"{folder}/{file}" for file in placed.plan.files)
    )
    golden = placed.golden and f"{folder}/{placed.golden}"
    return dataclasses.replace(placed, graphs=graphs, plan=plan, golden=golden)
