"""`vitdeploy quantize GRAPH --data DIR --target T -o DIR`: the graph of one target, in 8 bits or half precision."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.console import Console, Number, command_line, output_options
from vitdeploy.cli.sources import ImageSize

if TYPE_CHECKING:
    from vitdeploy.search.overrides import Mixed
    from vitdeploy.search.sensitivity import Sensitivity

LISTED_LAYERS = 8


@click.command("quantize")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Calibration images.")
@click.option(
    "--target",
    shell_complete=complete_targets,
    required=True,
    help="As `vitdeploy doctor` lists them: openvino-cpu, tensorrt ...",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for model.onnx.")
@click.option(
    "--precision",
    type=click.Choice(["int8", "mixed", "fp16", "bf16", "fp8"]),
    default="int8",
    show_default=True,
    help="mixed leaves in float what costs more answers than it saves time; the last three are for NVIDIA GPUs.",
)
@click.option("--num-samples", type=click.IntRange(min=1), default=128, show_default=True, help="Calibration images.")
@click.option("--vnni/--no-vnni", default=None, help="Whether the device's CPU has VNNI. Default: as this machine's.")
@click.option("--ignore", multiple=True, metavar="LAYER", help="Leave this layer (or pattern with *) in float.")
@click.option("--sensitivity", is_flag=True, help="Say what each layer costs: sensitivity.json and .html.")
@click.option(
    "--min-agreement", type=Number(min=0, max=100), help="For mixed: percent of the answers that are to stay."
)
@click.option(
    "--latency-table",
    type=click.Path(path_type=Path),
    help="For mixed: the latency.json of an earlier call on this device. Default: measured.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Choice of the images.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@click.option("--image-size", type=ImageSize(), help="Where a bare .onnx file leaves it open: 384, or 256x320 (HxW).")
@output_options
def command(
    console: Console,
    graph: Path,
    data: Path,
    target: str,
    output: Path,
    precision: str,
    num_samples: int,
    vnni: bool | None,
    ignore: tuple[str, ...],
    sensitivity: bool,
    min_agreement: float | None,
    latency_table: Path | None,
    seed: int,
    skip_bad: bool,
    image_size: tuple[int, int] | None,
) -> None:
    """Convert a float graph to INT8, FP8 or half precision for one target, with calibration images.

    GRAPH is a folder made by `vitdeploy export`, its model.onnx, or any .onnx file of a float image model. What such a
    file does not contain, such as mean and std, is assumed and printed; `vitdeploy export` takes it from a recipe.

    --precision mixed gives single layers a precision override, the cheapest first by measured time, until
    --min-agreement is expected to be met; without it, as long as an override pays. --sensitivity names the layers that
    cost most accuracy.

    For NVIDIA GPUs the types are written into the graph: int8, fp8 and fp16. A pass over the images finds what must
    stay in float32, and the result is evaluated on the images with these types.
    """
    import tempfile

    from vitdeploy.pipeline.available import check_placed, require_runtime
    from vitdeploy.pipeline.early import check_data
    from vitdeploy.publish import check_replaceable, replacing
    from vitdeploy.spec import TARGETS, Budget
    from vitdeploy.stages.files import MODEL_FILE, OUTPUT_NAMES, copy_labels, find_graph, is_ours

    if precision != "mixed" and (min_agreement is not None or latency_table is not None):
        raise click.UsageError("--min-agreement and --latency-table need --precision mixed.")
    check_placed(target, precision)
    typed = TARGETS[target].typed
    if typed and (vnni is not None or sensitivity):
        raise click.UsageError(f"--vnni and --sensitivity are for the targets of the CPU, not for {target}.")
    if precision == "mixed":
        require_runtime(target)
    given = file = find_graph(graph)
    check_data(data)
    check_replaceable(output, OUTPUT_NAMES)

    from vitdeploy.pipeline.job import weight_bits
    from vitdeploy.report.html import render_sensitivity
    from vitdeploy.runtime.host import describe_host
    from vitdeploy.runtime.weight_bits import saturation_warning
    from vitdeploy.stages.calibrate import calibrate
    from vitdeploy.stages.compile import check_task
    from vitdeploy.stages.external import import_external
    from vitdeploy.stages.place import PlaceConfig, place_graph
    from vitdeploy.stages.search import (
        SENSITIVITY_PAGE,
        SearchConfig,
        find_mixed,
        find_sensitivity,
        read_sensitivity,
    )
    from vitdeploy.stages.typed import EIGHT_BITS, place_typed
    from vitdeploy.tasks.images import calibration_images
    from vitdeploy.workflows.subjects import graph_metadata

    mixed, costs, bits = None, None, 8 if typed else weight_bits(vnni)
    if image_size is not None and is_ours(given):
        raise click.UsageError(f"{given} has its image size already; leave out --image-size")
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder, console:
        if not is_ours(given):
            file, notes = import_external(given, Path(folder), console.progress, image_size)
            for note in notes:
                console.note(note)
        metadata = graph_metadata(file)
        check_task(metadata.task, target, precision)
        with replacing(output, OUTPUT_NAMES) as work:
            samples, skipped = calibration_images(
                data, num_samples, seed, metadata.images, skip_bad=skip_bad, progress=console.progress
            )
            calibrated: dict[str, Any] = {"images": len(samples), "memory": None, "warnings": []}
            if not typed or precision in EIGHT_BITS:
                calibrated = calibrate(file, samples, work, console.progress)
            statistics, search = work / "statistics.npz", SearchConfig(target, ignore, bits)
            if precision == "mixed":
                budget = Budget(min_agreement=min_agreement)
                mixed = find_mixed(search, budget, file, statistics, samples, work, console.progress, latency_table)
                costs = read_sensitivity(work)
            elif sensitivity:
                costs = find_sensitivity(search, file, statistics, samples, work, console.progress)
            if costs is not None:
                page = render_sensitivity(_encoded(costs), metadata.name)
                (work / SENSITIVITY_PAGE).write_text(page, encoding="utf-8")
            config = PlaceConfig(target, precision, ignore, bits)  # type: ignore[arg-type]
            if typed:
                placed = place_typed(config, file, statistics, samples, work, console.progress)
            else:
                placed = place_graph(config, file, statistics, work, mixed)
            if statistics.exists():
                statistics.unlink()
                (work / "calibrate.json").unlink()
                (work / "ranges.json").rename(work / "calibration.json")
            copy_labels(given.parent, work)
    images = f"{calibrated['images']} calibration images"
    counts = f"{len(placed['int8'])} layers in {'FP8' if precision == 'fp8' else 'INT8'} for {target}"
    lines = [f"{counts}, {len(placed['float'])} in float, {images}"]
    if typed:
        lines = [*([counts] if placed["int8"] else []), *_half_lines(placed["half"]), images]
    if bits < 8:
        lines.append(f"weights of {bits} bits, for CPUs without VNNI")
    saturation = None if typed else saturation_warning(bits, describe_host()["isa"])
    warnings = [*calibrated["warnings"], *([saturation] if saturation else [])]
    lines += [f"  float: {name} ({reason})" for name, reason in placed["float"].items()]
    lines += _cost_lines(costs) if costs is not None else []
    lines += _override_lines(mixed) if mixed is not None else []
    lines += [f"warning: {text}" for text in warnings]
    if skipped:
        lines.append(f"skipped {len(skipped)} unreadable images: {', '.join(skipped[:3])}")
    document: dict[str, Any] = {
        "target": target,
        "precision": precision,
        "int8": list(placed["int8"]),
        "float": placed["float"],
        "calibration_images": calibrated["images"],
        "memory": calibrated["memory"],
        "weight_bits": bits,
        "warnings": warnings,
        "skipped": list(skipped),
        "path": str(output / MODEL_FILE),
    }
    if typed:
        document["half"] = placed["half"]
    for name, found in (("sensitivity", costs), ("mixed", mixed)):
        if found is not None:
            document[name] = _encoded(found)
    then = command_line("vitdeploy", "compile", output, "--target", target, "-o", "DIR")
    console.finish(document, lines, output, then)


def _encoded(found: Sensitivity | Mixed) -> Any:
    from vitdeploy.spec import encode

    return encode(found)


def _half_lines(found: dict[str, Any]) -> list[str]:
    """What is in half precision, and what is not."""
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
