"""The real Python APIs of TensorRT and CUDA, made checkable on a machine that has neither.

    python tests/tensorrt_api/make_stubs.py FOLDER

For each TensorRT of VERSIONS it installs the published bindings (a compiled module of some MB, without the libraries
that do the work), links empty libraries of the names that the module needs, so that it can be imported though nothing
can be built or run, and writes its type stubs:

    FOLDER/<version>/site      PYTHONPATH: `tensorrt_bindings`, and `tensorrt` as another name of it
    FOLDER/<version>/lib       LD_LIBRARY_PATH
    FOLDER/<version>/stubs     MYPYPATH: tensorrt/__init__.pyi
    FOLDER/cuda-12, cuda-13    PYTHONPATH: cuda-python's `cuda.bindings`, which can be imported without a driver

Where that cannot be done, FOLDER/<version>/missing.txt says why, and the tests that need it skip with that reason.
What is finished already is left alone.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# The newest, and the oldest that is supported (JetPack 6).
VERSIONS = {"11.4.0.106": "tensorrt-cu13-bindings", "10.3.0": "tensorrt-cu12-bindings"}
CUDA = {"cuda-13": ("cuda-bindings==13.0.3", "cuda-pathfinder==1.3.0"), "cuda-12": ("cuda-bindings==12.8.0",)}
STUBGEN = "pybind11-stubgen==2.5.5"
# Functions of TensorRT's libraries that the bindings call while they are imported, or when an object is made.
FACTORY = re.compile(r"^(create|get|init)\w*(Infer|NvOnnx|Plugin|Nv)\w*$")


class CannotMake(Exception):
    pass


def run(*argv: str | Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
    if result.returncode:
        last = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no message"]
        raise CannotMake(f"`{' '.join(map(str, argv[:4]))} ...` failed: {last[0][:300]}")
    return result.stdout


def install(folder: Path, *packages: str) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--upgrade")
    run(*pip, "--target", folder, *packages)


def make_tensorrt(out: Path, package: str, version: str, stubgen: Path) -> None:
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise CannotMake(f"{tool} is not installed; install gcc and binutils")
    site, lib = out / "site", out / "lib"
    install(site, f"{package}=={version}")
    module = next((site / "tensorrt_bindings").glob("tensorrt*.so"))
    lib.mkdir(exist_ok=True)
    link_empty_libraries(module, lib)
    (site / "tensorrt").mkdir(exist_ok=True)
    (site / "tensorrt/__init__.py").write_text(
        "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n", encoding="utf-8"
    )
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (site, stubgen))), "LD_LIBRARY_PATH": str(lib)}
    made = out / "generated"
    argv = (sys.executable, "-m", "pybind11_stubgen", "tensorrt_bindings.tensorrt", "-o", made, "--ignore-all-errors")
    run(*argv, env=environment)
    text = (made / "tensorrt_bindings/tensorrt.pyi").read_text(encoding="utf-8")
    (out / "stubs/tensorrt").mkdir(parents=True, exist_ok=True)
    (out / "stubs/tensorrt/__init__.pyi").write_text(
        f"{repaired(text)}\n__version__: str\n", encoding="utf-8"
    )


def link_empty_libraries(module: Path, lib: Path) -> None:
    """Libraries of the names that the module was linked with, whose functions all give nothing."""
    needed = re.findall(r"\(NEEDED\).*\[(libnv[\w.]+)\]", run("readelf", "-d", module))
    undefined = [line.split()[-1].split("@")[0] for line in run("nm", "-D", "--undefined-only", module).splitlines()]
    functions = sorted({name for name in undefined if FACTORY.match(name)})
    if not needed or not functions:
        raise CannotMake(f"{module.name} needs no library that looks like TensorRT's")
    source = lib / "empty.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions), encoding="utf-8")
    for name in needed:
        run("gcc", "-shared", "-fPIC", "-w", "-o", lib / name, source)


def repaired(text: str) -> str:
    """The stubs with what is no Python made wider: some parameters are called `in`, some defaults are misplaced."""
    lines = text.split("\n")
    for _ in range(1000):
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            index = (error.lineno or 1) - 1
            lines[index] = _widened(lines[index])
        else:
            return "\n".join(lines)
    raise CannotMake("the generated stubs are no Python, also after a thousand repairs")


def _widened(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    if match := re.match(r"\s*def (\w+)\(", line):
        end = " ..." if line.rstrip().endswith("...") else ""
        return f"{indent}def {match[1]}(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:{end}"
    if match := re.match(r"\s*(\w+)\s*:", line):
        return f"{indent}{match[1]}: typing.Any"
    return f"{indent}# {line.strip()}"


def make(folder: Path, key: str, work: Callable[[Path], None]) -> None:
    """Do `work` unless it was done by this very script; a failure leaves its reason."""
    out = folder / key
    stamp = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if (out / "done.txt").is_file() and (out / "done.txt").read_text(encoding="utf-8") == stamp:
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        work(out)
    except (CannotMake, OSError, StopIteration) as error:
        (out / "missing.txt").write_text(f"{error}\n", encoding="utf-8")
        print(f"{key}: {error}", file=sys.stderr)
    else:
        (out / "done.txt").write_text(stamp, encoding="utf-8")


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    make(folder, "stubgen", lambda out: install(out, STUBGEN))
    for version, package in VERSIONS.items():
        make(folder, version, lambda out: make_tensorrt(out, package, version, folder / "stubgen"))  # noqa: B023
    for key, packages in CUDA.items():
        make(folder, key, lambda out: install(out, *packages))  # noqa: B023
    return 0


if __name__ == "__main__":
    sys.exit(main())
