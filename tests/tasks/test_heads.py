"""Several heads on one backbone: each as a model of its task alone, modules as people write them, labels, bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

import vitdeploy as vd
from tests.command_line import command_line
from vitdeploy.data.folder import Sample
from vitdeploy.errors import CheckpointError, DataError, ManifestError, RecipeError
from vitdeploy.recipe.load import validate
from vitdeploy.runtime import load
from vitdeploy.runtime.tasks.binary import BinarySpec
from vitdeploy.runtime.tasks.heads import HEADS, KINDS, HeadSpec, HeadsSpec
from vitdeploy.runtime.tasks.multi_label import MultiLabelSpec
from vitdeploy.runtime.tasks.regression import RegressionSpec
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import DecodeError, TensorSpec, decode, encode
from vitdeploy.tasks.adapter import Data, DataChoice, Setting
from vitdeploy.tasks.heads import HeadLabel, HeadLabels, read_heads
from vitdeploy.tasks.multi_label import ImageLabels
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.tasks.regression import LabelledNumbers
from vitdeploy.verification.comparison import Control
from vitdeploy.verification.records import Answers
from vitdeploy.workflows.regression import _worst

SIDE = 16
PREPROCESS = vd.Preprocess(SIDE, (SIDE, SIDE), mean=(0.0,) * 3, std=(1.0,) * 3)
NAMES = ("ant", "bee", "cat")
SPEC = HeadsSpec(
    (
        HeadSpec("kind", "classification", "logits", NAMES, width=3),
        HeadSpec("tags", "multi-label", labels=("wet", "red"), postprocess=MultiLabelSpec((0.5, 0.4)), width=2),
        HeadSpec("whole", "binary", postprocess=BinarySpec(0.5, "whole"), width=1),
        HeadSpec("age", "regression", postprocess=RegressionSpec(("years",), 0.5), width=1),
        HeadSpec("vector", "embedding", width=4),
    )
)
WIDTHS = {head.reads: head.width for head in SPEC.heads}


def outputs(n=40, noise=0.0, seed=0):
    """[n, width] of each output, and where they come from."""
    random, other = np.random.default_rng(seed), np.random.default_rng(1)
    found = {name: 2 * random.normal(size=(n, width)) for name, width in WIDTHS.items()}
    return {name: (each + noise * other.normal(size=each.shape)).astype(np.float32) for name, each in found.items()}


def answers(noise=0.0, **more):
    return Answers({name: list(each) for name, each in outputs(noise=noise, **more).items()})


def labels(index, random):
    """Of an image: what is known for each head."""
    kind, tags = int(random.integers(3)), tuple(np.flatnonzero(random.integers(0, 2, 2)).tolist())
    values = kind, ImageLabels(tags), ImageLabels((0,) * (index % 2)), LabelledNumbers((float(kind),)), index % 8
    return HeadLabels(tuple(HeadLabel(value, str(value)) for value in values))


def data(tmp_path, n=40, calibration=0):
    random = np.random.default_rng(3)
    samples = tuple(Sample(tmp_path / f"{index}.png", None) for index in range(n))
    truth = {sample.path: labels(index, random) for index, sample in enumerate(samples)}
    return Data(tmp_path, samples[:calibration], samples, truth=truth)


def setting(spec=SPEC):
    return Setting("heads", PREPROCESS, spec)


# --- each head is compared as a model of its task alone ---------------------------------------------------------------


def alone(k, data, sides):
    """The comparison of the task of one head, of the same answers and labels."""
    head = SPEC.heads[k]
    values = [each.labels[k].value for each in data.truths()]
    if head.task in ("classification", "embedding"):
        samples = [dataclasses.replace(each, label=value) for each, value in zip(data.evaluation, values, strict=True)]
        data = dataclasses.replace(data, evaluation=samples, truth=None)
    else:
        paths = [sample.path for sample in data.evaluation]
        data = dataclasses.replace(data, truth=dict(zip(paths, values, strict=True)))
    adapter = make_adapter(Setting(head.task, PREPROCESS, head.spec, labels=head.labels, classes=head.width))
    name = KINDS[head.task][1]
    ours, theirs = (Answers({name: side.columns[head.reads]}) for side in sides)
    return adapter.compare(ours, theirs, data)


@pytest.mark.parametrize("k", range(len(SPEC.heads)), ids=[head.task for head in SPEC.heads])
def test_a_head_has_the_comparison_of_its_task_alone(k, tmp_path):
    known, sides = data(tmp_path), (answers(0.4), answers())
    part = make_adapter(setting()).compare(*sides, known).parts[k]
    assert (part.name, part.task) == (SPEC.heads[k].name, SPEC.heads[k].task)
    assert encode(part.comparison) == encode(alone(k, known, sides)) and part.comparison.drop_ci95 is not None


def test_all_heads_together_are_judged_by_the_one_that_loses_most(tmp_path):
    found = make_adapter(setting()).compare(answers(0.4), answers(), data(tmp_path))
    each = [part.comparison for part in found.parts]
    [worst] = [part for part in found.parts if part.name == found.worst]
    assert found.drop == worst.comparison.drop == max(one.drop for one in each)
    assert (found.value, found.reference_value) == (100 - found.drop, 100)
    assert found.drop_ci95 == tuple(max(one.drop_ci95[end] for one in each) for end in (0, 1))
    ours, theirs = answers(0.4), answers()
    columns = {name: [np.stack(side.columns[name]) for side in (ours, theirs)] for name in WIDTHS}
    same = columns["logits"][0].argmax(1) == columns["logits"][1].argmax(1)
    limits = {"tags": np.log([1.0, 0.4 / 0.6]), "whole": 0.0}
    for name, limit in limits.items():
        same &= ((columns[name][0] > limit) == (columns[name][1] > limit)).all(1)
    same &= np.abs(columns["age"][0] - columns["age"][1])[:, 0] <= 0.5
    unit = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in columns["vector"]]
    nearest = [(each @ each.T - 9 * np.eye(40)).argmax(1) for each in unit]
    same &= nearest[0] == nearest[1]
    assert found.agreement == 100 * same.mean() and 0 < same.mean() < 1
    assert found.max_difference == max(one.max_difference for one in each)


def test_without_labels_there_is_agreement_alone(tmp_path):
    found = make_adapter(setting()).compare(answers(0.4), answers(), dataclasses.replace(data(tmp_path), truth=None))
    assert found.metric is found.drop is found.worst is None and found.agreement < 100
    assert all(part.comparison.metric is None for part in found.parts)


def test_a_head_that_says_the_same_of_every_image_proves_nothing(tmp_path, monkeypatch):
    adapter = make_adapter(setting(HeadsSpec(SPEC.heads[:4])))  # without pixels
    whole = answers()
    found = adapter.verify(whole, whole, data(tmp_path))
    assert found.proves_nothing == "" and found.control.agreement < 50
    constant = Answers({**whole.columns, "whole": [np.ones(1, np.float32)] * 40})
    found = adapter.verify(constant, constant, dataclasses.replace(data(tmp_path), truth=None))
    assert found.agreement == 100 and found.control.agreement < 50
    assert found.proves_nothing.startswith("head whole: answers to other images agree to 100.00 %")


def test_a_comparison_is_the_same_after_a_round_trip(tmp_path):
    from vitdeploy.document.verified import decode_verified, diagnosed

    found = make_adapter(setting()).compare(answers(0.4), answers(), data(tmp_path))
    found = diagnosed(dataclasses.replace(found, control=Control(1.0, 2.0, 3.0)), None, "same")
    again = decode_verified(json.loads(json.dumps(encode(found))))
    assert again == found and type(again.parts[3].comparison).__name__ == "RegressionComparison"
    assert [*again.by_head] == [head.name for head in SPEC.heads]


def test_recorded_values_are_compared_head_by_head(tmp_path):
    """What is lost from one engine to another is not the difference of what each lost."""
    adapter, known = make_adapter(setting()), data(tmp_path)
    old, new = adapter.compare(answers(0.4), answers(), known), adapter.compare(answers(0.8), answers(), known)
    a, b = _worst(old, new)
    each = [old.by_head[name].value - new.by_head[name].value for name in old.by_head]
    assert a.value - b.value == max(each) and a.metric == b.metric != "worst head"
    fewer = dataclasses.replace(new, parts=new.parts[1:])
    for pair in ((old, fewer), (fewer, old)):
        a, b = _worst(*pair)
        assert a.metric != b.metric  # which is not compared
    alone = old.parts[0].comparison
    assert _worst(alone, alone) == (alone, alone)


def test_what_is_chosen_is_chosen_for_each_head(tmp_path):
    spec = HeadsSpec(tuple(dataclasses.replace(head, postprocess=None) for head in SPEC.heads))
    adapter, known = make_adapter(setting(spec)), data(tmp_path, calibration=40)
    assert adapter.fits(known) and not make_adapter(setting()).fits(known)
    fitted, note = adapter.fit(answers(), known)
    assert [type(head.postprocess) for head in fitted.heads] == [
        *(type(None), MultiLabelSpec, BinarySpec, RegressionSpec, type(None))
    ]
    single = make_adapter(Setting("multi-label", PREPROCESS, MultiLabelSpec(), labels=("wet", "red"), classes=2))
    truth = {path: each.labels[1].value for path, each in known.truth.items()}
    alone, _ = single.fit(Answers({"logits": answers().columns["tags"]}), dataclasses.replace(known, truth=truth))
    assert fitted.heads[1].postprocess == alone
    assert [part.partition(":")[0] for part in note.split("; head ")] == ["head tags", "whole", "age"]
    assert decode(HeadsSpec, encode(fitted)) == fitted


def test_changes_name_images_and_answers_are_shown_head_by_head(tmp_path):
    adapter, known = make_adapter(setting()), data(tmp_path)
    whole = answers()
    columns = {name: [*column] for name, column in whole.columns.items()}
    columns["logits"][7] = -columns["logits"][7]
    found = adapter.changes(Answers(columns), whole, known)
    assert np.flatnonzero(found.changed).tolist() == [7] and found.severity[7] > 0
    said = adapter.show(whole, 0, None).label
    assert [each.partition(":")[0] for each in said.split("; ")] == [head.name for head in SPEC.heads]
    assert adapter.truth_of(known, 0, None).startswith("kind: ")


# --- on the device ----------------------------------------------------------------------------------------------------


def test_an_answer_has_a_part_for_each_head():
    row = {name: each[0] for name, each in outputs(1).items()}
    reading = OutputReading((SIDE, SIDE), PREPROCESS, SPEC)
    answer = HEADS.answer(row, reading)
    assert answer["kind"].label == NAMES[row["logits"].argmax()]
    assert answer["age"].value == row["age"][0] and answer["age"].numbers[0].unit == "years"
    np.testing.assert_allclose(answer["vector"].vector, row["vector"] / np.linalg.norm(row["vector"]), rtol=1e-6)
    for head in SPEC.heads:
        task, name = KINDS[head.task]
        alone = OutputReading((SIDE, SIDE), PREPROCESS, head.spec, head.labels or None)
        assert answer[head.name].to_dict() == task.answer({name: row[head.reads]}, alone).to_dict()
    assert list(answer.to_dict()) == [head.name for head in SPEC.heads]
    assert "kind: " in str(answer) and "age: age" not in repr(answer)
    assert HEADS.same(row, row, reading)
    for name in row:
        assert not HEADS.same({**row, name: -row[name] + (name == "age")}, row, reading)


def test_probabilities_at_an_end_are_the_scores():
    spec = HeadsSpec(
        (
            HeadSpec("kind", "classification", ends_in="softmax"),
            HeadSpec("tags", "multi-label", ends_in="sigmoid"),
            HeadSpec("whole", "binary", ends_in="sigmoid"),
        )
    )
    row = {"kind": np.array([0.7, 0.3, 0]), "tags": np.array([0.9, 0.2]), "whole": np.array([0.8])}
    answer = HEADS.answer({k: v.astype(np.float32) for k, v in row.items()}, OutputReading((1, 1), None, spec))
    assert [each.score for each in answer["kind"].top] == pytest.approx([0.7, 0.3, 0])
    assert [each.score for each in answer["tags"].scores] == pytest.approx([0.9, 0.2])
    assert answer["whole"].score == pytest.approx(0.8)


def test_programs_write_each_head_in_the_form_of_its_task():
    spec = HeadsSpec((*SPEC.heads, HeadSpec("sure", "classification", ends_in="softmax")))
    form = HEADS.form([head.reads for head in spec.heads], spec)
    assert [(part.name, part.labels) for part in form.parts] == [(head.name, head.labels) for head in spec.heads]
    for head, part in zip(SPEC.heads, form.parts, strict=False):
        row, name = KINDS[head.task]
        assert part.form == dataclasses.replace(row.form([name], head.spec), output=head.reads)
    assert (form.parts[-1].form.given, form.parts[0].form.given) == (True, False)


BAD_MANIFESTS = {
    "no head": ({"heads": []}, "0 heads: expected 1 to 64"),
    "too many heads": ({"heads": [{"name": str(k), "task": "binary"} for k in range(65)]}, "65 heads"),
    "two of one name": ({"heads": [{"name": "a", "task": "binary"}] * 2}, "two heads have the name 'a'"),
    "two of one output": (
        {"heads": [{"name": "a", "task": "binary"}, {"name": "b", "task": "binary", "output": "a"}]},
        "two heads have the output 'a'",
    ),
    "another task": ({"heads": [{"name": "a", "task": "depth"}]}, "found 'depth'"),
    "heads in a head": ({"heads": [{"name": "a", "task": "heads", "postprocess": {"heads": []}}]}, "found 'heads'"),
    "a name of two lines": ({"heads": [{"name": "a\nb", "task": "binary"}]}, "labels without line breaks"),
}


@pytest.mark.parametrize("name", BAD_MANIFESTS)
def test_a_manifest_of_anybody_is_bounded(name):
    values, told = BAD_MANIFESTS[name]
    with pytest.raises(DecodeError) as refused:
        decode(HeadsSpec, values)
    assert any(told in problem for problem in refused.value.problems)


MISFITS = {
    "no such output": (HeadSpec("b", "binary"), "no output 'b'; the outputs are a, v"),
    "labels of another count": (HeadSpec("a", "classification", labels=("x",)), "1 labels for a ['batch', 3]"),
    "thresholds of another head": (
        HeadSpec("a", "multi-label", postprocess=MultiLabelSpec((0.5,))),
        "1 thresholds for 3 labels",
    ),
    "what another task means": (
        HeadSpec("a", "regression", postprocess=MultiLabelSpec()),
        "thresholds do not apply to the task regression",
    ),
    "one number": (HeadSpec("a", "binary"), "which is not one number per image"),
    "no axis of classes": (
        HeadSpec("v", "classification"),
        "v ['batch'] has the wrong shape for the task classification",
    ),
    "a sigmoid": (HeadSpec("a", "classification", ends_in="sigmoid"), "ends in sigmoid"),
    "a softmax": (HeadSpec("a", "multi-label", ends_in="softmax"), "ends in softmax"),
    "another width": (HeadSpec("a", "embedding", width=5), "expected 5 numbers per image"),
    "nobody's": (HeadSpec("a", None), "unknown task for a ['batch', 3]"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_head_that_is_not_of_the_outputs_is_named(name):
    head, told = MISFITS[name]
    outputs = [TensorSpec("a", "float32", ("batch", 3)), TensorSpec("v", "float32", ("batch",))]
    found = HeadsSpec((head,)).misfit(outputs)
    assert found.startswith(f"head {head.name}: ") and told in found


# --- modules and graphs as people write them --------------------------------------------------------------------------


class Backbone(nn.Module):
    def __init__(self, ending=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.kind, self.age, self.face = nn.Linear(8, 3), nn.Linear(8, 1), nn.Linear(8, 4)

    def parts(self, image):
        pooled = self.body(image)
        return self.kind(pooled), self.age(pooled), nn.functional.normalize(self.face(pooled), dim=1)


class InDict(Backbone):
    def forward(self, image):
        logits, age, embedding = self.parts(image)
        return {"class_logits": logits, "smile": torch.sigmoid(age), "embedding": embedding}


class InTuple(Backbone):
    def forward(self, image):
        return self.parts(image)


class Named(NamedTuple):
    kind: torch.Tensor
    age: torch.Tensor
    face: torch.Tensor


class InNamedTuple(Backbone):
    def forward(self, image):
        return Named(*self.parts(image))


@dataclasses.dataclass
class Output:
    kind: torch.Tensor
    age: torch.Tensor
    face: torch.Tensor


class InDataclass(Backbone):
    def forward(self, image):
        return Output(*self.parts(image))


def heads(*rows):
    return HeadsSpec(tuple(HeadSpec(*row) for row in rows))


MODULES = {
    "a dictionary": (InDict, ("class_logits", "smile", "embedding")),
    "a tuple": (InTuple, ("output_0", "output_1", "output_2")),
    "a named tuple": (InNamedTuple, ("kind", "age", "face")),
    "a dataclass": (InDataclass, ("kind", "age", "face")),
}


@pytest.mark.parametrize("name", MODULES)
def test_outputs_of_a_module_are_kept_as_numbers_with_a_proposal(name):
    make, names = MODULES[name]
    notes = vd.model(make(), preprocess=PREPROCESS).reference.notes
    told = " ".join(notes)
    assert vd.model(make(), preprocess=PREPROCESS).task == "tensors"
    assert "--task heads" in told and all(f"{{name: {each}, task: " in told for each in names), notes


def test_outputs_that_say_what_they_are_need_no_recipe(tmp_path):
    module = InDict().eval()
    model = vd.model(module, preprocess=PREPROCESS, task="heads")
    found = {head.name: (head.task, head.ends_in, head.width) for head in model.reference.postprocess.heads}
    assert found == {
        "class_logits": ("classification", "", 3),
        "smile": ("binary", "sigmoid", 1),
        "embedding": ("embedding", "", 4),
    }
    assert any("class_logits is classification, smile is binary" in note for note in model.reference.notes)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(tmp_path / "a.png")
    with vd.compile(vd.export(model, progress=False), "onnxruntime-cpu", progress=False).load() as predictor:
        answer = predictor.predict(tmp_path / "a.png")
    pixels = np.asarray(Image.open(tmp_path / "a.png"), np.float32).transpose(2, 0, 1)[None] / 255
    with torch.no_grad():
        right = module(torch.from_numpy(pixels))
    assert answer["smile"].score == pytest.approx(right["smile"].item(), abs=1e-5)
    np.testing.assert_allclose(answer["embedding"].vector, right["embedding"][0], atol=1e-5)
    assert answer["class_logits"].index == right["class_logits"].argmax().item()


@pytest.mark.parametrize("name", [name for name in MODULES if name != "a dictionary"])
def test_outputs_that_do_not_say_what_they_are_have_to_be_told(name):
    make, names = MODULES[name]
    with pytest.raises(CheckpointError, match="cannot be used for the task heads") as refused:
        vd.model(make(), preprocess=PREPROCESS, task="heads")
    assert f"unknown task for {names[1]} ['batch', 1]:" in refused.value.found
    assert f"postprocess: {{heads: [{{name: {names[0]}, task: " in refused.value.fix


def test_a_recipe_says_what_each_output_is():
    rows = [{"name": "kind", "task": "classification", "output": "output_0", "labels": [*NAMES]}]
    rows += [{"name": "age", "task": "regression", "output": "output_1", "postprocess": {"units": ["years"]}}]
    fields = {"vitdeploy": 1, "name": "heads", "source": {"model": "a.onnx"}, "data": {"path": "photos"}}
    fields |= {"targets": ["onnxruntime-cpu"], "postprocess": {"heads": rows}}
    spec = validate(fields, "recipe.yaml").postprocess.to_spec()
    model = vd.model(InTuple(), preprocess=PREPROCESS, task="heads", postprocess=spec)
    kind, age = model.reference.postprocess.heads
    assert (kind.labels, kind.width, age.postprocess.units, age.width) == (NAMES, 3, ("years",), 1)
    assert not any("taken" in note for note in model.reference.notes)
    with pytest.raises(CheckpointError, match="the post-processing does not fit") as refused:
        wrong = heads(("kind", "classification"), ("age", "regression"))
        vd.model(InTuple(), preprocess=PREPROCESS, task="heads", postprocess=wrong)
    assert "no output 'kind'; the outputs are output_0, output_1, output_2" in refused.value.found


BAD_RECIPES = {
    "another task": ({"name": "a", "task": "depth"}, "$.postprocess.heads[0].task: input should be 'classification'"),
    "no task": ({"name": "a"}, "$.postprocess.heads[0].task: missing"),
    "what only a model says": ({"name": "a", "task": "binary", "width": 1}, "$.postprocess.heads[0].width: unknown"),
    "a bound": (
        {"name": "a", "task": "multi-label", "postprocess": {"thresholds": [2.0]}},
        "$.postprocess.heads[0].postprocess.thresholds[0]: input should be less than or equal to 1",
    ),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_what_does_not_fit_in_a_recipe_is_named_where_it_stands(name):
    row, told = BAD_RECIPES[name]
    fields = {"vitdeploy": 1, "name": "heads", "source": {"model": "a.onnx"}, "data": {"path": "photos"}}
    fields |= {"targets": ["onnxruntime-cpu"], "postprocess": {"heads": [row]}}
    with pytest.raises(RecipeError) as refused:
        validate(fields, "recipe.yaml")
    assert any(problem.startswith(told) for problem in refused.value.problems), refused.value.problems


# --- labels: a column for each head -----------------------------------------------------------------------------------


LABELLED = (
    HeadSpec("kind", "classification", labels=NAMES, width=3),
    HeadSpec("tags", "multi-label", labels=("wet", "red"), width=2),
    HeadSpec("whole", "binary", width=1),
    HeadSpec("age", "regression", width=1),
    HeadSpec("who", "embedding", width=4),
)
HEADER = "image,kind,tags,whole,age,who"


def table(tmp_path, *rows, header=HEADER):
    images = tmp_path / "images"
    images.mkdir(exist_ok=True)
    for row in rows:
        Image.new("RGB", (4, 4)).save(images / row.partition(",")[0])
    (tmp_path / "labels.csv").write_text("\n".join([header, *rows]) + "\n")
    return images, tmp_path / "labels.csv"


def test_each_head_reads_its_column(tmp_path):
    rows = ("a.png,cat,wet;red,1,31.5,ann", "b.png,ant,,0,4,bob", "c.png,bee,red,true,7,ann")
    found = read_heads(*table(tmp_path, *rows), LABELLED)
    first, second, third = (each.labels for each in found.annotations.values())
    assert [each.value for each in first] == [*(2, ImageLabels((0, 1)), ImageLabels((0,)), LabelledNumbers((31.5,)), 0)]
    assert [each.shown for each in second] == ["ant", "no label", "no", "4", "bob"]
    assert third[4].value == first[4].value and found.notes == ()


def test_an_image_with_an_empty_cell_is_left_out_with_a_note(tmp_path):
    rows = ("a.png,cat,wet,1,31.5,ann", "b.png,,wet,0,4,bob", "c.png,bee,red,1,,ann")
    found = read_heads(*table(tmp_path, *rows), LABELLED)
    assert [sample.path.name for sample in found.samples] == ["a.png"] and found.unannotated == 2
    assert found.notes == ("2 images have an empty cell for a head (kind, age) and are ignored for all heads",)


def test_several_numbers_and_labels_have_columns_of_their_own(tmp_path):
    several = (
        HeadSpec("pose", "regression", labels=("yaw", "roll"), width=2),
        HeadSpec("tags", "multi-label", labels=("wet", "red"), width=2),
        HeadSpec("kind", "classification", width=3),
    )
    places = table(tmp_path, "a.png,1.5,2,0,1,2", header="image,roll,yaw,wet,red,kind")
    [found] = read_heads(*places, several).annotations.values()
    assert [each.value for each in found.labels] == [LabelledNumbers((2.0, 1.5)), ImageLabels((1,)), 2]


BAD_TABLES = {
    "no column": ("image,kind", "a.png,cat", "has no column for the head tags", "rename the column to the head's name"),
    "no class": (
        HEADER,
        "a.png,dog,wet,1,3,ann",
        "head kind: the classes of the data",
        "set its classes to the names in the column",
    ),
    "no label": (
        HEADER,
        "a.png,cat,dry,1,3,ann",
        "head tags: the classes of the data",
        "set its classes to the names in the column",
    ),
    "no flag": (HEADER, "a.png,cat,wet,2,3,ann", "the column 'whole' is neither 0 nor 1", "correct the cell"),
    "no number": (HEADER, "a.png,cat,wet,1,old,ann", "the column 'age' is not a number", "correct the cell"),
    "two rows": (HEADER, "a.png,cat,wet,1,3,ann\na.png,cat,wet,0,3,ann", "two different rows", "remove the wrong row"),
    "empty": (HEADER, "a.png,,wet,1,3,ann", "", ""),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_what_is_no_label_of_a_head_is_refused(name, tmp_path):
    header, row, told, fix = BAD_TABLES[name]
    with pytest.raises(DataError) as refused:
        read_heads(*table(tmp_path, row, header=header), LABELLED)
    assert told in refused.value.message and fix in refused.value.fix


def test_a_head_of_several_numbers_without_names_has_no_columns(tmp_path):
    with pytest.raises(DataError, match="not have a column for each number") as refused:
        read_heads(*table(tmp_path, "a.png,1", header="image,pose"), (HeadSpec("pose", "regression", width=2),))
    assert refused.value.expected == "names of its 2 numbers"


def choice(places, labels="columns"):
    return DataChoice(places[0], labels, places[1] if labels == "columns" else None, 0, "all", 0)


def test_what_makes_a_head_doubtful_is_said_with_its_name(tmp_path):
    places = table(tmp_path, *(f"{k}.png,cat,wet,{k % 2},{k},{k % 3}" for k in range(6)))
    unset = HeadsSpec(LABELLED)
    found = make_adapter(setting(unset)).find(choice(places))
    assert any(told.startswith("head tags: no evaluation image has the label red") for told in found.annotated.warnings)
    found = make_adapter(setting(unset)).find(choice(places, "none"))
    assert any(told.startswith("thresholds of tags, whole are 0.5") for told in found.parts.notes)
    assert make_adapter(setting()).find(choice(places, "none")).parts.notes == ()


def test_identities_of_one_image_each_are_refused(tmp_path):
    places = table(tmp_path, *(f"{k}.png,cat,wet,{k % 2},{k},{k}" for k in range(6)))
    with pytest.raises(DataError, match="no identity of the head who has two evaluation images") as refused:
        make_adapter(setting(HeadsSpec(LABELLED))).find(choice(places))
    assert refused.value.found == "6 identities in 6 images"


# --- from somebody's graph to an app's answer -------------------------------------------------------------------------


GRAPH_RECIPE = """
vitdeploy: 1
name: heads
source: {model: faces.onnx, task: heads}
preprocess: {resize: 16, crop: 16, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
postprocess:
  heads:
    - {name: kind, task: classification, output: output_0, labels: [ant, bee, cat]}
    - {name: tags, task: multi-label, output: output_1, labels: [wet, red, old]}
    - {name: whole, task: binary, output: output_2}
    - {name: age, task: regression, output: output_3, postprocess: {units: [years]}}
    - {name: who, task: embedding, output: output_4}
data: {path: photos, labels: columns, annotations: labels.csv, calibration: {images: 24}}
precision: fp32
targets: [onnxruntime-cpu]
budget: {min_agreement: 0}
bench: {scenarios: [single], batch: [1], duration: 0.1}
"""


class Many(Backbone):
    def __init__(self):
        super().__init__()
        self.tags, self.whole = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, image):
        pooled = self.body(image)
        spread = 30 * (pooled - self.body(torch.zeros(1, 3, SIDE, SIDE)))
        return (
            self.kind(spread).softmax(1),
            self.tags(spread),
            self.whole(spread)[:, 0],
            self.age(spread),
            self.face(spread),
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory, shared_store):
    """The folder of a bundle, its report and the command line; the graph is PyTorch's older exporter's."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "photos").mkdir()
    random, rows = np.random.default_rng(0), ["image,kind,tags,whole,age,who"]
    for index in range(64):
        level = random.integers(40, 215, 3)
        pixels = np.clip(level + random.normal(0, 20, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"photos/{index:02}.png")
        tags = "|".join(name for name, value in zip(("wet", "red", "old"), level, strict=True) if value > 127)
        rows.append(
            f"{index:02}.png,{NAMES[level.argmax()]},{tags},{int(level[0] > 127)},{level.mean():.2f},p{index % 9}"
        )
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    names = [f"output_{k}" for k in range(5)]
    torch.onnx.export(
        Many().eval(),
        torch.rand(2, 3, SIDE, SIDE),
        folder / "faces.onnx",
        input_names=["image"],
        output_names=names,
        dynamic_axes={name: {0: "batch"} for name in ("image", *names)},
        dynamo=False,
    )
    (folder / "recipe.yaml").write_text(GRAPH_RECIPE)
    with command_line(folder, shared_store, short_bench=True) as run:
        done = run("run", "recipe.yaml", "-o", "bundle", "--json")
        yield folder, done.document, run


def test_a_bundle_carries_its_heads_with_what_was_chosen(made):
    folder, report, _ = made
    chosen = json.loads((folder / "bundle/manifest.json").read_text())["postprocess"]["heads"]
    assert [each["name"] for each in chosen] == ["kind", "tags", "whole", "age", "who"]
    assert chosen[0]["ends_in"] == "softmax" and [each["width"] for each in chosen] == [3, 3, 1, 1, 4]
    assert len(chosen[1]["postprocess"]["thresholds"]) == 3 and chosen[2]["postprocess"]["decision_threshold"] > 0
    assert chosen[3]["postprocess"]["units"] == ["years"] and chosen[3]["postprocess"]["tolerance"][0] > 0
    [float32] = [each["verify"] for each in report["engines"] if each["precision"] == "fp32"]
    assert float32["metric"] == "worst head" and float32["agreement"] == 100 and float32["n"] == 40
    metrics = [part["comparison"]["metric"] for part in float32["parts"]]
    assert metrics == ["top-1", "mean AP", "AUROC", "R2", "recall@1"]
    assert all(part["comparison"]["control"] is not None for part in float32["parts"])
    page = (folder / "bundle/report.html").read_text()
    rows = re.findall(r'data-label="Head">(\w+)</td>\s*<td class="left" data-label="Metric">([^<]+)<', page)
    assert rows[:5] == list(zip(("kind", "tags", "whole", "age", "who"), metrics, strict=True)) and "MAE " in page


def test_commands_and_apps_answer_with_a_part_for_each_head(made):
    folder, _, run = made
    image = folder / "photos/00.png"
    [found] = run("predict", "bundle", image, "--json").document["predictions"]
    session = onnxruntime.InferenceSession(folder / "faces.onnx")
    pixels = (np.asarray(Image.open(image), np.float32).transpose(2, 0, 1)[None] / 255 - 0.5) / 0.5
    right = dict(zip((f"output_{k}" for k in range(5)), session.run(None, {"image": pixels}), strict=True))
    with load(folder / "bundle") as predictor:
        answer = predictor.predict(image)
    assert answer["kind"].label == NAMES[right["output_0"].argmax()]
    assert answer["kind"].score == pytest.approx(right["output_0"].max(), abs=1e-4)
    assert answer["whole"].score == pytest.approx(1 / (1 + np.exp(-right["output_2"][0])), abs=1e-4)
    assert answer["age"].value == pytest.approx(right["output_3"].item(), rel=1e-3, abs=1e-3)
    direction = right["output_4"][0] / np.linalg.norm(right["output_4"])
    np.testing.assert_allclose(answer["who"].vector, direction, atol=1e-3)
    assert list(found)[1:] == ["kind", "tags", "whole", "age", "who"] and {*found["whole"]} >= {"yes", "score"}


def test_a_bundle_whose_heads_are_of_another_model_is_refused(made, tmp_path):
    folder, *_ = made
    copy = Path(shutil.copytree(folder / "bundle", tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["postprocess"]["heads"][1]["postprocess"]["thresholds"] = [0.5] * 5
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ManifestError, match="does not fit the engine") as refused:
        load(copy)
    assert refused.value.found == "head tags: 5 thresholds for 3 labels"


def test_labels_of_one_file_are_not_those_of_every_head(tmp_path):
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    with pytest.raises(CheckpointError, match="has its own classes") as refused:
        vd.model(InDict(), preprocess=PREPROCESS, task="heads", labels=tmp_path / "labels.txt")
    assert "labels: [...]" in refused.value.fix
