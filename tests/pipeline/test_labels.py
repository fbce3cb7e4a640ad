"""Whose class is whose, from a checkpoint with label names and folders of these to what is said of the accuracy."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file

from tests.command_line import command_line
from tests.conftest import DIGITS, SMALL_MODEL
from vitdeploy.errors import GateError, InputError
from vitdeploy.models.source import Source
from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.verdict import foresee, split_notes
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe
from vitdeploy.recipe.recipe import BudgetSection
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import Budget
from vitdeploy.stages.reference_model import reference_runner
from vitdeploy.store.store import Store
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.workflows.comparison import Trial, verify_subjects
from vitdeploy.workflows.subjects import Finder, Subject
from vitdeploy.workflows.tuning import Tuner

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDER = (4, 7, 2, 0, 9, 5, 1, 8, 6, 3)
LABELS = [NAMES[i] for i in ORDER]
IMAGES = 12  # of a class


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits' model with its classes in another order, as timm's folder that names them; folders of these names."""
    home = tmp_path_factory.mktemp("labels")
    state = load_file(DIGITS / "vit_digits.safetensors")
    for key in ("head.weight", "head.bias"):
        state[key] = state[key][torch.tensor(ORDER)].contiguous()
    (home / "model").mkdir()
    save_file(state, home / "model" / "model.safetensors")
    own = {"input_size": [1, 32, 32], "mean": [0.5], "std": [0.5], "label_names": LABELS}
    arguments = {"img_size": 32, "patch_size": 4, "depth": 4, "num_heads": 3, "in_chans": 1}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 10, "model_args": arguments}
    (home / "model" / "config.json").write_text(json.dumps({**config, "pretrained_cfg": own}), encoding="utf-8")
    for index, name in enumerate(NAMES):
        folder = home / "data" / name
        folder.mkdir(parents=True)
        for path in sorted((DIGITS / "evaluation" / str(index)).glob("*.png"))[:IMAGES]:
            shutil.copy(path, folder)
    (home / "sorted.txt").write_text("".join(f"{name}\n" for name in sorted(NAMES)), encoding="utf-8")
    return home


def job_of(home: Path, calibration: object = 10, budget: object = None, **source: str) -> Job:
    recipe = {
        "vitdeploy": 1,
        "name": "labels",
        "source": {"model": f"hf:{home / 'model'}", **source},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
        "data": {"path": str(home / "data"), "calibration": {"images": calibration}},
        "targets": ["onnxruntime-cpu"],
        "precision": "fp32",
        "budget": budget or {},
    }
    file = home / "recipe.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    [job] = prepare(load_recipe(file, ()), skip_bad=False, progress=silent)
    return job


@pytest.fixture(scope="module")
def named(home):
    """The job, and what the original answers."""
    job = job_of(home)
    return job, job.adapter.answers(reference_runner(job.reference_model.source), job.data, lambda count: None)


def test_folders_of_the_labels_names_are_these_classes_whatever_their_order(named):
    job, answers = named
    found = job.adapter.compare(answers, answers, job.data)
    assert found.reference_value > 90
    assert found.reference_top5 >= found.reference_value
    assert (job.data.mapping.how, job.data.mapping.index) == ("name", {name: i for i, name in enumerate(LABELS)})
    assert job.data.mapping_facts.how == "name"
    assert (list(job.labels), job.data.notes) == (LABELS, ())
    assert job.adapter.doubt(answers, job.data, found) is None
    for index, sample in enumerate(job.data.evaluation):
        assert job.adapter.truth_of(job.data, index, job.labels) == sample.path.parent.name


def test_a_wrong_order_is_told_and_so_is_what_another_one_gives(home, named):
    job = job_of(home, labels=str(home / "sorted.txt"))
    answers = named[1]  # names are no part of an answer
    text = job.adapter.doubt(answers, job.data, None)
    assert "the class order may be wrong. In another order, fitted on one half of the images, it is" in text
    assert text.endswith("(classes are mapped by name: 10 of the data)")


def test_what_is_verified_depends_on_the_mapping(home, named):
    keys = []
    for job in (named[0], job_of(home), job_of(home, labels=str(home / "sorted.txt"))):
        [step] = [step for step in make_plan(job) if step.kind == "verify"]
        keys.append((step.config["mapping"], step.outside["samples"]))
    assert keys[0] == keys[1]
    assert keys[0][0] != keys[2][0]
    assert keys[0][1] != keys[2][1]


def test_what_cannot_be_proven_is_known_from_the_original_alone(named):
    job, answers = named
    assert foresee(job.adapter, answers, job.data, Budget()) == []
    [text] = foresee(job.adapter, answers, job.data, Budget(max_drop=0.5))
    assert text.startswith("110 images are too few: ") and "only a drop below " in text
    [text] = foresee(job.adapter, answers, job.data, Budget(min_agreement=99, max_drop=20))
    assert text == (
        "110 images are too few: even if all answers match, they prove only 96.62 % agreement "
        "(budget: 99 %); about 381 are needed"
    )


def test_few_images_leave_enough_to_evaluate_on_and_the_summary_says_so(home):
    job = job_of(home, "auto")
    assert (len(job.data.calibration), len(job.data.evaluation)) == (30, 90)
    [note] = split_notes(job)
    assert note.startswith("30 of 120 images are for calibration (usual: 128), 90 for evaluation")
    assert "data.calibration.images" in note


