"""Calibration that is shared out, from what a user says to the graph that comes of it."""

import pytest

import vitdeploy as vd
from tests.command_line import ROOT, command_line
from tests.stages.test_calibrate_shards import Watched
from vitdeploy.api.workers import workers_of
from vitdeploy.errors import InputError
from vitdeploy.pipeline.job import prepare
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe
from vitdeploy.stages import calibrate as stage
from vitdeploy.stages import calibrate_shards as shards
from vitdeploy.stages.workers import Workers
from vitdeploy.store.store import Store
from vitdeploy.workflows.executors import Processes, RayCluster

TARGET, RECIPE = "onnxruntime-cpu", ROOT / "recipes" / "digits.yaml"


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(stage, "IN_ONE", 40)
    monkeypatch.setattr(shards, "WINDOW", 4)
    monkeypatch.setattr(shards, "MOST", 32)


@pytest.mark.usefixtures("forked_workers")
def test_a_graph_that_several_processes_calibrated_has_the_bytes_of_one(
    small_export, digits, tmp_path, small_shards, monkeypatch
):
    files = []
    for jobs in (0, 2):
        monkeypatch.setenv("VITDEPLOY_STORE", str(tmp_path / f"store{jobs}"))
        made = vd.quantize(
            *(small_export, digits / "calibration", TARGET, tmp_path / f"out{jobs}"),
            **{"num_samples": 56, "high_precision": 0.0, "jobs": jobs, "progress": False},
        )
        files.append({path.name: path.read_bytes() for path in (tmp_path / f"out{jobs}").iterdir()})
        assert made.calibration_images == 56
        assert len(list((tmp_path / f"store{jobs}" / "artifacts").glob("*/*/shard.npz"))) > 2
    assert files[0] == files[1]


def test_a_plan_hands_its_workers_to_the_calibration_alone(tmp_path, small_shards):
    recipe = load_recipe(RECIPE, ["precision=int8", "data.calibration.images=56"])
    [job] = prepare(recipe, skip_bad=False, progress=silent)
    watched, store = Watched(), Store(tmp_path / "store")
    plan = make_plan(job, Workers(watched, store))
    assert [step.name for step in plan] == [step.name for step in make_plan(job)]
    until = [step.name for step in plan].index("calibrate") + 1
    made = run_plan([step for step in plan[:until] if step.name != "reference"], store, resume=True, progress=silent)
    assert len(watched.seen) > 2
    assert {piece.graph.key for piece in watched.seen} == {made["optimize"].key}


@pytest.mark.parametrize(
    ("executor", "jobs", "expected"),
    [
        (None, 0, None),
        (None, 1, None),
        (None, 3, Processes(3)),
        ("processes", 1, Processes(1)),
        ("ray", 0, RayCluster("", None)),
        ("ray:10.0.0.5:6379", 1, RayCluster("10.0.0.5:6379", 1)),
    ],
)
def test_who_works_is_who_was_named(tmp_path, monkeypatch, executor, jobs, expected):
    monkeypatch.setenv("VITDEPLOY_STORE", str(tmp_path))
    found = workers_of(executor, jobs, resume=False)
    assert type(found.executor) is type(expected) and getattr(found.executor, "__dict__", 0) == getattr(
        expected, "__dict__", 0
    )
    assert (found.store.root, found.resume) == (tmp_path, False)


def test_without_a_store_that_can_be_written_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("VITDEPLOY_STORE", str(tmp_path / "file"))
    assert workers_of(None, 0).store is None


def test_processes_without_a_number_are_one_for_each_core(monkeypatch):
    monkeypatch.setattr("vitdeploy.api.workers.usable_cores", lambda: 7)
    assert workers_of("processes", 0).executor.count == 7


@pytest.mark.parametrize("call", [
    lambda: vd.run(RECIPE, executor="dask", progress=False),
    lambda: vd.tune_recipe(RECIPE, executor="dask", progress=False),
])  # fmt: skip
def test_an_unknown_executor_is_refused_before_any_work(call):
    with pytest.raises(InputError, match="unknown executor"):
        call()


@pytest.mark.parametrize("command", [("run",), ("run", "--dry-run"), ("tune",)])
def test_the_command_line_takes_them(tmp_path, command):
    with command_line(tmp_path, tmp_path / "store") as run:
        done = run(*command, RECIPE, "-o", tmp_path / "out", "--executor", "dask", "--jobs", 2)
    assert done.returncode == 2
    assert "unknown executor" in done.stderr and "processes, ray or ray:HOST:PORT" in done.stderr
    assert not (tmp_path / "out").exists()
