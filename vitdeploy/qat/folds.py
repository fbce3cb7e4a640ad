"""The folds made before a placement, as scales and shifts between the module's tensors and the graph's.

    the graph reads u with x = scale * u + shift, and writes y' = factor * (y - moved) + added

for a layer that reads x and writes y in the module. Folds are exact for any values of these. Values recovered from
rounded weights, such as the factors between values and their projection, may therefore differ a little from the
calibrated ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.rows import Linear, exclusive, leaves, origin
from vitdeploy.graph.edit import Editor
from vitdeploy.qat.layers import ChannelRatio, Floats, Indices, LayerPiece, PlacedLayer, read_norms
from vitdeploy.quantization.folds import value_path
from vitdeploy.quantization.ranges import find_scores

# Factors closer to 1 than this are set to 1: rounded weights do not determine them more precisely.
UNCERTAIN = 0.02
# The largest relative difference between the weights of an INT8 graph and the float weights.
ROUNDED = 0.25
TINY = float(np.finfo(np.float64).tiny)

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Folds:
    """The folds of one layer of the graph.

    `scale`, `shift`: [in], both None without an input fold. `factor`: [out], includes the factors of the rewrites;
    `own`: [out], excludes them. `moved`: [out]. `free`: [out], outputs for which any `moved` is exact, because softmax
    or the next layer cancels it. `absorbs`: this layer cancels the shift of the layer before it.
    """

    scale: Floats | None
    shift: Floats | None
    factor: Floats
    own: Floats
    moved: Floats
    added: Floats
    free: Flags
    absorbs: bool = False

    @property
    def changed(self) -> bool:
        """Whether the folds change the weights or bias that the rewrites give."""
        return self.scale is not None or self.absorbs or bool(self.free.any())


@dataclass(frozen=True)
class Known:
    """The layers of the float graph by name: placement, pieces and ratios, and the module's weights [out, in, ...] and
    biases [out] in the graph's order."""

    model: ir.Model
    placed: Mapping[str, PlacedLayer]
    pieces: Mapping[str, Sequence[LayerPiece]]
    ratios: Mapping[str, ChannelRatio]
    weights: Mapping[str, Floats]
    biases: Mapping[str, Floats]


