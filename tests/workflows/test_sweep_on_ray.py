"""A grid on two Ray nodes, one of which measures: the bundles of one process, and no stage was made twice."""

import hashlib
import json
from collections import Counter

from tests.command_line import command_line
from tests.conftest import IN_SCALE
from tests.workflows.measured import measured_shortly
from vitdeploy.store.store import read_log
from vitdeploy.workflows import sweep
from vitdeploy.workflows.sweep import TRAVELS

AXES = {"precision": ["fp32", "int8"]}
# No times decide over what is made.
CHOSEN = {"high_precision": 0, "optimize": {"split_rows": "none", "float_rest": "fp32"}}
# Which engines a bundle holds, and so its golden answers, are up to measured times: they are compared in the store.
# What a runtime writes of an engine need not be the same twice.
ENGINES = ("compile", TRAVELS)
EQUAL = ("model.onnx", "calibration.json", "labels.txt", "golden/inputs.npz")


def a_grid(folder, checkpoint, digits, axes):
    recipe = {
        "vitdeploy": 1,
        "name": "small",
        "source": {"model": "vit_w32d2h2_patch8_32", "checkpoint": str(checkpoint)},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
        "data": {"path": str(digits), "calibration": {"images": 8}, "evaluation": {"images": 24}},
        "targets": ["onnxruntime-cpu"],
        "budget": {"min_agreement": 0},
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
        **CHOSEN,
    }
    (folder / "small.yaml").write_text(json.dumps(recipe))
    grid = {"grid": 1, "name": "small", "base": "small.yaml", "axes": axes}
    (folder / "grid.yaml").write_text(json.dumps(grid))
    return folder / "grid.yaml"


def files_of(bundle):
    return {
        name: hashlib.sha256((bundle / name).read_bytes()).hexdigest() for name in EQUAL if (bundle / name).exists()
    }


def stored(store):
    """Of each stage but engines, by its key: its name, and the digests of its files."""
    records = [json.loads(path.read_text()) for path in store.glob("artifacts/*/*/artifact.json")]
    return {
        record["key"]: (record["made"]["name"], record["files"]) for record in records if record["kind"] not in ENGINES
    }


def swept(home, grid, *options):
    """The rows of a sweep by name, and what it said."""
    home.mkdir(exist_ok=True)
    with command_line(home, home / "store", short_bench=True) as here:
        done = here("sweep", grid, "-o", "swept", "--json", *options)
    assert done.returncode in (0, 5), done.stderr[-3000:]
    return {row["name"]: row for row in json.loads(done.stdout)["recipes"]}, done.stderr


def check_a_grid(folder, address, grid, count, patch):
    """Sweep a grid on a cluster and one after the other, and compare."""
    patch.setattr(sweep, "measure_there", measured_shortly)
    on_ray, _ = swept(folder / "ray", grid, "--executor", f"ray:{address}", "--watch")
    alone, _ = swept(folder / "alone", grid)
    assert len(on_ray) == count and on_ray.keys() == alone.keys()
    assert all(row["host"] for row in on_ray.values()) and not any("host" in row for row in alone.values())
    for name in alone:
        bundles = [files_of(folder / home / "swept" / name) for home in ("ray", "alone")]
        assert bundles[0] == bundles[1] and len(bundles[0]) >= 3, name
    assert stored(folder / "ray" / "store") == stored(folder / "alone" / "store")
    lines = list(read_log(folder / "ray" / "store"))
    made = Counter(line.key for line in lines if line.kind != TRAVELS)
    assert set(made.values()) == {1} and made.keys() >= stored(folder / "ray" / "store").keys()
    kinds = Counter(line.kind for line in lines)
    assert kinds[TRAVELS] == count and kinds["export"] == 1 and kinds["reference"] == 1
    return lines


@IN_SCALE
def test_a_grid_on_two_nodes_gives_the_bundles_of_one_process(cluster, tmp_path, small_checkpoint, digits, monkeypatch):
    grid = a_grid(tmp_path, small_checkpoint, digits, AXES)
    lines = check_a_grid(tmp_path, cluster, grid, 2, monkeypatch)
    assert len({line.made.pid for line in lines}) > 1
    # The same command again: nothing is made, and nothing is measured.
    _, said = swept(tmp_path / "ray", grid, "--executor", f"ray:{cluster}")
    assert said.count("already finished, measured") == 2
    assert list(read_log(tmp_path / "ray" / "store")) == lines
