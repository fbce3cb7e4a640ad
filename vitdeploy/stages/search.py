"""Searches that a plan runs: scores, screening, mixed precision, float operators, layers out of plain INT8."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun
from vitdeploy.benchmark.run import BenchCandidate, engine_candidate, run_benchmark
from vitdeploy.benchmark.summary import block_medians, disturbed_reason, judged
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.data.folder import Sample
from vitdeploy.errors import GraphError, MissingPackageError
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.graph.io.files import fixed_batch, graph_spec, load_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement import QUANTIZE, shape
from vitdeploy.quantization.rounding import Rounded
from vitdeploy.quantization.statistics import load_statistics
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.host import VNNI, describe_host
from vitdeploy.search.expected import Expected
from vitdeploy.search.high_precision import (
    ENOUGH,
    HALF_SHARES,
    SHARES,
    FloatRestTable,
    Form,
    HighPrecision,
    Raised,
    Rung,
    choose_rung,
    compiled,
    ladder,
    measure_float_rest,
    not_measured,
    time_alternatives,
)
from vitdeploy.search.latency import fingerprint, load_table, measure_latencies
from vitdeploy.search.mixed import Sensitivity, choose_mends, mean_interval, measure_sensitivity, shapes_to_time
from vitdeploy.search.trials import Mixed, Reached, Trials, answers_of, opened, reached_by
from vitdeploy.spec import Budget, FloatRest, Task, WeightBits, decode, encode
from vitdeploy.stages.float_graph import float_reference_outputs
from vitdeploy.stages.place import FLOAT_REST, FLOAT_REST_FILE, PlaceConfig, place_graph, rest_of
from vitdeploy.stages.step import (
    CALIBRATE,
    HIGH_PRECISION,
    HIGH_PRECISION_FILE,
    MIXED_FILE,
    MODEL_FILE,
    OPTIMIZE,
    STATISTICS_FILE,
    Candidate,
    Folders,
    Step,
    package_versions,
    read_engine,
    read_json,
    target_tools,
    write_json,
)

if TYPE_CHECKING:
    from vitdeploy.store.store import Artifact
    from vitdeploy.tasks.adapter import Data


# --- Searches on the calibration images: which layer costs how much in INT8, and which to override --------------------


SENSITIVITY_FILE, SENSITIVITY_PAGE = "sensitivity.json", "sensitivity.html"
LATENCY_FILE = "latency.json"
# Every trial of a layer is a pass over this many images; the ranks are stable from a few tens on.
IMAGES = 32


@dataclass(frozen=True)
class SearchConfig:
    target: str
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8


def find_sensitivity(
    config: SearchConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
) -> Sensitivity:
    """Writes sensitivity.json: see `search.sensitivity`."""
    with open_trials(config, graph, statistics, samples[:IMAGES], progress) as trials:
        found = measure_sensitivity(trials, config.target, progress)
    write_json(out / SENSITIVITY_FILE, encode(found))
    return found


def find_mixed(
    config: SearchConfig,
    budget: Budget,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
    table: Path | None = None,
) -> Mixed:
    """Writes sensitivity.json, latency.json (measured here, unless `table` is given) and mixed.json, the overrides.

    Raises:
        MissingFileError, InputError, TargetError: `table` is not there, or not of this device and target.
    """
    known = load_table(table, config.target) if table is not None else None
    with open_trials(config, graph, statistics, samples, progress) as trials:
        latencies = known or measure_latencies(shapes_to_time(trials), config.target, progress=progress)
        sensitivity = measure_sensitivity(trials, config.target, progress)
        mixed = choose_mends(trials, sensitivity, latencies, budget, progress)
    write_json(out / SENSITIVITY_FILE, encode(sensitivity))
    latencies.save(out / LATENCY_FILE)
    write_json(out / MIXED_FILE, encode(mixed))
    return mixed


def read_sensitivity(folder: Path) -> Sensitivity:
    return decode(Sensitivity, read_json(folder / SENSITIVITY_FILE))


@contextmanager
def open_trials(
    config: SearchConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    progress: Progress,
    images: int = IMAGES,
) -> Iterator[Trials]:
    """Trials of all layers at once run on all samples, those of single layers on the first few, `images`."""
    progress("open the layers", 0, 1)
    model, known, whole = load_graph(graph), load_statistics(statistics), float_reference_outputs(graph, samples)
    few = whole.first(images)
    with opened(model, known, config.target, few, config.ignore, whole, config.weight_bits) as trials:
        progress("open the layers", 1, 1)
        yield trials


def search_step(
    candidate: Candidate, weight_bits: WeightBits, budget: Budget, data: Data, ignore: tuple[str, ...] = ()
) -> Step:
    """The overrides of a candidate in mixed precision; measured on this machine. Layers of `ignore` stay in float."""
    config, samples = SearchConfig(candidate.target, ignore, weight_bits), data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph, statistics = folders[OPTIMIZE].path / MODEL_FILE, folders[CALIBRATE].path / STATISTICS_FILE
        find_mixed(config, budget, graph, statistics, samples, out, progress)

    return Step(
        candidate.step("search"),
        "search",
        write,
        {**asdict(config), "min_agreement": budget.min_agreement, "max_drop": budget.max_drop},
        (OPTIMIZE, CALIBRATE),
        {"images": data.calibration_digest},
        {**target_tools(candidate.target), **package_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        measured=True,
    )


# ----------------------------------------------------------------------------------------------------------------------
# The distance of an engine's answers from the float graph's on the calibration images; variants are ranked by it.


SCORE_FILE = "score.json"


@dataclass(frozen=True)
class Score:
    """The distance (see `ReferenceOutputs.distance`), mean over the images with its 95 % t-interval, and what is
    expected of a classifier's answers; None for other tasks."""

    images: int
    distance: float
    ci95: tuple[float, float]
    expected: Expected | None


