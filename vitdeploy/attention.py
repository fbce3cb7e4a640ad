"""Attention weights for an image: run a graph with the weights as outputs on ONNX Runtime, and turn their rows into
maps over patches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import AttentionViews
from vitdeploy.graph.io.files import runner_of
from vitdeploy.graph.passes.tokens import mark, mark_mean
from vitdeploy.runtime.preprocess import Pixels, to_input
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import PreprocessSpec

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class InstrumentedOutputs:
    """The outputs of a graph for one image.

    outputs: the graph's own outputs, without the batch axis. means: float64 [queries, keys] for every attention except
    the last, the mean over its heads. heads: float64 [heads, queries, keys] for the last attention.
    """

    outputs: Mapping[str, Array]
    means: tuple[Floats, ...]
    heads: Floats

    def flow(self, views: AttentionViews) -> Floats:
        """Rollout over all attentions: see `rollout`."""
        return rollout([*self.means, self.heads.mean(axis=0)], pooled=views.last.learned)

    def flow_map(self, views: AttentionViews) -> Floats:
        """The rollout of the query rows of interest, over the patches: float64 [rows, columns]."""
        return to_grid(read_by(self.flow(views), views.rows), views.grid)


def run_instrumented(
    model: ir.Model, views: AttentionViews, images: Iterable[Pixels], preprocess: PreprocessSpec
) -> Iterator[InstrumentedOutputs]:
    """Run a graph on images, one by one. `views` belong to `model`, which is changed in place.

    Raises:
        GraphError, EngineError: ONNX Runtime cannot run the graph.
    """
    names = (*(mark_mean(model, each) for each in views.blocks[:-1]), mark(model, views.last))
    with runner_of(model, "the float graph", batch=1) as runner:
        tensor = runner.inputs[0]
        batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else 1
        for pixels in images:
            outputs = runner.infer({tensor.name: to_input([pixels] * batch, preprocess, tensor)})
            yield _watched(outputs, names, views, batch)


def _watched(
    outputs: Mapping[str, Array], names: tuple[str, ...], views: AttentionViews, batch: int
) -> InstrumentedOutputs:
    arrays = []
    for name, weights in zip(names, views.blocks, strict=True):
        array = outputs[name].astype(np.float64)
        # Batch and heads may share an axis.
        heads = array.size // (batch * weights.queries * weights.keys) if name == names[-1] else 1
        arrays.append(array.reshape(-1, heads, weights.queries, weights.keys)[0])
    own = {name: array[0] for name, array in outputs.items() if name not in names}
    return InstrumentedOutputs(own, tuple(array[0] for array in arrays[:-1]), arrays[-1])


def rollout(blocks: Sequence[Floats], *, pooled: bool = False) -> Floats:
    """The share of each input token in each output token, if only attention mixed them.

    Abnar & Zuidema, "Quantifying Attention Flow in Transformers", arXiv 2005.00928, section 3: a block's matrix is the
    mean over its heads, A = 0.5 W + 0.5 I for its residual connection, rows normalised to sum to 1; the matrices are
    multiplied, the last one leftmost.

    Args:
        blocks: the means over the heads, each [tokens, tokens]; the last one may have only the first rows,
            [queries, tokens].
        pooled: the last one is attention pooling, whose query is a parameter: it has no residual connection.

    Returns: [queries of the last block, tokens]; rows sum to 1.
    """
    flow: Floats = np.eye(blocks[0].shape[-1])
    for index, weights in enumerate(blocks):
        last = index == len(blocks) - 1
        mixed = weights if last and pooled else 0.5 * weights + 0.5 * np.eye(*weights.shape)
        flow = mixed / mixed.sum(axis=-1, keepdims=True) @ flow
    return flow


def read_by(weights: Floats, rows: Sequence[int]) -> Floats:
    """The mean of some rows: [..., queries, tokens] -> [..., tokens]."""
    return np.asarray(weights[..., list(rows), :].mean(axis=-2))


def to_grid(weights: Floats, grid: tuple[int, int]) -> Floats:
    """[..., prefix + patches] -> [..., rows, columns]: drops the tokens before the patches and rescales nothing, so the
    sum of a map is the share of the patches."""
    patches = grid[0] * grid[1]
    return np.asarray(weights[..., weights.shape[-1] - patches :].reshape(*weights.shape[:-1], *grid))
