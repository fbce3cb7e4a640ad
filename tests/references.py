"""The independent implementations that ours are compared with: timm, transformers, torchvision. Only tests use them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def reference(name: str) -> ModuleType:
    """The imported library `name`; skips the test where it is not installed.

    torchvision's wheel for CUDA has no operators that a CPU build of PyTorch can load, and its import then stops at a
    missing `torchvision::nms`. Declaring the two operators that it looks up at import is enough for models and
    transforms, which call neither.
    """
    declare_torchvision()
    return pytest.importorskip(name, reason=f"pip install {name} (make test does) to compare with it")


_LIBRARIES: list[torch.library.Library] = []


def declare_torchvision() -> None:
    """Declare, where they are not, the operators without which torchvision is not imported."""
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)  # a library that is collected takes its operators with it
