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

    GRAPH is a folder made by `vitdeploy export`, its model.onnx, or any .onnx file of a float model of images: what of
    such a file is not said in it, as mean and std, is assumed, and printed. A recipe can say it: `vitdeploy export`.
    """
    import tempfile

    from vitdeploy.pipeline.stages.files import MODEL_FILE, OUTPUT_NAMES, copy_labels, is_ours
    from vitdeploy.pipeline.stages.foreign import import_foreign
    from vitdeploy.pipeline.stages.quantize import PlaceConfig, calibrate, check_precision, place_graph
    from vitdeploy.pipeline.subjects import find_graph, graph_metadata
    from vitdeploy.pipeline.tasks.images import calibration_images
    from vitdeploy.store.publish import replacing

    check_precision(target, "int8")
    given = file = find_graph(graph)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder, console:
        if not is_ours(given):
            file, notes = import_foreign(given, Path(folder), console.progress)
            for note in notes:
                console.note(note)
        metadata = graph_metadata(file)
        with replacing(output, OUTPUT_NAMES) as work:
            samples, skipped = calibration_images(
                data, num_samples, seed, metadata.images, skip_bad=skip_bad, progress=console.progress
            )
            calibrated = calibrate(file, samples, work, console.progress)
            placed = place_graph(PlaceConfig(target, "int8", ignore), file, work / "statistics.npz", work)
            (work / "statistics.npz").unlink()
            (work / "calibrate.json").unlink()
            (work / "ranges.json").rename(work / "calibration.json")
            copy_labels(given.parent, work)
    lines = [
        f"{len(placed['int8'])} layers in INT8 for {target}, {len(placed['float'])} in float, "
        f"{calibrated['images']} calibration images"
    ]
    lines += [f"  float: {name} ({reason})" for name, reason in placed["float"].items()]
    lines += [f"warning: {text}" for text in calibrated["warnings"]]
    if skipped:
        lines.append(f"skipped {len(skipped)} unreadable images: {', '.join(skipped[:3])}")
    document = {
        "target": target,
        "int8": list(placed["int8"]),
        "float": placed["float"],
        "calibration_images": calibrated["images"],
        "memory": calibrated["memory"],
        "warnings": calibrated["warnings"],
        "skipped": list(skipped),
        "path": str(output / MODEL_FILE),
    }
    console.finish(document, lines, output, f"vitdeploy compile {output} --target {target} -o DIR")
