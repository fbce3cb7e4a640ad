"""Exact rewrites: folds of biases, factors, normalisations and rotations into weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import (
    Attention,
    ResidualStream,
    Stopped,
    behind,
    find_attentions,
    find_stream,
    last_axis,
    reads,
)
from vitdeploy.graph.analysis.rows import (
    MOVES,
    Indices,
    Linear,
    climb,
    exclusive,
    is_layout,
    leaves,
    origin,
    scaled_input,
    static_shape,
)
from vitdeploy.graph.edit import Editor, bypass, drop_unused
from vitdeploy.graph.values import Vector, affine_of, floats_of, only_user

# --- Biases of key and value that softmax makes redundant -------------------------------------------------------------


def drop_key_bias(model: ir.Model) -> int:
    """Set the bias of every attention's key to zero: it adds one number, q . b_k, to a whole row of the scores.

    softmax(s + c 1^T) = softmax(s), also with masks and position biases added and with factors along the way: exact.

    Left unchanged: keys that pass a norm or rotary positions after the bias; scores or keys with other readers. If the
    linear has no other bias left, its Add is removed. Returns the number of attentions whose key lost its bias.
    """
    editor, count = Editor(model), 0
    for attention in find_attentions(model):
        linear = editor.linear_behind(origin(attention.key, through_scales=True))
        if linear is None or linear.bias is None:
            continue
        sources = leaves(linear.output, through_scales=True)
        columns = exclusive(sources, attention.key, attention.scores, len(linear.bias)) if sources is not None else None
        # One column along the last axis, the keys: only then is the same number added to every score of a row.
        if columns is None or (columns != columns[..., :1]).any():
            continue
        count += _clear(editor, linear, linear.bias, columns)
    if count:
        drop_unused(model)
    return count


def fold_value_bias(model: ir.Model) -> int:
    """Move the bias of every attention's value into the linear after it: rows of softmax sum to one.

        P (V + 1 b_v^T) = P V + 1 b_v^T        and so b_proj' = b_proj + b_v W_proj

    Exact up to the rounding of the new bias, with any mask. Left unchanged: attention whose result reaches anything
    except one linear, or reaches it through more than layout operations (a norm, a gate); values with other readers.
    Returns the number of attentions whose value lost its bias.
    """
    editor, count = Editor(model), 0
    for attention in find_attentions(model):
        linear = editor.linear_behind(origin(attention.value))
        if linear is None or linear.bias is None:
            continue
        sources = leaves(linear.output)
        columns = exclusive(sources, attention.value, attention.mix, len(linear.bias)) if sources is not None else None
        # One column along the second-to-last axis, the keys: only then is the bias a vector added to every value.
        if columns is None or (columns != columns[..., :1, :]).any() or not linear.bias[columns].any():
            continue
        behind = projection_of(editor, attention, columns[..., :1, :])
        if behind is None:
            continue
        projection, channels = behind
        shift = linear.bias[channels].astype(np.float64) @ projection.weight
        bias = np.zeros_like(shift) if projection.bias is None else projection.bias
        editor.set_linear(projection, bias=bias + shift)
        count += _clear(editor, linear, linear.bias, columns)
    if count:
        drop_unused(model)
    return count


def _clear(editor: Editor, linear: Linear, bias: npt.NDArray[np.float32], columns: Indices) -> bool:
    if not bias[columns].any():
        return False
    cleared = bias.copy()
    cleared[columns] = 0
    editor.set_linear(linear, bias=cleared)
    return True


def projection_of(editor: Editor, attention: Attention, columns: Indices) -> tuple[Linear, Indices] | None:
    """The linear that reads the mixed values, and the value column of each of its input channels."""
    mixed = attention.mix.outputs[0]
    shape = static_shape(mixed)
    if shape is None or len(shape) != columns.ndim:
        return None
    # The values give the stand-in for a dynamic batch: the same size here, on another axis ("8 * batch").
    shape = (*columns.shape[:-2], shape[-2], columns.shape[-1])
    if any(isinstance(own, int) and own != size for own, size in zip(mixed.shape or (), shape, strict=True)):
        return None  # values of a different batch from the scores
    sources = leaves(mixed, shape)
    if sources is None or len(sources) != 1 or len(sources[0].readers) != 1:
        return None
    [reader] = sources[0].readers
    linear = next((linear for linear in editor.linears if linear.node is reader), None)
    if (
        linear is None
        or linear.kind != "matmul"
        or linear.input is not sources[0].value
        or sources[0].value.is_graph_output()
    ):
        return None
    if linear.bias_add is None and linear.output.is_graph_output():
        return None
    of_mixed = np.broadcast_to(columns, shape)
    channels = of_mixed.ravel()[sources[0].source]
    rows = channels.reshape(-1, channels.shape[-1])
    return (linear, rows[0]) if (rows == rows[0]).all() else None


# --- Factors after or between linears go into their weights: LayerScale, and the 1 / sqrt(d) of attention -------------


def fold_layer_scale(model: ir.Model) -> int:
    """Fold LayerScale: gamma * (x W + b) = x (W diag(gamma)) + gamma b, for a constant gamma with a number per channel.

    Exact up to the rounding of the new weights. Left unchanged: a gamma that is not per channel of the last axis, a
    linear whose output has other readers or is a graph output.
    Source of LayerScale: arXiv 2103.17239, section 2.1. Returns the number of Mul nodes removed.
    """
    editor, count = Editor(model), 0
    for linear in editor.linears:
        node = only_user(linear.output)
        if linear.kind != "matmul" or node is None or node.op_type != "Mul" or node.outputs[0].is_graph_output():
            continue
        side = 0 if node.inputs[0] is linear.output else 1
        gamma = floats_of(node.inputs[1 - side])
        width = linear.weight.shape[1]
        if gamma is None or gamma.size != width or gamma.shape[-1] != width:
            continue
        bias = None if linear.bias is None else linear.bias * gamma.ravel()
        folded = editor.set_linear(linear, linear.weight * gamma.ravel(), bias)
        bypass(node, folded.output)
        count += 1
    if count:
        drop_unused(model)
    return count


def fold_attention_scale(model: ir.Model) -> int:
    """Fold scalar factors of the query, the key or the scores into the linear (or norm) that computes query or key.

        (s q) k^T = q (s k)^T = s (q k^T)        and s (x W + b) = x (s W) + s b

    Exact up to the rounding of the new weights, and bit-exact if s is a power of two (head widths 4, 16, 64, 256). In a
    merged linear only the columns of the query change. With a LayerNormalization between linear and product (qk-norm),
    its gain and bias take the factor.

    Left unchanged: a factor that is computed or not a scalar; columns with other readers; queries that reach the
    product through more than layout operations (rotary positions); factors after the Add of a mask; scores that are
    graph outputs. Returns the number of Mul and Div nodes removed.
    """
    editor, count = Editor(model), 0
    for attention in find_attentions(model):
        while _fold_one(editor, attention):
            count += 1
    if count:
        drop_unused(model)
    return count


def _fold_one(editor: Editor, attention: Attention) -> bool:
    for node, takers in _factors(attention):
        found = scaled_input(node)
        if found is not None and any(_absorb(editor, *taker, found[1]) for taker in takers):
            still = scaled_input(node)  # the Add of an all-zero bias may have been removed
            assert still is not None
            bypass(node, still[0])
            return True
    return False


def _factors(attention: Attention) -> Iterator[tuple[ir.Node, list[tuple[ir.Value, ir.Node]]]]:
    """Each node with a scalar factor, and the (operand, reader) pairs that could take it instead."""
    operands = [(attention.query, attention.scores), (attention.key, attention.scores)]
    for operand, _ in operands:
        value: ir.Value | None = operand
        while value is not None and (node := value.producer()) is not None:
            found = scaled_input(node)
            if found is not None and not node.outputs[0].is_graph_output():
                yield node, [(found[0], node)]
            if found is None and not is_layout(node):
                break
            value = found[0] if found is not None else node.inputs[0]
    node = attention.scores
    while len(uses := list(node.outputs[0].uses())) == 1 and scaled_input(node := uses[0].node) is not None:
        yield node, operands


def _absorb(editor: Editor, operand: ir.Value, reader: ir.Node, factor: float) -> bool:
    """Multiply the columns that `reader` reads as `operand` by `factor`, in the weights that compute them."""
    source = origin(operand)
    found, shape = leaves(source), static_shape(source)
    if found is None or not shape:
        return False
    columns = exclusive(found, operand, reader, shape[-1])
    if columns is None:
        return False
    factors = np.ones(shape[-1])
    factors[columns] = factor
    if (linear := editor.linear_behind(source)) is not None:
        bias = None if linear.bias is None else linear.bias * factors
        editor.set_linear(linear, linear.weight * factors, bias)
        return True
    return _absorb_into_norm(editor, source.producer(), factors)


def _absorb_into_norm(editor: Editor, norm: ir.Node | None, factors: np.ndarray) -> bool:
    if norm is None or norm.op_type != "LayerNormalization":
        return False
    gain_and_bias = [floats_of(value) for value in norm.inputs[1:]]
    if not all(array is not None and array.shape == factors.shape for array in gain_and_bias):
        return False
    for index, array in enumerate(gain_and_bias, start=1):
        assert array is not None
        editor.set_input(norm, index, (array * factors).astype(np.float32))
    return True


# --- The normalisation of pixels goes into the weights of the patch embedding -----------------------------------------


MOVED = ("Cast", "Transpose", "Gather")


# (node, x, scale, shift): the node computes x * scale + shift, both [channels].
_Affine = tuple[ir.Node, ir.Value, Vector, Vector]


def fold_image_normalisation(model: ir.Model) -> int:
    """Fold multiplications and additions of a constant per channel before a convolution into its weights.

        conv(s x + t, W) + b = conv(x, s W) + (b + sum over channel and kernel of W t)

    Exact up to the rounding of the new weights, without padding: padding inserts zeros after the normalisation, which
    do not correspond to the pixels -t / s. The chain may cross a Transpose; a Cast of uint8 pixels ends it, and then
    the convolution reads raw pixels 0 ... 255.

    Left unchanged: convolutions with padding or after other layers, constants that are not per channel, values with
    other readers. Returns the number of convolutions that absorbed a chain.
    """
    editor, count = Editor(model), 0
    for linear in editor.linears:
        if linear.kind != "conv" or linear.padded:
            continue
        chain = _chain(linear.input, linear.weight.shape[1])
        if not chain:
            continue
        scale, shift = _composed(chain, linear.weight.shape[1])
        weight = linear.weight.astype(np.float64)
        bias = np.zeros(len(weight)) if linear.bias is None else linear.bias
        bias = bias + np.einsum("oihw,i->o", weight, shift)
        editor.set_linear(linear, weight * scale[:, None, None], bias)
        for node, value, _, _ in chain:
            bypass(node, value)
        count += 1
    if count:
        drop_unused(model)
    return count


def image_bounds(linear: Linear) -> tuple[Vector, Vector] | None:
    """The smallest and largest possible value of each channel of a convolution's input, [channels] each.

    None unless the input is uint8 pixels, at most scaled and shifted by constants.
    """
    if linear.kind != "conv":
        return None
    channels = linear.weight.shape[1] * linear.groups
    chain = _chain(linear.input, channels)
    image = _image(chain[-1][1] if chain else linear.input)
    if image is None or image.dtype != ir.DataType.UINT8:
        return None
    scale, shift = _composed(chain, channels)
    ends = shift, 255 * scale + shift
    return np.minimum(*ends), np.maximum(*ends)


def _composed(chain: Sequence[_Affine], channels: int) -> tuple[Vector, Vector]:
    """(scale, shift), [channels] each, of all steps together, the closest to the convolution first."""
    scale, shift = np.ones(channels), np.zeros(channels)
    for _, _, factor, offset in chain:
        scale, shift = scale * factor, shift + scale * offset
    return scale, shift


def _chain(value: ir.Value, channels: int) -> list[_Affine]:
    """The steps above `value` [batch, channels, height, width], closest first."""
    axis, chain = 1, []
    while (node := value.producer()) is not None and only_user(value) is not None:
        if node.op_type == "Transpose" and node.inputs[0] is not None:
            axis = node.attributes.get_ints("perm", ())[axis] if "perm" in node.attributes else 3 - axis
            value = node.inputs[0]
            continue
        step = affine_of(node, axis, channels, 4)
        if step is None:
            break
        chain.append((node, *step))
        value = step[0]
    return chain if _image(value) is not None else []


def _image(value: ir.Value) -> ir.Value | None:
    """The graph input that `value` equals, except for a cast, a layout change or another channel order."""
    while (node := value.producer()) is not None and (node.op_type == "Cast" or is_layout(node)):
        operand = node.inputs[0]
        assert operand is not None
        value = operand
    return value if value.is_graph_input() else None


def takes_pixels(linear: Linear) -> bool:
    """Whether a layer reads uint8 pixels, except for a cast, a layout change or another channel order."""
    source: ir.Value | None = linear.input
    while source is not None and (move := source.producer()) is not None and move.op_type in MOVED:
        source = move.inputs[0]
    return source is not None and source.dtype == ir.DataType.UINT8


# --- The Cast of pixels before layout operations: TensorRT accepts a uint8 input only if a Cast reads it directly -----
# Exports move pixels from NHWC to NCHW as uint8, which is the smaller copy; other targets keep this order.


def cast_pixels_first(model: ir.Model) -> int:
    """Rewrite input (uint8) -> moves -> Cast as input -> Cast -> moves, in place and exact; return how often.

    Left unchanged: chains whose tensors have other readers.
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
        value.name = floats_moved  # observations of the tensor are keyed by this name
        count += 1
    return count