def score(graph: Path, folder: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Writes score.json, of the engine in `folder` against a float graph."""
    engine = read_engine(folder)
    text = f"{engine.artifact} on the calibration images"
    progress(text, 0, 1)
    reference_outputs = float_reference_outputs(graph, samples)
    with make_runner(folder, engine, batch=reference_outputs.batch) as runner:
        answers = reference_outputs.ask(runner)
    mean, low, high = mean_interval(reference_outputs.distance(answers))
    found = Score(len(samples), mean, (low, high), reference_outputs.expected(answers))
    write_json(out / SCORE_FILE, encode(found))
    progress(text, 1, 1)


def read_score(folder: Path) -> Score:
    return decode(Score, read_json(folder / SCORE_FILE))


def score_step(candidate: Candidate, reference: str, data: Data) -> Step:
    """The distance of a compiled candidate from the float graph of the step `reference`: `OPTIMIZE`, or another one
    whose first word that is."""
    samples = data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph = folders[reference].path / MODEL_FILE
        score(graph, folders[candidate.step("compile")].path, samples, out, progress)

    return Step(
        candidate.step("score"),
        "score",
        write,
        {},
        (candidate.step("compile"), reference),
        {"images": data.calibration_digest},
        {**target_tools(candidate.target), **package_versions(("onnxruntime", "pillow", "numpy", "scipy"))},
    )


# --- The latencies of many engines, in one benchmark run of short blocks; those that matter are measured again --------


SCREEN, SCREEN_FILE = "compare the latencies", "screen.json"
BLOCK_SECONDS, WARMUP_SECONDS = 0.2, 0.5


def screen_step(batch: int, engines: Mapping[str, Artifact]) -> Step:
    """The latencies of compiled engines by name, at `batch`."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        bench_candidates = [
            engine_candidate(read_engine(artifact.path), artifact.path, name) for name, artifact in engines.items()
        ]
        protocol = Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, batch=batch)
        bench_run = run_benchmark(bench_candidates, protocol, lambda text, done, total: progress(SCREEN, done, total))
        disturbed = disturbed_reason(bench_run)
        faster = _proven_faster(bench_run) if disturbed else {}
        write_json(
            out / SCREEN_FILE,
            {"block_medians_ms": block_medians(bench_run), "disturbed": disturbed, "faster": faster},
        )

    tools: dict[str, str] = {}
    for target in sorted({read_engine(artifact.path).target for artifact in engines.values()}):
        tools |= target_tools(target)
    return Step(
        SCREEN,
        "screen",
        write,
        {"batch": batch, "engines": list(engines)},
        outside={name: artifact.digest for name, artifact in engines.items()},
        packages=tools,
        measured=True,
        usable=lambda folder: not read_json(folder / SCREEN_FILE)["disturbed"],
    )


