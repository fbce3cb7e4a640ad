"""What is sent to a device: the agent, placements and jobs; and its bounds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vitdeploy
from vitdeploy.bundle.read import file_sha256
from vitdeploy.devices.agent.documents import FORMAT, DeviceJob, Kind, PlacedArtifact, PlacedGraph
from vitdeploy.devices.registry import sender
from vitdeploy.spec import EngineSpec, FileEntry, Precision

# --- What is sent to a device for one artifact: its placement and its files -------------------------------------------


DATA = ".onnx.data"


@dataclass(frozen=True)
class Shipment:
    """`files` are by their paths on the device; those of `placed`."""

    placed: PlacedArtifact
    files: Mapping[str, Path]


def ship(
    placed: PlacedArtifact,
    graphs: Mapping[str, tuple[Path, int]],
    plan: tuple[EngineSpec, Path] | None = None,
    precisions: Mapping[str, Precision] | None = None,
    golden: Mapping[str, Path] | None = None,
) -> Shipment:
    """The shipment of `placed`, whose `graphs` and `plan` are filled in.

    Args:
        graphs: by part, the file, and how many of its layers are in integers.
        plan: an engine built on a device before, and the folder of its files.
        precisions: by part, where they are not all that of `placed`.
        golden: the manifest and the golden answers of a bundle, by their paths in it.
    """
    files: dict[str, Path] = {}
    sent = []
    for part, (graph, count) in graphs.items():
        weights = sorted(graph.parent.glob(f"*{DATA}"))
        # The graph names the file of its weights, and compilers look for it under the graph's own name.
        name = weights[0].name.removesuffix(".data") if len(weights) == 1 else graph.name
        files |= {f"{part}/{name}": graph, **{f"{part}/{path.name}": path for path in weights}}
        sent.append(PlacedGraph(part, f"{part}/{name}", count, (precisions or {}).get(part)))
    placed = dataclasses.replace(placed, graphs=tuple(sent))
    if plan is not None:
        engine, folder = plan
        products = {file: folder / file for file in engine.files}
        renamed = {file: f"plan/{file.replace('/', '-')}" for file in engine.files}
        files |= {renamed[file]: path for file, path in products.items()}
        engine = dataclasses.replace(engine, files=tuple(renamed[file] for file in engine.files))
        placed = dataclasses.replace(placed, plan=engine)
    if golden:
        files |= {f"golden/{name}": path for name, path in golden.items()}
        placed = dataclasses.replace(placed, golden="golden")
    return Shipment(placed, files)


def entries(files: Mapping[str, Path]) -> dict[FileEntry, Path]:
    """The files of a shipment with their sizes and digests."""
    return {FileEntry(name, path.stat().st_size, file_sha256(path)): path for name, path in files.items()}


def make_job(
    kind: Kind, shipments: Sequence[Shipment], options: Mapping[str, Any]
) -> tuple[DeviceJob, dict[str, Path]]:
    """One job of all shipments, and the local path of each of its files. Each shipment gets a folder of its own."""
    placed, files = [], dict[str, Path]()
    for index, shipment in enumerate(shipments):
        files |= {f"{index}/{name}": path for name, path in shipment.files.items()}
        placed.append(_below(shipment.placed, str(index)))
    listed = tuple(entries(files))
    job = DeviceJob(FORMAT, kind, agent_package().digest, sender(), tuple(placed), listed, dict(options))
    return job, files


def _below(placed: PlacedArtifact, folder: str) -> PlacedArtifact:
    graphs = tuple(dataclasses.replace(graph, file=f"{folder}/{graph.file}") for graph in placed.graphs)
    plan = placed.plan and dataclasses.replace(
        placed.plan, files=tuple(f"{folder}/{file}" for file in placed.plan.files)
    )
    golden = placed.golden and f"{folder}/{placed.golden}"
    return dataclasses.replace(placed, graphs=graphs, plan=plan, golden=golden)


# --- The versions of the runtimes that still run on an older system: what PyPI has for Linux --------------------------
# Looked up with `pip download --python-version P --platform manylinux_2_G_ARCH` on 2026-11-23. `pip install` finds the
# right one by itself; this is to say beforehand what it will find.


@dataclass(frozen=True)
class Wheel:
    """The newest version for Pythons (3, `python`) to (3, `last`), and the least glibc 2.x that it needs by machine."""

    package: str
    version: str
    python: int
    last: int
    glibc: dict[str, int]


NEWEST = 99
WHEELS = (
    Wheel("onnxruntime", "1.32.0", 11, NEWEST, {"x86_64": 28, "aarch64": 28}),
    Wheel("onnxruntime", "1.23.2", 10, 13, {"x86_64": 27, "aarch64": 27}),
    Wheel("openvino", "2026.4.1", 10, NEWEST, {"x86_64": 28, "aarch64": 35}),
    Wheel("openvino", "2025.4.1", 10, 13, {"x86_64": 17}),
    Wheel("openvino", "2025.2.0", 10, 13, {"aarch64": 31}),
)
RUNTIMES = {wheel.package for wheel in WHEELS}


def newest(package: str, python: tuple[int, int], glibc: tuple[int, int], machine: str) -> str | None:
    """The newest version of a runtime that runs there, of those that vitdeploy works with; None without any."""
    for wheel in WHEELS:
        fits = wheel.python <= python[1] <= wheel.last and python[0] == 3
        least = wheel.glibc.get(machine)
        if wheel.package == package and fits and least is not None and glibc >= (2, least):
            return wheel.version
    return None


def pair(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) of what is none."""
    numbers = [int(part) for part in version.split(".") if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) >= 2 else (0, 0)


