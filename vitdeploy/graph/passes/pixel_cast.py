"""The Cast of pixels in front of what moves them: TensorRT takes uint8 as an input that a Cast reads at once.

Exports move pixels from NHWC to NCHW as uint8, which is the smaller copy; other targets keep that.
"""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.analysis.layout import MOVES, climb
from vitdeploy.graph.edit import Editor, bypass
from vitdeploy.graph.values import only_user


def cast_pixels_first(model: ir.Model) -> int:
    """input (uint8) -> moves -> Cast becomes input -> Cast -> moves, in place and exact; returns how often.

    Left alone: where something else reads what lies between.
    """
    editor, count = Editor(model), 0
    for cast in [node for node in model.graph if node.op_type == "Cast" and not node.domain]:
        value = cast.inputs[0]
        if value is None:
            continue
        source, way = climb(value, MOVES)
        pixels = source.is_graph_input() and source.dtype == ir.DataType.UINT8
        if not way or not pixels or any(only_user(node.outputs[0]) is None for node in way):
            continue
        dtype = ir.DataType(cast.attributes.get_int("to"))
        name = str(source.name)
        [floats] = editor.node(way[-1], "Cast", [source], name, source.shape, to=dtype)
        way[-1].replace_input_with(0, floats)
        for output in (floats, *(node.outputs[0] for node in way)):
            output.type = ir.TensorType(dtype)
        floats_moved = str(cast.outputs[0].name)
        bypass(cast, value)
        value.name = floats_moved  # what was observed of the tensor is known by its name
        count += 1
    return count
