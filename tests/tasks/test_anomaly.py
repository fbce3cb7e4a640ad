"""The task adapter of anomalies on answers that are known: what is loaded, compared, doubted and shown."""

import io

import numpy as np
import pytest
from PIL import Image

from calibration.scenes.write import render
from vitdeploy.errors import DataError
from vitdeploy.progress import silent
from vitdeploy.runtime.tasks.anomaly import AnomalySpec, anomaly_map
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.verification.records import Answers

SPEC = PreprocessSpec((32, 32), (32, 32), "bilinear", (0.5,) * 3, (0.5,) * 3)
HEAD = AnomalySpec(threshold=2.0, pixel_threshold=2.0, sigma=0.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "parts"
    render("anomaly", folder, {"calibration": 6, "evaluation": 10})
    return folder


def choice(root, labels="mvtec", calibration=4):
    return DataChoice(root, labels, None, calibration, "all", 0)


@pytest.fixture(scope="module")
def adapter():
    return make_adapter(Setting("anomaly", SPEC, HEAD))


@pytest.fixture(scope="module")
def data(adapter, root):
    return adapter.load(choice(root), skip_bad=False, progress=silent)


def answers(data, defective, good, noise=0.1):
    """Distances of 8x8 patches: these values where a mask has a pixel and elsewhere, with noise."""
    generator, columns = np.random.RandomState(0), {"distances": [], "neighbours": [], "size": []}
    for sample in data.evaluation:
        mask = data.truth[sample.path].load().reshape(8, 8, 8, 8).any(axis=(1, 3))
        plane = np.where(mask, defective, good) + generator.uniform(0, noise, (8, 8))
        columns["distances"].append(plane.astype(np.float32))
        columns["neighbours"].append(np.array([30.0, 60.0], np.float32))  # whose softmax is 0 and 1
        columns["size"].append(np.array([64, 64], np.int64))
    return Answers({name: tuple(column) for name, column in columns.items()})


def test_defects_that_are_found_have_an_auroc_of_100(adapter, data):
    original = answers(data, 3.0, 1.0)
    found = adapter.compare(answers(data, 1.5, 1.0, 0.8), original, data)
    assert (found.n, found.metric, found.reference_value) == (10, "image AUROC", 100.0)
    assert found.reference_pixel_auroc > 90 and found.pixel_auroc < found.reference_pixel_auroc
    assert (found.reference_anomalous, found.agreement) == (5, 50.0 + 10 * found.anomalous)
    assert adapter.doubt(original, data, found) is None
    changed = adapter.changes(answers(data, 1.5, 1.0), original, data)
    assert changed.lost.sum() == 5 and not changed.gained.any()


def test_good_parts_that_look_stranger_than_defective_ones_are_told(adapter, root, tmp_path):
    """More images: of a few no interval is below chance."""
    render("anomaly", tmp_path / "many", {"calibration": 6, "evaluation": 60})
    data = adapter.load(choice(tmp_path / "many"), skip_bad=False, progress=silent)
    swapped = answers(data, 1.0, 3.0)
    for distances, sample in zip(swapped.columns["distances"], data.evaluation, strict=True):
        distances *= 1.0 if data.truth[sample.path].defect is None else 0.5
    told = adapter.doubt(swapped, data, adapter.compare(swapped, swapped, data))
    assert "the original's image AUROC is 0.0 %, and chance is 50 %" in told and "are not swapped" in told


def test_an_answer_in_words_and_pictures(adapter, data):
    found = answers(data, 3.0, 1.0)
    kinds = [adapter.truth_of(data, index, None) for index in range(10)]
    index = next(i for i, kind in enumerate(kinds) if kind != "good")
    assert sorted(set(kinds)) == ["good", "missing", "scratch", "spot"]
    assert adapter.show(found, index, None).label == "anomalous" and 0.7 < adapter.show(found, index, None).score < 0.8
    assert adapter.show(found, kinds.index("good"), None).label == "normal"
    panels = {title: Image.open(io.BytesIO(content)) for title, content in adapter.panels(data, index, {"x": found})}
    assert set(panels) == {"x", "label"} and min(panels["x"].size) >= 96
    assert [title for title, _ in adapter.panels(data, kinds.index("good"), {"x": found})] == ["x"]
    assert adapter.certainty(found).shape == (10,)
    outputs = {name: found.columns[name][index] for name in ("distances", "neighbours")}
    assert anomaly_map(outputs, (64, 64), SPEC, HEAD).max() > 2.5


def test_only_normal_images_calibrate(adapter, root):
    """Also where all of MVTec AD's folder is given: test images are to judge by, and masks are no images."""
    found = adapter.calibration(choice(root, calibration=0), skip_bad=False, progress=silent)
    assert {sample.path.parent for sample in found.samples} == {root / "train" / "good"} and len(found.samples) == 6


def test_without_labels_nothing_is_known(adapter, root):
    data = adapter.load(choice(root / "test" / "good", "none", 1), skip_bad=False, progress=silent)
    assert data.truth is None and adapter.truth_of(data, 0, None) is None
    with pytest.raises(DataError, match="the task anomaly cannot use labels of kind 'folders'"):
        adapter.load(choice(root, "folders"), skip_bad=False, progress=silent)
