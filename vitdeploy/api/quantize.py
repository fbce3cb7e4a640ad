"""A float graph in 8 bits or half precision, as one target takes it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitdeploy.api.graph import Graph, GraphLike, graph_file
from vitdeploy.api.images import Images, ImagesLike, images
from vitdeploy.api.values import Reporter, filling, home_of, reporting
from vitdeploy.api.workers import workers_of
from vitdeploy.errors import CapabilityError, InputError
from vitdeploy.spec import Budget, WeightBits, encode

if TYPE_CHECKING:
    from vitdeploy.data.folder import Sample
    from vitdeploy.search.high_precision import HighPrecision
    from vitdeploy.search.mixed import Sensitivity
    from vitdeploy.search.trials import Mixed
    from vitdeploy.stages.workers import Workers
    from vitdeploy.tasks.adapter import DataChoice, Drive, TaskAdapter

QuantizedPrecision = Literal["int8", "mixed", "int4", "fp16", "bf16", "fp8"]
LISTED_LAYERS = 8


@dataclass(frozen=True, repr=False)
class QuantizedGraph(Graph):
    """A graph that was placed for one target. `int8` names the layers in 8 bits, `dynamic` those of them whose
    activations the runtime quantizes, `int4` those with weights of 4, `float` those left in float, with the reason;
    `warnings` are about the calibration images and this machine."""

    int8: tuple[str, ...] = ()
    float: Mapping[str, str] = field(default_factory=dict)
    calibration_images: int = 0
    warnings: tuple[str, ...] = ()
    sensitivity: Sensitivity | None = None
    mixed: Mixed | None = None
    dynamic: tuple[str, ...] = ()
    high_precision: HighPrecision | None = None
    int4: tuple[str, ...] = ()


@dataclass(frozen=True)
class _How:
    """The parts of a request that concern one graph."""

    target: str
    precision: QuantizedPrecision
    ignore: tuple[str, ...]
    bits: WeightBits
    typed: bool
    sensitivity: bool
    budget: Budget
    latency_table: Path | None
    float_parts: tuple[str, ...] = ()
    high_precision: float = 0.0


@dataclass(frozen=True)
class _Made:
    """Results besides the files."""

    placed: dict[str, Any]
    calibrated: dict[str, Any]
    costs: Sensitivity | None
    mixed: Mixed | None
    high: HighPrecision | None = None


def quantize(
    graph: GraphLike,
    data: ImagesLike,
    target: str,
    folder: str | Path | None = None,
    *,
    precision: QuantizedPrecision = "int8",
    num_samples: int | None = 128,
    vnni: bool | None = None,
    ignore: Sequence[str] = (),
    float_parts: Sequence[str] = (),
    sensitivity: bool = False,
    min_agreement: float | None = None,
    latency_table: str | Path | None = None,
    high_precision: float = 5.0,
    seed: int = 0,
    skip_bad: bool = False,
    image_size: tuple[int, int] | None = None,
    executor: str | None = None,
    jobs: int = 0,
    progress: bool | Reporter = True,
) -> QuantizedGraph:
    """Convert a float graph to INT8, INT4 weights, FP8 or half precision for one target, with calibration images.

    Args:
        graph: from `export` or `optimize`, its folder, or an ONNX file of a float image model. What such a file does
            not contain, such as mean and std, is assumed and reported.
        data: calibration images, as `vitdeploy.images` takes them; of an encoder-decoder an .npz of tokens. Labels are
            used where they say more than the image: prompts, and the boxes of objects with key points.
        target: such as "openvino-cpu"; `vitdeploy doctor` lists them.
        folder: as for `export`.
        precision: "mixed" gives single layers a precision override, the cheapest first by measured time, until
            `min_agreement` is expected to be met; without it, as long as an override pays. "int4" is for the weights of
            linears alone. The last three are for NVIDIA GPUs.
        num_samples: number of calibration images, chosen by `seed`; None takes all.
        vnni: whether the device's CPU has VNNI; None: like this machine.
        ignore: names or patterns of layers to leave in float; of a model of several graphs as "graph/layer".
        float_parts: names of graphs to leave in float, of a model of several.
        sensitivity: also measure what each layer costs.
        min_agreement: for "mixed", percent of the answers that are to stay.
        latency_table: for "mixed", the latency.json of an earlier call on this device; None measures.
        high_precision: for "int8" on a CPU, percent of the latency that layers out of plain INT8 may add where they
            bring the answers nearer to the float graph's, measured on this machine; 0 measures nothing.
        skip_bad: go on without unreadable images.
        image_size: (height, width), if a bare .onnx file leaves it open.
        executor, jobs: who observes many calibration images, as for `vitdeploy.deploy`.
        progress: as for `export`.

    Raises:
        TargetError, CapabilityError, MissingPackageError: of the target. DataError, ImageError: of the images.
        InputError: arguments that contradict each other. GraphError: the graph is refused.

    >>> import numpy as np
    >>> import vitdeploy as vd
    >>> float_graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> noise = list(np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8))
    >>> int8 = vd.quantize(float_graph, noise, "onnxruntime-cpu", num_samples=None, progress=False)
    >>> int8.metadata.precision
    'int8'
    """
    from vitdeploy.backends import TARGETS
    from vitdeploy.pipeline.available import check_placed
    from vitdeploy.pipeline.early import check_data, require_annotations
    from vitdeploy.runtime.backend import require_runtime
    from vitdeploy.stages.step import OUTPUT_NAMES, is_ours

    _check_arguments(target, precision, vnni, sensitivity, min_agreement, latency_table, executor)
    check_placed(target, precision)
    if precision == "mixed":
        require_runtime(target)
    given, chosen = graph_file(graph), images(data)
    if chosen.path is not None:
        check_data(chosen.path)
    require_annotations(chosen.annotations)
    home, typed, reporter = home_of(folder, "quantized", OUTPUT_NAMES), TARGETS[target].typed, reporting(progress)

    from vitdeploy.graph.io.files import admitted_metadata
    from vitdeploy.pipeline.job import weight_bits
    from vitdeploy.pipeline.setting import graph_setting
    from vitdeploy.stages.compile import check_task
    from vitdeploy.stages.export import import_external
    from vitdeploy.stages.place import check_float_parts
    from vitdeploy.tasks.registry import make_adapter

    if image_size is not None and is_ours(given):
        raise InputError(f"{given} has its image size already", fix="leave the image size out")
    how = _How(
        target,
        precision,
        tuple(ignore),
        8 if typed else weight_bits(vnni),
        typed,
        sensitivity,
        Budget(min_agreement=min_agreement),
        Path(latency_table) if latency_table is not None else None,
        tuple(float_parts),
        high_precision if weight_bits(vnni) == weight_bits(None) else 0.0,
    )
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as scratch, reporter:
        file = given
        if not is_ours(given):
            file, notes = import_external(given, Path(scratch), reporter.progress, image_size)
            for note in notes:
                reporter.note(note)
        metadata = admitted_metadata(file)
        check_task(metadata.task, target, precision)
        check_float_parts(metadata.task, how.float_parts)
        _check_search(metadata.task, sensitivity)
        adapter = make_adapter(graph_setting(file, metadata))
        choice = _choice(chosen, adapter, num_samples, seed, reporter)
        with filling(home, OUTPUT_NAMES) as work:
            found = adapter.calibration(choice, skip_bad=skip_bad, progress=reporter.progress)
            drive = adapter.drive(found)
            if drive is None:
                workers = workers_of(executor, jobs)  # makes a store: behind what may be wrong
                made = _make(how, file, metadata.name, found.samples, work, reporter, workers)
            else:
                made = _make_parts(how, file.parent, drive, work, reporter)
            _write_beside(given.parent, found.samples, adapter, work)
    return _result(home, how, made, found.skipped)


def _write_beside(folder: Path, samples: Sequence[Sample], adapter: TaskAdapter, work: Path) -> None:
    """What lies beside the graph in `folder`; and what the calibration images are like, for the bundle that is made
    of it (`runtime.monitor_reference`)."""
    from vitdeploy.bundle.read import MONITOR_FILE
    from vitdeploy.pipeline.monitored import monitor_of_images
    from vitdeploy.stages.step import copy_labels
    from vitdeploy.tasks.adapter import ImageKit

    copy_labels(folder, work)
    if isinstance(adapter, ImageKit) and (text := monitor_of_images(samples, adapter.setting.images)) is not None:
        (work / MONITOR_FILE).write_text(text, encoding="utf-8")


def _choice(chosen: Images, adapter: TaskAdapter, num_samples: int | None, seed: int, reporter: Reporter) -> DataChoice:
    """The calibration images, with their annotations where the model is calibrated on these too."""
    from vitdeploy.tasks.adapter import TEMPLATE, DataChoice

    place, kind = chosen.place(adapter.setting)
    annotations, labels = chosen.annotations, kind
    if annotations is not None and adapter.calibrated_on is None:
        reporter.note(f"a model for {adapter.setting.task} is calibrated on images alone: annotations are not read")
        annotations = None
    if annotations is not None and chosen.kind is None and adapter.calibrated_on is not None:
        labels = adapter.calibrated_on
    asked = chosen.texts, chosen.template or TEMPLATE
    return DataChoice(place, labels, annotations, num_samples or 0, "all", seed, *asked)


def _check_arguments(
    target: str,
    precision: str,
    vnni: bool | None,
    sensitivity: bool,
    min_agreement: float | None,
    latency_table: str | Path | None,
    executor: str | None,
) -> None:
    from vitdeploy.backends import TARGETS
    from vitdeploy.workflows.executors import executor_of

    executor_of(executor, 1)
    if precision != "mixed" and (min_agreement is not None or latency_table is not None):
        raise InputError("min_agreement and latency_table need the precision mixed", found=f"precision {precision}")
    if precision == "int4" and (vnni is not None or sensitivity):
        raise InputError("vnni and sensitivity are of INT8", found="precision int4")
    if TARGETS[target].typed and (vnni is not None or sensitivity):
        raise InputError(f"vnni and sensitivity are for the targets of the CPU, not for {target}")


def _make(
    how: _How, file: Path, name: str, samples: Sequence[Sample], work: Path, reporter: Reporter, workers: Workers
) -> _Made:
    """Calibrate, search and place; the files lie in `work`."""
    from vitdeploy.report.html import render_sensitivity
    from vitdeploy.stages.calibrate import calibrate
    from vitdeploy.stages.place import PlaceConfig, place_graph
    from vitdeploy.stages.search import (
        HighPrecisionConfig,
        SearchConfig,
        find_high_precision,
        find_mixed,
        find_sensitivity,
        measures,
        read_sensitivity,
    )
    from vitdeploy.stages.typed import EIGHT_BITS, place_typed

    mixed, costs, high, statistics = None, None, None, work / "statistics.npz"
    calibrated: dict[str, Any] = {"images": len(samples), "memory": None, "warnings": []}
    if not how.typed or how.precision in EIGHT_BITS:
        calibrated = calibrate(file, samples, work, reporter.progress, workers=workers)
    search = SearchConfig(how.target, how.ignore, how.bits)
    if how.precision == "mixed":
        mixed = find_mixed(search, how.budget, file, statistics, samples, work, reporter.progress, how.latency_table)
        costs = read_sensitivity(work)
    elif how.sensitivity:
        costs = find_sensitivity(search, file, statistics, samples, work, reporter.progress)
    if measures(how.target, how.precision, how.high_precision):
        high = find_high_precision(
            HighPrecisionConfig(how.target, how.high_precision, 1, how.ignore, how.bits),
            *(file, statistics, samples, work, reporter.progress),
        )
    if costs is not None:
        (work / "sensitivity.html").write_text(render_sensitivity(costs, name), encoding="utf-8")
    config = PlaceConfig(how.target, how.precision, how.ignore, how.bits)
    if how.typed:
        placed = place_typed(config, file, statistics, samples, work, reporter.progress)
    else:
        placed = place_graph(config, file, statistics, work, mixed, high.raised if high else None)
    if statistics.exists():
        statistics.unlink()
        (work / "calibrate.json").unlink()
        (work / "ranges.json").rename(work / "calibration.json")
    return _Made(placed, calibrated, costs, mixed, high)


def _check_search(task: str, sensitivity: bool) -> None:
    from vitdeploy.runtime.flows import FLOWS

    if sensitivity and task in FLOWS:
        raise CapabilityError(
            "what each layer costs is not measured of a model of several graphs",
            found=f"sensitivity, for the task {task}",
            fix="leave sensitivity out; ignore and float_parts leave layers or graphs in float",
        )


def _make_parts(how: _How, folder: Path, drive: Drive, work: Path, reporter: Reporter) -> _Made:
    """Calibrate all graphs of a model at once, and place each; the files lie in `work`."""
    from vitdeploy.stages.calibrate import calibrate_parts
    from vitdeploy.stages.place import PlaceConfig, place_graphs
    from vitdeploy.stages.step import graphs_in, statistics_file

    graphs = graphs_in(folder)
    calibrated = calibrate_parts(graphs, drive, work, reporter.progress)
    config = PlaceConfig(how.target, how.precision, how.ignore, how.bits, how.float_parts)
    placed = place_graphs(config, folder, work, work)
    for name in graphs:
        (work / statistics_file(name)).unlink()
    (work / "calibrate.json").unlink()
    (work / "ranges.json").rename(work / "calibration.json")
    return _Made(placed, calibrated, None, None)


def _result(home: Path, how: _How, made: _Made, skipped: Sequence[str]) -> QuantizedGraph:
    from vitdeploy.runtime.host import describe_host
    from vitdeploy.runtime.values import saturation_warning

    saturation = None if how.typed or how.precision == "int4" else saturation_warning(how.bits, describe_host()["isa"])
    warnings = (*made.calibrated["warnings"], *([saturation] if saturation else []))
    document: dict[str, Any] = {
        "target": how.target,
        "precision": how.precision,
        "int8": [*made.placed["int8"], *made.placed.get("dynamic", ())],
        "float": made.placed["float"],
        "calibration_images": made.calibrated["images"],
        "memory": made.calibrated["memory"],
        "weight_bits": how.bits,
        "warnings": list(warnings),
        "skipped": list(skipped),
        "path": str(home / "model.onnx") if (home / "model.onnx").is_file() else str(home),
    }
    if how.typed:
        document["half"] = made.placed["half"]
    if made.placed.get("dynamic"):
        document["dynamic"] = list(made.placed["dynamic"])
    if how.precision == "int4":
        document |= {key: made.placed[key] for key in ("int4", "group", "embeddings")}
    for name, found in (("sensitivity", made.costs), ("mixed", made.mixed), ("high_precision", made.high)):
        if found is not None:
            document[name] = encode(found)
    return QuantizedGraph(
        home,
        document,
        tuple(_lines(how, made, warnings, skipped)),
        int8=(*made.placed["int8"], *made.placed.get("dynamic", ())),
        float=made.placed["float"],
        calibration_images=made.calibrated["images"],
        warnings=warnings,
        sensitivity=made.costs,
        mixed=made.mixed,
        dynamic=tuple(made.placed.get("dynamic", ())),
        high_precision=made.high,
        int4=tuple(made.placed.get("int4", ())),
    )


def _lines(how: _How, made: _Made, warnings: Sequence[str], skipped: Sequence[str]) -> list[str]:
    placed, images_used = made.placed, f"{made.calibrated['images']} calibration images"
    dynamic, kind = placed.get("dynamic", {}), "FP8" if how.precision == "fp8" else "INT8"
    counts = f"{len(placed['int8']) + len(dynamic)} layers in {kind} for {how.target}"
    if how.precision == "int4":
        sizes = " or ".join(str(size) for size in sorted(set(placed["group"].values())))
        groups = f", a scale for {sizes} inputs" if sizes else ""
        tables = f"; embeddings in INT8: {', '.join(placed['embeddings'])}" if placed["embeddings"] else ""
        counts = f"{len(placed['int4'])} layers with INT4 weights{groups}, for {how.target}{tables}"
    lines = [f"{counts}, {len(placed['float'])} in float, {images_used}"]
    if how.typed:
        lines = [*([counts] if placed["int8"] else []), *_half_lines(placed["half"]), images_used]
    if how.bits < 8 and how.precision != "int4":
        lines.append(f"weights of {how.bits} bits, for CPUs without VNNI")
    lines += [f"  activations quantized at run time: {name} ({reason})" for name, reason in dynamic.items()]
    lines += [f"  float: {name} ({reason})" for name, reason in placed["float"].items()]
    lines += [f"layers out of plain INT8: {made.high.why}"] if made.high is not None else []
    lines += _cost_lines(made.costs) if made.costs is not None else []
    lines += _override_lines(made.mixed) if made.mixed is not None else []
    lines += [f"warning: {text}" for text in warnings]
    if skipped:
        lines.append(f"skipped {len(skipped)} unreadable images: {', '.join(skipped[:3])}")
    return lines


def _half_lines(found: dict[str, Any]) -> list[str]:
    """Lines on what is in half precision, and what is not."""
    total, left = sum(found["macs"].values()), found["macs"]["float32"]
    reasons = Counter(found["float32"].values())
    lines = [f"{found['type']} typed in the graph, {100 * left / max(total, 1):.1f} % of the products in float32"]
    if found["residual_exponent"]:
        lines.append(f"the residual stream is scaled by 2^-{found['residual_exponent']}, which is exact")
    lines += [f"  float32: {count} operations ({reason})" for reason, count in reasons.most_common(LISTED_LAYERS)]
    for name, share in list(found["underflow"].items())[:1]:
        count = len(found["underflow"])
        lines.append(f"underflow: {count} tensors lose over 1 % of their numbers to zero, most {name} ({share:.0%})")
    return lines


def _cost_lines(found: Sensitivity) -> list[str]:
    """The layers that cost most."""
    worst = found.layers[:LISTED_LAYERS]
    width = max((len(each.cost.name) for each in worst), default=0)
    lines = [f"all in INT8: {found.distance:.3g} ({found.unit}) from the float graph, on {found.images} images"]
    for each in worst:
        reads = f"reads {each.low:.3g} to {each.high:.3g}, half of its channels within {each.median:.3g}"
        lines.append(f"  {each.cost.name:<{width}}  {100 * each.cost.share:5.1f} %  {reads}")
    return lines


def _override_lines(found: Mixed) -> list[str]:
    """The precision overrides, and where they led."""
    lines = [f"{len(found.taken)} precision overrides; INT8 saves {found.saved_us:.0f} us in all layers"]
    lines += [f"  {each.override}: {each.override.price_us:+.1f} us" for each in found.taken]
    for name, reached in (("int8", found.int8), ("mixed", found.reached)):
        expected = reached.expected
        words = f", expected agreement {expected.agreement:.2f} %" if expected is not None else ""
        lines.append(f"  {name}: distance {reached.distance:.3g}{words}")
    if found.met is False:
        lines.append("no further override helps: the wanted agreement is not expected to be met")
    return lines
