"""What is sent to a device for one artifact: its placement and its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.bundle.read import file_sha256
from vitdeploy.devices.agent.documents import FORMAT, Job, Kind, Placed, PlacedGraph
from vitdeploy.devices.package import agent_package
from vitdeploy.devices.registry import sender
from vitdeploy.spec import EngineSpec, FileEntry, Precision

DATA = ".onnx.data"


@dataclass(frozen=True)
class Shipment:
    """`files` are by their paths on the device; those of `placed`."""

    placed: Placed
    files: Mapping[str, Path]


def ship(
    placed: Placed,
    graphs: Mapping[str, tuple[Path, int]],
    plan: tuple[EngineSpec, Path] | None = None,
    precisions: Mapping[str, Precision] | None = None,
    golden: Mapping[str, Path] | None = None,
) -> Shipment:
    """The shipment of `placed`, whose `graphs` and `plan` are filled in.

    Args:
        graphs: by part, the file, and how many of its layers are in integers.
        plan: an engine built on a device before, and the folder of its files.
        precisions: by part, where they are not all that of `placed`.
        golden: the manifest and the golden answers of a bundle, by their paths in it.
    """
    files: dict[str, Path] = {}
    sent = []
    for part, (graph, count) in graphs.items():
        weights = sorted(graph.parent.glob(f"*{DATA}"))
        # The graph names the file of its weights, and compilers look for it under the graph's own name.
        name = weights[0].name.removesuffix(".data") if len(weights) == 1 else graph.name
        files |= {f"{part}/{name}": graph, **{f"{part}/{path.name}": path for path in weights}}
        sent.append(PlacedGraph(part, f"{part}/{name}", count, (precisions or {}).get(part)))
    placed = dataclasses.replace(placed, graphs=tuple(sent))
    if plan is not None:
        engine, folder = plan
        products = {file: folder / file for file in engine.files}
        renamed = {file: f"plan/{file.replace('/', '-')}" for file in engine.files}
        files |= {renamed[file]: path for file, path in products.items()}
        engine = dataclasses.replace(engine, files=tuple(renamed[file] for file in engine.files))
        placed = dataclasses.replace(placed, plan=engine)
    if golden:
        files |= {f"golden/{name}": path for name, path in golden.items()}
        placed = dataclasses.replace(placed, golden="golden")
    return Shipment(placed, files)


def entries(files: Mapping[str, Path]) -> dict[FileEntry, Path]:
    """The files of a shipment with their sizes and digests."""
    return {FileEntry(name, path.stat().st_size, file_sha256(path)): path for name, path in files.items()}


def make_job(kind: Kind, shipments: Sequence[Shipment], options: Mapping[str, Any]) -> tuple[Job, dict[str, Path]]:
    """One job of all shipments, and the local path of each of its files. Each shipment gets a folder of its own."""
    placed, files = [], dict[str, Path]()
    for index, shipment in enumerate(shipments):
        files |= {f"{index}/{name}": path for name, path in shipment.files.items()}
        placed.append(_below(shipment.placed, str(index)))
    listed = tuple(entries(files))
    job = Job(FORMAT, kind, agent_package().digest, sender(), tuple(placed), listed, dict(options))
    return job, files


def _below(placed: Placed, folder: str) -> Placed:
    graphs = tuple(dataclasses.replace(graph, file=f"{folder}/{graph.file}") for graph in placed.graphs)
    plan = placed.plan and dataclasses.replace(
        placed.plan, files=tuple(f"{folder}/{file}" for file in placed.plan.files)
    )
    golden = placed.golden and f"{folder}/{placed.golden}"
    return dataclasses.replace(placed, graphs=graphs, plan=plan, golden=golden)