def _proven_faster(bench_run: BenchRun) -> dict[str, list[str]]:
    """For each artifact those that it is proven to be faster than, whatever disturbed the measurement of others."""
    names, scenario = [entry.artifact for entry in bench_run.entries], bench_run.protocol.latency_scenario
    faster: dict[str, list[str]] = {}
    for name in names:
        against = {other: judged(bench_run, name, other, scenario) for other in names if other != name}
        highest = {other: pair.ratio.interval[2] if pair.decided else pair.bounds[1] for other, pair in against.items()}
        faster[name] = [other for other, high in highest.items() if high is not None and high < 1]
    return faster


# --- Find in which precision INT8 engines compute their float operators on this machine: see `search.rest_timing` -----


# MACs of linears and convolutions at batch 1. Below, an engine is done before a few percent can be told apart.
LEAST_MACS = 400_000_000


@dataclass(frozen=True)
class FloatRestConfig:
    target: str
    batch: int = 1
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8


def has_half_rest(target: str, precision: str, task: Task) -> bool:
    """Whether an engine may be faster here with its float operators in bf16: INT8, of one graph, on such a CPU."""
    return precision == "int8" and task not in FLOWS and COMPILE[target].half_rest()


def find_float_rest(
    config: FloatRestConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
) -> FloatRestTable:
    """Writes float_rest.json: what was measured of the model in plain INT8.

    Raises:
        GraphError, EngineError, CapabilityError, WorkerError: as `place_graph`, `compile_engine` and `run_benchmark`.
    """
    model = load_graph(graph)
    macs = sum(layer_macs(model, linear) or 0 for linear in find_linears(model))
    batch = fixed_batch(graph_spec(model, MODEL_FILE)) or config.batch
    if macs < LEAST_MACS:
        reason = f"{macs / 1e6:.0f} million products at batch 1, which are too few"
        found = not_measured(config.target, batch, reason)
    else:
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            place = PlaceConfig(config.target, "int8", config.ignore, config.weight_bits)
            place_graph(place, graph, statistics, Path(folder))
            placed, whole = Path(folder) / graph.name, float_reference_outputs(graph, samples)
            found = measure_float_rest(placed, config.target, batch, whole, progress=progress)
    write_json(out / FLOAT_REST_FILE, encode(found))
    return found


