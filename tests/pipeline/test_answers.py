"""Which samples a report shows, and what it says of the answers to all of them."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data.decoding import DecodedSet
from vitdeploy.data.folder import Sample
from vitdeploy.data.masks import PanopticMap
from vitdeploy.pipeline.plan import answer_facts
from vitdeploy.report.summary import class_headline, wrong_otherwise
from vitdeploy.runtime.postprocess import softmax
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec, SequenceSpec, encode
from vitdeploy.tasks.adapter import Data, Setting, thumbnail
from vitdeploy.tasks.answers import ChangedCounts, Marks
from vitdeploy.tasks.examples import CHANGED, UNSURE, USUAL, Chosen, choose, example
from vitdeploy.tasks.features import neighbour_changes
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.tasks.sequence import TokenPair
from vitdeploy.verification.changes import class_map, object_changes, pixel_changes
from vitdeploy.verification.classes import LISTED_ROWS, MATRIX_CLASSES, Classified, by_class, confusion, reliability
from vitdeploy.verification.records import Answers

PREPROCESS = PreprocessSpec(resize=32, crop=(32, 32), mean=(0.5,), std=(0.5,))
N, CLASSES = 200, 10


def classes_of(folder, count=N, classes=CLASSES, labelled=True):
    samples = [Sample(folder / f"{i % classes}/{i}.png", i % classes if labelled else None) for i in range(count)]
    names = tuple(f"class {i}" for i in range(classes)) if labelled else ()
    return Data(folder, (), samples, "", "", classes=names)


def sure(answers, confidence, classes=CLASSES):
    """The logits of these answers, each of this confidence."""
    rest = np.log((1 - np.asarray(confidence)) / (classes - 1))
    logits = np.repeat(rest[:, None], classes, axis=1)
    logits[np.arange(len(answers)), answers] = np.log(confidence)
    return Answers({"logits": tuple(logits.astype(np.float32))})


@pytest.fixture
def adapter():
    return make_adapter(Setting("classification", PREPROCESS, classes=CLASSES))


def original(truth):
    """Right but for the samples 0 to 9; the higher its number, the surer it is of a sample."""
    answers = truth.copy()
    answers[:10] = (answers[:10] + 1) % CLASSES
    return answers, np.linspace(0.5, 0.95, len(truth))


def test_the_worst_changes_come_first_then_the_least_sure_then_one_of_each_class(adapter):
    truth = np.arange(N) % CLASSES
    answers, confidence = original(truth)
    reference, changed = sure(answers, confidence), answers.copy()
    changed[3] = truth[3]  # wrong became right
    changed[4] = (truth[4] + 2) % CLASSES  # wrong otherwise
    changed[[50, 150]] += 1  # right became wrong, and of 150 it is surer
    data = classes_of(Path("data"))
    found = choose(adapter, reference, {"same": reference, "changed": sure(changed, confidence)}, data)
    assert [(each.index, each.why) for each in found[:4]] == [(i, "changed") for i in (150, 50, 4, 3)]
    assert {each.engine for each in found[:4]} == {"changed"}
    assert [each.differing for each in found] == [("changed",)] * 4 + [()] * (len(found) - 4)
    assert [each.index for each in found if each.why == "unsure"] == [0, 1, 2, 5]
    usual = [each.index for each in found if each.why == "usual"]
    assert len(usual) == USUAL and len({i % CLASSES for i in usual}) >= USUAL - 2
    everything = choose(adapter, reference, {"other": sure((answers + 1) % CLASSES, confidence)}, data)
    assert [each.why for each in everything] == ["changed"] * CHANGED + ["unsure"] * UNSURE + ["usual"] * USUAL


def test_changes_are_counted_by_what_became_of_the_answer(adapter):
    truth = np.arange(N) % CLASSES
    answers, confidence = original(truth)
    changed = answers.copy()
    changed[[3, 50]], changed[4] = truth[3], (truth[4] + 2) % CLASSES
    engines = {"changed": sure(changed, confidence)}
    facts = answer_facts(adapter, classes_of(Path("data")), sure(answers, confidence), engines, None)
    assert facts.changed["changed"] == ChangedCounts(3, 1, 1)
    assert facts.classes.rows[0].name == "class 0" and facts.classes.left == 0
    assert np.trace(facts.confusion.matrix["original"]) == N - 10
    assert set(facts.reliability) == {"original", "changed"}
    bare = answer_facts(adapter, classes_of(Path("data"), labelled=False), sure(answers, confidence), engines, None)
    assert bare.changed["changed"] == ChangedCounts(3, None, None)
    assert (bare.confusion, bare.classes, bare.reliability) == (None, None, None)


def test_many_classes_keep_the_document_small():
    classes, n = 1000, 5000
    random = np.random.default_rng(0)
    names = [f"class {i}" for i in range(classes)]
    truth = np.arange(n) % classes
    found = {name: Classified(truth, random.integers(0, classes, n)) for name in ("original", "engine")}
    confused, drops = confusion(found, names), by_class(found["original"], {"engine": found["engine"]}, names)
    assert confused.matrix is None and len(confused.pairs) == LISTED_ROWS and confused.left > 5000
    assert len(drops.rows) == LISTED_ROWS and drops.left == classes - LISTED_ROWS
    assert len(json.dumps(encode([confused, drops]))) < 20_000
    few = confusion(
        {"original": Classified(np.arange(MATRIX_CLASSES), np.arange(MATRIX_CLASSES))}, names[:MATRIX_CLASSES]
    )
    assert np.array_equal(few.matrix["original"], np.eye(MATRIX_CLASSES)) and few.pairs == ()


def test_the_interval_of_a_drop_allows_for_how_many_classes_were_looked_at():
    truth = np.repeat(np.arange(10), 40)
    was, now = truth.copy(), truth.copy()
    now[:6] = 1  # six of the forty images of one class
    alone = by_class(Classified(truth[:40], was[:40]), {"e": Classified(truth[:40], now[:40])}, ["a"] * 10)
    among = by_class(Classified(truth, was), {"e": Classified(truth, now)}, ["a", *"bcdefghij"])
    [low, _], [lower, _] = (each.rows[0].engines["e"].drop_ci95 for each in (alone, among))
    assert among.rows[0].name == "a" and lower < low and low > 0


def test_what_one_engine_loses_is_found_beside_one_that_loses_everything():
    truth = np.repeat(np.arange(60), 40)
    collapsed, subtle = (truth + 1) % 60, truth.copy()
    subtle[truth == 57] = 3
    engines = {"collapsed": Classified(truth, collapsed), "subtle": Classified(truth, subtle)}
    found = by_class(Classified(truth, truth), engines, [f"class {i}" for i in range(60)])
    assert found.lost["subtle"].classes == 1
    assert found.lost["subtle"].worst[0].name == "class 57"
    assert (found.lost["collapsed"].classes, len(found.lost["collapsed"].worst)) == (60, LISTED_ROWS)
    assert class_headline(found, "subtle").startswith("Provably lost: class 57 100")
    assert class_headline(found, "collapsed").endswith("; and 55 more.")


def test_a_calibration_error_is_held_against_what_chance_makes():
    random = np.random.default_rng(1)
    confidence = random.uniform(0.3, 1.0, 2000)
    truth = np.zeros(2000, np.int64)
    honest = Classified(truth, (random.random(2000) > confidence).astype(np.int64), confidence)
    boastful = Classified(truth, (random.random(2000) > confidence - 0.2).astype(np.int64), confidence)
    found, off = reliability(honest), reliability(boastful)
    assert found.error < found.by_chance < 5 < off.error
    assert off.error == pytest.approx(20, abs=3)
    assert sum(each.n for each in found.bins) == 2000
    for each in found.bins:
        assert each.ci95[0] <= each.accuracy <= each.ci95[1]


def boxes(*rows):
    from vitdeploy.verification.average_precision import Objects

    table = np.array(rows, np.float64).reshape(-1, 6)
    return Objects(table[:, 0].astype(np.int64), table[:, 1], table[:, 2:])


def test_an_image_of_a_detector_has_changed_where_an_object_is_alone():
    one, moved, other = boxes((1, 0.9, 0, 0, 10, 10)), boxes((1, 0.8, 1, 0, 11, 10)), boxes((2, 0.9, 0, 0, 10, 10))
    found = object_changes([one, moved, other, boxes()], [one, one, one, one])
    assert found.changed.tolist() == [False, False, True, True] and found.lost is None
    assert found.severity[2] > found.severity[3] > 0 == found.severity[0]


def test_boxes_are_marked_where_the_picture_shows_them():
    head = PostprocessSpec("softmax", "cxcywh", 0.5)
    preprocess = PreprocessSpec(resize=(32, 32), crop=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    adapter = make_adapter(Setting("detection", preprocess, head))
    logits, box = np.array([[5.0, 0.0, 0.0]]), np.array([[0.5, 0.5, 0.2, 0.4]])
    found, nothing = (
        Answers({"logits": (each,), "boxes": (box,), "size": (np.array([640, 480]),)}) for each in (logits, -logits)
    )
    marks = adapter.marks("engine", found, found, 0)
    assert marks == Marks("engine", both=(pytest.approx((0.4, 0.3, 0.6, 0.7)),))
    marks = adapter.marks("engine", found, nothing, 0)
    assert [len(each) for each in (marks.both, marks.artifact, marks.original)] == [0, 1, 0]


def test_an_image_is_cut_otherwise_from_one_percent_of_its_pixels_on():
    cut = PanopticMap(np.ones((20, 20), np.int32), {1: 0, 2: 1, 3: 0})
    ids = [np.ones((20, 20), np.int32) for _ in range(3)]
    ids[0][0, :2], ids[1][0, :8], ids[2][:] = 2, 2, 3
    found = pixel_changes([class_map(PanopticMap(each, cut.classes)) for each in ids], [class_map(cut)] * 3)
    assert found.changed.tolist() == [False, True, False]


def test_another_neighbour_of_the_right_class_is_not_wrong():
    near = np.array([[1, 0], [0.99, 0.1], [0.98, -0.15], [0, 1], [0.05, 1]], np.float32)
    found = neighbour_changes(near[[0, 2, 1, 3, 4]], near, np.array([0, 0, 0, 1, 1]))
    assert found.changed.tolist() == found.kept.tolist() == [True, False, False, False, False]
    assert not found.lost.any() and not found.gained.any() and 0 < found.severity[0] < 1
    assert [wrong_otherwise(ChangedCounts(5, 1, 1, kept)) for kept in (0, 1)] == [3, 2]


def test_changes_of_neighbours_and_of_tokens():
    adapter = make_adapter(Setting("features", PREPROCESS))
    data = classes_of(Path("data"), count=4, classes=2)
    near = np.array([[1, 0.1], [0, 1], [1, 0], [0.1, 1]], np.float32)
    vectors = [Answers({"features": tuple(each)}) for each in (near[[0, 1, 3, 2]], near)]
    found = adapter.changes(*vectors, data)
    assert found.changed.all() and found.lost.all()
    pairs = [TokenPair(np.array([1]), np.array([5, 6, 0])) for _ in range(3)]
    adapter = make_adapter(Setting("sequence", None, sequence=SequenceSpec(1, 2, 0, 8, 16)))
    tokens = Data(Path(), (), pairs, "", "")
    right, wrong, worse = (np.array(each) for each in ([5, 6, 0], [5, 7, 0], [8, 9, 0]))
    ours, theirs = (Answers({"tokens": each}) for each in ((right, wrong, worse), (wrong, right, right)))
    found = adapter.changes(ours, theirs, tokens)
    assert found.gained.tolist() == [True, False, False] and found.lost.tolist() == [False, True, True]
    assert np.argsort(-found.severity).tolist() == [2, 1, 0]


def test_an_example_names_its_file_and_has_the_smaller_picture(adapter, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3), np.uint8)
    assert thumbnail(noise).startswith(b"\xff\xd8")
    (tmp_path / "0").mkdir()
    Image.fromarray(np.zeros((32, 32), np.uint8)).save(tmp_path / "0/0.png")
    found = sure(np.array([0]), np.array([0.9]))
    engines = {"engine": found}
    data = classes_of(tmp_path, 1)
    data = dataclasses.replace(data, decoded=DecodedSet(data.evaluation, tmp_path))
    row, images = example(adapter, data, Chosen(0, "usual", "engine"), found, engines, None)
    assert (row.sample, row.label, row.image, row.marks) == ("0/0.png", "class 0", "0.png", None)
    assert Image.open(io.BytesIO(images["0.png"])).size == (96, 96)
    assert row.reference.score == pytest.approx(float(softmax(found.stacked("logits")).max()))
