"""`vitdeploy quantize GRAPH --data DIR --target T -o DIR`: the graph of one target, in 8 bits or half precision."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.options import (
    Console,
    ImageSize,
    Number,
    command_line,
    label_options,
    output_options,
    text_options,
    wait_option,
    worker_options,
)


@click.command("quantize")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option(
    "--data", required=True, type=click.Path(path_type=Path), help="Calibration images, or an .npz of tokens."
)
@click.option(
    "--target",
    shell_complete=complete_targets,
    required=True,
    help="As `vitdeploy doctor` lists them: openvino-cpu, tensorrt ...",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for model.onnx.")
@click.option(
    "--precision",
    type=click.Choice(["int8", "mixed", "int4", "fp16", "bf16", "fp8"]),
    default="int8",
    show_default=True,
    help="mixed leaves in float what costs more answers than it saves time; int4 is of weights alone; the last three "
    "are for NVIDIA GPUs.",
)
@click.option("--num-samples", type=click.IntRange(min=1), default=128, show_default=True, help="Calibration images.")
@click.option("--vnni/--no-vnni", default=None, help="Whether the device's CPU has VNNI. Default: as this machine's.")
@click.option("--ignore", multiple=True, metavar="LAYER", help="Leave this layer (or pattern with *) in float.")
@click.option("--float-part", multiple=True, metavar="GRAPH", help="Leave this graph of a model of several in float.")
@click.option(
    "--high-precision",
    type=click.FloatRange(0, 100),
    default=5.0,
    show_default=True,
    metavar="PERCENT",
    help="What layers out of plain INT8 may add to the latency, measured here; 0: none.",
)
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
@label_options
@text_options
@click.option("--image-size", type=ImageSize(), help="Where a bare .onnx file leaves it open: 384, or 256x320 (HxW).")
@worker_options
@wait_option
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
    float_part: tuple[str, ...],
    high_precision: float,
    sensitivity: bool,
    min_agreement: float | None,
    latency_table: Path | None,
    seed: int,
    skip_bad: bool,
    labels: str | None,
    annotations: Path | None,
    texts: Path | None,
    template: str | None,
    image_size: tuple[int, int] | None,
    executor: str | None,
    jobs: int | None,
) -> None:
    """Convert a float graph to INT8, INT4 weights, FP8 or half precision for one target, with calibration images.

    GRAPH is a folder made by `vitdeploy export`, its model.onnx, or any .onnx file of a float image model. What such a
    file does not contain, such as mean and std, is assumed and printed; `vitdeploy export` takes it from a recipe.

    --precision mixed gives single layers a precision override, the cheapest first by measured time, until
    --min-agreement is expected to be met; without it, as long as an override pays. --sensitivity names the layers that
    cost most accuracy.

    In plain INT8 for a CPU, layers that cost many answers and little time are left in float, or have their activations
    quantized by the runtime, as far as that adds no more than --high-precision to the latency.

    --precision int4 stores the weights of linears in 4 bits: half of the bytes of INT8, and faster where few rows are
    multiplied, as by the decoder of a text; slower than INT8 where many are.

    Promptable segmentation is calibrated on the prompts of --annotations, and key points on the boxes of its objects;
    all other models on the images alone.

    For NVIDIA GPUs the types are written into the graph: int8, fp8 and fp16. A pass over the images finds what must
    stay in float32, and the result is evaluated on the images with these types.
    """
    if precision != "mixed" and (min_agreement is not None or latency_table is not None):
        raise click.UsageError("--min-agreement and --latency-table need --precision mixed.")
    if precision == "int4" and (vnni is not None or sensitivity):
        raise click.UsageError("--vnni and --sensitivity are of INT8, not of --precision int4.")
    from vitdeploy.backends import TARGETS

    if TARGETS[target].typed and (vnni is not None or sensitivity):
        raise click.UsageError(f"--vnni and --sensitivity are for the targets of the CPU, not for {target}.")
    from vitdeploy.api.images import images
    from vitdeploy.api.quantize import quantize

    made = quantize(
        graph,
        images(data, labels, annotations=annotations, texts=texts, template=template),
        target,
        output,
        precision=precision,  # type: ignore[arg-type]
        num_samples=num_samples,
        vnni=vnni,
        ignore=ignore,
        float_parts=float_part,
        high_precision=high_precision,
        sensitivity=sensitivity,
        min_agreement=min_agreement,
        latency_table=latency_table,
        seed=seed,
        skip_bad=skip_bad,
        image_size=image_size,
        executor=executor,
        jobs=jobs or 0,
        progress=console,
    )
    then = command_line("vitdeploy", "compile", output, "--target", target, "-o", "DIR")
    console.finish(dict(made.document), made.text, output, then)
