"""Find which layers to take out of plain INT8 on this machine, by what they cost and what they add to the latency."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.candidate import BenchCandidate
from vitdeploy.data.folder import Sample
from vitdeploy.errors import GraphError, MissingPackageError
from vitdeploy.graph.analysis.linears import count_int8, find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.graph.io.files import fixed_batch, graph_spec, load_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.backend import QUANTIZE
from vitdeploy.quantization.placement import shape
from vitdeploy.quantization.rounding import Rounded
from vitdeploy.quantization.statistics import load_statistics
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.host import VNNI, describe_host
from vitdeploy.search.alternatives import compiled, time_alternatives
from vitdeploy.search.high_precision import ENOUGH, HALF_SHARES, SHARES, choose_rung, ladder
from vitdeploy.search.latency import fingerprint
from vitdeploy.search.overrides import Reached
from vitdeploy.search.raised import Form, HighPrecision, Raised, Rung
from vitdeploy.search.sensitivity import measure_sensitivity
from vitdeploy.search.trial import answers_of
from vitdeploy.search.trials import Trials, reached_by
from vitdeploy.spec import FloatRest, Task, WeightBits, encode
from vitdeploy.stages.asked_rest import rest_of
from vitdeploy.stages.files import HIGH_PRECISION_FILE, MODEL_FILE, STATISTICS_FILE, read_json, write_json
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.stages.search import SENSITIVITY_FILE, SearchConfig, open_trials
from vitdeploy.stages.step import CALIBRATE, HIGH_PRECISION, OPTIMIZE, Candidate, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

# MACs of linears and convolutions at batch 1. Below, no layer takes long enough for a few percent to be told apart.
LEAST_MACS = 400_000_000
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
