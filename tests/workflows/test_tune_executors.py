"""`vitdeploy tune --executor`: what one process finds, from processes that make variants side by side. Ray's nodes get
steps as in `test_run_executors`."""

import json
from types import SimpleNamespace

import pytest

from tests.command_line import command_line, undisturbed
from tests.workflows.pieces import stage_at_second_try
from tests.workflows.stored import check_made_beside, copy_times, stored
from vitdeploy.pipeline import schedule
from vitdeploy.store.store import read_log

RECIPE = {
    "vitdeploy": 1,
    "name": "tuned",
    "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
    "targets": ["onnxruntime-cpu"],
    "budget": {"min_agreement": 50},
    "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory, digits, small_checkpoint):
    home = tmp_path_factory.mktemp("tune")
    recipe = {
        **RECIPE,
        "source": {"model": "vit_w32d2h2_patch8_32", "checkpoint": str(small_checkpoint)},
        "data": {"path": str(digits), "calibration": {"images": 32}, "evaluation": {"images": 64}},
    }
    (home / "recipe.yaml").write_text(json.dumps(recipe))
    return home


def tuned(home, name, *options):
    store = home / name / "store"
    with undisturbed(home), command_line(home, store, short_bench=True) as command:
        done = command("tune", "recipe.yaml", "-o", f"{name}/tuned", "--json", "-v", *options)
    assert done.returncode in (0, 5), done.stderr[-3000:]
    return SimpleNamespace(document=json.loads(done.stdout), said=done.stderr, store=store, log=list(read_log(store)))


@pytest.fixture(scope="module")
def alone(home):
    return tuned(home, "alone")


def test_processes_find_what_one_process_finds_though_one_of_them_is_killed(home, alone, monkeypatch):
    """In a store that has nothing but the times of the search without processes."""
    monkeypatch.setattr(schedule, "make_stage", stage_at_second_try)
    copy_times(alone.store, home / "processes" / "store")
    found = tuned(home, "processes", "--executor", "processes", "--jobs", 2)
    assert (home / "processes" / "killed").is_dir()
    assert stored(found.store) == stored(alone.store)
    for part in ("variants", "left_out", "merging", "pruning"):
        assert found.document.get(part) == alone.document.get(part), part
    judged = [[(each["artifact"], each["verify"]) for each in made.document["engines"]] for made in (found, alone)]
    assert judged[0] == judged[1]
    check_made_beside(found.log, found.said)
