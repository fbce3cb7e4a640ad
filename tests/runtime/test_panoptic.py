"""The panoptic map of one image: against transformers' post-processing, and by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.references import reference
from vitdeploy.runtime import upsample
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.panoptic import Segment, segment
from vitdeploy.spec import PreprocessSpec

SQUASH = PreprocessSpec((64, 96), (64, 96), "bilinear")
CLASSES, THINGS = 6, (0, 1, 2)
SPEC = PostprocessSpec("softmax", threshold=0.5, things=THINGS, mask_threshold=0.5, overlap=0.8)


def random_outputs(seed, queries=12, size=(16, 24), dtype=np.float64):
    """Noisy discs that overlap here and there, mostly sure classes, and some queries without an object."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    centre_y, centre_x = generator.uniform(0, size[0], queries), generator.uniform(0, size[1], queries)
    distance = np.hypot(y - centre_y[:, None, None], x - centre_x[:, None, None])
    masks = 2 * (generator.uniform(1, 6, (queries, 1, 1)) - distance) + generator.normal(size=distance.shape)
    logits = generator.normal(0, 4, (queries, CLASSES + 1))
    return {"logits": logits.astype(dtype), "masks": masks.astype(dtype)}


def by_transformers(outputs, size, spec=SPEC):
    transformers = reference("transformers")
    return transformers.DetrImageProcessor().post_process_panoptic_segmentation(
        SimpleNamespace(logits=torch.tensor(outputs["logits"])[None], pred_masks=torch.tensor(outputs["masks"])[None]),
        threshold=spec.threshold,
        mask_threshold=spec.mask_threshold,
        overlap_mask_area_threshold=spec.overlap,
        label_ids_to_fuse=set(range(CLASSES)) - set(spec.things),
        target_sizes=[(size[1], size[0])],
    )[0]


@pytest.mark.parametrize("things", [tuple(range(CLASSES)), THINGS], ids=["no fusion", "stuff is fused"])
@pytest.mark.parametrize("size", [(24, 16), (61, 37), (13, 50)], ids=str)
def test_map_and_segments_are_those_of_transformers(size, things):
    spec = PostprocessSpec("softmax", threshold=0.5, things=things, mask_threshold=0.5, overlap=0.8)
    segments = fused = hidden = 0
    for seed in range(12):
        outputs = random_outputs(seed)
        theirs = by_transformers(outputs, size, spec)
        ours = segment(outputs, size, SQUASH, spec, None)
        infos, expected = theirs["segments_info"], theirs["segmentation"].numpy()
        if not infos:
            assert not ours.segments and not ours.map.any()
            continue
        parts = [info["label_id"] for info in infos]
        stuff = [label for label in parts if label not in things]
        fused += len(stuff) - len(set(stuff))
        hidden += bool((expected == 0).any())
        segments += len(parts)
        assert ours.map.dtype == np.int32 and ours.map.shape == expected.shape
        assert sorted(s.index for s in ours.segments) == sorted(
            [label for label in parts if label in things] + list(set(stuff))
        )
        for found in ours.segments:
            assert found.isthing == (found.index in things)
            assert found.area == (ours.map == found.id).sum() > 0
            same = [info["score"] for info in infos if info["label_id"] == found.index]
            assert min(abs(found.score - score) for score in same) < 1e-6
        if len({info["id"] for info in infos}) == len(ours.segments):  # transformers' own ids are unique
            assert np.array_equal(ours.map, expected)
        else:  # its ids of two classes fell together: ours are finer
            assert {tuple(pair) for pair in np.stack([ours.map, expected], -1).reshape(-1, 2).tolist()} == {
                (int(i), int(expected[ours.map == i][0])) for i in np.unique(ours.map)
            }
    assert segments > 20 and hidden > 2
    assert (fused > 5) == (things is THINGS)


def test_float32_differs_from_transformers_at_most_where_two_masks_are_equal():
    outputs = random_outputs(1, dtype=np.float32)
    theirs = by_transformers(outputs, (61, 37))
    ours = segment(outputs, (61, 37), SQUASH, SPEC, None)
    assert len(ours.segments) > 2
    assert (ours.map != theirs["segmentation"].numpy()).mean() < 1e-3


