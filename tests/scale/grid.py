"""Row: a grid of recipes on two Ray nodes, and one after the other."""

from __future__ import annotations

import collections
import hashlib
import json
from pathlib import Path

from tests.command_line import command_line, undisturbed
from tests.scale.cluster import two_nodes as cluster_of_two
from tests.scale.commands import DIGITS, SMALL_MODEL, kept, small_model
from tests.scale.row import Row
from vitdeploy.store.store import read_log

AXES = {"precision": ["fp32", "int8"]}
# What measured times decide, and what a runtime writes of an engine.
UNEQUAL = ("float_rest", "high_precision", "parts", "compile")
ALSO_EQUAL = ("calibration.json", "monitor.json")
MORE = {
    "targets": [["onnxruntime-cpu"], ["openvino-cpu"]],
    "data.calibration.images": [16, 32, 48],
    "optimize.class_token_only": [True, False],
}


def two_nodes(full: bool, work: Path, row: Row) -> None:
    """2 recipes, or 24: the same bundles and the same artifacts in the store."""
    grid = write_grid(work, small_model(work.parent / "made").checkpoint, {**AXES, **(MORE if full else {})})
    with undisturbed(work):
        with cluster_of_two(work) as address:
            ray = _swept(work / "ray", grid, "--executor", f"ray:{address}")
        alone = _swept(work / "alone", grid)
    count = 24 if full else 2
    row.check(len(ray) == len(alone) == count, f"{count} recipes gave bundles", f"{len(ray)} and {len(alone)}")
    for name in sorted(alone):
        both = ray.get(name, {}), alone[name]
        # Which engines a bundle holds, its measured times say.
        common = both[0].keys() & both[1].keys()
        row.same(*({each: found[each] for each in common} for found in both), f"{name}: the same bundle")
    stores = [_files(work / name / "store") for name in ("ray", "alone")]
    common = stores[0].keys() & stores[1].keys()
    row.same(*({key: store[key] for key in common} for store in stores), "the same files under the same keys")
    made = collections.Counter(line.key for line in read_log(work / "ray" / "store") if line.event == "made")
    twice = [key for key, times in made.items() if times > 1]
    row.check(bool(made) and not twice, "each stage was made once, as the store's log has it", f"{len(twice)} were not")
    processes = {line.made.pid for line in read_log(work / "ray" / "store") if line.event == "made"}
    row.check(len(processes) > 1, "they were made by several processes", f"{processes}")
    row.seen["made"] = f"{len(made)} stages for {count} recipes, by {len(processes)} processes"


def write_grid(work: Path, checkpoint: Path, axes: dict[str, list[object]]) -> Path:
    """grid.yaml, and the recipe that it varies."""
    recipe = {
        "vitdeploy": 1,
        "name": "small",
        "source": {"model": SMALL_MODEL, "checkpoint": str(checkpoint)},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
        "targets": ["onnxruntime-cpu"],
        "data": {"path": str(DIGITS), "calibration": {"images": 32}, "evaluation": {"images": 64}},
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
    }
    (work / "small.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    grid = {"grid": 1, "name": "small", "base": "small.yaml", "axes": axes}
    (work / "grid.yaml").write_text(json.dumps(grid), encoding="utf-8")
    return work / "grid.yaml"


def _swept(home: Path, grid: Path, *options: object) -> dict[str, dict[str, str]]:
    """The digests of the bundles by name."""
    home.mkdir()
    with command_line(home, home / "store", short_bench=True) as command:
        found = command("sweep", grid, "-o", "swept", "--json", *options)
    assert found.returncode in (0, 5), found.stderr[-3000:]
    return {each["name"]: equal_files(home / "swept" / each["name"]) for each in json.loads(found.stdout)["recipes"]}


def equal_files(bundle: Path) -> dict[str, str]:
    """The digests of all files of a bundle but those that tell of measured times, and of engines as a runtime keeps
    them."""
    named = [path for path in bundle.rglob("*") if path.is_file()]
    kept = [path for path in named if path.suffix in (".onnx", ".npz", ".txt") or path.name in ALSO_EQUAL]
    return {str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def _files(store: Path) -> dict[str, object]:
    return {key: record["files"] for key, record in kept(store).items() if record["kind"] not in UNEQUAL}
