"""The independent implementations that ours are compared with: timm, transformers, torchvision. Only tests use them."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.torchvision_operators import declare


def reference(name: str) -> ModuleType:
    """The imported library `name`; skips the test where it is not installed."""
    declare()
    return pytest.importorskip(name, reason=f"pip install {name} (make test does) to compare with it")