# --- An orthogonal rotation of the residual stream: the same function, with channels that quantize differently --------
# A few channels of the residual stream are much larger than the others. In a rotated basis every channel is a mix of
# all, so none stands out. Rows can be rotated before a LayerNormalization instead of after it, if the rotation Q keeps
# the mean over the channels (Q 1 = 1): it then keeps the length of the centred row too, so that n(x Q) = n(x) Q for the
# norm n without scale and shift. Writers of the stream are multiplied by Q, readers by its transpose:
#
#     W' = W Q and b' = b Q (writers, the patch embedding, tokens and positions)
#     W' = Q^T diag(gamma) W and b' = b + beta W (linears after a norm, whose gamma becomes 1 and beta 0)
#
# Source: QuaRot (arXiv 2404.00456, section 4) and SliceGPT (arXiv 2401.15024, section 3.1), both for norms that do not
# subtract the mean, or with a linear that subtracts it; Q 1 = 1 preserves the mean.


Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Norm:
    """gamma and beta [width], and the nodes of the linears that read the norm, through selections and averages."""

    gamma: npt.NDArray[np.float32]
    beta: npt.NDArray[np.float32]
    linears: set[ir.Node]


def rotate_residual(model: ir.Model, seed: int = 0) -> int:
    """Rotate the channels of the residual stream by a random orthogonal matrix, in place.

    Exact up to the rounding of the new weights. Runs after `fold_layer_scale`: a factor per channel between a linear
    and the stream does not commute with a rotation. Runs before the folds of biases, since beta goes into biases.

    Left unchanged: a stream with readers other than linears and norms followed by linears (a graph output, a
    concatenation of channels), or with writers other than linears, convolutions and constants (norms after the sum, or
    before the first block); a graph without self-attention over a fixed number of tokens; and a graph whose norms have
    neither scale nor shift, which this pass leaves.

    Args:
        model: a graph in canonical form.
        seed: the seed of the rotation, see `orthogonal`.

    Returns: the number of norms whose scale and shift moved into the linears after them.
    """
    editor = Editor(model)
    stream = find_stream(editor.linears, model)
    if stream is None:
        return 0
    by_node = {linear.node: linear for linear in editor.linears}
    try:
        norms = {node: _norm(node, by_node, stream.width) for node in stream.norms}
    except Stopped:
        return 0
    if all((norm.gamma == 1).all() and not norm.beta.any() for norm in norms.values()):
        return 0
    _apply(editor, stream, norms, orthogonal(stream.width, seed))
    return len(norms)


