"""A process that runs one engine of a bundle on its golden inputs, in any Python environment.

It reads one JSON command per line from standard input and answers each with one JSON line, like `benchmark/worker.py`:

    {"do": "check", "folder": "...", "artifact": "...", "rebuild": "" or a folder}     see `check`
    {"do": "close"}                                                                    {"closed": true}
"""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.worker import answer_lines
from vitdeploy.bundle.read import read_bundle
from vitdeploy.compilation.backend import COMPILE, CompileRequest
from vitdeploy.errors import TargetError
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import check_golden
from vitdeploy.spec import EngineSpec, encode


def answer(command: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one command; errors propagate."""
    if command["do"] == "close":
        return {"closed": True}
    return check(Path(command["folder"]), command["artifact"], command["rebuild"])


def check(folder: Path, artifact: str, rebuild: str) -> dict[str, Any]:
    """Return the golden check of an engine, the engine (encoded), the folder of its files, and the runtime's version.

    With `rebuild`, an empty folder, the engine is first compiled there from the bundle's graph.
    """
    manifest = read_bundle(folder)
    engine = next(each for each in manifest.engines if each.artifact == artifact)
    made, home = (engine, folder) if not rebuild else (compiled(folder, engine, Path(rebuild)), Path(rebuild))
    with make_runner(home, made) as runner:
        found = check_golden(folder, manifest, engine, runner)
    runtime = importlib.import_module(TARGETS[engine.target].module)
    version = str(runtime.__version__).split("-")[0]
    return {**vars(found), "ok": found.ok, "engine": encode(made), "home": str(home), "version": version}


def compiled(folder: Path, engine: EngineSpec, out: Path) -> EngineSpec:
    """Compile an engine's graph again, into the empty folder `out`."""
    if engine.parts:
        raise TargetError(
            f"{engine.artifact} has {len(engine.parts)} graphs and cannot be rebuilt",
            expected="an engine of one graph",
            fix="omit --rebuild",
        )
    source, graph = folder / engine.graph, out / "graph.onnx"
    graph.write_bytes(source.read_bytes())
    for weights in source.parent.glob("*.onnx.data"):
        (out / weights.name).write_bytes(weights.read_bytes())
    precision: Any = engine.precision
    request = CompileRequest(graph, engine.target, precision, engine.batch, None, lambda text, done, total: None)
    made = COMPILE[engine.target].compile_graph(request)
    return replace(made, precision=engine.precision, weight_bits=engine.weight_bits)


def main() -> int:
    return answer_lines(answer)


if __name__ == "__main__":
    sys.exit(main())