def test_a_split_that_leaves_too_few_is_refused_with_the_number_that_works(home):
    with pytest.raises(GateError) as caught:
        split_notes(job_of(home, 60))
    assert caught.value.exit_code == 5 and "about 73 are needed" in caught.value.found
    assert caught.value.fix == "--set data.calibration.images=30"
    assert split_notes(job_of(home, 30)) == []


@pytest.mark.parametrize("budget", [{"min_agreement": 99}, {"max_drop": 0.5}])
def test_what_no_split_can_prove_is_a_note(home, budget):
    [note] = split_notes(job_of(home, 60, budget))
    assert note.startswith("60 images are too few: ") and "undecided" in note
    assert split_notes(job_of(home, 60, {"min_agreement": 90})) == []


def test_a_search_knows_it_before_it_makes_anything(named, tmp_path):
    recipe = named[0].recipe.model_copy(update={"budget": BudgetSection(max_drop=0.5)})
    made: list[str] = []
    job = dataclasses.replace(named[0], recipe=recipe)
    tuner = Tuner(job, Store(tmp_path), True, silent, lambda step, reused: made.append(step.name))
    assert [text.startswith("110 images are too few: ") for text in tuner.foresee()] == [True]
    assert made == ["reference"]


def test_verify_warns_and_says_what_cannot_be_proven_before_the_gate(home, tmp_path):
    swapped = shutil.copytree(home / "model", tmp_path / "swapped")
    config = json.loads((swapped / "config.json").read_text(encoding="utf-8"))
    config["pretrained_cfg"]["label_names"] = sorted(NAMES)
    (swapped / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with command_line(home, tmp_path / "store") as command:
        done = command(
            *("verify", f"hf:{swapped}", "--against", f"hf:{swapped}", "--image-size", 32),
            *("--data", "data", "--max-drop", 0.5),
        )
    assert done.returncode == 5
    said = "120 images are too few: "
    assert [line.startswith(said) for line in done.stderr.splitlines() if "they prove only a drop" in line] == [True]
    *_, warning, gate, _ = done.stdout.splitlines()
    assert warning.startswith("warning: the original's top-1 is ")
    assert "the class order may be wrong. In another order, fitted on one half of the images, it is 9" in warning
    assert gate.startswith("gate        undecided; drop 0.00 points")


# --- two models -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(small_checkpoint, tmp_path_factory) -> Subject:
    source = Source(checkpoint=small_checkpoint)
    [subject] = Finder(tmp_path_factory.mktemp("work")).find(SMALL_MODEL, source)
    grey = dataclasses.replace(subject.setting.images, mean=(0.5,), std=(0.5,))
    return dataclasses.replace(subject, own=True, setting=dataclasses.replace(subject.setting, preprocess=grey))


def changed(subject: Subject, labels: tuple[str, ...] = (), **preprocess: object) -> Subject:
    images = dataclasses.replace(subject.setting.images, **preprocess)
    return dataclasses.replace(subject, setting=dataclasses.replace(subject.setting, preprocess=images, labels=labels))


def choice(home: Path) -> DataChoice:
    return DataChoice(home / "data", "folders", None, 0, 40, 0)


def test_two_models_with_their_classes_in_another_order_are_not_compared(home, small):
    with pytest.raises(InputError, match="have their classes in different orders") as caught:
        Trial(changed(small, NAMES), changed(small, tuple(LABELS)), choice(home), skip_bad=False, progress=silent)
    assert caught.value.found == "class 0 is 'zero' in one model and 'four' in the other"


def test_an_artifact_without_labels_has_those_of_its_original(home, small):
    said: list[str] = []
    found = verify_subjects(
        *(changed(small), changed(small, tuple(LABELS)), choice(home)),
        skip_bad=False,
        budget=Budget(max_drop=0.5),
        progress=silent,
        note=said.append,
    )
    assert found.mapping.how == "name"
    assert len([text for text in said if text.startswith("40 images are too few: ")]) == 1
    assert (found.verified.agreement, found.verified.drop) == (100, 0)


def test_another_normalisation_is_shown_by_the_same_tensor(home, small):
    ours = changed(small, mean=(0.9,), std=(0.1,))
    found = verify_subjects(ours, small, choice(home), skip_bad=False, budget=Budget(), progress=silent)
    assert found.verified.diagnosis.startswith(
        "preprocessing differs: mean (0.9,) instead of (0.5,), std (0.1,) instead of"
    )
    assert "on the same tensor 100.0 % agree" in found.verified.diagnosis
    assert found.verified.same_tensor.max_difference < 1e-5 < found.verified.max_difference


def test_a_graph_that_normalises_by_itself_cannot_be_fed_another_normalisation(home, small):
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ("batch", 32, 32, 1))
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("batch", 10))
    weights = numpy_helper.from_array(np.random.RandomState(0).randn(32 * 32, 10).astype(np.float32), "weights")
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("Cast", ["flat"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["pixels", "weights"], ["logits"]),
    ]
    graph = helper.make_graph(nodes, "linear", [image], [logits], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    theirs = dataclasses.replace(small, runner=lambda: OnnxRuntimeRunner(model, name="linear"))
    ours = changed(small, mean=(0.9,), std=(0.1,))
    found = verify_subjects(ours, theirs, choice(home), skip_bad=False, budget=Budget(), progress=silent)
    assert found.verified.same_tensor is None
    assert found.verified.diagnosis.startswith("unknown: preprocessing differs: ")
    assert "so the cause is not confirmed" in found.verified.diagnosis