def float_rest_step(
    candidate: Candidate, batch: int, weight_bits: WeightBits, data: Data, ignore: tuple[str, ...] = ()
) -> Step:
    """The precision of a candidate's float operators; measured on this machine. Layers of `ignore` stay in float."""
    config, samples = FloatRestConfig(candidate.target, batch, ignore, weight_bits), data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph, statistics = folders[OPTIMIZE].path / MODEL_FILE, folders[CALIBRATE].path / STATISTICS_FILE
        find_float_rest(config, graph, statistics, samples, out, progress)

    return Step(
        candidate.step(FLOAT_REST),
        FLOAT_REST,
        write,
        asdict(config),
        (OPTIMIZE, CALIBRATE),
        {"images": data.calibration_digest},
        {**target_tools(candidate.target), **package_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        measured=True,
        usable=lambda folder: not read_json(folder / FLOAT_REST_FILE)["disturbed"],
    )


# --- Find which layers to take out of plain INT8 on this machine ------------------------------------------------------
# by what they cost and what they add to the latency.


# MACs of linears and convolutions at batch 1. Below, no layer takes long enough for a few percent to be told apart.
# A layer is tried on this many images; on fewer if it would take more than so many MACs for each layer.
MOST_IMAGES, LEAST_IMAGES, TRIAL_MACS = 32, 8, 64_000_000_000
# With more in all trials of single layers, which takes some ten minutes on two cores, none is tried.
MOST_MACS = 100_000_000_000_000


@dataclass(frozen=True)
class HighPrecisionConfig:
    """`price`: percent of the latency that layers out of plain INT8 may add; `batch`: at which it is measured."""

    target: str
    price: float
    batch: int = 1
    ignore: tuple[str, ...] = ()
    weight_bits: WeightBits = 8


def raises_precision(target: str, precision: str, task: Task | None, price: float) -> bool:
    """Whether layers of a placement may be taken out of plain INT8 by measurement: INT8, of one graph, on a CPU. Where
    no task is given it is one graph."""
    return precision == "int8" and price > 0 and not TARGETS[target].typed and task not in FLOWS


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
    config: HighPrecisionConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress = silent,
    float_rest: FloatRest = "fp32",
) -> HighPrecision:
    """Writes high_precision.json, and sensitivity.json where layers were tried.

    Layers are ranked by what each costs in INT8 on the calibration images; growing sets of them are placed, compiled
    and timed against plain INT8, and run on all calibration images; `choose_rung` takes one. `float_rest`: in which
    precision their engines compute float operators.

    Raises:
        GraphError, EngineError, CapabilityError, WorkerError: as `place_graph`, `compile_engine` and `run_benchmark`.
    """
    found = _find(config, graph, statistics, samples, out, progress, float_rest)
    write_json(out / HIGH_PRECISION_FILE, encode(found))
    return found


def _find(
    config: HighPrecisionConfig,
    graph: Path,
    statistics: Path,
    samples: Sequence[Sample],
    out: Path,
    progress: Progress,
    rest: FloatRest,
) -> HighPrecision:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    form = form_of(config.target, config.weight_bits)
    shaped = load_graph(graph)
    shape(shaped, config.target, config.ignore)
    linears = find_linears(shaped)
    macs = sum(layer_macs(shaped, linear) or 0 for linear in linears)
    about = (config.target, form, config.price, len(samples), now, fingerprint(config.target))
    if reason := _too_small_or_large(macs, len(linears)):
        return HighPrecision(*about, reason)
    asked = SearchConfig(config.target, config.ignore, config.weight_bits)
    with contextlib.ExitStack() as stack:
        try:
            trials = stack.enter_context(open_trials(asked, graph, statistics, samples, progress, _images(macs)))
        except GraphError as error:  # plain INT8 takes graphs that single layers cannot be tried of
            return HighPrecision(*about, f"single layers cannot be tried: {error.message}")
        int8 = reached_by(trials.answers({}), trials.whole)
        if int8.expected is not None and int8.expected.agreement >= ENOUGH:
            kept = f"plain INT8 is expected to keep {int8.expected.agreement:.2f} % of the answers"
            return HighPrecision(*about, kept, int8)
        costs = measure_sensitivity(trials, config.target, progress)
        write_json(out / SENSITIVITY_FILE, encode(costs))
        split = {each.layer for each in trials.prepared.hidden}
        shares = SHARES[form] if rest == "fp32" else HALF_SHARES
        sets = ladder(shaped, costs, form, split, _kept(shaped, config.target, statistics), shares)
        if not sets:
            return HighPrecision(*about, "no layer costs more answers than its share of the products", int8)
        rungs, int8, disturbed = _climb(config, form, graph, statistics, sets, trials, progress, rest)
    layers, why = choose_rung(int8, rungs, config.price, disturbed)
    return HighPrecision(*about, why, int8, tuple(rungs), layers, disturbed)


def form_of(target: str, bits: WeightBits) -> Form:
    """The form of layers that cost too much in plain INT8: where the runtime quantizes activations itself on this CPU
    that, else float."""
    here = set(describe_host()["isa"].split())
    return "dynamic" if QUANTIZE[target].dynamic is not None and bits == 8 and VNNI & here else "float"


