"""How the output of a module ends, seen in one run of it: the operator and the layer that gave its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitdeploy.graph.io.meanings import Ending

# Operators of ATen: what keeps the numbers of rows, or averages them, tells nothing of its own.
_KEEPS = ("mean", "clone", "_to_copy", "index", "gather", "index_select", "select", "cat")
_ENDINGS: dict[str, Ending] = {
    **dict.fromkeys(("sigmoid", "sigmoid_", "hardsigmoid"), "sigmoid"),
    **dict.fromkeys(("mm", "bmm", "native_layer_norm", "native_group_norm", "tanh", "_fused_rms_norm"), "vector"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"), "vector"),
}
_TOLERANCE = 1e-4


@dataclass
class Watched(TorchDispatchMode):
    """The last operator and the last layer that wrote to each address; views share it."""

    operators: dict[int, Ending] = field(default_factory=dict)
    layers: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor):
            sources = [each.data_ptr() for each in args if isinstance(each, Tensor)]
            name = func.overloadpacket.__name__
            if name in _KEEPS and sources:
                self.operators[first.data_ptr()] = self.operators.get(sources[0], "")
            elif first.data_ptr() not in sources:  # else a view
                self.operators[first.data_ptr()] = _ENDINGS.get(name, "")
        return result

    def layer(self, name: str) -> Callable[..., None]:
        """A forward hook."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self.layers[output.data_ptr()] = name

        return hook

    def ending(self, output: Tensor) -> Ending:
        """Of [batch, width]: by its numbers where these tell, else by the operator."""
        rows = output.detach().double()
        if rows.shape[1] > 1 and bool(rows.isfinite().all()):
            if bool((rows >= 0).all()) and _all_one(rows.sum(1)):
                return "softmax"
            if bool((rows <= 0).all()) and _all_one(rows.exp().sum(1)):
                return "log"
            if _all_one(rows.norm(dim=1)):
                return "vector"
        return self.operators.get(output.data_ptr(), "")


def _all_one(numbers: Tensor) -> bool:
    return bool(((numbers - 1).abs() < _TOLERANCE).all())


def watched(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, Watched]:
    """What `run` returns, and what it did. A module that cannot be watched is run alone."""
    watch = Watched()
    with contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules():
            if next(layer.children(), None) is None:
                with contextlib.suppress(Exception):  # a layer of TorchScript takes none
                    hooks.callback(layer.register_forward_hook(watch.layer(name)).remove)
        try:
            with watch:
                return run(), watch
        except Exception:
            watch = Watched()
    return run(), watch
