"""Labels of their own, many (multi-label) or one (binary): metrics, thresholds, and where labels are read from."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from vitdeploy.errors import DataError
from vitdeploy.runtime.tasks.binary import BINARY, BinarySpec
from vitdeploy.runtime.tasks.multi_label import MULTI_LABEL, MultiLabelSpec
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import PreprocessSpec, TensorSpec
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.binary import BinaryAdapter, binary_comparison
from vitdeploy.tasks.multi_label import MultiLabelAdapter, best_threshold, listed_labels, multi_label_comparison
from vitdeploy.verification.records import Answers, ImageRows

metrics = pytest.importorskip("sklearn.metrics")

LABELS = ("cat", "dog", "red car")
SPEC = PreprocessSpec((8, 8), (8, 8), "bilinear", (0.5,) * 3, (0.5,) * 3)


def scored(n=120, k=4, seed=0):
    """Scores with ties of two models, and which labels images have; the last label has one image."""
    generator = np.random.RandomState(seed)
    truth = generator.uniform(size=(n, k)) < 0.3
    truth[:, -1] = np.arange(n) == 5
    theirs = np.round(generator.normal(size=(n, k)) + 1.5 * truth, 1)
    return np.round(theirs + generator.normal(0, 0.2, (n, k)), 1), theirs, truth


def rows(ours, theirs, truth, threshold=0.5):
    return ImageRows.each(
        ours=ours, theirs=theirs, ours_above=ours > threshold, theirs_above=theirs > threshold, truth=truth
    )


def test_the_metrics_of_several_labels_are_scikit_learns():
    ours, theirs, truth = scored()
    found = multi_label_comparison(rows(ours, theirs, truth), max_difference=0.1)
    for value, scores in ((found.value, ours), (found.reference_value, theirs)):
        assert value == pytest.approx(100 * metrics.average_precision_score(truth, scores, average="macro"))
    for value, scores in ((found.f1, ours), (found.reference_f1, theirs)):
        assert value == pytest.approx(100 * metrics.f1_score(truth, scores > 0.5, average="macro"))
    assert found.drop == pytest.approx(found.reference_value - found.value)
    assert found.f1_drop == pytest.approx(found.reference_f1 - found.f1)
    same = (ours > 0.5) == (theirs > 0.5)
    assert found.agreement == pytest.approx(100 * same.all(axis=1).mean())
    assert found.label_agreement == pytest.approx(100 * same.mean())
    assert found.least_label_agreement == pytest.approx(100 * same.mean(axis=0).min())
    for low, value, high in (
        (found.map_ci95[0], found.value, found.map_ci95[1]),
        (found.f1_ci95[0], found.f1, found.f1_ci95[1]),
        (found.drop_ci95[0], found.drop, found.drop_ci95[1]),
    ):
        assert low < value < high


def test_the_metrics_of_one_label_are_scikit_learns():
    ours, theirs, truth = (each[:, :1] for each in scored())
    found = binary_comparison(rows(ours, theirs, truth), max_difference=0.1)
    for value, precise, accuracy, scores in (
        (found.value, found.average_precision, found.accuracy, ours),
        (found.reference_value, found.reference_average_precision, found.reference_accuracy, theirs),
    ):
        assert value == pytest.approx(100 * metrics.roc_auc_score(truth[:, 0], scores[:, 0]))
        assert precise == pytest.approx(100 * metrics.average_precision_score(truth[:, 0], scores[:, 0]))
        assert accuracy == pytest.approx(100 * metrics.accuracy_score(truth[:, 0], scores[:, 0] > 0.5))
    assert found.auroc_ci95[0] < found.value < found.auroc_ci95[1]
    assert found.accuracy_drop_ci95[0] <= found.accuracy_drop <= found.accuracy_drop_ci95[1]


def test_a_label_that_no_image_has_is_left_out_of_the_mean():
    ours, theirs, truth = scored()
    alone = multi_label_comparison(rows(ours[:, :3], theirs[:, :3], truth[:, :3]), max_difference=0.0)
    truth[:, 3] = False
    found = multi_label_comparison(rows(ours, theirs, truth), max_difference=0.0)
    assert (found.value, found.labelled) == (pytest.approx(alone.value), 3)
    with pytest.raises(DataError, match="no evaluation image has a label"):
        multi_label_comparison(rows(ours, theirs, np.zeros_like(truth)), max_difference=0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gain", ["f1", "youden"])
def test_no_other_threshold_gains_more(gain, seed):
    generator = np.random.RandomState(seed)
    truth = generator.uniform(size=60) < 0.3
    scores = np.round(np.clip(generator.normal(0.4 + 0.2 * truth, 0.2), 0.01, 0.99), 2)

    def gained(threshold):
        above = scores > threshold
        if gain == "f1":
            return metrics.f1_score(truth, above, zero_division=0)
        return above[truth].mean() - above[~truth].mean()

    chosen = best_threshold(scores, truth, gain)
    assert gained(chosen) == pytest.approx(max(map(gained, np.linspace(0, 1, 401))))
    assert chosen not in scores  # between two images


def test_thresholds_of_images_of_one_kind_are_a_half():
    assert best_threshold(np.array([0.1, 0.9]), np.array([True, True]), "f1") == 0.5
    assert best_threshold(np.array([0.1, 0.9]), np.array([False, False]), "youden") == 0.5
    assert best_threshold(np.array([0.1, 0.9]), np.array([False, True]), "youden") == pytest.approx(0.5)


# --- Answers ----------------------------------------------------------------------------------------------------------


def reading(head, labels=LABELS):
    return OutputReading((8, 8), SPEC, head, labels)


def test_an_answer_has_the_labels_above_their_thresholds_and_all_scores():
    logits = {"logits": np.array([0.0, 3.0, -1.0], np.float32)}
    found = MULTI_LABEL.answer(logits, reading(MultiLabelSpec((0.6, 0.9, 0.2))))
    assert [each.label for each in found.labels] == ["dog", "red car"]
    assert [each.score for each in found.scores] == pytest.approx([0.5, 0.952574, 0.268941], abs=1e-6)
    assert str(found) == "dog 95.3 %, red car 26.9 %"
    assert [each.label for each in MULTI_LABEL.answer(logits, reading(MultiLabelSpec())).labels] == ["dog"]
    given = {"probabilities": np.array([0.1, 0.2, 0.3], np.float32)}
    assert str(MULTI_LABEL.answer(given, reading(MultiLabelSpec()))) == "no label above its threshold"
    assert not MULTI_LABEL.same(logits, given, reading(MultiLabelSpec()))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_decision_is_yes_above_the_threshold(shape):
    outputs = {"logits": np.full(shape, 1.0, np.float32)}
    found = BINARY.answer(outputs, reading(BinarySpec(0.8), ("seven",)))
    assert (found.yes, found.label, found.threshold) == (False, "seven", 0.8)
    assert found.score == pytest.approx(0.731059, abs=1e-6)
    assert BINARY.answer(outputs, reading(BinarySpec(None, "defect"), None)).to_dict() == {
        "yes": True, "score": found.score, "label": "defect", "threshold": 0.5,
    }  # fmt: skip


def test_thresholds_of_other_classes_do_not_fit():
    logits = [TensorSpec("logits", "float32", ("batch", 3))]
    assert MultiLabelSpec((0.5, 0.5)).misfit(logits) == "2 thresholds for 3 labels"
    assert MultiLabelSpec((0.5, 0.5, 0.1)).misfit(logits) == MultiLabelSpec().misfit(logits) == ""
    assert "not one number" in BinarySpec().misfit(logits)
    assert BinarySpec().misfit([TensorSpec("probabilities", "float32", ("batch",))]) == ""


# --- Labels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(8):
        pixels = np.random.RandomState(index).randint(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


WITH = [(0,), (0, 1), (1,), (), (2,), (0, 1, 2), (1,), (2,)]


def loaded(path, labels, place=None, *, names=LABELS, count=3, adapter=MultiLabelAdapter, head=None):
    head = head or (MultiLabelSpec() if adapter is MultiLabelAdapter else BinarySpec())
    setting = Setting("multi-label", SPEC, head, labels=names, classes=count)
    choice = DataChoice(path, labels, place, 3, "all", 0)
    return adapter(setting), adapter(setting).load(choice, skip_bad=False, progress=lambda *each: None)


def truth_of(data):
    return {path.name: each.labels for path, each in data.truth.items()}


def written(file, header, lines):
    file.write_text("\n".join([header, *lines]) + "\n")
    return file


def test_columns_of_0_and_1_are_matched_with_the_labels_by_name(pictures, tmp_path):
    lines = [f"{i}.png,{int(2 in has)},x,{int(0 in has)},{int(1 in has)}" for i, has in enumerate(WITH)]
    file = written(tmp_path / "labels.csv", "image,Red_car,comment,cat,dog", lines)
    _, data = loaded(pictures, "columns", file)
    assert truth_of(data) == {f"{i}.png": has for i, has in enumerate(WITH)}
    assert any("ignored: comment" in note for note in data.notes)


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_column_of_lists_says_the_labels(form, pictures, tmp_path):
    lists = [[LABELS[k] for k in has] for has in WITH]
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        file = tmp_path / "labels.parquet"
        parquet.write_table(pyarrow.table({"image": [f"{i}.png" for i in range(8)], "tags": lists}), file)
    else:
        cells = [json.dumps(each).replace('"', '""') if form == "json" else "; ".join(each) for each in lists]
        file = written(tmp_path / "labels.csv", "image,tags", [f'{i}.png,"{each}"' for i, each in enumerate(cells)])
    _, data = loaded(pictures, "columns", file)
    assert truth_of(data) == {f"{i}.png": has for i, has in enumerate(WITH)}


def test_lists_in_cells():
    assert listed_labels("a, b|c;d") == ["a", "b", "c", "d"] and listed_labels('["a, b"]') == ["a, b"]
    assert listed_labels(None) == [] and listed_labels(3) is None and listed_labels("[broken") is None


def test_the_categories_of_a_coco_file_are_labels(pictures, tmp_path):
    images = [{"id": i, "file_name": f"{i}.png", "width": 8, "height": 8} for i in range(8)]
    found = [{"image_id": i, "category_id": 10 * k} for i, has in enumerate(WITH) for k in (*has, *has)]
    categories = [{"id": 10 * k, "name": name} for k, name in enumerate(LABELS)]
    file = tmp_path / "coco.json"
    file.write_text(json.dumps({"images": images, "annotations": found, "categories": categories}))
    _, data = loaded(pictures, "coco", file)
    assert truth_of(data) == {f"{i}.png": has for i, has in enumerate(WITH)}


def test_copies_of_an_image_in_several_class_folders_give_it_several_labels(pictures, tmp_path):
    for i, has in enumerate(WITH):
        for k in has:
            folder = tmp_path / "folders" / LABELS[k]
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(pictures / f"{i}.png", folder / f"{i}.png")
    adapter, data = loaded(tmp_path / "folders", "folders")
    assert truth_of(data) == {f"{i}.png": has for i, has in enumerate(WITH) if has}
    assert len(data.calibration) + len(data.evaluation) == 7 and data.copies is None
    assert any("2 images are in several class folders" in note for note in data.notes)
    assert adapter.fits(data)


def test_a_label_that_no_image_has_is_a_warning(pictures, tmp_path):
    lines = [f"{i}.png,{int(0 in has)},{int(1 in has)},0" for i, has in enumerate(WITH)]
    _, data = loaded(pictures, "columns", written(tmp_path / "labels.csv", "image,cat,dog,red car", lines))
    assert any("no evaluation image has the label red car" in doubt for doubt in data.warnings)


@pytest.mark.parametrize(
    ("header", "cells", "names", "match"),
    [
        ("image,cat,dog", "1,0", LABELS, "no column for some labels"),
        ("image,cat,dog,red car", "1,0,2", LABELS, "is neither 0 nor 1"),
        ("image,cat,dog,red car", "1,0,", LABELS, "is empty"),
        ("image,cat,CAT,dog,red car", "1,0,0,0", LABELS, "more than one way"),
        ("image,bird,fish", "1,0", LABELS, "which column is which label"),
        ("image,a,b", "1,0", (), "which column is which label"),
    ],
)
def test_columns_that_contradict_the_labels_are_refused(header, cells, names, match, pictures, tmp_path):
    file = written(tmp_path / "labels.csv", header, [f"{i}.png,{cells}" for i in range(8)])
    with pytest.raises(DataError, match=match) as caught:
        loaded(pictures, "columns", file, names=names)
    assert caught.value.fix


def test_columns_are_in_the_order_of_outputs_without_names(pictures, tmp_path):
    lines = [f"{i}.png,{int(0 in has)},{int(1 in has)},{int(2 in has)}" for i, has in enumerate(WITH)]
    _, data = loaded(pictures, "columns", written(tmp_path / "labels.csv", "image,a,b,c", lines), names=())
    assert truth_of(data)["5.png"] == (0, 1, 2)
    assert any("columns are mapped by position" in note for note in data.notes)


# --- Yes or no --------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(pictures, tmp_path):
    for i in range(8):
        folder = tmp_path / "two" / ("good" if i % 2 else "defect")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(pictures / f"{i}.png", folder / f"{i}.png")
    return tmp_path / "two"


@pytest.mark.parametrize("how", ["label", "recipe"])
def test_the_folder_that_means_yes_is_named(how, two):
    names, head = (("Defect",), BinarySpec()) if how == "label" else ((), BinarySpec(None, "defect"))
    _, data = loaded(two, "folders", names=names, count=1, adapter=BinaryAdapter, head=head)
    assert truth_of(data) == {f"{i}.png": () if i % 2 else (0,) for i in range(8)}


@pytest.mark.parametrize("names", [(), ("crack",)])
def test_which_folder_means_yes_is_never_guessed(names, two):
    with pytest.raises(DataError, match="which class folder means yes") as caught:
        loaded(two, "folders", names=names, count=1, adapter=BinaryAdapter)
    assert "postprocess: {positive: FOLDER}" in caught.value.fix and "defect, good" in caught.value.found


def test_folders_that_say_nothing_are_refused(two, pictures):
    kept = {"names": ("defect",), "count": 1, "adapter": BinaryAdapter}
    shutil.copyfile(two / "defect" / "0.png", two / "good" / "copy.png")
    with pytest.raises(DataError, match="is in both class folders"):
        loaded(two, "folders", **kept)
    (two / "good" / "copy.png").unlink()
    (two / "third").mkdir()
    shutil.move(two / "good" / "1.png", two / "third" / "1.png")
    with pytest.raises(DataError, match="which class folder means yes"):
        loaded(two, "folders", **kept)


def test_two_columns_for_one_number_are_refused(pictures, tmp_path):
    file = written(tmp_path / "labels.csv", "image,good,bad", [f"{i}.png,{i % 2},{1 - i % 2}" for i in range(8)])
    with pytest.raises(DataError, match="which column is which label"):
        loaded(pictures, "columns", file, names=(), count=1, adapter=BinaryAdapter)
    _, data = loaded(pictures, "columns", file, names=("bad",), count=1, adapter=BinaryAdapter)
    assert truth_of(data)["0.png"] == (0,)


def test_images_of_one_answer_are_refused(pictures, tmp_path):
    file = written(tmp_path / "labels.csv", "image,bad", [f"{i}.png,0" for i in range(8)])
    with pytest.raises(DataError, match="all evaluation images have the same label"):
        loaded(pictures, "columns", file, names=("bad",), count=1, adapter=BinaryAdapter)


def test_answers_in_probabilities_and_in_logits_are_compared(pictures, tmp_path):
    file = written(tmp_path / "labels.csv", "image,bad", [f"{i}.png,{i % 2}" for i in range(8)])
    adapter, data = loaded(pictures, "columns", file, names=("bad",), count=1, adapter=BinaryAdapter)
    logits = [np.array([value], np.float32) for value in (-2.0, 1.0, 0.5, -0.5, 3.0)]
    shares = [1 / (1 + np.exp(-each)) for each in logits]
    found = adapter.verify(Answers({"logits": logits}), Answers({"probabilities": shares}), data)
    assert found.agreement == 100 and found.max_difference < 1e-6 and found.control is not None
    assert found.control.agreement < 100
