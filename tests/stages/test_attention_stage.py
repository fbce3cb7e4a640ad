"""The attention maps of a run: where they were planted, of the original and of placements, or why there are none."""

import json

import numpy as np
import pytest

from tests.pipeline import planted
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import save_graph
from vitdeploy.runtime.preprocess import load_image
from vitdeploy.stages.attention import find_attention, read_attention, shared
from vitdeploy.stages.step import ORIGINAL

PLACES = {3: ((1, 2), (3, 0)), 8: ((0, 1), (2, 2))}  # by image: its brightest and darkest patch


def saved(folder, name, model, canonical=False):
    if canonical:
        normalise(model)
    path = folder / f"{name}.onnx"
    save_graph(model, path)
    return path


def looked(folder, original, **placements):
    images = {}
    for number, places in PLACES.items():
        (folder / str(number)).mkdir()
        images[number] = load_image(planted.picture(folder / str(number), *places), planted.PREPROCESS)[0]
    files = {name: saved(folder, name, model, canonical=True) for name, model in placements.items()}
    find_attention(saved(folder, "original", original), files, images, planted.PREPROCESS, folder)
    return read_attention(folder)


def test_maps_of_the_original_and_of_a_placement_are_where_attention_was_planted(tmp_path):
    facts, maps = looked(tmp_path, planted.classifier(), ours=planted.classifier())
    assert {key: facts[key] for key in ("images", "grid", "blocks", "left_out")} == {
        "images": [3, 8],
        "grid": [4, 4],
        "blocks": 2,
        "left_out": {},
    }
    assert facts["reader"] == "last attention, read by the class token"
    assert sorted(maps) == [ORIGINAL, "ours"]
    for index, places in enumerate(PLACES.values()):
        for found in maps.values():
            assert (found[index].shape, found[index].dtype) == ((4, 4), np.float32)
            strongest = [divmod(int(i), 4) for i in np.argsort(-found[index], axis=None)[:2]]
            assert sorted(strongest) == sorted(places)
    assert shared(maps["ours"][0], maps[ORIGINAL][0]) == pytest.approx(1.0, abs=1e-5)


def test_what_cannot_be_read_is_told_and_the_rest_is_there(tmp_path):
    facts, maps = looked(tmp_path, planted.classifier(), ours=planted.classifier(), fused=planted.classifier(blocks=1))
    assert facts["left_out"] == {"fused": "1 of its 2 attention blocks can be read"}
    assert sorted(maps) == ["original", "ours"]


def test_without_maps_of_the_original_there_are_none(tmp_path):
    facts, maps = looked(tmp_path, planted.windowed(), ours=planted.classifier())
    assert maps == {} and "inside windows" in facts["left_out"][ORIGINAL]
    assert json.loads((tmp_path / "attention.json").read_text()) == facts


def test_two_maps_share_what_lies_at_the_same_place():
    left, both = np.array([[2.0, 0.0]]), np.array([[3.0, 1.0]])
    assert shared(left, left) == 1.0
    assert shared(left, np.array([[0.0, 5.0]])) == 0.0
    assert shared(left, both) == pytest.approx(0.75) == shared(both, left)
