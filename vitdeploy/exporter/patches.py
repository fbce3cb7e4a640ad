"""Patches of PyTorch and of the model during export: attention in the form that passes and runtimes recognise (batch
axis first, MatMul, Softmax, MatMul), TorchScript parts, and `len` as a symbolic size."""

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnxscript import opset18 as op
from torch import Tensor, nn
from torch.nn.modules import transformer


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """scaled_dot_product_attention as MatMul, Softmax, MatMul: the pattern that every runtime fuses.

    The exporter's own translation transposes the key through Reshape nodes with computed shapes.
    Source: arXiv 1706.03762, equation 1; `scale` multiplies the query before the first MatMul. A mask of numbers is
    added to the scores; a boolean mask keeps the true positions. A causal mask is a constant; keys and values shared by
    several query heads are gathered with a constant, too.
    """
    if dropout_p:
        raise NotImplementedError(f"scaled_dot_product_attention with dropout_p={dropout_p:g} draws random numbers")
    rank, rows, columns = len(key.shape), query.shape[-2], key.shape[-2]
    if enable_gqa:
        key, value = (_for_heads(each, query) for each in (key, value))
    factor = float(scale) if scale is not None else float(query.shape[-1]) ** -0.5
    scaled = op.Mul(query, op.Constant(value_float=factor))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2]))
    if is_causal:
        if not isinstance(rows, int) or not isinstance(columns, int):
            raise NotImplementedError("scaled_dot_product_attention with a causal mask of dynamic size")
        hidden = np.triu(np.full((rows, columns), -np.inf, np.float32), 1)
        scores = op.Add(scores, op.Constant(value=ir.tensor(hidden)))
    elif attn_mask is not None and attn_mask.dtype == ir.DataType.BOOL:
        scores = op.Where(attn_mask, scores, op.Constant(value_float=float("-inf")))
    elif attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def _for_heads(shared: Any, query: Any) -> Any:
    """Repeat keys or values [..., key heads, tokens, width] for each query head."""
    heads, own = query.shape[-3], shared.shape[-3]
    if heads == own:
        return shared
    indices = np.repeat(np.arange(own, dtype=np.int64), heads // own)
    return op.Gather(shared, op.Constant(value=ir.tensor(indices)), axis=len(shared.shape) - 3)


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Context in which `nn.MultiheadAttention` computes batch-first, and encoder layers take their training path.

    PyTorch's own code moves the tokens before the batch and merges batch and heads; in that form no pass can remove
    what a class token does not need. The fused encoder layer is one operator, which ONNX does not have.
    """
    fused, own = torch.backends.mha.get_fastpath_enabled(), nn.MultiheadAttention.forward
    detect = transformer._detect_is_causal_mask

    def forward(module: nn.MultiheadAttention, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        found = _multihead(module, *arguments, **options)
        return own(module, *arguments, **options) if found is None else found

    torch.backends.mha.set_fastpath_enabled(False)
    nn.MultiheadAttention.forward = forward  # type: ignore[method-assign, assignment]
    # PyTorch inspects the mask's values to detect a causal one, only to skip reading the mask.
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        nn.MultiheadAttention.forward = own  # type: ignore[method-assign]
        transformer._detect_is_causal_mask = detect
        torch.backends.mha.set_fastpath_enabled(fused)


def _multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the result of the module's own `forward`, up to rounding; None for cases left to it: no batch axis, or
    extra tokens in keys and values."""
    if query.dim() != 3 or module.bias_k is not None or module.add_zero_attn:
        return None
    q, k, v = _projected(module, query, key, value)
    mask = _mask(attn_mask, key_padding_mask, q)
    if need_weights or (is_causal and key_padding_mask is not None):
        scores = (q * float(q.shape[-1]) ** -0.5) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        mixed = weights @ v
    else:
        weights = None
        mixed = F.scaled_dot_product_attention(q, k, v, None if is_causal else mask, is_causal=is_causal)
    result = module.out_proj(mixed.transpose(1, 2).flatten(2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(dim=1)
    return result if module.batch_first else result.transpose(0, 1), weights if need_weights else None


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return query, key and value, [batch, heads, tokens, head width], with one linear layer for each source tensor."""
    same, width = module._qkv_same_embed_dim, module.embed_dim
    weight: Tensor | None = module.in_proj_weight if same else None
    parts: list[tuple[list[Tensor], Tensor]]
    if weight is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        parts = [([source], w) for source, w in zip((query, key, value), weights, strict=True)]
    elif query is key and key is value:
        parts = [([query] * 3, weight)]
    elif key is value:
        parts = [([query], weight[:width]), ([key] * 2, weight[width:])]
    else:
        parts = [([x], w) for x, w in zip((query, key, value), weight.chunk(3), strict=True)]
    found, done = list[Tensor](), 0
    for sources, w in parts:
        count, x = len(sources), sources[0] if module.batch_first else sources[0].transpose(0, 1)
        bias = None if module.in_proj_bias is None else module.in_proj_bias[done * width : (done + count) * width]
        y = F.linear(x, w, bias)
        y = y.reshape(y.shape[0], y.shape[1], count, module.num_heads, module.head_dim)
        found += y.permute(2, 0, 3, 1, 4).unbind(0)
        done += count
    return found


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return both masks as one additive mask for scores [batch, heads, queries, keys]; true hides a position."""
    batch, heads = query.shape[:2]
    found = []
    if attn_mask is not None:
        attn_mask = _numbers(attn_mask, query)
        found.append(attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(batch, heads, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        found.append(_numbers(key_padding_mask, query)[:, None, None, :])
    return sum(found[1:], found[0]) if found else None


def _numbers(mask: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


# --- TorchScript parts of a model: `torch.export` runs them and records their operations ------------------------------


class _Run(nn.Module):
    """A scripted module, run by its interpreter. Not registered as a child: `torch.export` wraps children in proxies,
    which pass a scripted `forward` its `self` twice. Its weights become constants of the graph."""

    def __init__(self, scripted: torch.jit.ScriptModule) -> None:
        super().__init__()
        self._hidden = (scripted,)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        # With gradients enabled, a scripted encoder layer avoids its fused path, an operator that ONNX does not have.
        with torch.enable_grad():
            return self._hidden[0]._c._get_method("forward")(*arguments, **options)


@contextlib.contextmanager
def scripts_as_they_run(model: nn.Module) -> Iterator[None]:
    """Context in which scripted parts of `model` can be exported. Sizes that a script reads become constants.

    The interpreter's profiling is off: it specialises on the sizes that it has seen.
    """
    replaced = list(_replace(model))
    profiling, optimized = torch._C._jit_set_profiling_executor(False), torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(optimized)
        torch._C._jit_set_profiling_executor(profiling)
        for parent, name, scripted in replaced:
            parent._modules[name] = scripted


def _replace(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in list(model._modules.items()):
        if isinstance(child, torch.jit.ScriptModule):
            model._modules[name] = _Run(child)
            yield model, name, child
        elif child is not None:
            yield from _replace(child)


# --- `len(tensor)` in a module's own code: Python turns it into an int; here it stays a symbolic size -----------------


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else builtins.len(value)


@contextlib.contextmanager
def lengths_as_sizes(model: nn.Module) -> Iterator[None]:
    """Context in which `len` of a tensor is `shape[0]` in the files that define the classes of `model` and its parts.

    Otherwise `torch.export` would fix the batch size of the example: Python's `len` returns an `int`, never a symbolic
    size.
    """
    files = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    spaces = [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules and not _of_torch(name)]
    spaces = [space for space in spaces if "len" not in space]
    for space in spaces:
        space["len"] = _length
    try:
        yield
    finally:
        for space in spaces:
            del space["len"]


def _of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("builtins", "torch", "vitdeploy")
