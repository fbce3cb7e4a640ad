"""Searches that a plan runs: scores, screening, mixed precision, float operators, layers out of plain INT8."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import results, run, summary
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.errors import GraphError, MissingPackageError
from vitdeploy.graph.analysis import rows, work
from vitdeploy.graph.io.files import fixed_batch, get_metadata, graph_spec, load_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement import QUANTIZE, HigherForm, shape
from vitdeploy.quantization.ranges import load_statistics
from vitdeploy.quantization.rounding import Rounded
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import VNNI, describe_host
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.search import frame, latency
from vitdeploy.search.precision import (
    ENOUGH,
    HALF_SHARES,
    SHARES,
    FloatRestTable,
    HighPrecision,
    Mixed,
    Rung,
    Sensitivity,
    choose_mends,
    choose_rung,
    in_higher_precision,
    ladder,
    measure_float_rest,
    measure_sensitivity,
    shapes_to_time,
)
from vitdeploy.search.trials import Trials, opened
from vitdeploy.spec import Budget, FloatRest, Task, WeightBits
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
SENSITIVITY_FILE, LATENCY_FILE = "sensitivity.json", "latency.json"
SENSITIVITY_SEARCH = step.Search("sensitivity", SENSITIVITY_FILE, Sensitivity)
# Every trial of a layer is a pass over this many images; the ranks are stable from a few tens on.
IMAGES, BATCH = 32, 8


@dataclass(frozen=True)
class CalibratedGraph:
    """A float graph, the statistics of its calibration, and the calibration images."""

    graph: Path
    statistics: Path
    samples: Sequence[Sample]

    @classmethod
    def of(cls, folders: step.Folders, data: Data) -> CalibratedGraph:
        """Those of a plan's steps."""
        graph, statistics = (
            folders[step.OPTIMIZE].path / step.MODEL_FILE,
            folders[step.CALIBRATE].path / step.STATISTICS_FILE,
        )
        return cls(graph, statistics, data.calibration)


def float_reference_outputs(graph: Path, samples: Sequence[Sample]) -> frame.ReferenceOutputs:
    """A float graph's outputs for some images, run at the graph's own batch if that is fixed."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    batch = fixed_batch(graph_spec(model, step.MODEL_FILE)) or BATCH
    pixels = np.concatenate(list(batches(samples, metadata.images, BATCH)))
    with OnnxRuntimeRunner(graph, name="the float graph", batch=batch) as runner:
        return frame.ReferenceOutputs(runner, pixels, metadata.images, metadata.task, batch=batch)


# --- Searches on the calibration images: which layer costs how much in INT8, and which to override --------------------


def find_sensitivity(
    config: PlaceConfig, calibrated: CalibratedGraph, out: Path, progress: Progress = silent
) -> Sensitivity:
    """Writes sensitivity.json: see `search.precision`."""
    with open_trials(config, calibrated, progress, few=True) as trials:
        return SENSITIVITY_SEARCH.write(measure_sensitivity(trials, config.target, progress), out)


def find_mixed(
    config: PlaceConfig,
    budget: Budget,
    calibrated: CalibratedGraph,
    out: Path,
    progress: Progress = silent,
    table: Path | None = None,
) -> Mixed:
    """Writes sensitivity.json, latency.json (measured here, unless `table` is given) and mixed.json, the overrides.

    Raises:
        MissingFileError, InputError, TargetError: `table` is not there, or not of this device and target.
    """
    known = latency.load_table(table, config.target) if table is not None else None
    with open_trials(config, calibrated, progress) as trials:
        latencies = known or latency.measure_latencies(shapes_to_time(trials), config.target, progress=progress)
        sensitivity = SENSITIVITY_SEARCH.write(measure_sensitivity(trials, config.target, progress), out)
        mixed = choose_mends(trials, sensitivity, latencies, budget, progress)
    latencies.save(out / LATENCY_FILE)
    return MIXED_SEARCH.write(mixed, out)


@contextmanager
def open_trials(
    config: PlaceConfig,
    calibrated: CalibratedGraph,
    progress: Progress,
    images: int = IMAGES,
    *,
    few: bool = False,
) -> Iterator[Trials]:
    """Trials of all layers at once run on all samples, or on `few` too; those of single layers on the first few."""
    progress("open the layers", 0, 1)
    model, known = load_graph(calibrated.graph), load_statistics(calibrated.statistics)
    whole = float_reference_outputs(calibrated.graph, calibrated.samples[: images if few else None])
    with opened(model, known, config.target, whole.first(images), config.ignore, whole, config.weight_bits) as trials:
        progress("open the layers", 1, 1)
        yield trials


def search_step(candidate: step.Candidate, config: PlaceConfig, budget: Budget, data: Data) -> step.Step:
    """The overrides of a candidate in mixed precision; measured on this machine. `config`: of plain INT8."""

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        find_mixed(config, budget, CalibratedGraph.of(folders, data), out, progress)

    bounds = {"min_agreement": budget.min_agreement, "max_drop": budget.max_drop}
    return _step_of(MIXED_SEARCH, candidate, write, {**asdict(config), **bounds}, data)


def _step_of(
    search: step.Search[T],
    candidate: step.Candidate,
    write: Callable[[step.Folders, Path, Progress], None],
    config: step.Facts,
    data: Data,
    inputs: tuple[str, ...] = (),
) -> step.Step:
    """A step that measures a candidate of the calibrated graph on this machine."""
    name = candidate.step(search.kind)
    return search.step(name, write, config, (step.OPTIMIZE, step.CALIBRATE, *inputs), candidate.target, data)


# ----------------------------------------------------------------------------------------------------------------------
# The distance of an engine's answers from the float graph's on the calibration images; variants are ranked by it.


@dataclass(frozen=True)
class Score:
    """The distance (see `ReferenceOutputs.distance`), mean over the images with its 95 % t-interval, and what is
    expected of a classifier's answers; None for other tasks."""

    images: int
    distance: float
    ci95: tuple[float, float]
    expected: frame.Expected | None


