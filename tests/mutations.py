"""Do the tests of the numeric core notice a fault? `python -m tests.mutations [FILE ...]` plants faults of one token,
drawn with a seed, in a copy of this checkout, one at a time, runs the file's tests, and prints its row of
CONTRIBUTING.md and each fault that no test noticed.

mutmut draws no sample and plants nothing at the level of modules and in dataclasses; cosmic-ray begins a process for
each fault, which loads PyTorch and the runtimes for some ten seconds. Here each is a fork that has them.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "numpy",
    "scipy.optimize",
    "scipy.stats",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "openvino",
    "torch",
    "pydantic",
)
# The tests of each file that need seconds: others that would notice a fault begin processes or whole runs.
FILES = {
    "quantization/rounding.py": [f"quantization/test_{name}.py" for name in ("rounding", "channels", "four_bits")],
    "quantization/folds.py": [f"quantization/test_{name}.py" for name in ("folds", "smoothing", "channel_split")],
    "quantization/ranges.py": [
        f"quantization/test_{name}.py" for name in ("ranges", "observers", "smoothing", "folds", "placement")
    ],
    "search/precision.py": [f"search/test_{name}.py" for name in ("high_precision", "mixed", "greedy", "sensitivity")],
    "search/costs.py": [f"search/test_{name}.py" for name in ("costs", "row_parts")],
    "search/frame.py": [
        f"search/test_{name}.py"
        for name in ("expected", "front", "interval_search", "trials", "reference_outputs", "row_parts")
    ],
    "verification/intervals.py": ["verification/test_intervals.py"],
    "benchmark/evidence.py": [f"benchmark/test_{name}.py" for name in ("paired", "percentiles", "quiet", "throttling")],
}
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or), (ast.Continue, ast.Break)),
)
SWAPS: dict[type, type] = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


class Planter(ast.NodeTransformer):
    """Counts the places of a fault, and plants the one with the number `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count, self.what = at, 0, ""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for fault in faults(node):
            if self.count == self.at:
                line = getattr(node, "lineno", 0)
                self.what = f"{line}: {first_line(node)} -> {first_line(fault)}"
                node = ast.copy_location(fault, node)
            self.count += 1
        return node


def faults(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of this one node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            yield ast.Compare(node.left, [SWAPS[type(operator)]()], node.comparators)
        case ast.BinOp(left, operator, right) if type(operator) in SWAPS:
            yield ast.BinOp(left, SWAPS[type(operator)](), right)
        case ast.AugAssign(target, operator, value) if type(operator) in SWAPS:
            yield ast.AugAssign(target, SWAPS[type(operator)](), value)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(SWAPS[type(operator)](), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Raise() | ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Continue() | ast.Break():
            yield SWAPS[type(node)]()


def first_line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0]


def passes(checkout: Path, tests: list[str], limit: float) -> bool:
    """Whether all tests pass, in a fork; one that takes longer than `limit` seconds is ended, and has not."""
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        os.setpgid(0, 0)
        os.chdir(checkout)
        sys.path[0] = os.environ["PYTHONPATH"] = str(checkout)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vitdeploy", "tests")]:
            del sys.modules[name]
        quiet = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = 3
        try:
            # A slow draw of a busy machine is no fault that was noticed.
            hypothesis.settings.register_profile(
                "busy", deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
            )
            hypothesis.settings.load_profile("busy")
            base = f"--basetemp={checkout.parent / 'tests'}"
            status = int(pytest.main(["-x", "-q", *quiet, base, *(f"tests/{name}" for name in tests)]))
        finally:
            os._exit(status)  # the copy and the libraries are those of the process that forked this one
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end:
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                return ended[1] == 0
            time.sleep(0.05)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what its tests began


def measure(checkout: Path, name: str, count: int, seed: int) -> None:
    """One row, and a line for each fault that lives."""
    file = checkout / "vitdeploy" / name
    source, lives = file.read_text(encoding="utf-8"), []
    whole = Planter()
    whole.visit(ast.parse(source))
    began = time.monotonic()
    if not passes(checkout, FILES[name], 1800):
        raise SystemExit(f"{name}: its tests fail without a fault")
    limit = 30 + 5 * (time.monotonic() - began)
    drawn = sorted(random.Random(seed).sample(range(whole.count), min(count, whole.count)))
    for at in drawn:
        planter = Planter(at)
        tree = ast.fix_missing_locations(planter.visit(ast.parse(source)))
        file.write_text(ast.unparse(tree), encoding="utf-8")
        if passes(checkout, FILES[name], limit):
            lives.append(planter.what)
    file.write_text(source, encoding="utf-8")
    print(f"| `{name}` | {whole.count} | {len(drawn)} | {len(drawn) - len(lives)} |", flush=True)
    for what in lives:
        print(f"    {name}:{what}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)}; all of them")
    parser.add_argument("--count", type=int, default=20, help="faults of each file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True  # a fault of the same size in the same second is not what was compiled
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "__pycache__", "out", "build"))
        compileall.compile_dir(checkout, quiet=2)
        for name in options.files or FILES:
            for stale in (checkout / "vitdeploy" / name).parent.glob(f"__pycache__/{Path(name).stem}.*"):
                stale.unlink()
            measure(checkout, name, options.count, options.seed)