# --- What a device may say at most, whatever is asked -----------------------------------------------------------------
# checked before a line is parsed, and before a document is decoded.
#
# A line of the allowed length can still be a document of many times its size in memory, or hold a number that no
# arithmetic here takes.


# Of a line: its lists and objects, its quotes (two a text), its values. Latencies are most of a result.
MOST_NESTED, MOST_QUOTES, MOST_VALUES = 2_000_000, 16_000_000, 16_000_000
# Of a document: items of a list or object; characters of a text; depth.
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 100_000, 1 << 20, 32
# A number for each query, however many there were; `results.check_run` looks at each.
MEASURED = (".latencies_ms", ".waiting_ms")
# Operations a second are the largest numbers that there are.
LARGEST = 1e18
# What the host has chosen, and compares: tokens may have negative numbers there.
OURS = ("sequence", "protocol")


def problem_of_line(line: bytes) -> str:
    """Why a line is not even parsed; "" for one that is."""
    counts = {
        "lists and objects": (line.count(b"[") + line.count(b"{"), MOST_NESTED),
        "quotes": (line.count(b'"'), MOST_QUOTES),
        "values": (line.count(b","), MOST_VALUES),
    }
    return next((f"{found:,} {what}, more than {most:,}" for what, (found, most) in counts.items() if found > most), "")


def problem_of(value: Any, path: str = "$", depth: int = 0) -> str:
    """What of a parsed document is beyond every measure, with its path; "" for nothing. `path` and `depth` are those of
    `value` in the document.

    Whole numbers count something, so none is negative. One with a fraction may be: a temperature.
    """
    if not isinstance(value, dict | list):
        odd = _problem(value)
    elif path.endswith(MEASURED) and set(map(type, value)) <= {int, float}:
        odd = ""
    elif len(value) > MOST_ITEMS:
        odd = f"{len(value):,} items, more than {MOST_ITEMS:,}"
    elif depth >= DEEPEST:
        odd = f"nested more than {DEEPEST} deep"
    else:
        return next(filter(None, (problem_of(item, path + name, depth + 1) for name, item in _items(value))), "")
    return f"{path}: {odd}" if odd else ""


def _items(container: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """What is in a list or an object, each with the end of its path."""
    if isinstance(container, list):
        return ((f"[{index}]", item) for index, item in enumerate(container))
    return ((f".{key[:60]}", item) for key, item in container.items() if key not in OURS)


def _problem(value: object) -> str:
    if isinstance(value, str):
        return f"a text of {len(value):,} characters" if len(value) > LONGEST_TEXT else ""
    if type(value) is int and not 0 <= value <= LARGEST:
        return f"the number {_short(value)}"
    return f"the number {value:g}" if type(value) is float and not abs(value) <= LARGEST else ""


def _short(value: int) -> str:
    """A whole number, however long."""
    digits = str(abs(value))
    return f"{value}" if len(digits) <= 40 else f"{'-' if value < 0 else ''}{digits[:6]}... of {len(digits):,} digits"


# --- The agent as one file: the device zone in a zipapp, the same bytes wherever it is packed -------------------------
# What its modules import beyond the standard library is numpy and Pillow, where images or numbers are touched, and one
# runtime. tests/devices/test_package.py imports all of them where nothing else is installed.


# Folders go with all that is below them.
ZONE = (
    *("__init__.py", "backends.py", "errors.py", "extensions.py", "limits.py", "paths.py", "zip_members.py"),
    *("publish.py", "spec", "runtime", "compilation", "benchmark"),
    *(f"bundle/{name}.py" for name in ("__init__", "checked", "layout", "read", "sign")),
    *("devices/__init__.py", "devices/agent"),
)
MAIN = "import sys\nfrom vitdeploy.devices.agent.main import main\n\nmain(sys.argv[0])\n"
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Package:
    """`data` is agent.pyz, `digest` its SHA-256."""

    data: bytes
    digest: str


@functools.cache
def agent_package() -> Package:
    """Stored, not deflated: what zlib makes of a text depends on its version."""
    home = Path(vitdeploy.__file__).parent
    files = sorted(file for name in ZONE for file in _files(home / name))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in [
            ("__main__.py", MAIN.encode()),
            *((f"vitdeploy/{file.relative_to(home).as_posix()}", file.read_bytes()) for file in files),
        ]:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return Package(buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest())


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))