SCORES = step.Search("score", "score.json", Score, ("onnxruntime", "pillow", "numpy", "scipy"))


def score(graph: Path, folder: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Writes score.json, of the engine in `folder` against a float graph."""
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
    """The distance of a compiled candidate from the float graph of the step `reference`: `OPTIMIZE`, or another one
    whose first word that is."""
    samples, compiled = data.calibration, candidate.step("compile")

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        score(folders[reference].path / step.MODEL_FILE, folders[compiled].path, samples, out, progress)

    name = candidate.step("score")
    return SCORES.step(name, write, {}, (compiled, reference), candidate.target, data, measured=False)


# --- The latencies of many engines, in one benchmark run of short blocks; those that matter are measured again --------


SCREEN, SCREEN_FILE = "compare the latencies", "screen.json"
BLOCK_SECONDS, WARMUP_SECONDS = 0.2, 0.5


def screen_step(batch: int, engines: Mapping[str, Artifact]) -> step.Step:
    """The latencies of compiled engines by name, at `batch`."""

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
    """For each artifact those that it is proven to be faster than, whatever disturbed the measurement of others."""
    names, scenario = [entry.artifact for entry in bench_run.entries], bench_run.protocol.latency_scenario
    faster: dict[str, list[str]] = {}
    for name in names:
        against = {other: summary.judged(bench_run, name, other, scenario) for other in names if other != name}
        highest = {other: pair.ci95[1] if pair.decided else pair.bounds[1] for other, pair in against.items()}
        faster[name] = [other for other, high in highest.items() if high is not None and high < 1]
    return faster


# --- Find in which precision INT8 engines compute their float operators on this machine -------------------------------


def has_half_rest(target: str, precision: str, task: Task) -> bool:
    """Whether an engine may be faster here with its float operators in bf16: INT8, of one graph, on such a CPU."""
    return precision == "int8" and not flow_of(task) and COMPILE[target].half_rest()


def find_float_rest(
    config: PlaceConfig, batch: int, calibrated: CalibratedGraph, out: Path, progress: Progress = silent
) -> FloatRestTable:
    """Writes float_rest.json: what was measured of the model in plain INT8, at `batch` if the graph has no other.

    Raises:
        GraphError, EngineError, CapabilityError, WorkerError: as `place_graph` and `search.frame.measure`.
    """
    model = load_graph(calibrated.graph)
    batch = fixed_batch(graph_spec(model, step.MODEL_FILE)) or batch
    if reason := frame.too_few(sum(work.layer_macs(model, linear) or 0 for linear in rows.find_linears(model))):
        return FLOAT_REST_SEARCH.write(
            FloatRestTable(**frame.measured_here(config.target), batch=batch, reason=reason), out
        )
    whole = float_reference_outputs(calibrated.graph, calibrated.samples)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as placed:
        name = _Placed(config, calibrated).write(Path(placed)).name

        def write(folder: Path) -> Path:
            return Path(shutil.copytree(placed, folder, dirs_exist_ok=True)) / name

        table = measure_float_rest(write, config.target, batch, whole, progress)
    return FLOAT_REST_SEARCH.write(table, out)


@dataclass(frozen=True)
class _Placed:
    """The graph of a variant: placed in INT8 with some layers out of it, in `form`."""

    config: PlaceConfig
    calibrated: CalibratedGraph
    layers: tuple[str, ...] = ()
    form: HigherForm = "float"
    rounding: Rounded | None = None

    def write(self, folder: Path) -> Path:
        graph, statistics = self.calibrated.graph, self.calibrated.statistics
        asked = in_higher_precision(self.layers, self.form)
        place_graph(self.config, graph, statistics, folder, asked, self.rounding)
        return folder / graph.name


def float_rest_step(candidate: step.Candidate, config: PlaceConfig, batch: int, data: Data) -> step.Step:
    """The precision of a candidate's float operators; measured on this machine. `config`: of plain INT8."""

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        find_float_rest(config, batch, CalibratedGraph.of(folders, data), out, progress)

    return _step_of(FLOAT_REST_SEARCH, candidate, write, {**asdict(config), "batch": batch}, data)


# --- Find which layers to take out of plain INT8 on this machine ------------------------------------------------------
# by what they cost and what they add to the latency.


# A layer is tried on this many images; on fewer if it would take more than so many MACs for each layer.
MOST_IMAGES, LEAST_IMAGES, TRIAL_MACS = 32, 8, 64_000_000_000
# With more in all trials of single layers, which takes some ten minutes on two cores, none is tried.
MOST_MACS = 100_000_000_000_000


def raises_precision(target: str, precision: str, task: Task | None, price: float) -> bool:
    """Whether layers of a placement may be taken out of plain INT8 by measurement: INT8, of one graph, on a CPU. Where
    no task is given it is one graph."""
    return precision == "int8" and price > 0 and not TARGETS[target].typed and (task is None or not flow_of(task))


def measures(target: str, precision: str, price: float) -> bool:
    """As `raises_precision` for one graph, and whether the target's runtime is here to be measured."""
    if not raises_precision(target, precision, None, price):
        return False
    try:
        require_runtime(target)
    except MissingPackageError:
        return False
    return True


def find_high_precision(
    config: PlaceConfig,
    price: float,
    batch: int,
    calibrated: CalibratedGraph,
    out: Path,
    progress: Progress = silent,
    float_rest: FloatRest = "fp32",
) -> HighPrecision:
    """Writes high_precision.json, and sensitivity.json where layers were tried.

    Layers are ranked by what each costs in INT8 on the calibration images; growing sets of them are placed, compiled
    and timed against plain INT8, and run on all calibration images; `choose_rung` takes one.

    Args:
        config: of plain INT8.
        price: percent of the latency that layers out of plain INT8 may add, measured at `batch` if the graph has no
            other.
        float_rest: in which precision their engines compute float operators.

    Raises:
        GraphError, EngineError, CapabilityError, WorkerError: as `place_graph` and `search.frame.measure`.
    """
    return HIGH_PRECISION_SEARCH.write(_find(config, price, batch, calibrated, out, progress, float_rest), out)


def _find(
    config: PlaceConfig,
    price: float,
    batch: int,
    calibrated: CalibratedGraph,
    out: Path,
    progress: Progress,
    rest: FloatRest,
) -> HighPrecision:
    target, form = config.target, form_of(config.target, config.weight_bits)
    about: step.Facts = {**frame.measured_here(target), "form": form, "price": price}
    about["images"] = len(calibrated.samples)
    shaped = load_graph(calibrated.graph)
    shape(shaped, target, config.ignore)
    linears = rows.find_linears(shaped)
    macs = sum(work.layer_macs(shaped, linear) or 0 for linear in linears)
    if reason := _too_small_or_large(macs, len(linears)):
        return HighPrecision(**about, why=reason)
    with contextlib.ExitStack() as stack:
        try:
            trials = stack.enter_context(open_trials(config, calibrated, progress, _images(macs)))
        except GraphError as error:  # plain INT8 takes graphs that single layers cannot be tried of
            return HighPrecision(**about, why=f"single layers cannot be tried: {error.message}")
        int8 = trials.whole.reached(trials.answers({}))
        if int8.expected is not None and int8.expected.agreement >= ENOUGH:
            kept = f"plain INT8 is expected to keep {int8.expected.agreement:.2f} % of the answers"
            return HighPrecision(**about, why=kept, int8=int8)
        costs = SENSITIVITY_SEARCH.write(measure_sensitivity(trials, target, progress), out)
        split = {each.layer for each in trials.prepared.hidden}
        shares = SHARES[form] if rest == "fp32" else HALF_SHARES
        sets = dict(ladder(shaped, costs, form, split, _kept(shaped, target, calibrated.statistics), shares))
        if not sets:
            return HighPrecision(**about, why="no layer costs more answers than its share of the products", int8=int8)
        whole = trials.whole
    rounding, batch = Rounded(), fixed_batch(graph_spec(shaped, step.MODEL_FILE)) or batch
    placed = [_Placed(config, calibrated, layers, form, rounding) for layers in ((), *sets)]
    variants = [frame.GraphVariant(str(number), each.write, rest) for number, each in enumerate(placed)]
    texts = f"layers out of plain INT8 for {target}", "time them"
    measured, disturbed = frame.measure(variants, target, batch, texts, progress, reference_outputs=whole)
    plain, *reached = (frame.Reached(float(each.distances.mean()), each.expected) for each in measured)
    rungs = [
        Rung(layers=layers, share=share, reached=found, **vars(each.timing))
        for (layers, share), found, each in zip(sets.items(), reached, measured[1:], strict=True)
    ]
    layers, why = choose_rung(plain, rungs, price, disturbed)
    return HighPrecision(**about, why=why, int8=plain, rungs=tuple(rungs), layers=layers, disturbed=disturbed)


def form_of(target: str, bits: WeightBits) -> HigherForm:
    """The form of layers that cost too much in plain INT8: where the runtime quantizes activations itself on this CPU
    that, else float."""
    here = set(describe_host()["isa"].split())
    return "dynamic" if QUANTIZE[target].dynamic is not None and bits == 8 and VNNI & here else "float"


def _kept(shaped: ir.Model, target: str, statistics: Path) -> set[str]:
    """The layers whose inputs the runtime does not quantize; and queries and keys whose scores are in INT8, as those of
    others would not be, which costs more than the layer."""
    linears, is_dynamic = rows.find_linears(shaped), QUANTIZE[target].dynamic
    scores = QUANTIZE[target].scores_in_int8(shaped, {each.name for each in linears}, load_statistics(statistics))
    other = {each.name for each in linears if is_dynamic is not None and not is_dynamic(each)}
    return other | {linear.name for each in scores for linear in (each.query, each.key)}


def _too_small_or_large(macs: int, layers: int) -> str:
    """Why layers of a model with so many MACs are not tried; "" if they are."""
    if reason := frame.too_few(macs, " to time layers"):
        return reason
    if _images(macs) * macs * layers > MOST_MACS:
        return f"{macs / 1e9:.0f} billion products in {layers} layers, which are too many to try each layer"
    return ""


def _images(macs: int) -> int:
    return max(LEAST_IMAGES, min(MOST_IMAGES, TRIAL_MACS // max(macs, 1)))


def high_precision_step(
    candidate: step.Candidate,
    config: PlaceConfig,
    price: float,
    batch: int,
    data: Data,
    rest: FloatRest | Literal["measured"] = "fp32",
) -> step.Step:
    """The layers of a candidate that are taken out of plain INT8, which `config` is of; measured on this machine.
    `rest`: the precision of float operators, or that which the plan's step for it has found."""
    asked = rest_of(candidate, rest)

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        calibrated = CalibratedGraph.of(folders, data)
        find_high_precision(config, price, batch, calibrated, out, progress, asked.of(folders))

    about = {**asdict(config), "price": price, "batch": batch, **asked.config}
    return _step_of(HIGH_PRECISION_SEARCH, candidate, write, about, data, asked.inputs)
