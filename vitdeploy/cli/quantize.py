"""`vitdeploy quantize GRAPH --data DIR --target T -o DIR`: the graph of one target, in 8 bits or half precision."""

from __future__ import annotations

from vitdeploy.api.options import Described, Quantize
from vitdeploy.cli.options import Console, call, command_line, command_of, with_images


@command_of(Quantize, (Described, "image_size"), waits=True)
def command(console: Console, options: Quantize, described: Described) -> None:
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
    made = call("quantize", with_images(options, described))
    then = command_line("vitdeploy", "compile", options.folder, "--target", options.target, "-o", "DIR")
    console.finish(dict(made.document), made.text, options.folder, then)
