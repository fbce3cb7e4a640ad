"""The engines of a bundle on an emulated board: built there by the agent, asked over ssh, judged by golden answers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitdeploy.bundle.read import read_bundle
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.devices.client import Client
from vitdeploy.devices.registry import Device
from vitdeploy.devices.runner import RemoteRunner
from vitdeploy.devices.shipment import Shipment, entries, find_device_artifacts, placed_shipment
from vitdeploy.errors import CapabilityError
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.io.files import load_graph
from vitdeploy.pipeline.assemble import TOLERANCE
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import GoldenSet, comparable, engine_outputs, largest_difference, read_golden
from vitdeploy.runtime.tasks.registry import count_same
from vitdeploy.spec import EngineSpec, Manifest
from vitdeploy.workflows.placement import place_graphs

# The names of the emulated boards are QEMU's CPU models: those without half precision have no FP16 engine.
NO_HALF = ("cortex-a53", "cortex-a72")


@dataclass(frozen=True)
class Engine:
    """One engine to prove. `golden`: what it is to give, within its tolerance; `placed`: layers in INT8, and whether
    `convolutions` are among them."""

    model: str
    name: str
    shipment: Shipment
    manifest: Manifest
    golden: GoldenSet
    placed: int
    convolutions: bool = False

    @property
    def precision(self) -> str:
        return self.shipment.placed.precision

    def refusal(self, cpu: str) -> str:
        """The words that a board with this CPU has to refuse it by; "" where it has to run."""
        if self.precision == "fp16" and cpu in NO_HALF:
            return "OpenVINO does not support fp16 on this CPU"
        if self.shipment.placed.target == "openvino-cpu" and self.convolutions:
            return "openvino-cpu did not run the graph in INT8"
        return ""


@dataclass(frozen=True)
class Proof:
    """What one engine did on one board. `kernels` are the agent's record; `refused` is instead of all others."""

    engine: Engine
    cpu: str
    host: Mapping[str, str]
    kernels: Mapping[str, int]
    same: int = 0
    difference: float = float("nan")
    refused: str = ""

    @property
    def text(self) -> str:
        golden = self.engine.golden
        count = len(next(iter(golden.inputs.values())))
        if self.refused:
            return f"refused: {self.refused}"
        return (
            f"{dict(self.kernels)}, {self.same} of {count} the same, off by {self.difference:.1e} ({golden.tolerance})"
        )

    @property
    def ok(self) -> bool:
        golden = self.engine.golden
        if (expected := self.engine.refusal(self.cpu)) or self.refused:
            return bool(expected) and expected == self.refused
        ran = self.kernels.get("int8" if self.engine.placed else self.engine.precision, 0) >= max(self.engine.placed, 1)
        told = "emulated" in self.host and self.host.get("machine") == "aarch64"
        return ran and told and self.same >= golden.least_same and self.difference <= golden.tolerance


def engines_of(model: str, bundle: Path, work: Path, images: int, expected: Sequence[str] = ()) -> list[Engine]:
    """The INT8 engines of a bundle, and its float graph in FP32 for both targets and in FP16 for OpenVINO.

    Args:
        images: how many of the golden inputs.
        expected: the names of the engines; all where none is named.
    """
    manifest = read_bundle(bundle)
    [(_, found)] = manifest.graphs.items()
    shipments: dict[str, tuple[Shipment, EngineSpec | None]] = {}
    for engine in manifest.engines:
        [artifact] = find_device_artifacts(str(bundle), target=engine.target, work=work)
        shipments[engine.artifact] = (artifact, engine)
    for target, precision in (("onnxruntime-cpu", "fp32"), ("openvino-cpu", "fp32"), ("openvino-cpu", "fp16")):
        folder = Path(tempfile.mkdtemp(dir=work))
        graphs = place_graphs(bundle / found.file, target, precision, folder)
        shipments[f"{target}-{precision}"] = (placed_shipment(f"{target}-{precision}", graphs, 1), None)
    return [
        Engine(model, name, shipment, manifest, _golden(bundle, manifest, engine, images, name), *_placed(shipment))
        for name, (shipment, engine) in shipments.items()
        if not expected or name in expected
    ]


def quantized_engine(like: Engine, name: str, file: Path, work: Path) -> Engine:
    """The engine of another placement of the same model. Its golden answers are those that it gives here."""
    graphs = place_graphs(file, like.shipment.placed.target, None, Path(tempfile.mkdtemp(dir=work)))
    shipment, home = placed_shipment(name, graphs, 1), Path(tempfile.mkdtemp(dir=work))
    [placed], [(_, graph)] = shipment.placed.graphs, shipment.files.items()
    target = shipment.placed.target
    engine = compile_engine(graph, home, target=target, precision="int8", batch=1, placed=placed.placed)
    pixels = like.golden.inputs[next(iter(like.golden.inputs))]
    with make_runner(home, engine) as runner:
        outputs = engine_outputs(runner, like.manifest.preprocess, pixels)
    return Engine(like.model, name, shipment, like.manifest, replace(like.golden, outputs=outputs), *_placed(shipment))


def _placed(shipment: Shipment) -> tuple[int, bool]:
    """How many layers are in INT8, and whether there are convolutions among them."""
    [graph] = [load_graph(file) for name, file in shipment.files.items() if name.endswith(".onnx")]
    sources = [
        node.inputs[0].producer() for node in graph.graph if node.op_type == "Conv" and node.inputs[0] is not None
    ]
    return count_int8(graph), any(each is not None and each.op_type == "DequantizeLinear" for each in sources)


def _golden(bundle: Path, manifest: Manifest, engine: EngineSpec | None, images: int, name: str) -> GoldenSet:
    """Of an engine of the bundle what it gave on x86; of a float engine, which the bundle has none of, the original."""
    found = read_golden(bundle, manifest, engine or manifest.engines[0])
    assert found is not None
    inputs, original, outputs = (
        {tensor: array[:images] for tensor, array in each.items()}
        for each in (found.inputs, found.original, found.outputs)
    )
    count = len(next(iter(inputs.values())))
    if engine is not None:
        missing = len(next(iter(found.inputs.values()))) - found.least_same
        return GoldenSet(inputs, original, outputs, found.tolerance, max(0, count - missing))
    return GoldenSet(inputs, original, original, TOLERANCE[name.rpartition("-")[2]], count)


def prove(engine: Engine, device: Device) -> Proof:
    """Build an engine on a board and ask it there.

    Raises:
        VitdeployError: what the board reports, but for a precision that its CPU lacks.
    """
    files, golden = entries(engine.shipment.files), engine.golden
    runner = RemoteRunner(Client(device), engine.shipment.placed, files, name=engine.name)
    try:
        with runner:
            found = engine_outputs(runner, engine.manifest.preprocess, golden.inputs[next(iter(golden.inputs))])
    except CapabilityError as error:
        return Proof(engine, device.name, {}, {}, refused=error.message.partition(": ")[2])
    assert runner.engine is not None
    task = (engine.manifest.task, engine.manifest.preprocess, engine.manifest.postprocess)
    return Proof(
        *(engine, device.name, runner.host, runner.engine.kernels),
        same=count_same(*task, found, golden.original),
        difference=largest_difference(found, golden.outputs, comparable(engine.manifest, found)),
    )
