"""Parts of an engine between parts of the float graph, to measure what each does to the answers.

    image -> float graph -> `given` -> a part of the placement, on its runtime -> `wanted` -> float graph -> answers

The float graph runs on ONNX Runtime in float32. Of all intermediate tensors, one batch is held at a time.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.cuts import part
from vitdeploy.graph.io.files import save_graph
from vitdeploy.quantization.placement_reader import find_quantized, make_float
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.search.facts import TensorFacts, facts_of
from vitdeploy.search.reference_outputs import ReferenceOutputs
from vitdeploy.spec import EngineSpec


class Splice:
    """The float graph and the placement of an engine, joined at tensors with the same name in both."""

    def __init__(
        self, graph: ir.Model, placement: ir.Model, engine: EngineSpec, reference_outputs: ReferenceOutputs
    ) -> None:
        """`engine`: whose runtime, options and batch the parts of the placement run with. `ran` is called after every
        run.

        Raises:
            DataError: the float graph's own answers are not finite.
        """
        if not _finite(reference_outputs.answers):
            raise DataError(
                "the float graph's own answers are not finite",
                found="NaN or infinity in its outputs on these images",
                fix="check the checkpoint and the preprocessing",
            )
        self.graph, self.placement, self.engine, self.reference_outputs = graph, placement, engine, reference_outputs
        self.outputs = [str(value.name) for value in graph.graph.outputs]
        self.runs, self.ran = 0, _nothing

    def distance(self, given: Sequence[str] = (), wanted: Sequence[str] = (), floats: Collection[str] = ()) -> float:
        """Mean distance over the images of the answers with a part of the float graph replaced by the placement's;
        infinite if they are not finite.

        Args:
            given: the tensors that the part starts from; none: the input of the graph.
            wanted: the tensors that it ends with; none: the outputs of the graph.
            floats: quantized tensors that are left in float.
        """
        batch = self.reference_outputs.batch
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            chain = Chain(Path(folder), self.outputs)
            ends: Sequence[str] = self.outputs
            if given:
                chain.add(part(self.graph, (), given, batch))
            if wanted:
                rest = part(self.graph, [*given, *wanted], self.outputs, batch)
                read = {str(value.name) for value in rest.graph.inputs}
                ends = [name for name in wanted if name in read]
            if ends:
                placed = part(self.placement, given, ends, batch)
                make_float(placed, floats)
                chain.add(placed, self.engine)
            if wanted:
                chain.add(rest)
            with chain:
                answers = self.reference_outputs.ask(chain)
        self.count()
        return self.mean_distance(answers)

    def mean_distance(self, answers: Mapping[str, Array]) -> float:
        """The mean distance over the images; infinite if answers are not finite."""
        return float(self.reference_outputs.distance(answers).mean()) if _finite(answers) else np.inf

    def count(self) -> None:
        """Count one more run."""
        self.runs += 1
        self.ran()

    def facts(self, tensor: str, given: Sequence[str] = (), *, placed: bool) -> TensorFacts | None:
        """Facts of a tensor of the placement with nothing quantized in front of it (of the float graph if not
        `placed`), from `given` on; None if its shape is unknown."""
        model = part(self.placement if placed else self.graph, given, [tensor], self.reference_outputs.batch)
        make_float(model, [each.tensor for each in find_quantized(model)])
        [value] = model.graph.outputs
        if value.shape is None or value.dtype != ir.DataType.FLOAT:
            return None
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            chain = Chain(Path(folder), [tensor])
            if given:
                chain.add(part(self.graph, (), given, self.reference_outputs.batch))
            chain.add(model)
            with chain:
                axis = 1 if len(value.shape) == 4 else -1
                return facts_of(
                    (each[tensor] for each in self.reference_outputs.stream(chain)),
                    len(self.reference_outputs.pixels),
                    axis,
                )


class Chain(Runner):
    """Several runners in sequence: each takes what it needs from the outputs of all previous ones."""

    def __init__(self, folder: Path, outputs: Sequence[str]) -> None:
        """`folder` is for files of the parts; `outputs` are the tensors that the chain gives."""
        super().__init__("chain")
        self.folder, self.names = folder, tuple(outputs)
        self._parts: list[tuple[Runner, list[str], list[str]]] = []

    def add(self, model: ir.Model, engine: EngineSpec | None = None) -> None:
        """Add a part that runs as `engine` does; without one, on ONNX Runtime."""
        file = self.folder / f"part{len(self._parts)}.onnx"
        save_graph(model, file)
        runner: Runner = OnnxRuntimeRunner(file, name="float")
        if engine is not None:
            runner = make_runner(self.folder, dataclasses.replace(engine, files=(file.name,)))
        names = [[str(value.name) for value in values] for values in (model.graph.inputs, model.graph.outputs)]
        self._parts.append((runner, names[0], names[1]))

    def _load(self) -> None:
        for runner, _, _ in self._parts:
            runner.load()
        first, names, _ = self._parts[0]
        self.inputs = tuple(dataclasses.replace(t, name=name) for t, name in zip(first.inputs, names, strict=True))
        self.provider = first.provider

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        known = dict(feeds)
        for runner, inputs, outputs in self._parts:
            # By order: a runtime may know a tensor under several names.
            given = {t.name: known[name] for t, name in zip(runner.inputs, inputs, strict=True)}
            known |= dict(zip(outputs, runner.infer(given).values(), strict=True))
        return {name: known[name] for name in self.names}

    def _close(self) -> None:
        for runner, _, _ in self._parts:
            runner.close()


def _nothing() -> None:
    pass


def _finite(answers: Mapping[str, Array]) -> bool:
    return all(np.isfinite(each).all() for each in answers.values() if each.dtype.kind == "f")