def orthogonal(width: int, seed: int) -> Matrix:
    """A random orthogonal matrix [width, width] with Q 1 = 1, uniformly distributed.

    It is uniform on the complement of the vector of ones, whose basis comes from a Householder reflection: the QR
    decomposition of a normal matrix, with the signs of R's diagonal (Mezzadri, arXiv math-ph/0609050, section 5).
    """
    reflected = np.full(width, -1 / np.sqrt(width))
    reflected[0] += 1
    basis = np.eye(width)[:, 1:]
    if width > 1:
        basis = basis - 2 * np.outer(reflected, reflected[1:]) / (reflected @ reflected)
    inner, triangle = np.linalg.qr(np.random.default_rng(seed).standard_normal((width - 1, width - 1)))
    matrix: Matrix = np.full((width, width), 1 / width) + basis @ (inner * np.sign(np.diag(triangle))) @ basis.T
    return matrix


def _norm(node: ir.Node, by_node: Mapping[ir.Node, Linear], width: int) -> _Norm:
    """Return the parameters and readers of a norm; raises Stopped if it covers more than the channels, or if anything
    except linears reads its result."""
    value, gamma = node.inputs[0], floats_of(node.inputs[1])
    shift = node.inputs[2] if len(node.inputs) > 2 else None
    beta = np.zeros(width, np.float32) if shift is None else floats_of(shift)
    axis = node.attributes.get_int("axis", -1)
    over_channels = value is not None and axis in (-1, last_axis(value))
    if not over_channels or gamma is None or beta is None or not gamma.shape == beta.shape == (width,):
        raise Stopped
    norm, rest = _Norm(gamma, beta, set()), [(node.outputs[0], last_axis(node.outputs[0]))]
    while rest:
        value, axis = rest.pop()
        if value.is_graph_output():
            raise Stopped
        for reader, index in value.uses():
            linear = by_node.get(reader)
            if linear is not None and reads(linear, value, axis):
                shifted = linear.bias is None and (beta @ linear.weight).any()
                if shifted and linear.output.is_graph_output():  # a graph output keeps its name: no Add possible
                    raise Stopped
                norm.linears.add(reader)
            elif is_layout(reader) or reader.op_type == "ReduceMean":  # these keep a shift
                rest += behind(reader, index, axis, width)
            elif reader.op_type != "Shape":
                raise Stopped
    return norm


