"""`sweep`: many recipes, made side by side, measured alone, one table; and the executors under it."""

import dataclasses
import json
import sys

import pytest

from tests.command_line import command_line
from tests.documents import as_report
from tests.pipeline.test_imported import NETWORK
from tests.report.test_html import REPORT
from vitdeploy.api.sweep import _unmet
from vitdeploy.document.report import SizeRow
from vitdeploy.errors import InputError, MissingFileError
from vitdeploy.pipeline.schedule import _StageTask, at_size, make_stage
from vitdeploy.recipe.grid import list_recipes
from vitdeploy.recipe.load import load_recipe
from vitdeploy.stages.step import Step
from vitdeploy.workflows.executors import Processes
from vitdeploy.workflows.sweep import Entry, unmeasured


def a_recipe(folder, name, checkpoint, digits, **fields):
    recipe = {
        "vitdeploy": 1,
        "name": name,
        "source": {"model": "vit_w32d2h2_patch8_32", "checkpoint": str(checkpoint)},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
        "data": {"path": str(digits / "calibration"), "labels": "none", "calibration": {"images": 4}},
        "targets": ["onnxruntime-cpu"],
        "precision": "fp32",
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 0.1},
        **fields,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    return path


# --- executors --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_workers")
def test_an_error_of_one_piece_is_its_result_and_ends_no_other(tmp_path, digits):
    files = [a_recipe(tmp_path, name, tmp_path / f"{name}.safetensors", digits) for name in ("first", "second")]
    entries = [Entry(load_recipe(file), tmp_path / "store", False, file=file) for file in files]
    tasks = [_StageTask(at_size(entry, 0), "export", (), "") for entry in entries]
    found = dict(Processes(1).map(make_stage, tasks))
    assert [type(found[index]) for index in (0, 1)] == [MissingFileError, MissingFileError]
    assert "second.safetensors" in found[1].message and found[1].exit_code == 2


# --- the sweep --------------------------------------------------------------------------------------------------------


def test_nothing_that_needs_a_measured_step_is_made_ahead():
    def step(name, *inputs, measured=False):
        return Step(name, "kind", {}, lambda *_: None, inputs, measured=measured)

    plan = [step("a"), step("times", "a", measured=True), step("b", "times"), step("c", "b"), step("d", "a")]
    assert [each.name for each in unmeasured(plan)] == ["a", "d"]


def test_two_recipes_of_one_name_are_refused(tmp_path, small_checkpoint, digits):
    first = a_recipe(tmp_path, "same", small_checkpoint, digits)
    with pytest.raises(InputError, match="the same name"):
        list_recipes([first, first])


def test_a_module_of_ones_own_in_recipes_that_name_no_model(tmp_path, shared_store, digits, monkeypatch):
    name = f"swept_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETWORK)
    values = {
        **{"vitdeploy": 1, "name": "own", "targets": ["onnxruntime-cpu"], "precision": "fp32"},
        "data": {"path": str(digits), "calibration": {"images": 4}, "evaluation": {"images": 8}},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
        "budget": {"min_agreement": 0},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(values))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with command_line(tmp_path, shared_store, short_bench=True) as here:
        done = here("sweep", "own.yaml", "--model", f"{name}:build", "-o", "swept", "--json")
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["recipes"]
    assert row["report"]["model"]["source"] == f"{name}:build"


def test_a_budget_that_another_image_size_misses_is_missed():
    whole = as_report(REPORT)
    latency = whole.bench.results[0].latency_ms
    sizes = [
        SizeRow(f"{n}x{n}", "", "", gate, None, "", None, None, latency, 1.0) for n, gate in enumerate(("pass", "fail"))
    ]
    assert _unmet(dataclasses.replace(whole, sizes=tuple(sizes))) and not _unmet(whole)


def test_recipes_become_one_table_and_one_that_fails_ends_no_other(tmp_path, shared_store, small_checkpoint, digits):
    recipes = [
        a_recipe(tmp_path, "plain", small_checkpoint, digits),
        a_recipe(tmp_path, "broken", tmp_path / "missing.safetensors", digits),
        a_recipe(tmp_path, "strict", small_checkpoint, digits, budget={"min_agreement": 99.99}),
    ]
    with command_line(tmp_path, shared_store, short_bench=True) as here:
        done = here("sweep", *recipes, "-o", "swept", "--json")
        assert done.returncode == 2 and "broken" in done.stderr and "missing.safetensors" in done.stderr
        assert "\nmeasure plain\n" in done.stderr  # it takes minutes
        found = {row["name"]: row for row in json.loads(done.stdout)["recipes"]}
        assert found["broken"]["report"] is None and found["broken"]["error"]["exit_code"] == 2
        assert found["plain"]["error"] is None and found["plain"]["report"]["bench"]["results"]
        for name in ("plain", "strict"):
            assert (tmp_path / "swept" / name / "manifest.json").is_file()
        page = (tmp_path / "swept" / "sweep.html").read_text()
        assert 'href="plain/report.html"' in page and "onnxruntime-cpu-fp32" in page and "Failed" in page
        again = here("sweep", *recipes, "-o", "swept", "--json", "--watch")
        assert again.returncode == 2 and again.stderr.count("already finished, measured") == 2
        plan = here("sweep", *recipes, "-o", "swept", "--json", "--dry-run")
        rows = {row["name"]: row for row in json.loads(plan.stdout)["recipes"]}
        assert plan.returncode == 2 and "missing.safetensors" in rows["broken"]["error"]["message"]
        assert rows["plain"]["finished"] and rows["plain"]["seconds"] is None
        late = here("sweep", recipes[0], "-o", "late", "--minutes", 0.001)
        assert late.returncode == 5 and "not started: plain" in late.stderr
        assert not (tmp_path / "late" / "plain").exists()
        assert "Not started" in (tmp_path / "late" / "sweep.html").read_text()
        # Images that are few prove no 99.99 %.
        assert here("sweep", recipes[2], "-o", "swept", "--jobs", 2, "--no-resume").returncode == 5
        (tmp_path / "swept" / "plain" / "mine.txt").write_text("kept")
        refused = here("sweep", recipes[0], "-o", "swept")
        assert refused.returncode == 2 and (tmp_path / "swept" / "plain" / "mine.txt").read_text() == "kept"