def _kept(shaped: ir.Model, target: str, statistics: Path) -> set[str]:
    """The layers whose inputs the runtime does not quantize; and queries and keys whose scores are in INT8, as those of
    others would not be, which costs more than the layer."""
    linears, is_dynamic = find_linears(shaped), QUANTIZE[target].dynamic
    scores = QUANTIZE[target].scores_in_int8(shaped, {each.name for each in linears}, load_statistics(statistics))
    other = {each.name for each in linears if is_dynamic is not None and not is_dynamic(each)}
    return other | {linear.name for each in scores for linear in (each.query, each.key)}


def _too_small_or_large(macs: int, layers: int) -> str:
    """Why layers of a model with so many MACs are not tried; "" if they are."""
    if macs < LEAST_MACS:
        return f"{macs / 1e6:.0f} million products at batch 1, which are too few to time layers"
    if _images(macs) * macs * layers > MOST_MACS:
        return f"{macs / 1e9:.0f} billion products in {layers} layers, which are too many to try each layer"
    return ""


def _images(macs: int) -> int:
    return max(LEAST_IMAGES, min(MOST_IMAGES, TRIAL_MACS // max(macs, 1)))


def _climb(
    config: HighPrecisionConfig,
    form: Form,
    graph: Path,
    statistics: Path,
    sets: Sequence[tuple[tuple[str, ...], float]],
    trials: Trials,
    progress: Progress,
    rest: FloatRest,
) -> tuple[list[Rung], Reached, str]:
    """Each set of layers timed against plain INT8 and run on all images; what plain INT8 reaches; and why the times
    are unreliable."""
    rounding = Rounded()
    text, candidates, reached = f"layers out of plain INT8 for {config.target}", list[BenchCandidate](), list[Reached]()
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as scratch:
        for done, layers in enumerate(((), *(each for each, _ in sets))):
            progress(text, done, len(sets) + 1)
            folder = Path(scratch) / str(done)
            folder.mkdir()
            place = PlaceConfig(config.target, "int8", config.ignore, config.weight_bits)
            place_graph(place, graph, statistics, folder, raised=Raised(layers, form), rounding=rounding)
            placed = load_graph(folder / graph.name)
            answers = answers_of(placed, config.target, "int8", trials.whole, rest)
            reached.append(reached_by(answers, trials.whole))
            batch = fixed_batch(graph_spec(placed, MODEL_FILE)) or config.batch
            made, count = folder / "engine", count_int8(placed)
            candidates.append(compiled(folder / graph.name, made, config.target, "int8", batch, count, str(done), rest))
        progress(text, len(sets) + 1, len(sets) + 1)
        timings, disturbed = time_alternatives(candidates, lambda done, total: progress("time them", done, total))
    rungs = [
        Rung(layers, share, **vars(timing), reached=each)
        for (layers, share), timing, each in zip(sets, timings[1:], reached[1:], strict=True)
    ]
    return rungs, reached[0], disturbed


def high_precision_step(
    candidate: Candidate,
    price: float,
    batch: int,
    weight_bits: WeightBits,
    data: Data,
    ignore: tuple[str, ...] = (),
    rest: FloatRest | Literal["measured"] = "fp32",
) -> Step:
    """The layers of a candidate that are taken out of plain INT8; measured on this machine. Layers of `ignore` stay in
    float. `rest`: the precision of float operators, or that which the plan's step for it has found."""
    asked = rest_of(candidate, rest)
    config, samples = HighPrecisionConfig(candidate.target, price, batch, ignore, weight_bits), data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph, statistics = folders[OPTIMIZE].path / MODEL_FILE, folders[CALIBRATE].path / STATISTICS_FILE
        find_high_precision(config, graph, statistics, samples, out, progress, asked.of(folders))

    return Step(
        candidate.step(HIGH_PRECISION),
        HIGH_PRECISION,
        write,
        {**asdict(config), **asked.config},
        (OPTIMIZE, CALIBRATE, *asked.inputs),
        {"images": data.calibration_digest},
        {**target_tools(candidate.target), **package_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        measured=True,
        usable=lambda folder: not read_json(folder / HIGH_PRECISION_FILE)["disturbed"],
    )
