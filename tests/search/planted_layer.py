"""A layer that INT8 spoils and nothing cheaper than float fixes, planted without changing what a model computes."""

from __future__ import annotations

import numpy as np

from vitdeploy.graph.edit import Editor
from vitdeploy.quantization.folds import hidden_first
from vitdeploy.search.frame import fingerprint
from vitdeploy.search.latency import FORMAT, LatencyTable, Timing
from vitdeploy.search.precision import shapes_to_time

PLANTED, IMAGES = "blocks.1.mlp.fc2", 24


def plant(model, layer, louder=20.0, size=30.0):
    """Give `layer` hidden channels that are always zero (GELU of -30), with weights `size` times as large as others.

    These change no output; but the scales of INT8 weights are now made for channels that never count. Neither the range
    of what is read nor a scale of its channels is to blame, so neither fixes it. And all weights are made `louder`, so
    that the layer matters.
    """
    editor = Editor(model)
    [second] = [linear for linear in editor.linears if linear.name == layer]
    first = hidden_first(editor, second)
    dead = 16
    weight = np.concatenate([first.weight, np.zeros((len(first.weight), dead))], axis=1)
    editor.set_linear(first, weight, np.concatenate([first.bias, np.full(dead, -30)]))
    for value in (first.node.outputs[0], first.output, second.input):
        value.shape = None
    weight = louder * second.weight
    large = np.random.default_rng(0).normal(0, size * weight.std(), (dead, second.weight.shape[1]))
    editor.set_linear(second, np.concatenate([weight, large]))
    return model


def table_for(trials, target, fp32=20.0, int8=10.0, planted=None):
    """INT8 saves the same time in every layer, but for the planted one."""
    [own] = [layer.shape for layer in trials.layers if layer.name == PLANTED]
    timings = []
    for shape in dict.fromkeys(shapes_to_time(trials)):
        slow = planted if planted is not None and shape == own else fp32
        fast = int8 + 2 * len(shape.front)
        timings += [Timing(shape, "fp32", (slow, slow, slow)), Timing(shape, "int8", (fast, fast, fast))]
    return LatencyTable(FORMAT, target, "2026-01-01T00:00:00+00:00", fingerprint(target), tuple(timings))
