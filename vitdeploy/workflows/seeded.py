"""Golden answers for the engine of a graph alone, which has no original beside it: seeded images, and what the graph
itself gives for them, evaluated apart from the runtime that it is compiled for.

ONNX Runtime without any optimisation computes one node after the other, as they are written: no fused kernel, no
INT8 product. What it shares with an engine of ONNX Runtime are the kernels of single operators.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import MANIFEST_FILE, read_bundle
from vitdeploy.bundle.write import GOLDEN_BYTES, Golden, write_bundle
from vitdeploy.errors import AnswersError, MissingPackageError, VitdeployError
from vitdeploy.graph.half.half import emulate
from vitdeploy.graph.io.admit import admit_graph
from vitdeploy.graph.io.files import GraphMetadata, fixed_batch, get_metadata, graph_spec, load_graph, serialised
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import (
    GoldenCheck,
    check_golden,
    engine_outputs,
    largest_difference,
    read_golden,
    wrong_answers,
)
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise, to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.search.bisect import SECONDS, first_layer
from vitdeploy.spec import EngineSpec, GraphSpec, Manifest, PreprocessSpec

IMAGES, SEED = 4, 0
# The largest max|a - b| / max|b| of an engine from its graph's own answers. Half precision and INT8 round where the
# evaluation does not, more than one engine on two machines does (`pipeline.assemble.TOLERANCE`). A wrong engine is off
# by about 1.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}
ROUNDED = 0.2
# Where two scores are nearly equal, as most are in noise, rounding decides which comes first, and the answers change by
# their size: D-FINE with seeded weights is 0.5 apart on OpenVINO and ONNX Runtime.
RANKS = frozenset({"ArgMax", "ArgMin", "NonMaxSuppression", "TopK"})
# Of the tolerance: the noise on an input that must not change the answers by more than the tolerance, or they say
# nothing of an engine.
NOISE = 0.01


@dataclass(frozen=True)
class Seeded:
    """Images, uint8 [n, height, width, channels], the graph's outputs for them, [n, ...] by name, and how far those of
    an engine may be. `why`: why nothing can be compared; "" where it can."""

    metadata: GraphMetadata
    spec: GraphSpec
    pixels: Array
    outputs: Mapping[str, Array]
    tolerance: float
    why: str = ""


def seeded_answers(file: Path, target: str) -> Seeded:
    """What the graph in a file, placed for `target`, gives for seeded images; errors as `load_graph`."""
    model = load_graph(file)
    metadata, spec = get_metadata(model, str(file)), graph_spec(model, file.name)
    tolerance = TOLERANCE.get(metadata.precision or "fp32", ROUNDED)
    nothing = Seeded(metadata, spec, np.zeros((0, 1, 1, 1), np.uint8), {}, tolerance)
    if metadata.preprocess is None or flow_of(metadata.task) or len(spec.inputs) != 1:
        return dataclasses.replace(nothing, why="the graph takes something else than images")
    if ranks := sorted({node.op_type for node in model.graph} & RANKS):
        why = f"the graph ranks what it finds ({', '.join(ranks)}), and of nearly equal scores rounding decides"
        return dataclasses.replace(nothing, why=why)
    try:
        graph = serialised(emulate(model)) if TARGETS[target].typed else file
        with OnnxRuntimeRunner(graph, name="evaluation", batch=fixed_batch(spec) or 1, plain=True) as runner:
            pixels, outputs = _evaluate(runner, metadata, tolerance)
    except MissingPackageError:  # not a fault of the graph, and no reason to refuse it
        return dataclasses.replace(nothing, why="onnxruntime, which would evaluate the graph, is not installed")
    except VitdeployError as error:
        return dataclasses.replace(nothing, why=f"{error.message}: {error.found}")
    if not len(pixels):
        why = "the graph's own answers change with the rounding of its input, or are not finite"
        return dataclasses.replace(nothing, why=why)
    return dataclasses.replace(nothing, pixels=pixels, outputs=outputs)


def _evaluate(runner: Runner, metadata: GraphMetadata, tolerance: float) -> tuple[Array, dict[str, Array]]:
    """The images whose answers are steady, and these."""
    images, kept, answers = seeded_images(metadata), list[int](), list[dict[str, Array]]()
    for index, image in enumerate(images):
        found = engine_outputs(runner, metadata.preprocess, image[None])
        if _is_steady(runner, metadata, image, found, tolerance):
            kept.append(index)
            answers.append(found)
        if (len(kept) + 1) * sum(array.nbytes for array in found.values()) > GOLDEN_BYTES and kept:
            break
    joined = {name: np.concatenate([each[name] for each in answers]) for name in answers[0]} if answers else {}
    return images[kept], joined


def seeded_images(metadata: GraphMetadata) -> Array:
    """uint8 [4, height, width, channels]: two of noise, two of large spots, of which a network sees more."""
    spec = metadata.images
    random = np.random.default_rng(SEED)
    height, width = spec.crop
    noise = random.integers(0, 256, (IMAGES, height, width, spec.channels), np.uint8)
    rows, columns = (np.arange(side) * 4 // max(side, 1) for side in (height, width))
    spots = random.integers(0, 256, (IMAGES, 4, 4, spec.channels), np.uint8)[:, rows][:, :, columns]
    mixed = (0.8 * spots + 0.2 * noise).astype(np.uint8)
    return np.concatenate([noise[: IMAGES // 2], mixed[IMAGES // 2 :]])


def _is_steady(
    runner: Runner, metadata: GraphMetadata, image: Array, found: Mapping[str, Array], tolerance: float
) -> bool:
    names = [name for name in found if found[name].dtype.kind == "f"]
    if not all(np.isfinite(found[name]).all() for name in names):
        return False
    (tensor,) = runner.inputs
    if tensor.dtype != "float32":  # pixels have no smaller change than one step
        return True
    feed = normalise(image[None], metadata.images)
    noise = np.random.default_rng(SEED).standard_normal(feed.shape, np.float32) * feed.std()
    changed = runner.infer({tensor.name: feed + np.float32(NOISE * tolerance) * noise})
    compared = list(found) if metadata.postprocess is None else metadata.postprocess.comparable(found)
    return largest_difference(changed, found, compared) <= tolerance


def golden_folder(seeded: Seeded, target: str, out: Path) -> dict[str, Path]:
    """Fill the empty folder `out` with a manifest and the golden answers, as a bundle has them, for one target; gives
    the files by their paths in it."""
    out.mkdir(exist_ok=True)
    manifest = _manifest(seeded, target, out)
    assert manifest.golden is not None
    names = (MANIFEST_FILE, manifest.golden.inputs, manifest.golden.outputs)
    return {name: out / name for name in names}


def _manifest(seeded: Seeded, target: str, out: Path) -> Manifest:
    metadata = seeded.metadata
    return write_bundle(
        out,
        name="graph",
        task=metadata.task,
        graphs={},
        preprocess=metadata.preprocess,
        postprocess=metadata.postprocess,
        engines=(),
        golden=Golden({seeded.spec.inputs[0].name: seeded.pixels}, seeded.outputs, {}, {target: seeded.tolerance}),
    )


def compare(seeded: Seeded, engine: EngineSpec, home: Path) -> GoldenCheck:
    """How far the answers of an engine, whose files lie in `home`, are from the graph's own; errors of engines."""
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        manifest = _manifest(seeded, engine.target, Path(folder))
        with make_runner(home, engine) as runner:
            return check_golden(Path(folder), manifest, engine, runner)