def _apply(editor: Editor, stream: ResidualStream, norms: Mapping[ir.Node, _Norm], rotation: Matrix) -> None:
    of_linear = {node: norm for norm in norms.values() for node in norm.linears}
    for linear in editor.linears:
        norm = of_linear.get(linear.node)
        if norm is None and linear.node not in stream.writers | stream.readers:
            continue
        weight = linear.weight.astype(np.float64)
        bias = None if linear.bias is None else linear.bias.astype(np.float64)
        if norm is not None:
            bias = norm.beta @ weight + (0 if bias is None else bias)
            weight = norm.gamma[:, None] * weight
        if norm is not None or linear.node in stream.readers:
            weight = rotation.T @ weight
        if linear.node in stream.writers:
            weight = _rotated(weight, linear.out_axis, rotation)
            bias = None if bias is None else bias @ rotation
        editor.set_linear(linear, weight, bias)
    for (node, index), axis in stream.constants.items():
        array = floats_of(node.inputs[index])
        assert array is not None
        editor.set_input(node, index, _rotated(array, axis, rotation).astype(np.float32))
    for node, norm in norms.items():
        editor.set_input(node, 1, np.ones_like(norm.gamma))
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            editor.set_input(node, 2, np.zeros_like(norm.beta))


def _rotated(array: npt.NDArray[np.floating], axis: int, rotation: Matrix) -> Matrix:
    return np.moveaxis(np.moveaxis(array, axis, -1) @ rotation, -1, axis)
