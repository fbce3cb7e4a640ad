"""Instances of queries with masks: equal to what transformers' own processors find, at the image's size."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.references import reference
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec, candidates, overlaps, segment_instances
from vitdeploy.runtime.tasks.registry import count_same
from vitdeploy.runtime.upsample import nearest
from vitdeploy.spec import PreprocessSpec, decode, encode
from vitdeploy.spec.tasks import Postprocess

WHOLE = PreprocessSpec((64, 64), (64, 64))
SIZE, SQUARE = (90, 50), (70, 70)  # of original images: width, height
HEADS = {
    "Mask2Former": InstanceSpec(mask_size=(384, 384), threshold=0.3),
    "MaskFormer": InstanceSpec(threshold=0.3),
    "Eomt": InstanceSpec("softmax", "queries", (64, 64), "bilinear", 0.3),
    "RfDetr": InstanceSpec("sigmoid", enlarge="bilinear", threshold=0.8),
}


def outputs_of(kind, seed=0):
    """Blobs with borders that no two masks share, and scores on both sides of the threshold."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(12, 4, 5, generator=generator)[None]
    masks = 4 * torch.nn.functional.interpolate(coarse, (16, 16), mode="bicubic")[0] - 1.5
    masks[3] = -1.0  # an empty one
    classes = 2.5 * torch.randn(12, 6, generator=generator)
    return {"class_logits": classes.numpy(), "masks": masks.numpy()}


def library_instances(kind, outputs, size, threshold):
    """Masks, or of EoMT a map of the numbers of instances, and what transformers tells of each."""
    processor = getattr(reference("transformers"), f"{kind}ImageProcessor")()
    given = {name: torch.from_numpy(array)[None] for name, array in outputs.items()}
    names = ("logits", "pred_masks") if kind == "RfDetr" else ("class_queries_logits", "masks_queries_logits")
    both = SimpleNamespace(**dict(zip(names, (given["class_logits"], given["masks"]), strict=True)))
    more = {"size": {"shortest_edge": 64, "longest_edge": 64}} if kind == "Eomt" else {"return_binary_maps": True}
    [found] = processor.post_process_instance_segmentation(both, target_sizes=[size[::-1]], threshold=threshold, **more)
    return found["segmentation"].numpy(), found["segments_info"]


@pytest.mark.parametrize("kind", HEADS)
def test_instances_of_random_outputs_are_the_librarys(kind):
    head, outputs = HEADS[kind], outputs_of(kind)
    # EoMT's processor cuts the answer of an image that is not square: it has padded what the model saw.
    size = SQUARE if kind == "Eomt" else SIZE
    maps, told = library_instances(kind, outputs, size, head.threshold)
    found = list(candidates(outputs, size, WHOLE, head, None))
    assert len(told) >= 3 and len(found) == len(told)
    score_of = lambda each: (each["label_id"], round(each["score"], 4))  # noqa: E731
    if kind == "Eomt":  # a map, on which a later query covers an earlier one
        ours = np.full(size[::-1], -1)
        for number, each in enumerate(found):
            ours[each.mask] = number
            assert (each.index, round(each.score, 4)) == score_of(told[number])
        assert (ours == maps).mean() > 0.999  # a pixel at 0 up to float32's rounding may be on either side
        return
    ours = sorted(((each.index, round(each.score, 4), each.mask) for each in found), key=lambda row: row[:2])
    order = sorted(range(len(told)), key=lambda i: score_of(told[i]))
    assert [row[:2] for row in ours] == [score_of(told[i]) for i in order]
    for (_, _, mask), i in zip(ours, order, strict=True):
        assert np.count_nonzero(mask != maps[i].astype(bool)) <= (0 if head.enlarge == "nearest" else 2)


def test_the_answer_is_ranked_and_masks_come_back_from_coco():
    coco = pytest.importorskip("pycocotools.mask")
    head = HEADS["Mask2Former"]
    found = segment_instances(outputs_of("Mask2Former"), SIZE, WHOLE, head, list("abcde"))
    assert list(found.scores) == sorted(found.scores, reverse=True) and min(found.scores) >= head.threshold
    assert found.labels == tuple("abcde"[each.index] for each in found.objects)
    told = json.loads(json.dumps(found.to_dict()))
    for each, row, mask, box in zip(found.objects, told["objects"], found.masks, found.boxes, strict=True):
        runs = coco.frPyObjects(row["segmentation"], *row["segmentation"]["size"])
        np.testing.assert_array_equal(coco.decode(runs).astype(bool), each.mask)
        assert coco.area(runs) == row["area"] == mask.sum() == each.runs.area
        x, y, w, h = coco.toBbox(runs)
        assert [x, y, x + w, y + h] == list(box)
    assert "pixels" in str(found) and "in 90x50" in repr(found)
    none = segment_instances(outputs_of("Mask2Former"), SIZE, WHOLE, InstanceSpec(threshold=1.0), None)
    assert (none.masks.shape, none.boxes.shape, str(none)) == ((0, 50, 90), (0, 4), "nothing above the threshold")


@pytest.mark.parametrize("size", [(33, 70), (5, 4), (32, 16), (427, 640), (1080, 811)], ids=str)
def test_cells_are_the_nearest_of_pytorch(size):
    cells = torch.arange(96 * 61, dtype=torch.float32).reshape(1, 1, 96, 61)
    expected = torch.nn.functional.interpolate(cells, size, mode="nearest")[0, 0].numpy()
    rows, columns, y, x = nearest(size[::-1], WHOLE, (96, 61))
    found = np.zeros(size)
    found[rows, columns] = cells[0, 0].numpy()[y[:, None], x]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("enlarge", ["nearest", "bilinear"])
def test_what_a_crop_leaves_out_is_in_no_mask(enlarge):
    logits, masks = np.full((1, 3), -9, np.float32), np.full((1, 16, 16), 9, np.float32)
    logits[0, 1] = 9
    head = InstanceSpec(candidates="queries", enlarge=enlarge)
    spec = PreprocessSpec(64, (64, 64))  # the middle of a wide image
    [found] = segment_instances({"class_logits": logits, "masks": masks}, (200, 100), spec, head, None).objects
    assert found.box == (50.0, 0.0, 150.0, 100.0) and found.runs.area == 10000 and found.label == "1"


def test_run_lengths_are_those_of_a_mask():
    generator = np.random.default_rng(0)
    for mask in (generator.random((7, 5)) < 0.4, np.zeros((3, 4), bool), np.ones((3, 4), bool)):
        runs = RunLengths.of(mask)
        np.testing.assert_array_equal(runs.mask, mask)
        assert (runs.area, runs.size, sum(runs.counts)) == (mask.sum(), mask.shape[::-1], mask.size)
    a, b = (RunLengths.of(np.arange(12).reshape(3, 4) < n) for n in (6, 3))
    assert overlaps([a, b], [b]).tolist() == [[0.5], [1.0]] and overlaps([], [b]).shape == (0, 1)


def test_two_models_agree_where_most_instances_have_a_partner():
    head = HEADS["MaskFormer"]
    ours = {name: np.stack([outputs_of("MaskFormer", seed)[name] for seed in (0, 1)]) for name in outputs_of("")}
    other = {name: array[::-1] for name, array in ours.items()}
    task = "instance-segmentation"
    assert (count_same(task, WHOLE, head, ours, ours), count_same(task, WHOLE, head, other, ours)) == (2, 0)


def test_a_manifest_says_what_the_outputs_mean():
    for head in HEADS.values():
        assert decode(Postprocess, encode(head)) == head
