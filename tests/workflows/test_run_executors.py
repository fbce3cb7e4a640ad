"""`vitdeploy run --executor`: the stages of one process, from Ray nodes that make them side by side (for processes see
`test_tune_executors`), and the error of one that a process cannot make."""

import json
import shutil
from types import SimpleNamespace

import pytest

from tests.command_line import command_line, undisturbed
from tests.workflows.stored import check_made_beside, copy_times, stored
from vitdeploy.store.store import read_log

RECIPE = {
    "vitdeploy": 1,
    "name": "small",
    "preprocess": {"resize": 40, "crop": 32, "mean": [0.5], "std": [0.5]},
    "targets": ["onnxruntime-cpu"],  # OpenVINO gives parts of a graph other names in each process
    "budget": {"min_agreement": 50},
    "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory, digits, small_checkpoint):
    home = tmp_path_factory.mktemp("run")
    recipe = {
        **RECIPE,
        "source": {"model": "vit_w32d2h2_patch8_32", "checkpoint": str(small_checkpoint), "image_sizes": [32, 40]},
        "data": {"path": str(digits), "calibration": {"images": 32}, "evaluation": {"images": 64}},
    }
    (home / "recipe.yaml").write_text(json.dumps(recipe))
    return home


def ran(home, name, *options):
    store = home / name / "store"
    with undisturbed(home), command_line(home, store, short_bench=True) as command:
        done = command("run", "recipe.yaml", "-o", f"{name}/bundle", "--json", "-v", *options)
    return SimpleNamespace(done=done, store=store, log=list(read_log(store)), bundle=home / name / "bundle")


@pytest.fixture(scope="module")
def alone(home):
    return ran(home, "alone")


def test_two_ray_nodes_make_what_one_process_makes(home, alone, cluster):
    copy_times(alone.store, home / "ray" / "store")
    found = ran(home, "ray", "--executor", f"ray:{cluster}")
    assert found.done.returncode == alone.done.returncode == 0, found.done.stderr[-3000:]
    assert stored(found.store) == stored(alone.store)
    reports = [json.loads((each.bundle / "report.json").read_text()) for each in (found, alone)]
    assert [row["verify"] for row in reports[0]["engines"]] == [row["verify"] for row in reports[1]["engines"]]
    assert [row["size"] for row in reports[0]["sizes"]] == ["32x32", "40x40"]
    check_made_beside(found.log, found.done.stderr)


def test_a_stage_that_a_worker_cannot_make_ends_the_run_with_its_error(home, alone):
    wrong = ("--set", "ignore=[nobody]", "--executor", "processes", "--jobs", 2)
    found = []
    for name, options in (("wrong0", wrong[:2]), ("wrong1", wrong)):
        shutil.copytree(alone.store, home / name / "store")  # of all that does not depend on the wrong name
        found.append(ran(home, name, *options).done)
    assert found[0].returncode == found[1].returncode == 2
    errors = [done.stderr[done.stderr.index("VD2202") :] for done in found]
    assert "nobody" in errors[0] and errors[0] == errors[1]
    assert not (home / "wrong1" / "bundle").exists()
