"""Answers of many samples: in pieces, with the report of one piece; an interruption costs one piece at most."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SMALL_MODEL
from vitdeploy.errors import ImageError
from vitdeploy.models.source import Source
from vitdeploy.pipeline.plan import answer_facts
from vitdeploy.pipeline.setting import reference_setting
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.spec import encode
from vitdeploy.stages import answers as stage
from vitdeploy.stages.answers import judge, read_answers, write_answers
from vitdeploy.stages.reference_model import find_reference_model, reference_runner
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.tasks.examples import choose
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.verification import records as collect

IMAGES = 75


@pytest.fixture(scope="module")
def work(small_checkpoint, tmp_path_factory):
    """Of the small classifier: its adapter and data, the original's runner, and an engine's whose answers differ."""
    folder = tmp_path_factory.mktemp("images")
    for i in range(IMAGES):
        (folder / str(i % 10)).mkdir(exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (32, 32), np.uint8)
        Image.fromarray(pixels).save(folder / str(i % 10) / f"{i:04}.png")
    model = find_reference_model(Source(SMALL_MODEL, small_checkpoint))
    adapter = make_adapter(reference_setting(model))
    data = adapter.load(
        DataChoice(folder, "folders", None, 0, "all", 3), skip_bad=False, progress=lambda text, done, total: None
    )
    return adapter, data, lambda: reference_runner(model.source), lambda: tilted(reference_runner(model.source))


def tilted(runner):
    """An engine of the same model that takes one class for another for some images."""
    plain = runner._infer

    def infer(feeds):
        logits = plain(feeds)["logits"].copy()
        moved = np.floor(logits[:, 0] * 1000) % 2 == 0
        logits[moved] = np.roll(logits[moved], 1, axis=1)
        return {"logits": logits}

    runner._infer = infer
    return runner


def small_pieces(monkeypatch):
    for module in (stage, collect):
        monkeypatch.setattr(module, "PIECE", 16)


def results(work, folder):
    """All that a report says of the answers of an original and an engine, which are written below `folder`."""
    adapter, data, original, engine = work
    written = []
    for name, runner in (("original", original), ("engine", engine)):
        (folder / name).mkdir(parents=True)
        write_answers(adapter, runner(), data, folder / name, lambda images: None)
        written.append(read_answers(folder / name))
    reference, ours = written
    found = judge(adapter, ours, reference, data, "fp32", (None, None), None)
    chosen = choose(adapter, reference, {"engine": ours}, data)
    return {
        "verify": encode(found),
        "answers": encode(answer_facts(adapter, data, reference, {"engine": ours}, None)),
        "doubt": adapter.doubt(reference, data, found),
        "chosen": [(dataclasses.astuple(each), encode(adapter.show(ours, each.index, None))) for each in chosen],
    }


def test_in_pieces_the_report_is_that_of_one_piece(work, monkeypatch, tmp_path):
    whole = results(work, tmp_path / "whole")
    small_pieces(monkeypatch)
    assert results(work, tmp_path / "pieces") == whole
    assert sorted(path.name for path in (tmp_path / "whole" / "engine").iterdir()) == ["answers.npz"]
    names = [path.name for path in sorted((tmp_path / "pieces" / "engine").iterdir())]
    assert names == [f"answers-{i:06}.npz" for i in range(5)]
    assert 0 < whole["answers"]["changed"]["engine"]["changed"] < IMAGES
    assert {each[0][1] for each in whole["chosen"]} == {"changed", "unsure", "usual"}


def test_columns_of_pieces_are_those_of_one_file(work, monkeypatch, tmp_path):
    adapter, data, original, _ = work
    whole = adapter.answers(original(), data, lambda images: None)
    small_pieces(monkeypatch)
    write_answers(adapter, original(), data, tmp_path, lambda images: None)
    found = read_answers(tmp_path)
    assert len(found) == len(found.columns["logits"]) == IMAGES and found.columns.keys() == whole.columns.keys()
    assert np.array_equal(found.stacked("logits"), whole.stacked("logits"))
    for index in (0, 15, 16, IMAGES - 1, -1):
        assert np.array_equal(found.columns["logits"][index], whole.columns["logits"][index])
    with pytest.raises(IndexError):
        found.columns["logits"][IMAGES]
    assert [len(piece) for piece in found.pieces("logits")] == [16, 16, 16, 16, 11]


def test_an_interruption_costs_one_piece(work, monkeypatch, tmp_path):
    adapter, data, original, _ = work
    small_pieces(monkeypatch)
    scratch, done = tmp_path / "scratch", []

    def stop(images):
        done.append(images)
        if sum(done) >= 40:
            raise KeyboardInterrupt

    (tmp_path / "first").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_answers(adapter, original(), data, tmp_path / "first", stop, scratch)
    assert len(list(scratch.iterdir())) == 2
    (scratch / "answers-000001.npz").write_bytes(b"cut off")
    ran = []
    outputs = Predictor.outputs

    def counted(self, pixels, *further):
        ran.append(len(pixels))
        return outputs(self, pixels, *further)

    monkeypatch.setattr(Predictor, "outputs", counted)
    (tmp_path / "second").mkdir()
    counted = []
    write_answers(adapter, original(), data, tmp_path / "second", counted.append, scratch)
    assert sum(counted) == IMAGES and sum(ran) == IMAGES - 16 + 5  # the last eight are filled up
    whole = adapter.answers(original(), data, lambda images: None)
    assert np.array_equal(read_answers(tmp_path / "second").stacked("logits"), whole.stacked("logits"))


def test_pieces_are_decoded_where_no_pixels_are_kept(work, monkeypatch):
    adapter, data, _, _ = work
    pixels = adapter.pixels(data)
    kept = [image.tobytes() for image, _ in pixels.some(range(20, 30))]
    monkeypatch.setattr(pixels, "_file", None)
    assert not pixels.kept
    assert [image.tobytes() for image, _ in pixels.some(range(20, 30))] == kept


def test_an_image_that_went_meanwhile_is_the_error(work, monkeypatch):
    adapter, data, _, _ = work
    pixels = adapter.pixels(data)
    monkeypatch.setattr(pixels, "_file", None)
    path = pixels._samples[21].path
    content = path.read_bytes()
    try:
        path.write_bytes(b"no image")
        with pytest.raises(ImageError, match=path.name):
            list(pixels.some(range(20, 30)))
    finally:
        path.write_bytes(content)
