"""`vitdeploy optimize DIR_OR_ONNX -o DIR`: rewrites of a float graph, exact unless tokens are merged."""

from __future__ import annotations

from vitdeploy.api.options import Optimize
from vitdeploy.cli.options import Console, call, command_line, command_of


@command_of(Optimize)
def command(console: Console, options: Optimize) -> None:
    """Apply exact rewrites to a float graph and compare the result with the graph before.

    GRAPH is a folder made by `vitdeploy export`, or an .onnx file of any exporter. The graph is first brought into
    canonical form (LayerNorm and GELU as single nodes, linears as MatMul and Add, shapes as constants). --merge-tokens
    applies after the comparison.
    """
    made = call("optimize", options)
    then = command_line(
        *("vitdeploy", "quantize", options.folder, "--data", "DIR", "--target", "openvino-cpu", "-o", "DIR")
    )
    console.finish(dict(made.document), made.text, options.folder, then)
