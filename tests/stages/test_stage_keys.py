"""Which stages a change of the code makes again: one line is changed in a copy of the package, and the digests of all
steps are compared."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from vitdeploy.pipeline.job import prepare
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe
from vitdeploy.spec import EngineSpec, encode
from vitdeploy.stages.files import write_json
from vitdeploy.stages.float_rest import float_rest_step
from vitdeploy.stages.high_precision import high_precision_step
from vitdeploy.stages.rows import rows_step
from vitdeploy.stages.schedules import schedules_step
from vitdeploy.stages.score import score_step
from vitdeploy.stages.screen import screen_step
from vitdeploy.stages.step import Candidate, Step
from vitdeploy.stages.typed import typed_step
from vitdeploy.store.sources import HOME, source_digest
from vitdeploy.store.store import Artifact

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.yaml"
ENGINES = {"export", "optimize", "calibrate", "place", "typed", "compile"}
TRIED = {"search", "score", "schedules", "rows", "parts", "screen", "high_precision", "float_rest"}
ASKED = {"reference", "verify", "attention"}
COMPILED = {"compile", "typed", "search", "high_precision", "parts", "float_rest", "rows", "schedules"}
ALL = ENGINES | TRIED | ASKED


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A step of every stage, as plans of `run` and `tune` have them, by kind."""
    [job] = prepare(load_recipe(RECIPE, ["precision=mixed"]), skip_bad=False, progress=silent)
    folder = tmp_path_factory.mktemp("engine")
    write_json(folder / "engine.json", encode(EngineSpec("onnxruntime-cpu", "int8", "g", ("g",), 1, True, "", (), ())))
    artifact, candidate = Artifact(folder, "", ""), Candidate("onnxruntime-cpu", "int8", True)
    found = [*make_plan(job), rows_step("onnxruntime-cpu"), schedules_step("onnxruntime-cpu", job.data)]
    found += [score_step(candidate, artifact, job.data), screen_step(1, {"onnxruntime-cpu-int8": artifact})]
    found += [high_precision_step(candidate, 5.0, 1, 8, job.data), float_rest_step(candidate, 1, 8, job.data)]
    typed = typed_step(Candidate("onnxruntime-cuda", "fp16", True), job.data)
    by_kind = {**{step.kind: step for step in found}, "typed": typed}
    assert by_kind.keys() == ALL
    return by_kind


@pytest.fixture(scope="module")
def digests(steps, tmp_path_factory):
    """The digest of every stage's code once a line is added to a module; None for the package as it is."""
    folder = tmp_path_factory.mktemp("trees")

    def of(module):
        home = folder / (module or "as it is").replace("/", ".")
        if not home.exists():
            shutil.copytree(HOME / "vitdeploy", home / "vitdeploy", ignore=shutil.ignore_patterns("__pycache__"))
            if module is not None:
                file = home / "vitdeploy" / f"{module}.py"
                file.write_text(file.read_text(encoding="utf-8") + "\nCHANGED = True\n", encoding="utf-8")
        return {kind: source_digest(step.modules, home) for kind, step in steps.items()}

    return of


def test_a_step_has_the_digest_of_its_code_wherever_the_package_lies(steps, digests):
    assert {kind: step.tools["code"] for kind, step in steps.items()} == digests(None)


@pytest.mark.parametrize(
    ("module", "stages"),
    [
        ("errors", ALL),
        ("__init__", set()),
        ("cli/run", set()),
        ("report/html", set()),
        ("serve/app", set()),
        ("devices/client", set()),
        ("bundle/write", set()),
        ("recipe/recipe", set()),
        ("pipeline/plan", set()),
        ("pipeline/verdict", set()),
        ("models/architectures/vit", {"export", "reference"}),
        ("exporter/torch_onnx", {"export"}),
        ("graph/passes/optimize", {"optimize"}),
        ("graph/canonical/normalise", {"export", "optimize", "attention"}),
        ("quantization/channels", {"place", "typed", "search", "high_precision", "float_rest", "score"}),
        ("quantization/observers", {"calibrate"}),
        ("quantization/half", {"typed"}),
        ("compilation/openvino", COMPILED),
        ("compilation/tensorrt_build", COMPILED),
        ("runtime/ort", ALL - {"place"}),
        ("benchmark/worker", {"typed", *TRIED} - {"score"}),
        ("data/decoding", ASKED),
        ("data/pixels", {"calibrate", "typed", "search", "high_precision", "float_rest", "score", "schedules", *ASKED}),
        ("verification/classes", ASKED),
        ("verification/diagnosis", {"verify"}),
        ("tasks/classification", ASKED),
        ("tasks/detection", set()),
        ("stages/calibrate", {"calibrate"}),
        ("attention/rollout", {"attention"}),
    ],
)
def test_a_change_of_a_module_makes_again_what_runs_it_and_nothing_else(digests, module, stages):
    before, after = digests(None), digests(module)
    assert {kind for kind in ALL if before[kind] != after[kind]} == stages


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
    assert step.tools["code"] != Step("a", "a", lambda folders, out, progress: None, {}).tools["code"]


def test_a_key_has_the_code_in_it(steps):
    step = steps["optimize"]
    key = step.key({"export": Artifact(Path(), "", "e")})
    other = dataclasses.replace(step, write=steps["calibrate"].write)
    assert other.key({"export": Artifact(Path(), "", "e")}) != key


def test_layers_that_a_recipe_leaves_in_float_are_part_of_every_quantizing_key():
    for asked, wanted in (("[]", ()), ("[patch_embed.proj]", ("patch_embed.proj",))):
        recipe = load_recipe(RECIPE, ["precision=mixed", f"ignore={asked}"])
        [job] = prepare(recipe, skip_bad=False, progress=silent)
        keys = {step.name: step.config["ignore"] for step in make_plan(job) if "ignore" in step.config}
        quantizing = {name: found for name, found in keys.items() if "fp32" not in name}
        assert quantizing and set(quantizing.values()) == {wanted}
        assert {keys[name] for name in keys.keys() - quantizing.keys()} == {()}
