"""What the keys of steps hold: our own code, the task's, and what a recipe leaves in float."""

import dataclasses
from pathlib import Path

import pytest

from vitdeploy.pipeline.job import prepare
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe
from vitdeploy.spec import EngineSpec, encode
from vitdeploy.stages.place import PlaceConfig
from vitdeploy.stages.rows import schedules_step
from vitdeploy.stages.search import float_rest_step, high_precision_step, score_step, screen_step
from vitdeploy.stages.step import Candidate, Step, write_json
from vitdeploy.stages.typed import typed_step
from vitdeploy.store.store import Artifact

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.yaml"
ALL = {"export", "optimize", "calibrate", "place", "typed", "compile", "search", "score", "schedules", "parts"}
ALL |= {"screen", "high_precision", "float_rest", "reference", "verify", "attention"}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A step of every stage, as plans of `run` and `tune` have them, by kind."""
    [job] = prepare(load_recipe(RECIPE, ["precision=mixed"]), skip_bad=False, progress=silent)
    folder = tmp_path_factory.mktemp("engine")
    write_json(folder / "engine.json", encode(EngineSpec("onnxruntime-cpu", "int8", "g", ("g",), 1, True, "", (), ())))
    artifact, candidate = Artifact(folder, "", ""), Candidate("onnxruntime-cpu", "int8", True)
    found = [*make_plan(job), schedules_step("onnxruntime-cpu", job.data)]
    found += [score_step(candidate, artifact, job.data), screen_step(1, {"onnxruntime-cpu-int8": artifact})]
    plain = PlaceConfig(candidate.target, "int8")
    found += [high_precision_step(candidate, plain, 5.0, 1, job.data), float_rest_step(candidate, plain, 1, job.data)]
    typed = typed_step(Candidate("onnxruntime-cuda", "fp16", True), job.data)
    by_kind = {**{step.kind: step for step in found}, "typed": typed}
    assert by_kind.keys() == ALL
    return by_kind


def test_every_stage_has_the_code_in_its_key(steps, monkeypatch):
    before = {kind: step.tools for kind, step in steps.items()}
    monkeypatch.setattr("vitdeploy.stages.step.code_version", lambda: "another")
    for kind, step in steps.items():
        assert step.tools == {**before[kind], "code": "another"} != before[kind]


def test_what_is_made_by_another_adapter_has_another_digest(steps):
    """The code of a task is no import of a stage: the step is given an object of it."""

    class Adapter:
        pass

    Adapter.__module__ = "vitdeploy.tasks.detection"
    adapter = Adapter()

    def write(folders, out, progress):
        return adapter

    step = Step("a", "a", write, {})
    assert step.modules == {__name__, "vitdeploy.tasks.detection"}
    assert step.key({}) != Step("a", "a", lambda folders, out, progress: None, {}).key({})


def test_a_key_has_the_code_in_it(steps):
    step = steps["optimize"]
    key = step.key({"export": Artifact(Path(), "", "e")})
    other = dataclasses.replace(step, write=steps["calibrate"].write)
    assert other.key({"export": Artifact(Path(), "", "e")}) != key


def test_layers_that_a_recipe_leaves_in_float_are_part_of_every_quantizing_key():
    for asked, expected in (("[]", ()), ("[patch_embed.proj]", ("patch_embed.proj",))):
        recipe = load_recipe(RECIPE, ["precision=mixed", f"ignore={asked}"])
        [job] = prepare(recipe, skip_bad=False, progress=silent)
        keys = {step.name: step.config["ignore"] for step in make_plan(job) if "ignore" in step.config}
        quantizing = {name: found for name, found in keys.items() if "fp32" not in name}
        assert quantizing and set(quantizing.values()) == {expected}
        assert {keys[name] for name in keys.keys() - quantizing.keys()} == {()}
