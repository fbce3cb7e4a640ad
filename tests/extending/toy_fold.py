"""A fold before INT8: powers of two between two linears with a Relu between them bring channels closer together.

    relu(x W + b) V = relu(x (W / s) + b / s) (s V)        s: a power of two a channel, so nothing is rounded

Source: cross-layer equalization (arXiv 1906.04721, section 4.1), here with SmoothQuant's scale.
"""

import numpy as np

from vitdeploy.graph.edit import Editor
from vitdeploy.quantization.folds import Fold, balanced, hidden_first
from vitdeploy.quantization.rounding import expected_error


def equalise_relu(model, statistics, request):
    editor, known, folds = Editor(model), dict(statistics), []
    for second in editor.linears:
        found, name = known.get(str(second.input.name)), str(second.input.name)
        first = hidden_first(editor, second) if second.name in request.layers else None
        if found is None or first is None or second.input.producer().op_type != "Relu":
            continue
        scale = np.exp2(np.rint(np.log2(balanced(found, [second.weight], 0.5))))
        moved = found.moved(np.zeros(len(scale)), scale)
        before = expected_error(found.without_covariance(), [second.weight], bits=request.bits)
        after = expected_error(moved.without_covariance(), [scale[:, None] * second.weight], bits=request.bits)
        if after >= before:
            continue
        editor.set_linear(first, first.weight / scale, None if first.bias is None else first.bias / scale)
        editor.set_linear(second, scale[:, None] * second.weight)
        known[name] = moved
        folds.append(Fold((second.name,), 0.5, False, before / after))
    return known, folds
