"""Quantize a float graph to 8 bits, INT4 weights or half precision for one target."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api import artifacts, calls, values
from vitdeploy.api.images import Images, images
from vitdeploy.api.options import (
    Quantize,
)
from vitdeploy.api.workers import workers_of
from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import MONITOR_FILE
from vitdeploy.data.folder import Sample
from vitdeploy.errors import CapabilityError, InputError
from vitdeploy.extensions import lazy
from vitdeploy.graph.io.files import admitted_metadata, graph_spec, load_graph
from vitdeploy.pipeline import assemble, setting
from vitdeploy.pipeline.job import weight_bits
from vitdeploy.report.html import render_sensitivity
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.inputs import require_image_alone
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.runtime.values import saturation_warning
from vitdeploy.search.costs import costs_for
from vitdeploy.search.precision import HighPrecision, Mixed, Sensitivity
from vitdeploy.spec import Budget, TensorSpec, WeightBits, encode
from vitdeploy.stages import search, step
from vitdeploy.stages.calibrate import calibrate, calibrate_parts
from vitdeploy.stages.compile import check_task
from vitdeploy.stages.place import PlaceConfig, check_float_parts, place_graph, place_graphs
from vitdeploy.stages.typed import EIGHT_BITS, place_typed
from vitdeploy.stages.workers import Workers
from vitdeploy.tasks.adapter import TEMPLATE, Calibration, DataChoice, Drive, ImageAdapter, TaskAdapter
from vitdeploy.tasks.registry import make_adapter

if TYPE_CHECKING:
    from vitdeploy.stages import export
else:
    export = lazy("vitdeploy.stages.export")  # needs PyTorch, which measuring, comparing and sending do not

LISTED_LAYERS = 8


@dataclass(frozen=True, repr=False)
class QuantizedGraph(artifacts.Graph):
    """A graph quantized for one target. `int8` names the layers in 8 bits, `dynamic` those whose activations the
    runtime quantizes, `int4` those with 4-bit weights, `float` those kept in float, with the reason; `warnings` concern
    the `calibration_images`, a count, and this machine. `sensitivity`, `mixed` and `high_precision` are the evidence of
    these options, None without them."""

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
class _Made:
    """Results besides the files. `bits`: bits per weight."""

    bits: WeightBits
    placed: dict[str, Any]
    calibrated: dict[str, Any]
    costs: Sensitivity | None = None
    mixed: Mixed | None = None
    high: HighPrecision | None = None


@calls.takes(Quantize)
def quantize(options: Quantize) -> QuantizedGraph:
    """Convert a float graph to INT8, INT4 weights, FP8 or half precision for one target, with calibration images.

    Raises:
        TargetError, CapabilityError, MissingPackageError: the target is unknown or unusable here. DataError,
            ImageError: the images are unusable. InputError: conflicting arguments. GraphError: the graph is refused.

    >>> import numpy as np
    >>> import vitdeploy as vd
    >>> float_graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> noise = list(np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8))
    >>> int8 = vd.quantize(float_graph, noise, "onnxruntime-cpu", num_samples=None, progress=False)
    >>> int8.metadata.precision
    'int8'
    """
    target, typed = options.target, TARGETS[options.target].typed
    given, chosen = artifacts.graph_file(options.graph), images(options.data)
    home, reporter = values.home_of(options.folder, "quantized", step.OUTPUT_NAMES), values.reporting(options.progress)
    if options.image_size is not None and step.is_ours(given):
        raise InputError(
            f"{given} already has a fixed image size",
            found="an image size",
            expected="an .onnx file with an open size",
            fix="leave the image size out",
        )
    bits = 8 if typed else weight_bits(options.vnni)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as scratch, reporter:
        file = given
        if not step.is_ours(given):
            file, notes = export.import_external(given, Path(scratch), reporter.progress, options.image_size)
            for note in notes:
                reporter.note(note)
        metadata = admitted_metadata(file)
        check_task(metadata.task, target, options.precision)
        check_float_parts(metadata.task, options.float_parts)
        _check_search(metadata.task, options.sensitivity)
        adapter = make_adapter(setting.graph_setting(file, metadata, graph_spec(load_graph(file), file.name)))
        _require_shown(options, metadata.name, adapter.setting.inputs)
        choice = _choice(chosen, adapter, options, reporter)
        with values.filling(home, step.OUTPUT_NAMES) as work:
            found = adapter.calibration(choice, skip_bad=options.skip_bad, progress=reporter.progress)
            drive = adapter.drive(found)
            if drive is None or flow_of(metadata.task) is None:
                workers = workers_of(options.executor, options.jobs)  # makes a store: only after the checks
                made = _make(options, bits, file, metadata.name, found, drive, work, reporter, workers)
            else:
                made = _make_parts(options, bits, file.parent, drive, work, reporter)
            _write_beside(given.parent, found.samples, adapter, work)
    return _result(home, options, made, found.skipped)


def _write_beside(folder: Path, samples: Sequence[Sample], adapter: TaskAdapter, work: Path) -> None:
    """Write the files that belong to the graph in `folder`, and the statistics of the calibration images for the later
    bundle (`runtime.monitor_reference`)."""
    step.copy_labels(folder, work)
    if (
        isinstance(adapter, ImageAdapter)
        and not adapter.setting.inputs
        and (text := assemble.monitor_of_images(samples, adapter.setting.images)) is not None
    ):
        (work / MONITOR_FILE).write_text(text, encoding="utf-8")


def _choice(chosen: Images, adapter: TaskAdapter, options: Quantize, reporter: values.Reporter) -> DataChoice:
    """The calibration images, with annotations if the model is calibrated on these too."""
    place, labels = chosen.place(adapter.setting)
    annotations = chosen.annotations
    if annotations is not None and adapter.calibrated_on is None:
        reporter.note(f"annotations ignored: calibration for {adapter.setting.task} uses only images")
        annotations = None
    if annotations is not None and chosen.kind is None and adapter.calibrated_on is not None:
        labels = adapter.calibrated_on
    more = chosen.texts, chosen.template or TEMPLATE, chosen.inputs
    return DataChoice(place, labels, annotations, options.num_samples or 0, "all", options.seed, *more)


def _make(
    options: Quantize,
    bits: WeightBits,
    file: Path,
    name: str,
    found: Calibration,
    drive: Drive | None,
    work: Path,
    reporter: values.Reporter,
    workers: Workers,
) -> _Made:
    """Calibrate, search and place into the folder `work`. `drive`: runs a graph that takes more than images."""
    samples = found.samples
    target, precision, ignore = options.target, options.precision, tuple(options.ignore)
    typed = TARGETS[target].typed
    mixed, costs, high, statistics = None, None, None, work / "statistics.npz"
    calibrated: dict[str, Any] = {"images": len(samples), "memory": None, "warnings": []}
    if drive is not None and (not typed or precision in EIGHT_BITS):
        calibrated = calibrate_parts({"model": file}, drive, work, reporter.progress)
    elif not typed or precision in EIGHT_BITS:
        calibrated = calibrate(file, samples, work, reporter.progress, workers=workers)
    plain, given = PlaceConfig(target, "int8", ignore, bits), search.CalibratedGraph(file, statistics, samples)
    into = work, reporter.progress
    if precision == "mixed":
        budget = Budget(min_agreement=options.min_agreement)
        mixed = search.find_mixed(plain, budget, given, costs_for(target), *into)
        costs = search.SENSITIVITY_SEARCH.read(work)
    elif options.sensitivity:
        costs = search.find_sensitivity(plain, given, *into)
    here = weight_bits(options.vnni) == weight_bits(None) and drive is None  # where it is measured
    allowed = options.high_precision if here else 0.0
    if search.raises_precision(target, precision, None, allowed):
        high = search.find_high_precision(plain, allowed, 1, given, costs_for(target), *into)
    if costs is not None:
        (work / "sensitivity.html").write_text(render_sensitivity(costs, name), encoding="utf-8")
    config = PlaceConfig(target, precision, ignore, bits)
    if typed:
        placed = place_typed(config, file, statistics, samples, *into, found.inputs)
    else:
        asked = [each for chosen in (mixed, high) if chosen is not None for each in chosen.precisions]
        placed = place_graph(config, file, statistics, work, asked)
    if statistics.exists():
        statistics.unlink()
        (work / "calibrate.json").unlink()
        (work / "ranges.json").rename(work / "calibration.json")
    return _Made(bits, placed, calibrated, costs, mixed, high)


def _check_search(task: str, sensitivity: bool) -> None:
    if sensitivity and flow_of(task):
        raise CapabilityError(
            "sensitivity is not available for a model of several graphs",
            found=f"the task {task}",
            expected="a model of one graph",
            fix="leave sensitivity out; ignore and float_parts keep layers or graphs in float",
        )


def _require_shown(options: Quantize, name: str, further: Sequence[TensorSpec]) -> None:
    """Raise CapabilityError for an option that runs the graph on images but cannot supply its further inputs."""
    requested = {
        f"precision {options.precision}": options.precision == "mixed"
        or (TARGETS[options.target].typed and options.precision == "int8"),
        "sensitivity": options.sensitivity,
    }
    for what, expected in requested.items():
        if expected:
            require_image_alone(name, further, what)


def _make_parts(
    options: Quantize, bits: WeightBits, folder: Path, drive: Drive, work: Path, reporter: values.Reporter
) -> _Made:
    """Calibrate all graphs of a model at once, and place each into the folder `work`."""
    graphs = step.graphs_in(folder)
    calibrated = calibrate_parts(graphs, drive, work, reporter.progress)
    ignore, in_float = tuple(options.ignore), tuple(options.float_parts)
    placed = place_graphs(PlaceConfig(options.target, options.precision, ignore, bits, in_float), folder, work, work)
    for name in graphs:
        (work / step.statistics_file(name)).unlink()
    (work / "calibrate.json").unlink()
    (work / "ranges.json").rename(work / "calibration.json")
    return _Made(bits, placed, calibrated)


def _result(home: Path, options: Quantize, made: _Made, skipped: Sequence[str]) -> QuantizedGraph:

    typed = TARGETS[options.target].typed
    saturation = None if typed or options.precision == "int4" else saturation_warning(made.bits, describe_host()["isa"])
    warnings = (*made.calibrated["warnings"], *([saturation] if saturation else []))
    document: dict[str, Any] = {
        "target": options.target,
        "precision": options.precision,
        "int8": [*made.placed["int8"], *made.placed.get("dynamic", ())],
        "float": made.placed["float"],
        "calibration_images": made.calibrated["images"],
        "memory": made.calibrated["memory"],
        "weight_bits": made.bits,
        "warnings": list(warnings),
        "skipped": list(skipped),
        "path": str(home / "model.onnx") if (home / "model.onnx").is_file() else str(home),
    }
    if typed:
        document["half"] = made.placed["half"]
    if made.placed.get("dynamic"):
        document["dynamic"] = list(made.placed["dynamic"])
    if options.precision == "int4":
        document |= {key: made.placed[key] for key in ("int4", "group", "embeddings")}
    for name, found in (("sensitivity", made.costs), ("mixed", made.mixed), ("high_precision", made.high)):
        if found is not None:
            document[name] = encode(found)
    return QuantizedGraph(
        home,
        document,
        tuple(_lines(options, made, warnings, skipped)),
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


def _lines(options: Quantize, made: _Made, warnings: Sequence[str], skipped: Sequence[str]) -> list[str]:
    typed, placed, images_used = (
        TARGETS[options.target].typed,
        made.placed,
        f"{made.calibrated['images']} calibration images",
    )
    dynamic, kind = placed.get("dynamic", {}), "FP8" if options.precision == "fp8" else "INT8"
    counts = f"{len(placed['int8']) + len(dynamic)} layers in {kind} for {options.target}"
    if options.precision == "int4":
        sizes = " or ".join(str(size) for size in sorted(set(placed["group"].values())))
        groups = f", one scale per {sizes} inputs" if sizes else ""
        tables = f"; embeddings in INT8: {', '.join(placed['embeddings'])}" if placed["embeddings"] else ""
        counts = f"{len(placed['int4'])} layers with INT4 weights{groups}, for {options.target}{tables}"
    lines = [f"{counts}, {len(placed['float'])} in float, {images_used}"]
    if typed:
        lines = [*([counts] if placed["int8"] else []), *_half_lines(placed["half"]), images_used]
    if made.bits < 8 and options.precision != "int4":
        lines.append(f"weights have {made.bits} bits, for CPUs without VNNI")
    lines += [f"  activations quantized at run time: {name} ({reason})" for name, reason in dynamic.items()]
    lines += [f"  float: {name} ({reason})" for name, reason in placed["float"].items()]
    lines += [f"layers in higher precision: {made.high.why}"] if made.high is not None else []
    lines += _cost_lines(made.costs) if made.costs is not None else []
    lines += _override_lines(made.mixed) if made.mixed is not None else []
    lines += [f"warning: {text}" for text in warnings]
    if skipped:
        names = f"{', '.join(skipped[:3])}{', ...' if len(skipped) > 3 else ''}"
        lines.append(f"skipped {len(skipped)} unreadable image{'' if len(skipped) == 1 else 's'}: {names}")
    return lines


def _half_lines(found: dict[str, Any]) -> list[str]:
    """Lines on the operations in half precision and in float32."""
    total, left = sum(found["macs"].values()), found["macs"]["float32"]
    reasons = Counter(found["float32"].values())
    lines = [f"{found['type']} typed in the graph, {100 * left / max(total, 1):.1f} % of the MACs in float32"]
    if found["residual_exponent"]:
        lines.append(f"residual stream scaled by 2^-{found['residual_exponent']} (exact)")
    lines += [f"  float32: {count} operations ({reason})" for reason, count in reasons.most_common(LISTED_LAYERS)]
    for name, share in list(found["underflow"].items())[:1]:
        count = len(found["underflow"])
        lines.append(
            f"underflow: more than 1 % of the values become zero in {count} tensor{'' if count == 1 else 's'}, "
            f"most in {name} ({share:.0%})"
        )
    return lines


def _cost_lines(found: Sensitivity) -> list[str]:
    """The layers with the highest accuracy cost."""
    worst = found.layers[:LISTED_LAYERS]
    width = max((len(each.cost.name) for each in worst), default=0)
    lines = [f"all in INT8: {found.distance:.3g} ({found.unit}) from the float graph, on {found.images} images"]
    if found.impassable:
        lines.append(f"layers measured one by one: those before {', '.join(found.impassable)}")
    for each in worst:
        reads = f"input {each.low:.3g} to {each.high:.3g}, half of its channels within {each.median:.3g}"
        lines.append(f"  {each.cost.name:<{width}}  {100 * each.cost.share:5.1f} %  {reads}")
    return lines


def _override_lines(found: Mixed) -> list[str]:
    """The precision overrides and their result."""
    lines = [f"{len(found.taken)} precision overrides; INT8 saves {found.saved_us:.0f} us in all layers"]
    lines += [f"  {each.override}: {each.override.price_us:+.1f} us" for each in found.taken]
    for name, reached in (("int8", found.int8), ("mixed", found.reached)):
        expected = reached.expected
        words = f", expected agreement {expected.agreement:.2f} %" if expected is not None else ""
        lines.append(f"  {name}: distance {reached.distance:.3g}{words}")
    if found.met is False:
        lines.append("no further override helps: the expected agreement stays below the requested minimum")
    return lines