def spread(vector: Floats, weight: Floats, groups: int = 1) -> Floats:
    """Reshape a vector with one number per input channel to broadcast to a weight [out, in / groups, ...]."""
    inputs = weight.shape[1]
    rows = vector.reshape(groups, 1, inputs).repeat(len(weight) // groups, axis=1).reshape(len(weight), inputs)
    return rows.reshape(len(weight), inputs, *(1,) * (weight.ndim - 2))


def find_folds(
    known: Known, linears: Mapping[str, Linear], norms: Mapping[str, tuple[Floats, Floats]]
) -> dict[str, Folds]:
    """Return the folds of all layers that have pieces.

    Raises:
        GraphError: the weights of a layer differ from those that the placement was made from.
    """
    own_norms = read_norms(known.model)
    folds = {}
    for name, pieces in known.pieces.items():
        if not pieces:
            continue
        ratio, count = known.ratios[name], len(known.weights[name])
        scale, shift = _input(known, linears[name], own_norms, norms)
        ones, zeros = np.ones(count), np.zeros(count)
        folds[name] = Folds(scale, shift, ratio.factor, ones, zeros, ratio.shift, np.zeros(count, bool))
    editor = Editor(known.model)
    attentions = find_attentions(known.model)
    for attention in attentions:
        _values(known, editor, attention, folds)
        _keys(known, editor, attention, folds)
    for scores in find_scores(editor, attentions):
        _scores(known, scores.query.name, scores.key.name, scores.partner, folds)
    for name in folds:
        _check(known, linears[name], folds[name])
    return {name: _settled(known, linears[name], each) for name, each in folds.items()}


def _input(
    known: Known,
    linear: Linear,
    own: Mapping[str, tuple[Floats, Floats]],
    placed: Mapping[str, tuple[Floats, Floats]],
) -> tuple[Floats | None, Floats | None]:
    layer, ratio = known.placed[linear.name], known.ratios[linear.name]
    if ratio.scale is not None and ratio.offset is not None:
        return ratio.scale * (255 if layer.codes is not None else 1), ratio.offset  # `_in_unit_range` of the placement
    if layer.read is not None and layer.read.factor is not None and layer.read.offset is not None:
        factor, offset, source = layer.read.factor, layer.read.offset, layer.source
        if source is None:
            return 1 / factor, -offset / factor
        counts = np.bincount(source)
        scale = np.zeros(len(counts))
        scale[source] = 1 / (factor * counts[source])
        return scale, -scale * np.bincount(source, offset)
    norm = origin(linear.input).producer()
    name = str(norm.name) if norm is not None else ""
    if name not in own or name not in placed:
        return None, None
    (gamma, beta), (folded, moved) = own[name], placed[name]
    scale = np.where(folded != 0, gamma / np.where(folded != 0, folded, 1), 1.0)
    shift = beta - moved * scale
    if np.allclose(scale, 1, atol=1e-6) and np.allclose(shift, 0, atol=1e-6 * (1 + np.abs(beta).max())):
        return None, None
    return scale, shift


def expected(known: Known, linear: Linear, folds: Folds) -> Floats:
    """Return the layer's float weight after the folds."""
    weight = known.weights[linear.name]
    wide = folds.factor.reshape(-1, *(1,) * (weight.ndim - 1))
    return weight * wide if folds.scale is None else weight * wide * spread(folds.scale, weight, linear.groups)


def _factors(known: Known, name: str, folds: Folds) -> Floats:
    """Return the output scale that `folds` does not explain, by least squares over each output's weights."""
    weight = known.weights[name] * folds.factor[:, None]
    weight = weight if folds.scale is None else weight * folds.scale
    power = (weight**2).sum(axis=1)
    found = (weight * known.placed[name].weight).sum(axis=1) / np.maximum(power, TINY)
    return np.where((power > 0) & (found > 0), found, 1.0)


def constant(known: Known, linear: Linear, folds: Folds) -> Floats:
    """Return what the input shift adds to the module's outputs through the placed weights, [out]."""
    if folds.shift is None or folds.scale is None:
        return np.zeros(len(folds.factor))
    weight = known.placed[linear.name].weight
    factor = np.where(folds.factor != 0, folds.factor, 1).reshape(-1, *(1,) * (weight.ndim - 1))
    read = weight / factor / spread(folds.scale, weight, linear.groups)
    return np.asarray((read * spread(folds.shift, weight, linear.groups)).sum(axis=tuple(range(1, weight.ndim))))


def _values(known: Known, editor: Editor, attention: Attention, folds: dict[str, Folds]) -> None:
    """Scale and shift between an attention's values and its projection (`smooth_values`, `fold_value_bias`)."""
    path = value_path(editor, attention)
    if path is None:
        return
    linear, columns, projection, channels = path
    lacking = next((each.name for each in (linear, projection) if each.name not in folds), None)
    if lacking is not None and all(known.placed[each.name].codes is None for each in (linear, projection)):
        return
    if lacking is not None:
        raise GraphError(
            f"{lacking}, which a fold needs, does not match a layer of the module",
            expected="an nn.Linear for the values (or for query, key and value together) and one for the projection",
        )
    value, used = folds[linear.name], np.unique(columns)
    own = value.own.copy()
    if len(np.unique(channels)) == len(channels):
        own[used] = _settle(_factors(known, linear.name, value)[used])
    value = _scaled(value, own)
    moved = value.moved.copy()
    moved[used] = _moved(known, linear, value)[used]
    folds[linear.name] = replace(value, moved=moved, free=_marked(value.free, used))
    scale = 1 / np.where(value.factor != 0, value.factor, 1)
    folds[projection.name] = replace(
        folds[projection.name],
        scale=scale[channels],
        shift=moved[channels],
        added=np.zeros(projection.weight.shape[1]),
        absorbs=True,
    )


def _keys(known: Known, editor: Editor, attention: Attention, folds: dict[str, Folds]) -> None:
    """Mark the key bias as free: softmax cancels it (`drop_key_bias`)."""
    linear = editor.linear_behind(origin(attention.key, through_scales=True))
    found = leaves(linear.output, through_scales=True) if linear is not None else None
    if linear is None or found is None or linear.name not in folds:
        return
    columns = exclusive(found, attention.key, attention.scores, linear.weight.shape[1])
    if columns is not None and (columns == columns[..., :1]).all():
        folds[linear.name] = replace(folds[linear.name], free=_marked(folds[linear.name].free, np.unique(columns)))


def _scores(known: Known, query: str, key: str, partner: Indices, folds: dict[str, Folds]) -> None:
    """Queries and keys are balanced against each other (`smooth_scores`)."""
    if query not in folds or key not in folds:
        return
    of_key, of_query = _factors(known, key, folds[key]), _factors(known, query, folds[query])
    balance = _settle(np.sqrt(of_key / of_query[partner]))
    own = np.ones(len(of_query))
    own[partner] = 1 / balance
    folds[key], folds[query] = _scaled(folds[key], balance), _scaled(folds[query], own)


def _settle(factors: Floats) -> Floats:
    alike: bool = np.abs(factors - 1).max() < UNCERTAIN
    return np.ones(len(factors)) if alike else factors


def _scaled(folds: Folds, own: Floats) -> Folds:
    return replace(folds, own=own, factor=folds.factor / folds.own * own)


def _moved(known: Known, linear: Linear, folds: Folds) -> Floats:
    """Return the shift of the outputs, recovered from the placed bias."""
    factor = np.where(folds.factor != 0, folds.factor, 1)
    shown = constant(known, linear, folds) - known.placed[linear.name].bias / factor
    return np.asarray(known.biases[linear.name] + shown)


def _settled(known: Known, linear: Linear, folds: Folds) -> Folds:
    """Return the folds with the shifts of free outputs, once all factors are known."""
    moved = np.where(folds.free, _moved(known, linear, folds), folds.moved)
    return replace(folds, moved=moved, added=np.where(folds.free, 0.0, folds.added))


def _marked(free: Flags, columns: Indices) -> Flags:
    marked: Flags = free.copy()
    marked[columns] = True
    return marked


def _check(known: Known, linear: Linear, folds: Folds) -> None:
    weight, folded = known.placed[linear.name].weight, expected(known, linear, folds)
    size = max(float(np.linalg.norm(weight)), TINY)
    apart = float(np.linalg.norm(folded - weight)) / size if folded.shape == weight.shape else np.inf
    if not apart <= ROUNDED:
        raise GraphError(
            f"the module does not match the graph: the weights of {linear.name} differ",
            found=f"a difference of {100 * apart:.0f} %"
            if np.isfinite(apart)
            else f"{folded.shape}, not {weight.shape}",
            expected="the weights that the graph was quantized from",
            fix="load those weights before prepare(); load weights trained since into the prepared module",
        )
