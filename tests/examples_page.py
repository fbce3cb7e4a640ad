"""The page of the examples, and the blocks of commands on it, which tests run."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

from tests.command_line import ROOT

PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def block(language: str, naming: str) -> str:
    """The only block of the page in this language that names something."""
    (found,) = (text for kind, text in BLOCKS if kind == language and naming in text)
    return found


def load_example(name: str) -> ModuleType:
    """The module of examples/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