def require_seeded(seeded: Seeded, engine: EngineSpec, home: Path) -> GoldenCheck | None:
    """The comparison of a new engine; None where nothing can be compared.

    Raises:
        AnswersError: it answers otherwise, and no entry of the table of runtimes known to be wrong was accepted for it.
    """
    if seeded.why:
        return None
    found = compare(seeded, engine, home)
    if not found.ok and not engine.accepted:
        raise _located(wrong_answers(engine, found, engine.device, of_graph=True), seeded, engine, home)
    return found


def _located(error: AnswersError, seeded: Seeded, engine: EngineSpec, home: Path) -> AnswersError:
    """The error, with the first layer that differs where it can be found in time."""
    with contextlib.suppress(VitdeployError):
        graph = load_graph(home / engine.graph)
        _locate(error, graph, engine, seeded.pixels, seeded.metadata.images, seeded.tolerance)
    return error


def locate(error: AnswersError, seconds: float = SECONDS) -> None:
    """Add to what was found of a bundle's engine where it leaves its own graph, on the golden inputs of the bundle.
    Nothing is added where that cannot be said: of several graphs, of other inputs than images, of engines of GPUs.

    Raises:
        VitdeployError: the bundle, or a part of the graph, cannot be read or run.
    """
    folder = Path(error.bundle)
    manifest = read_bundle(folder)
    engine = next((engine for engine in manifest.engines if engine.artifact == error.engine), None)
    golden = read_golden(folder, manifest, engine) if engine is not None else None
    if engine is None or golden is None or manifest.preprocess is None or len(golden.inputs) != 1:
        return
    [images] = golden.inputs.values()
    graph = admit_graph(folder / engine.graph)
    _locate(error, graph, engine, images, manifest.preprocess, golden.tolerance, seconds)


def _locate(
    error: AnswersError,
    graph: ir.Model,
    engine: EngineSpec,
    images: Array,
    preprocess: PreprocessSpec,
    tolerance: float,
    seconds: float = SECONDS,
) -> None:
    feeds = [to_input(image[None], preprocess, engine.inputs[0]) for image in images]
    if where := first_layer(graph, engine, feeds, tolerance, seconds):
        error.found += f"; {where}"


@dataclass(frozen=True)
class AnswersTold:
    """What is said of a comparison, in a line and in a document."""

    line: str
    facts: dict[str, object]


def answers_told(seeded: Seeded, found: GoldenCheck | None, accepted: bool = False) -> AnswersTold:
    """`accepted`: an entry of the table of runtimes known to be wrong was, so that wrong answers are no error."""
    if found is None:
        return AnswersTold(f"answers: not compared: {seeded.why}", {"compared": 0, "why": seeded.why})
    wrong = "" if found.ok else "WRONG, as was accepted: " if accepted else "WRONG: "
    line = (
        f"answers: {wrong}{found.difference:.1e} of the largest from the graph's own, evaluated by ONNX Runtime "
        f"without optimisation on {found.inputs} seeded images (allowed {found.tolerance:.0e})"
    )
    return AnswersTold(line, {"compared": found.inputs, "difference": found.difference, "tolerance": found.tolerance})


def compared_there(seeded: Seeded, device: str, sent: bool) -> AnswersTold:
    """The same of an engine that a device made and compared with golden answers that were `sent` along."""
    if not sent:
        why = seeded.why or "a runtime that is known to be wrong was accepted"
        return AnswersTold(f"answers: not compared: {why}", {"compared": 0, "why": why})
    count = len(seeded.pixels)
    line = (
        f"answers: compared on {device} with the graph's own, evaluated by ONNX Runtime without optimisation on "
        f"{count} seeded images (allowed {seeded.tolerance:.0e})"
    )
    return AnswersTold(line, {"compared": count, "on": device, "tolerance": seeded.tolerance})
