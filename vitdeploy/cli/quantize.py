"""`vitdeploy quantize DIR_OR_ONNX --data DIR --target T -o DIR`: INT8 for one target."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.console import Console, output_options


@click.command("quantize")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Calibration images.")
@click.option("--target", required=True, help="onnxruntime-cpu or openvino-cpu.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for model.onnx.")
@click.option("--num-samples", type=click.IntRange(min=1), default=128, show_default=True, help="Calibration images.")
@click.option("--ignore", multiple=True, metavar="LAYER", help="Leave this layer (or pattern with *) in float.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Choice of the images.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@output_options
def command(
    console: Console,
    graph: Path,
    data: Path,
    target: str,
    output: Path,
    num_samples: int,
    ignore: tuple[str, ...],
    seed: int,
    skip_bad: bool,
) -> None:
    """A float graph to INT8 for one target, with calibration images.

    GRAPH is a folder made by `vitdeploy export`, or its model.onnx.
    """
    from vitdeploy.pipeline.stages.files import MODEL_FILE, OUTPUT_NAMES, copy_labels
    from vitdeploy.pipeline.stages.quantize import PlaceConfig, calibrate, check_precision, place_graph
    from vitdeploy.pipeline.subjects import find_graph, graph_metadata
    from vitdeploy.pipeline.tasks.images import calibration_images
    from vitdeploy.store.publish import replacing

    check_precision(target, "int8")
    file = find_graph(graph)
    metadata = graph_metadata(file)
    with console, replacing(output, OUTPUT_NAMES) as work:
        samples, skipped = calibration_images(
            data, num_samples, seed, metadata.images, skip_bad=skip_bad, progress=console.progress
        )
        calibrate(file, samples, work, console.progress)
        placed = place_graph(PlaceConfig(target, "int8", ignore), file, work / "statistics.npz", work)
        (work / "statistics.npz").unlink()
        (work / "ranges.json").rename(work / "calibration.json")
        copy_labels(file.parent, work)
    lines = [
        f"{len(placed['int8'])} layers in INT8 for {target}, {len(placed['float'])} in float, "
        f"{len(samples)} calibration images"
    ]
    lines += [f"  float: {name} ({reason})" for name, reason in placed["float"].items()]
    if skipped:
        lines.append(f"skipped {len(skipped)} unreadable images: {', '.join(skipped[:3])}")
    document = {
        "target": target,
        "int8": list(placed["int8"]),
        "float": placed["float"],
        "calibration_images": len(samples),
        "skipped": list(skipped),
        "path": str(output / MODEL_FILE),
    }
    console.finish(document, lines, output, f"vitdeploy compile {output} --target {target} -o DIR")
