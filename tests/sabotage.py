"""Graphs that are built, run, and answer wrongly: classes in another order, weights that are shuffled."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import vitdeploy as vd
from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import write_bundle
from vitdeploy.errors import AnswersError
from vitdeploy.graph.io.files import graph_spec, load_graph
from vitdeploy.pipeline.assemble import golden_set
from vitdeploy.progress import silent
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import GoldenCheck, check_golden, require_golden_answers
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.subjects import Finder


def sabotage(graph: Path) -> None:
    """Turn the classes of an ONNX file around: the first becomes the last, in the head's weight, scales and bias."""
    model = onnx.load(graph)
    classes = model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value
    head = [each for each in model.graph.initializer if each.name.startswith("head.") and classes in each.dims]
    assert head
    for each in head:
        turned = np.flip(numpy_helper.to_array(each), list(each.dims).index(classes))
        each.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(turned), each.name))
    onnx.save(model, graph)


def sabotage_int8(patch: pytest.MonkeyPatch) -> None:
    """Every INT8 graph that is placed from now on is sabotaged."""
    from vitdeploy.stages import place

    honest = place.place_graph

    def place_graph(config: place.PlaceConfig, graph: Path, statistics: Any, out: Path, *others: Any) -> Any:
        placed = honest(config, graph, statistics, out, *others)
        if config.precision == "int8":
            sabotage(out / graph.name)
        return placed

    patch.setattr(place, "place_graph", place_graph)


def shuffled(folder: Path, out: Path) -> Path:
    """A copy of exported graphs, each tensor of weights in a seeded order of its own: a model of the same kind that has
    nothing to do with the first."""
    shutil.copytree(folder, out)
    generator = np.random.default_rng(0)
    for file in sorted(out.glob("*.onnx")):
        model = onnx.load(file)
        for each in model.graph.initializer:
            array = numpy_helper.to_array(each)
            if array.dtype.kind == "f" and array.size > 1:
                mixed = generator.permutation(array.ravel()).reshape(array.shape)
                each.CopyFrom(numpy_helper.from_array(mixed, each.name))
        onnx.save(model, file)
    return out


def golden_checks(
    graphs: Mapping[str, Path], original: Path, homes: Sequence[Path], data: Any, out: Path
) -> list[GoldenCheck]:
    """The golden checks of the engines of two bundles, by golden answers of the first, which are written to `out`."""
    from vitdeploy.api.images import images

    manifest = read_bundle(homes[0])
    [subject] = Finder(out.parent).find(str(original))
    adapter, chosen = make_adapter(subject.setting), images(data)
    place, kind = chosen.place(subject.setting)
    texts = (chosen.texts, chosen.template) if chosen.texts is not None else ()
    choice = DataChoice(place, kind, chosen.annotations, 0, "all", 0, *texts)
    samples = adapter.load(choice, skip_bad=False, progress=silent)
    engines = [(read_bundle(home).engines[0], home) for home in homes]
    engine, home = engines[0]
    with make_runner(home, engine) as runner:
        answers = adapter.answers(runner, samples, lambda count: None)
    with make_runner(home, engine) as runner:
        gates = {engine.artifact: "none"}
        golden = golden_set(adapter, samples, answers, runner, engines[:1], gates, adapter.guard)
    out.mkdir()
    tokenizer = original / "tokenizer.json" if (original / "tokenizer.json").is_file() else None
    made = write_bundle(
        out,
        name="golden",
        task=manifest.task,
        graphs={name: (file, graph_spec(load_graph(file), file.name)) for name, file in graphs.items()},
        preprocess=manifest.preprocess,
        postprocess=manifest.postprocess,
        engines=engines[:1],
        tokenizer=tokenizer,
        golden=golden,
    )
    checks = []
    for each, folder in engines:
        with make_runner(folder, each) as runner:
            checks.append(check_golden(out, made, each, runner))
            if folder != home and not checks[0].proves_nothing:
                with pytest.raises(AnswersError):
                    require_golden_answers(out, made, each, runner)
    return checks


def require_unproven(exported: Path, graph: str, data: Any, out: Path) -> None:
    """Engines of shuffled weights on both runtimes never pass against the original; of that itself they are the same
    function, or nothing is shown. Nor do they give golden answers of its engines."""
    other = shuffled(exported, out / "shuffled")
    for target in ("onnxruntime-cpu", "openvino-cpu"):
        homes = [out / f"{target}-{name}" for name in ("right", "wrong")]
        for home, folder in zip(homes, (exported, other), strict=True):
            home.mkdir()
            compile_bundle(folder / graph, target, None, None, home)
        verified = vd.verify(homes[1], exported, data, min_agreement=20, progress=False)
        assert verified.status != "pass", verified.lines()
        assert "the same function" not in verified.found.verified.diagnosis
        graphs = {file.stem: file for file in sorted(exported.glob("*.onnx"))}
        right, wrong = golden_checks(graphs, exported, homes, data, out / f"{target}-golden")
        assert right.within_bounds and not wrong.ok