@pytest.mark.parametrize("size", [(96, 64), (7, 5), (24, 16), (1, 1)], ids=str)
def test_masks_are_upsampled_as_torch_does(size):
    masks = np.random.default_rng(0).normal(size=(3, 16, 24))
    expected = F.interpolate(torch.tensor(masks)[None], (size[1], size[0]), mode="bilinear", align_corners=False)[0]
    found = np.full(expected.shape, np.nan)
    for rows, columns, band in upsample.bands(masks, size, SQUASH):
        found[:, rows, columns] = band
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-12)


def test_bands_do_not_change_the_answer(monkeypatch):
    outputs = random_outputs(3)
    whole = segment(outputs, (61, 37), SQUASH, SPEC, None)
    monkeypatch.setattr(upsample, "BAND_ELEMENTS", 61 * 12 * 5)
    banded = segment(outputs, (61, 37), SQUASH, SPEC, None)
    assert whole.segments and banded.segments == whole.segments
    assert np.array_equal(banded.map, whole.map)


def sure(classes, size=(4, 4)):
    """One query a class, with a mask of its own quarter of columns."""
    logits = np.full((len(classes), CLASSES + 1), -9.0, np.float32)
    logits[np.arange(len(classes)), classes] = 9.0
    masks = np.full((len(classes), *size), -9.0, np.float32)
    for i in range(len(classes)):
        masks[i, :, i] = 9.0
    return {"logits": logits, "masks": masks}


def test_ids_stay_unique_after_a_fusion():
    # Stuff 4, thing 1, stuff 4 again, thing 2: transformers gives the last one the id of thing 1.
    outputs = sure([4, 1, 4, 2])
    found = segment(outputs, (4, 4), SQUASH, SPEC, ["a", "b", "c", "d", "sky", "f"])
    assert [info["id"] for info in by_transformers(outputs, (4, 4))["segments_info"]] == [1, 2, 1, 2]
    assert found.map.tolist() == [[1, 2, 1, 3]] * 4
    assert [(s.id, s.label, s.area, s.isthing) for s in found.segments] == [
        (1, "sky", 8, False),
        (2, "b", 4, True),
        (3, "c", 4, True),
    ]


def test_a_mask_that_others_hide_is_dropped():
    outputs = sure([0, 1])
    outputs["masks"][0, :, :] = 5.0  # all of the image, half of it under a surer mask
    outputs["masks"][1, :, :2] = 9.0
    found = segment(outputs, (4, 4), SQUASH, SPEC, None)
    assert found.map.tolist() == [[1, 1, 0, 0]] * 4
    assert [s.index for s in found.segments] == [1]
    assert [s.index for s in segment(outputs, (4, 4), SQUASH, PostprocessSpec(overlap=0.4), None).segments] == [0, 1]


def test_what_a_crop_does_not_show_has_no_segment():
    # 8x8 -> 4x4 and the middle 2x2 of it: x and y 2..6 of the original.
    spec = PreprocessSpec(4, (2, 2))
    outputs = sure([3])
    outputs["masks"][:] = 9.0
    found = segment(outputs, (8, 8), spec, SPEC, None)
    expected = np.zeros((8, 8), int)
    expected[2:6, 2:6] = 1
    assert found.map.tolist() == expected.tolist()
    assert found.segments[0].area == 16


def test_a_crop_that_shows_no_whole_pixel_gives_an_empty_map():
    found = segment(sure([0, 1]), (4, 4), PreprocessSpec((4000, 4000), (2, 2)), SPEC, None)
    assert found.map.tolist() == [[0] * 4] * 4
    assert found.segments == ()


@pytest.mark.parametrize("logit", [9.0, -9.0], ids=["no object", "unsure"])
def test_an_image_without_objects_is_all_zero(logit):
    outputs = sure([0, 1])
    outputs["logits"][:] = -9.0
    outputs["logits"][:, -1] = logit
    found = segment(outputs, (6, 5), SQUASH, SPEC, None)
    assert found.map.shape == (5, 6)
    assert not found.map.any() and found.segments == ()


def test_the_answer_is_json_but_for_the_map():
    found = segment(sure([1]), (4, 4), SQUASH, SPEC, None)
    assert found.segments == (Segment(1, 1, "1", found.segments[0].score, 16, True),)
    assert json.loads(json.dumps(found.to_dict())) == {
        "width": 4,
        "height": 4,
        "segments": [{**found.segments[0].__dict__}],
    }
