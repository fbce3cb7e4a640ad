"""Compile a placed graph with its rows in parts (`graph.passes.row_split`)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from vitdeploy.compilation.backend import COMPILE
from vitdeploy.compilation.engine import GRAPH_FILE, weights_of
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.search.parts import PartsTable, in_parts
from vitdeploy.spec import EngineSpec, Task, decode
from vitdeploy.stages.files import read_json
from vitdeploy.stages.step import QUANTIZED

PARTS_FILE = "row_parts.json"


def splits_rows(target: str, precision: str, task: Task) -> bool:
    """Whether an engine may compute the rows of its tokens in parts: INT8, of one graph, where the back end does."""
    return COMPILE[target].splits_rows and precision in QUANTIZED and precision != "int4" and task not in FLOWS


def read_parts(folder: Path) -> PartsTable:
    return decode(PartsTable, read_json(folder / PARTS_FILE))


def compile_in_parts(graph: Path, parts: Sequence[int], out: Path, compiling: Callable[..., EngineSpec]) -> EngineSpec:
    """The engine, made by `compiling`, of a placed graph with its rows in parts, next to the placement itself.

    Raises:
        GraphError: the rows cannot be split so.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        split = Path(folder) / graph.name
        engine = compiling(split, out, placed=in_parts(graph, parts, split))
    for file in (graph, weights_of(graph)):
        if file.is_file():
            shutil.copyfile(file, out / (GRAPH_FILE if file == graph else file.name))
    return engine
