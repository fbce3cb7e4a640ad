"""`python tests/torchvision_operators.py` mends the import of torchvision, of a wheel for CUDA beside PyTorch for CPUs.

PyPI has no other wheel of torchvision for Linux on x86-64. Its operators need PyTorch's libraries for CUDA, so none
loads, and the import stops at the first that torchvision looks up: "operator torchvision::nms does not exist". The
script adds the declaration to the installed torchvision, where the import fails.
"""

import inspect
from importlib.util import find_spec
from pathlib import Path


def declare() -> None:
    """Declare the two operators that torchvision looks up at import, where they are missing. Models and transforms call
    neither."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        declare.library = library  # a library that is collected takes its operators with it


if __name__ == "__main__":
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        file = Path(find_spec("torchvision").origin).with_name("extension.py")
        text = file.read_text(encoding="utf-8")
        file.write_text(f"{text}\n\n{inspect.getsource(declare)}\n\ndeclare()\n", encoding="utf-8")
