"""Searches in a plan: scores, screening, mixed precision, float operators, layers kept in higher precision."""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from vitdeploy.benchmark import results, run, summary
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis import rows, work
from vitdeploy.graph.io.files import fixed_batch, get_metadata, graph_spec, load_graph, runner_of
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement import QUANTIZE, HigherForm, shape
from vitdeploy.quantization.ranges import Statistics, load_statistics
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.search import costs, frame
from vitdeploy.search.precision import (
    ENOUGH,
    FloatRestChoice,
    HighPrecision,
    Mixed,
    Sensitivity,
    choose_float_rest,
    choose_mends,
    layers_by_worth,
    measure_sensitivity,
)
from vitdeploy.search.trials import FLOAT, Trials, opened
from vitdeploy.spec import Budget, FloatRest, Task
from vitdeploy.stages import step
from vitdeploy.stages.place import (
    FLOAT_REST_SEARCH,
    HIGH_PRECISION_SEARCH,
    MIXED_SEARCH,
    PlaceConfig,
    place_graph,
    rest_of,
)

if TYPE_CHECKING:
    from vitdeploy.store.store import Artifact
    from vitdeploy.tasks.adapter import Data

T = TypeVar("T")
SENSITIVITY_FILE = "sensitivity.json"
SENSITIVITY_SEARCH = step.Search("sensitivity", SENSITIVITY_FILE, Sensitivity)
# Every trial of a layer is a pass over this many images; the ranks are stable from a few dozen images on.
IMAGES, BATCH = 32, 8


@dataclass(frozen=True)
class CalibratedGraph:
    """A float graph, the statistics of its calibration, and the calibration images."""

    graph: Path
    statistics: Path
    samples: Sequence[Sample]

    @classmethod
    def of(cls, folders: step.Folders, data: Data) -> CalibratedGraph:
        """The calibrated graph of a plan's steps."""
        graph, statistics = (
            folders[step.OPTIMIZE].path / step.MODEL_FILE,
            folders[step.CALIBRATE].path / step.STATISTICS_FILE,
        )
        return cls(graph, statistics, data.calibration)


def float_reference_outputs(graph: Path, samples: Sequence[Sample]) -> frame.ReferenceOutputs:
    """A float graph's outputs for some images, at the graph's own batch if that is fixed."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    batch = fixed_batch(graph_spec(model, step.MODEL_FILE)) or BATCH
    pixels = np.concatenate(list(batches(samples, metadata.images, BATCH)))
    with runner_of(model, "the float graph", batch=batch) as runner:
        return frame.ReferenceOutputs(runner, pixels, metadata.images, metadata.task, batch=batch)


# --- Searches on the calibration images: the cost of each layer in INT8, and which layers to override -----------------


def find_sensitivity(
    config: PlaceConfig, calibrated: CalibratedGraph, out: Path, progress: Progress = silent
) -> Sensitivity:
    """Write sensitivity.json: see `search.precision`."""
    with open_trials(config, calibrated, progress, few=True) as trials:
        return SENSITIVITY_SEARCH.write(measure_sensitivity(trials, config.target, progress), out)


def find_mixed(
    config: PlaceConfig,
    budget: Budget,
    calibrated: CalibratedGraph,
    table: costs.CostTable,
    out: Path,
    progress: Progress = silent,
) -> Mixed:
    """Write sensitivity.json, and mixed.json with the overrides."""
    with open_trials(config, calibrated, progress, scaled=True) as trials:
        sensitivity = SENSITIVITY_SEARCH.write(measure_sensitivity(trials, config.target, progress), out)
        return MIXED_SEARCH.write(choose_mends(trials, sensitivity, table, budget, progress), out)


@contextmanager
def open_trials(
    config: PlaceConfig,
    calibrated: CalibratedGraph,
    progress: Progress,
    images: int = IMAGES,
    *,
    few: bool = False,
    scaled: bool = False,
) -> Iterator[Trials]:
    """Open trials of layers. Trials of all layers together run on all samples, or on the first `images` if `few`;
    trials of single layers on the first `images`. `scaled`: as for `opened`."""
    progress("load layers", 0, 1)
    model, target, bits = load_graph(calibrated.graph), config.target, config.weight_bits
    whole = float_reference_outputs(calibrated.graph, calibrated.samples[: images if few else None])
    some, known = whole.first(images), load_statistics
    with opened(model, known(calibrated.statistics), target, some, config.ignore, whole, bits, scaled=scaled) as trials:
        progress("load layers", 1, 1)
        yield trials


def search_step(candidate: step.Candidate, config: PlaceConfig, budget: Budget, data: Data) -> step.Step:
    """The step that chooses a candidate's overrides for mixed precision. `config`: the config of plain INT8."""
    table = costs.costs_for(candidate.target)

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        find_mixed(config, budget, CalibratedGraph.of(folders, data), table, out, progress)

    bounds = {"min_agreement": budget.min_agreement, "max_drop": budget.max_drop, "costs": table.digest}
    return _step_of(MIXED_SEARCH, candidate, write, {**asdict(config), **bounds}, data)


