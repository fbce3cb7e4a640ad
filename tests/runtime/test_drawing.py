"""Pictures of answers: what they show where, and the colours."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from vitdeploy.runtime.drawing import OPACITY, colours
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.runtime.tasks.depth import Depth, depth_picture
from vitdeploy.runtime.tasks.detection import Detection, Detections
from vitdeploy.runtime.tasks.instance_segmentation import Instance, Instances
from vitdeploy.runtime.tasks.panoptic import Panoptic, Segment
from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.runtime.tasks.segmentation import NONE, Segmentation, areas
from vitdeploy.runtime.upsample import bands, bicubic, enlarged
from vitdeploy.spec import PreprocessSpec

GREY = Image.new("RGB", (120, 80), (100, 100, 100))


def picture(task, result):
    return np.asarray(Image.open(io.BytesIO(TASKS[task].draw(GREY, result)[".png"])), np.int64)


def test_classes_lie_over_the_image_in_their_colours_and_the_map_keeps_its_numbers():
    found = np.zeros((80, 120), np.int32)
    found[:, 60:], found[70:] = 2, NONE
    result = Segmentation(found, areas(found, ["sky", "car", "road"]))
    assert [(each.label, each.area) for each in result.classes] == [("sky", 4200), ("road", 4200)]
    drawn = picture("segmentation", result)
    for x, index in ((40, 0), (100, 2)):
        expected = OPACITY * colours(3)[index].astype(float) + (1 - OPACITY) * 100
        assert np.abs(drawn[60, x] - expected).max() <= 2
    assert drawn[75, 100].tolist() == [100, 100, 100]
    whole = np.asarray(Image.open(io.BytesIO(TASKS["segmentation"].draw(GREY, result)[".classes.png"])))
    assert (whole[60, 40], whole[60, 100], whole[75, 100], whole.dtype) == (0, 2, 255, np.uint8)
    many = Segmentation(np.array([[300, NONE]], np.int32), ())
    assert np.asarray(Image.open(io.BytesIO(many.png()))).tolist() == [[300, 65535]]


def test_boxes_are_outlined_and_segments_filled():
    box = Detections((120, 80), (Detection(1, "dog", 0.9, (20.0, 30.0, 100.0, 70.0)),))
    drawn = picture("detection", box)
    assert drawn[70, 60].tolist() == colours(2)[1].tolist() and drawn[60, 60].tolist() == [100, 100, 100]
    ids = np.zeros((80, 120), np.int32)
    ids[40:] = 1
    drawn = picture("panoptic", Panoptic(ids, (Segment(1, 7, "wall", 0.9, 4800, False),)))
    assert drawn[20, 60].tolist() == [100, 100, 100] and drawn[60, 60].tolist() != [100, 100, 100]
    empty = picture("panoptic", Panoptic(np.zeros((80, 120), np.int32), ()))
    assert (empty == 100).all()


def test_masks_lie_over_the_image_in_the_colours_of_their_classes_with_a_rim():
    masks = np.zeros((2, 80, 120), bool)
    masks[0, 20:70, 20:80], masks[1, 30:60, 60:110] = True, True
    boxes = ((20.0, 20.0, 80.0, 70.0), (60.0, 30.0, 110.0, 60.0))
    rows = zip((0, 2), (0.9, 0.6), boxes, masks, strict=True)
    objects = tuple(Instance(i, "dog", score, box, RunLengths.of(mask)) for i, score, box, mask in rows)
    drawn = picture("instance-segmentation", Instances((120, 80), objects))
    for x, index in ((70, 0), (100, 2)):  # at 70 both: the surer one is on top
        expected = OPACITY * colours(3)[index].astype(float) + (1 - OPACITY) * 100
        assert np.abs(drawn[50, x] - expected).max() <= 2
    assert (drawn[50, 79] > 180).all() and drawn[75, 100].tolist() == [100, 100, 100]
    assert (picture("instance-segmentation", Instances((120, 80), ())) == 100).all()


def test_near_is_light_and_what_is_unknown_is_black():
    metres = Depth(np.array([[1.0, 2.0, np.nan, 9.0]], np.float32), "metric")
    near, middle, unknown, far = np.asarray(depth_picture(metres.nearness), np.int64)[0].sum(axis=-1)
    assert near > middle > far > unknown == 0
    assert np.load(io.BytesIO(TASKS["depth"].draw(GREY, metres)[".npy"])).shape == (1, 4)
    flat = Depth(np.full((2, 2), np.nan, np.float32), "inverse")
    assert not np.asarray(depth_picture(flat.nearness)).any() and flat.range == (0.0, 0.0, 0.0)


def test_the_colours_of_neighbouring_classes_differ_and_none_is_black():
    found = colours(255).astype(np.int64)
    assert len(np.unique(found, axis=0)) == 255 and found.sum(axis=1).min() > 0
    assert np.abs(np.diff(found[:20], axis=0)).max(axis=1).min() >= 64


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(33, 70), (5, 4)], ids=str)
def test_maps_are_enlarged_as_pytorch_does_it(mode, size):
    maps = np.random.default_rng(0).standard_normal((1, 9, 13)).astype(np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(maps)[None], size, mode=mode)[0, 0].numpy()
    spec = PreprocessSpec((8, 8), (8, 8))
    found = np.zeros(size)
    if mode == "bicubic":
        rows, columns, values = bicubic(maps[0], size[::-1], spec)
        found[rows, columns] = values
    else:
        for rows, columns, band in bands(maps, size[::-1], spec):
            found[rows, columns] = band[0]
        np.testing.assert_allclose(enlarged(maps, size)[0], expected, atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)
