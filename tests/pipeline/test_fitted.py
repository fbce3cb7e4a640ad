"""A model of anomalies is fitted on normal images before anything is made of it: which images, which numbers, once."""

import dataclasses
import shutil

import numpy as np
import pytest
from PIL import Image

from calibration.scenes.write import render
from tests.conftest import SMALL_MODEL
from vitdeploy.data.folder import scan
from vitdeploy.errors import CheckpointError, DataError, ImageError, InputError, RecipeError
from vitdeploy.models.memory_bank import MemoryBank
from vitdeploy.models.source import Source
from vitdeploy.pipeline.job import prepare, source_of
from vitdeploy.pipeline.setting import fitted, refuse_known
from vitdeploy.progress import silent
from vitdeploy.recipe.load import validate
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.tasks.anomaly import image_score, smoothed
from vitdeploy.stages import fit as module
from vitdeploy.stages.fit import FitOptions, distinct, fit
from vitdeploy.stages.reference_model import find_reference_model, from_request, reference_runner, to_request

PATCHES = 16


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "parts"
    render("anomaly", folder, {"calibration": 12, "evaluation": 6})
    return folder


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("VITDEPLOY_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def source(root, **more):
    return Source(SMALL_MODEL, task="anomaly", normal=root, **more)


def test_a_fit_is_made_once_and_is_the_same_each_time(root, store, monkeypatch):
    found = fitted(source(root))
    bank = MemoryBank.load(found.memory)
    assert found.memory.is_relative_to(store) and found.normal == root
    assert len(bank.images) == 12 and bank.patches == 10 * PATCHES and bank.memory.shape == (16, 32)
    assert fitted(found) is found and fitted(source(root / "train" / "good")).memory == found.memory
    shutil.rmtree(store)
    again = MemoryBank.load(fitted(source(root)).memory)
    np.testing.assert_array_equal(again.memory, bank.memory)
    assert again.threshold == bank.threshold
    monkeypatch.setattr(module, "fit_step", lambda *arguments: pytest.fail("of another task"))
    plain = Source(SMALL_MODEL)
    assert fitted(plain) is plain


def test_thresholds_are_the_largest_scores_of_images_that_the_bank_does_not_hold(root, store):
    found = find_reference_model(fitted(source(root)))
    samples, _ = scan(root / "train" / "good", "none")
    held = np.random.RandomState(0).permutation(12)[:2]
    pixels = np.stack([load_pixels(samples[i].path, found.images) for i in held])
    with reference_runner(found.source) as runner:
        outputs = runner.infer({"image": normalise(pixels, found.images)})
    rows = [{name: array[i] for name, array in outputs.items()} for i in range(2)]
    assert found.postprocess.threshold == pytest.approx(max(image_score(row) for row in rows))
    peaks = [smoothed(row["distances"], (32, 32), 4.0).max() for row in rows]
    assert found.postprocess.pixel_threshold == pytest.approx(max(peaks))


def test_the_source_with_its_bank_goes_to_other_processes(root, store):
    found = fitted(source(root))
    assert from_request(to_request(found)) == dataclasses.replace(found, memory=found.memory.resolve())


def test_other_normal_images_make_other_artifacts(root, store, tmp_path):
    fewer = tmp_path / "fewer"
    shutil.copytree(root / "train" / "good", fewer)
    (fewer / "000003.png").unlink()
    first, second = (find_reference_model(fitted(source(each))) for each in (root, fewer))
    assert first.identity()["task"] == "anomaly" and first.digests != second.digests


def test_few_or_equal_images_say_nothing(root, store, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for i in range(6):
        shutil.copy(root / "train" / "good" / f"{i % 4:06d}.png", few / f"{i}.png")
    with pytest.raises(DataError, match="has too few normal images") as error:
        fitted(source(few))
    assert error.value.found == "4 images, 6 with copies"
    for i in range(6):
        Image.new("RGB", (32 + i, 32 + i), (90, 90, 90)).save(few / f"{i}.png")
    with pytest.raises(DataError, match="all normal images have the same features"):
        fitted(source(few))


def test_a_broken_image_is_an_error_or_left_out(root, store, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(root / "train" / "good", mine)
    (mine / "000000.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"000000\.png"):
        fitted(source(mine))
    assert MemoryBank.load(fitted(source(mine), skip_bad=True).memory).patches < 11 * PATCHES


def test_a_large_bank_is_cut_and_says_so(root, tmp_path):
    folder = root / "train" / "good"
    normal = distinct(scan(folder, "none")[0], folder)
    features = find_reference_model(Source(SMALL_MODEL))
    options = FitOptions(most=5, pool=40)
    bank = fit(features.source, features.images, normal, tmp_path, silent, options=options)
    assert bank.patches == 40 and len(bank.memory) == 4 and bank.asked == 4
    bank = fit(features.source, features.images, normal, tmp_path, silent, options=FitOptions(most=5))
    assert len(bank.memory) == 5 and bank.asked == 16 and bank.neighbours.shape == (5, 5)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (Source(SMALL_MODEL), InputError, "normal images are for the task anomaly only"),
        (Source("model.onnx", task="anomaly"), CheckpointError, "is an ONNX graph and cannot be fitted"),
        (Source("detr_r1-1-1-1c8_w32h4e1d1q6_64", task="anomaly"), CheckpointError, "has no patch tokens"),
    ],
)
def test_what_has_no_normal_images_is_refused(root, store, given, error, message):
    with pytest.raises(error, match=message):
        fitted(dataclasses.replace(given, normal=root))


def recipe(root, normal=None, labels="mvtec", model=SMALL_MODEL):
    fields = {"model": model, "task": "anomaly", **({"normal": str(normal)} if normal else {})}
    data = {"path": str(root), "labels": labels, "calibration": {"images": 8}}
    rest = {"vitdeploy": 1, "name": "a", "targets": ["onnxruntime-cpu"], "precision": "fp32"}
    return validate({**rest, "source": fields, "data": data}, "the test")


def test_normal_images_are_those_of_the_data_where_no_others_are_named(root, tmp_path):
    assert source_of(recipe(root)).normal == root and source_of(recipe(root, tmp_path)).normal == tmp_path
    assert source_of(recipe(root, labels="none")).normal is None
    assert source_of(recipe(root, model="theirs.onnx")).normal is None


def test_what_is_judged_must_not_be_known(root, store, tmp_path):
    [job] = prepare(recipe(root), skip_bad=False, progress=silent)
    assert job.reference_model.task == "anomaly" and len(job.data.evaluation) == 6
    refuse_known(job.reference_model.source, job.data.evaluation)
    mine = tmp_path / "mine"
    shutil.copytree(root / "train" / "good", mine)
    shutil.copy(root / "test" / "good" / "000002.png", mine / "another.png")
    with pytest.raises(DataError, match="the evaluation data contains images that are also in the normal images"):
        prepare(recipe(root, mine), skip_bad=False, progress=silent)


def test_thresholds_of_a_recipe_are_taken(root, store):
    with pytest.raises(RecipeError, match="threshold"):
        validate({**recipe(root).model_dump(), "postprocess": {"pixel_threshold": 2.0}}, "the test")
    mine = validate({**recipe(root).model_dump(), "postprocess": {"threshold": 9.5, "pixel_threshold": 7.5}}, "a test")
    [job] = prepare(mine, skip_bad=False, progress=silent)
    assert (job.reference_model.postprocess.threshold, job.reference_model.postprocess.sigma) == (9.5, 4.0)