def _step_of(
    search: step.Search[T],
    candidate: step.Candidate,
    write: Callable[[step.Folders, Path, Progress], None],
    config: step.Facts,
    data: Data,
    inputs: tuple[str, ...] = (),
) -> step.Step:
    """A step that searches on the calibrated graph for a candidate."""
    name, before = candidate.step(search.kind), (step.OPTIMIZE, step.CALIBRATE, *inputs)
    return search.step(name, write, config, before, candidate.target, data)


# ----------------------------------------------------------------------------------------------------------------------
# The distance of an engine's answers from the float graph's on the calibration images; variants are ranked by it.


@dataclass(frozen=True)
class Score:
    """The distance (see `ReferenceOutputs.distance`), as mean over the images with its 95 % t-interval, and the
    expected agreement of a classifier's answers; None for other tasks."""

    images: int
    distance: float
    ci95: tuple[float, float]
    expected: frame.Expected | None


SCORES = step.Search("score", "score.json", Score, ("onnxruntime", "pillow", "numpy", "scipy"))


def score(graph: Path, folder: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Write score.json: the distance of the engine in `folder` from a float graph."""
    engine = step.read_engine(folder)
    text = f"{engine.artifact} on the calibration images"
    progress(text, 0, 1)
    reference_outputs = float_reference_outputs(graph, samples)
    with make_runner(folder, engine, batch=reference_outputs.batch) as runner:
        answers = reference_outputs.ask(runner)
    mean, low, high = frame.mean_interval(reference_outputs.distance(answers))
    SCORES.write(Score(len(samples), mean, (low, high), reference_outputs.expected(answers)), out)
    progress(text, 1, 1)


def score_step(candidate: step.Candidate, reference: str, data: Data) -> step.Step:
    """The step that measures the distance of a compiled candidate from the float graph of the step `reference`:
    `OPTIMIZE`, or another step of that kind."""
    samples, compiled = data.calibration, candidate.step("compile")

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        score(folders[reference].path / step.MODEL_FILE, folders[compiled].path, samples, out, progress)

    name = candidate.step("score")
    return SCORES.step(name, write, {}, (compiled, reference), candidate.target, data)


# --- Screening: the latencies of many engines in one benchmark run of short blocks; the relevant ones are re-measured -


SCREEN, SCREEN_FILE = "compare the latencies", "screen.json"
BLOCK_SECONDS, WARMUP_SECONDS = 0.2, 0.5


def screen_step(batch: int, engines: Mapping[str, Artifact]) -> step.Step:
    """The step that measures the latencies of compiled engines, by name, at `batch`."""

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        bench_candidates = [
            run.engine_candidate(step.read_engine(artifact.path), artifact.path, name)
            for name, artifact in engines.items()
        ]
        protocol = Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, batch=batch)
        bench_run = run.run_benchmark(
            bench_candidates, protocol, lambda text, done, total: progress(SCREEN, done, total)
        )
        disturbed = summary.disturbed_reason(bench_run)
        faster = _proven_faster(bench_run) if disturbed else {}
        step.write_json(
            out / SCREEN_FILE,
            {"block_medians_ms": summary.block_medians(bench_run), "disturbed": disturbed, "faster": faster},
        )

    tools: dict[str, str] = {}
    for target in sorted({step.read_engine(artifact.path).target for artifact in engines.values()}):
        tools |= step.target_tools(target)
    return step.Step(
        SCREEN,
        "screen",
        write,
        {"batch": batch, "engines": list(engines)},
        outside={name: artifact.digest for name, artifact in engines.items()},
        packages=tools,
        measured=True,
        usable=lambda folder: not step.read_json(folder / SCREEN_FILE)["disturbed"],
    )


def _proven_faster(bench_run: results.BenchRun) -> dict[str, list[str]]:
    """For each artifact, the artifacts that it is provably faster than, even if others were disturbed."""
    names, scenario = [entry.artifact for entry in bench_run.entries], bench_run.protocol.latency_scenario
    faster: dict[str, list[str]] = {}
    for name in names:
        against = {other: summary.judged(bench_run, name, other, scenario) for other in names if other != name}
        highest = {other: pair.ci95[1] if pair.decided else pair.bounds[1] for other, pair in against.items()}
        faster[name] = [other for other, high in highest.items() if high is not None and high < 1]
    return faster


# --- Searches by the costs of layers: the precision of float operators, and layers kept in higher precision -----------


# MACs of linears and convolutions at batch 1. In a smaller model, call overhead dominates, which costs of layers do not
# predict (for the digits model, 115 million, they would choose no layer for INT8); it takes 1-2 ms in any precision.
LEAST_MACS = 400_000_000


def has_half_rest(target: str, precision: str, task: Task) -> bool:
    """Whether an engine may be faster here with its float operators in bf16: INT8, one graph, and a CPU with bf16."""
    return precision == "int8" and not flow_of(task) and COMPILE[target].half_rest()


def find_float_rest(
    config: PlaceConfig,
    batch: int,
    calibrated: CalibratedGraph,
    table: costs.CostTable,
    out: Path,
    progress: Progress = silent,
) -> FloatRestChoice:
    """Write float_rest.json: the precision of float operators of the model in plain INT8, at `batch` unless the graph
    has a fixed one.

    Raises:
        GraphError, EngineError, CapabilityError: as in `place_graph` and `choose_float_rest`.
    """
    shaped, batch = _shaped(config, calibrated.graph, batch)
    ratio = 1.0
    if _macs(shaped) >= LEAST_MACS:
        with contextlib.suppress(GraphError):  # unknown sizes: bf16 then needs an explicit float_rest
            workload = costs.workload_of(shaped, batch)
            ratio = table.plain(workload, "bf16") / table.plain(workload, "fp32")
    if ratio >= 1:
        return FLOAT_REST_SEARCH.write(FloatRestChoice(config.target, batch, str(table), ratio), out)
    whole = float_reference_outputs(calibrated.graph, calibrated.samples)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        place_graph(config, calibrated.graph, calibrated.statistics, Path(folder))
        placed = load_graph(Path(folder) / calibrated.graph.name)
        choice = choose_float_rest(placed, table, batch, ratio, whole, progress)
    return FLOAT_REST_SEARCH.write(choice, out)


def _shaped(config: PlaceConfig, graph: Path, batch: int) -> tuple[ir.Model, int]:
    """The float graph in the form that is placed, and its fixed batch, or else `batch`."""
    model = load_graph(graph)
    shape(model, config.target, config.ignore)
    return model, fixed_batch(graph_spec(model, step.MODEL_FILE)) or batch


def _macs(model: ir.Model) -> int:
    return sum(work.layer_macs(model, linear) or 0 for linear in rows.find_linears(model))


def float_rest_step(candidate: step.Candidate, config: PlaceConfig, batch: int, data: Data) -> step.Step:
    """The step that chooses the precision of a candidate's float operators. `config`: the config of plain INT8."""
    table = costs.costs_for(candidate.target)

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        find_float_rest(config, batch, CalibratedGraph.of(folders, data), table, out, progress)

    facts = {**asdict(config), "batch": batch, "costs": table.digest}
    return _step_of(FLOAT_REST_SEARCH, candidate, write, facts, data)


# Layers are ranked on 32 images, and tried together on all images; on fewer images if that takes more MACs than this.
LEAST_IMAGES, RANK_MACS, TRIAL_MACS = 8, 64_000_000_000, 600_000_000_000


def raises_precision(target: str, precision: str, task: Task | None, price: float) -> bool:
    """Whether layers of a placement may be kept in higher precision: INT8, one graph, and known costs of layers.
    `task` None stands for a model with one graph."""
    return precision == "int8" and price > 0 and costs.has_costs(target) and (task is None or not flow_of(task))


def find_high_precision(
    config: PlaceConfig,
    price: float,
    batch: int,
    calibrated: CalibratedGraph,
    table: costs.CostTable,
    out: Path,
    progress: Progress = silent,
    float_rest: FloatRest = "fp32",
) -> HighPrecision:
    """Write high_precision.json, and sensitivity.json if layers were ranked.

    Layers are ranked by the distance on the calibration images that their INT8 causes, relative to the time that their
    higher precision adds according to `table`. The chosen layers are tried together, and stay in plain INT8 if that
    is closer to the float graph.

    Args:
        config: the config of plain INT8.
        price: how much of the latency, in percent, higher precision may add, at `batch` unless the graph has a fixed
            batch.
        float_rest: the precision of the engine's float operators.

    Raises:
        GraphError: as in `place_graph`.
    """
    return HIGH_PRECISION_SEARCH.write(_find(config, price, batch, calibrated, table, out, progress, float_rest), out)


def _find(
    config: PlaceConfig,
    price: float,
    batch: int,
    calibrated: CalibratedGraph,
    table: costs.CostTable,
    out: Path,
    progress: Progress,
    rest: FloatRest,
) -> HighPrecision:
    target, form = config.target, form_of(config)
    shaped, batch = _shaped(config, calibrated.graph, batch)
    macs = max(_macs(shaped), 1)
    tried = replace(calibrated, samples=calibrated.samples[: max(IMAGES, TRIAL_MACS // macs)])
    ranked = max(LEAST_IMAGES, min(IMAGES, RANK_MACS // macs))
    conclude = functools.partial(HighPrecision, target, form, price, batch, len(tried.samples), str(table))
    if macs < LEAST_MACS:
        return conclude(f"the model is too small to time single layers ({macs / 1e6:.0f} million MACs at batch 1)")
    with contextlib.ExitStack() as stack:
        try:
            workload = costs.workload_of(shaped, batch)
            added = _added(shaped, workload, table, form, rest, load_statistics(calibrated.statistics))
            del shaped
            trials = stack.enter_context(open_trials(config, tried, progress, ranked))
        except GraphError as error:  # plain INT8 accepts graphs whose single layers cannot be tried
            return conclude(f"single layers cannot be tried: {error.message}")
        added = {layer.name: added[layer.name] for layer in trials.layers if layer.name in added}
        for hidden in trials.prepared.hidden:  # operators that scale channels for INT8 only are removed with it
            if hidden.layer in added:
                one = workload.layers[hidden.layer]
                added[hidden.layer] -= table.scaling * one.rows * one.k
        answers = trials.answers({})
        int8 = trials.whole.reached(answers)
        if _agreement(int8.expected) >= ENOUGH:
            kept = f"plain INT8 is expected to keep {_agreement(int8.expected):.2f} % of the answers"
            return conclude(kept, int8=int8)
        sensitivity = SENSITIVITY_SEARCH.write(measure_sensitivity(trials, target, progress), out)
        plain = table.plain(workload, rest)
        layers, spent = layers_by_worth(
            sensitivity,
            added,
            price / 100 * plain,
            lambda left: _agreement(trials.whole.expected(answers, left)) >= ENOUGH,
        )
        if not layers:
            return conclude(f"no layer is worth its latency within the limit of {price:g} %", int8=int8)
        answers_without = trials.answers(dict.fromkeys(layers, FLOAT))
        reached = trials.whole.reached(answers_without)
        nearer, low, _ = frame.mean_interval(trials.whole.distance(answers) - trials.whole.distance(answers_without))
    ratio, images = 1 + spent / plain, len(tried.samples)
    if low <= 0:
        needed = math.ceil(images * ((nearer - low) / nearer) ** 2) + 1 if nearer > 0 else 0
        more = f"; about {needed} images may prove it" if needed > images else ""
        noun = "layer" if len(layers) == 1 else "layers"
        return conclude(
            f"{len(layers)} {noun} in higher precision: not provably closer, on {images} images{more}", int8=int8
        )
    why = f"the distance falls from {int8.distance:.2g} to {reached.distance:.2g} at {ratio:.2f} times the latency"
    return conclude(why, int8=int8, reached=reached, ratio=ratio, layers=layers)


def _agreement(expected: frame.Expected | None) -> float:
    return expected.agreement if expected is not None else 0.0


def form_of(config: PlaceConfig) -> HigherForm:
    """The form of layers that cost too much in plain INT8: dynamic quantization of activations by the runtime if this
    CPU has it, otherwise float."""
    return "dynamic" if config.weight_bits == 8 and costs.has_dynamic(config.target, describe_host()) else "float"


def _added(
    shaped: ir.Model,
    workload: costs.Workload,
    table: costs.CostTable,
    form: HigherForm,
    rest: FloatRest,
    statistics: Mapping[str, Statistics],
) -> dict[str, float]:
    """Nanoseconds that the other form adds, for each layer that may have it.

    "dynamic" excludes layers whose input the runtime does not quantize, and queries and keys whose scores are in INT8:
    in float these scores would cost more than the layer. With "float", the scores become float with the layer.
    """
    linears, is_dynamic = rows.find_linears(shaped), QUANTIZE[table.target].dynamic
    added = {name: table.added(layer, form, rest) for name, layer in workload.layers.items()}
    for linear in linears:
        if form == "dynamic" and is_dynamic is not None and not is_dynamic(linear):
            added.pop(linear.name, None)
    names = {linear.name for linear in linears}
    for scores in QUANTIZE[table.target].scores_in_int8(shaped, names, statistics):
        macs = work.node_macs(shaped, scores.attention.scores) or 0
        for linear in (scores.query, scores.key):
            if form == "dynamic":
                added.pop(linear.name, None)
            elif linear.name in added:
                added[linear.name] += macs * (table.forms["float"].mac - table.forms["int8"].mac)
    return added


def high_precision_step(
    candidate: step.Candidate,
    config: PlaceConfig,
    price: float,
    batch: int,
    data: Data,
    rest: FloatRest | Literal["chosen"] = "fp32",
) -> step.Step:
    """The step that chooses the layers of a candidate to keep in higher precision. `config`: the config of plain INT8.
    `rest`: the precision of float operators, or "chosen" for the result of the plan's search."""
    asked, table = rest_of(candidate, rest), costs.costs_for(candidate.target)

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        calibrated = CalibratedGraph.of(folders, data)
        find_high_precision(config, price, batch, calibrated, table, out, progress, asked.of(folders))

    about = {**asdict(config), "price": price, "batch": batch, "costs": table.digest, **asked.config}
    return _step_of(HIGH_PRECISION_SEARCH, candidate, write, about, data, asked.inputs)
