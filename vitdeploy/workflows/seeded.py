"""Golden answers for an engine compiled from a graph without its original: seeded images, and the graph's outputs for
them, evaluated independently of the target's runtime.

ONNX Runtime without optimisation computes the nodes one by one as written: no fused kernels, no INT8 products. It
shares only the kernels of single operators with an ONNX Runtime engine.
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
# Maximum max|a - b| / max|b| between an engine and its graph. Half precision and INT8 round where the evaluation does
# not, which differs more than one engine on two machines (`pipeline.assemble.TOLERANCE`). A wrong engine is off by
# about 1.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}
ROUNDED = 0.2
# Operators that rank scores. In noise most scores are nearly equal, so rounding decides their order, and outputs change
# by their full size: D-FINE with seeded weights differs by 0.5 between OpenVINO and ONNX Runtime.
RANKS = frozenset({"ArgMax", "ArgMin", "NonMaxSuppression", "TopK"})
# Noise on the input as a share of the tolerance; if it changes the answers by more than the tolerance, they cannot
# test an engine.
NOISE = 0.01


@dataclass(frozen=True)
class Seeded:
    """Images, uint8 [n, height, width, channels], the graph's outputs for them, [n, ...] by name, and the tolerance for
    an engine. `why`: the reason why nothing can be compared; "" if it can."""

    metadata: GraphMetadata
    spec: GraphSpec
    pixels: Array
    outputs: Mapping[str, Array]
    tolerance: float
    why: str = ""


def seeded_answers(file: Path, target: str) -> Seeded:
    """The outputs of the graph in a file, placed for `target`, for seeded images; errors as in `load_graph`."""
    model = load_graph(file)
    metadata, spec = get_metadata(model, str(file)), graph_spec(model, file.name)
    tolerance = TOLERANCE.get(metadata.precision or "fp32", ROUNDED)
    nothing = Seeded(metadata, spec, np.zeros((0, 1, 1, 1), np.uint8), {}, tolerance)
    if metadata.preprocess is None or flow_of(metadata.task) or len(spec.inputs) != 1:
        return dataclasses.replace(nothing, why="the graph does not take only images")
    if ranks := sorted({node.op_type for node in model.graph} & RANKS):
        why = f"the graph ranks scores ({', '.join(ranks)}), and rounding decides the order of nearly equal ones"
        return dataclasses.replace(nothing, why=why)
    try:
        graph = serialised(emulate(model)) if TARGETS[target].typed else file
        with OnnxRuntimeRunner(graph, name="evaluation", batch=fixed_batch(spec) or 1, plain=True) as runner:
            pixels, outputs = _evaluate(runner, metadata, tolerance)
    except MissingPackageError:  # not the graph's fault, so it is not refused
        return dataclasses.replace(nothing, why="onnxruntime, which evaluates the graph, is not installed")
    except VitdeployError as error:
        return dataclasses.replace(nothing, why=f"{error.message}: {error.found}")
    if not len(pixels):
        why = "the graph's own outputs depend on the rounding of its input, or are not finite"
        return dataclasses.replace(nothing, why=why)
    return dataclasses.replace(nothing, pixels=pixels, outputs=outputs)


def _evaluate(runner: Runner, metadata: GraphMetadata, tolerance: float) -> tuple[Array, dict[str, Array]]:
    """The images with stable answers, and these answers."""
    images, kept, answers = seeded_images(metadata), list[int](), list[dict[str, Array]]()
    for index, image in enumerate(images):
        found = engine_outputs(runner, metadata.preprocess, image[None])
        if _is_steady(runner, metadata, image, found, tolerance):
            kept.append(index)
            answers.append(found)
        if (len(kept) + 1) * sum(array.nbytes for array in found.values()) > GOLDEN_BYTES and kept:
            break
    joined = {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]} if answers else {}
    return images[kept], joined


def seeded_images(metadata: GraphMetadata) -> Array:
    """uint8 [4, height, width, channels]: two images of noise, and two of large spots, to which networks react more."""
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
    if tensor.dtype != "float32":  # the smallest change of a pixel is one step
        return True
    feed = normalise(image[None], metadata.images)
    noise = np.random.default_rng(SEED).standard_normal(feed.shape, np.float32) * feed.std()
    changed = runner.infer({tensor.name: feed + np.float32(NOISE * tolerance) * noise})
    compared = list(found) if metadata.postprocess is None else metadata.postprocess.comparable(found)
    return largest_difference(changed, found, compared) <= tolerance


def golden_folder(seeded: Seeded, target: str, out: Path) -> dict[str, Path]:
    """Fill the empty folder `out` with a manifest and the golden answers for one target, as in a bundle; return the
    files by their paths in it."""
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
    """Compare the answers of an engine with files in `home` with the graph's own; errors of engines propagate."""
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        manifest = _manifest(seeded, engine.target, Path(folder))
        with make_runner(home, engine) as runner:
            return check_golden(Path(folder), manifest, engine, runner)


def require_seeded(seeded: Seeded, engine: EngineSpec, home: Path) -> GoldenCheck | None:
    """The comparison of a new engine; None if nothing can be compared.

    Raises:
        AnswersError: the answers differ, and no entry of the known-bad runtime table was accepted for the engine.
    """
    if seeded.why:
        return None
    found = compare(seeded, engine, home)
    if not found.ok and not engine.accepted:
        raise _located(wrong_answers(engine, found, engine.device, of_graph=True), seeded, engine, home)
    return found


def _located(error: AnswersError, seeded: Seeded, engine: EngineSpec, home: Path) -> AnswersError:
    """The error, with the first differing layer if it can be found in time."""
    with contextlib.suppress(VitdeployError):
        graph = load_graph(home / engine.graph)
        _locate(error, graph, engine, seeded.pixels, seeded.metadata.images, seeded.tolerance)
    return error


def locate(error: AnswersError, seconds: float = SECONDS) -> None:
    """Add the first layer at which a bundle's engine differs from its graph to the error, on the bundle's golden
    inputs. Nothing is added for models of several graphs, for inputs other than images, and for GPU engines.

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
    """The result of a comparison, as a line and as a document."""

    line: str
    facts: dict[str, object]


def answers_told(seeded: Seeded, found: GoldenCheck | None, accepted: bool = False) -> AnswersTold:
    """The report of a comparison. `accepted`: a known-bad entry was accepted, so wrong answers are not an error."""
    if found is None:
        return AnswersTold(f"output check: skipped: {seeded.why}", {"compared": 0, "why": seeded.why})
    wrong = "" if found.ok else "WRONG (accepted): " if accepted else "WRONG: "
    line = (
        f"output check: {wrong}max error {found.difference:.1e} (relative) vs. unoptimised ONNX Runtime on "
        f"{found.inputs} random images; limit {found.tolerance:g}"
    )
    return AnswersTold(line, {"compared": found.inputs, "difference": found.difference, "tolerance": found.tolerance})


def compared_there(seeded: Seeded, device: str, sent: bool) -> AnswersTold:
    """The report for an engine that a device built and compared with golden answers, if these were `sent`."""
    if not sent:
        why = seeded.why or "a known-bad runtime was accepted"
        return AnswersTold(f"output check: skipped: {why}", {"compared": 0, "why": why})
    count = len(seeded.pixels)
    line = (
        f"output check: compared on {device} with unoptimised ONNX Runtime on {count} random images; limit "
        f"{seeded.tolerance:g}"
    )
    return AnswersTold(line, {"compared": count, "on": device, "tolerance": seeded.tolerance})
