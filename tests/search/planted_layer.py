"""A layer that INT8 spoils and nothing cheaper than float fixes, planted without changing what a model computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitdeploy.graph.edit import Editor
from vitdeploy.quantization.folds import hidden_first
from vitdeploy.search.costs import CostTable

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


@dataclass(frozen=True)
class KnownCosts(CostTable):
    """A table by which a layer takes the microseconds that `times` gives for its shape and form."""

    times: Callable = None

    def layer(self, shape, form, rest="fp32"):
        return 1e3 * self.times(shape, form)

    def saved(self, shape):
        return self.added(shape, "float")


def known_costs(times, target="openvino-cpu", scaling=0.0):
    return KnownCosts(target, "a CPU", "", "known", {}, {}, scaling, times=times)


def table_for(trials, target, fp32=20.0, int8=10.0, planted=None):
    """INT8 saves the same time in every layer, but for the planted one."""
    [own] = [layer.shape for layer in trials.layers if layer.name == PLANTED]
    slow = fp32 if planted is None else planted
    return known_costs(lambda shape, form: int8 if form == "int8" else slow if shape == own else fp32, target, 10.0)
