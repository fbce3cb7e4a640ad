"""Prompts as tensors, what is refused, and masks at an image's own size as transformers' processors make them."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.prompted import processor_of
from tests.references import reference
from vitdeploy.errors import InputError
from vitdeploy.runtime.geometry import input_window
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.prompts import Prompt, PromptSpec, grid_prompts, prompt_arrays, read_prompts
from vitdeploy.runtime.tasks.prompted import PromptedMasks, PromptMasks, chosen, full_size, iou
from vitdeploy.spec import PreprocessSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SAM = PreprocessSpec((48, 48), (48, 48), "bilinear", MEAN, STD, "longest-pad")
SAM2 = PreprocessSpec((64, 64), (64, 64), "bilinear", MEAN, STD)
SPEC = PromptSpec(6)
SIZE = (100, 60)  # width, height
SIZES = [(100, 60), (31, 77), (48, 48), (20, 13)]


def noise(size):
    return np.random.default_rng(4).integers(0, 256, (*size[::-1], 3), np.uint8)


# --- preprocessing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_images_are_padded_as_transformers_does(size):
    pixels = load_pixels(noise(size), SAM)
    processor = processor_of("sam")
    theirs = processor(Image.fromarray(noise(size)), return_tensors="np")
    height, width = theirs["reshaped_input_sizes"][0]
    ours = normalise(pixels[None], SAM)[0]
    apart = np.abs(ours - theirs["pixel_values"][0])
    grey = 1 / 255 / min(STD)
    assert apart[:, :height, :width].max() < 1.01 * grey  # Pillow and torch round differently
    assert apart.max() < 1.01 * grey
    # What is padded is 0 there, and here the nearest grey level: half a level away.
    assert ours.shape == (3, 48, 48) and max(np.abs(ours[:, height:]).max(initial=0), 0) < 0.51 * grey
    window = input_window(size, SAM)
    assert (window.left, window.top) == (0, 0)
    assert window.right == pytest.approx(48 * size[0] / width)


def test_a_size_that_is_not_padded_to_is_refused():
    with pytest.raises(ValueError, match=r"must equal resize .* with longest-pad"):
        PreprocessSpec((48, 48), (48, 64), fit="longest-pad")


# --- from prompts to tensors ------------------------------------------------------------------------------------------


def test_points_and_boxes_are_those_of_transformers_processors():
    transformers = reference("transformers")
    points, box = [[12.0, 50.5], [99.0, 3.0]], [10.0, 5.0, 80.0, 59.0]
    for kind, spec, name in (("sam", SAM, "SamProcessor"), ("sam2", SAM2, "Sam2Processor")):
        processor = getattr(transformers, name)(processor_of(kind))
        given = processor(
            Image.fromarray(noise(SIZE)), input_points=[[points]], input_boxes=[[box]], return_tensors="np"
        )
        prompts = read_prompts(points, None, box, SIZE)
        ours = prompt_arrays(prompts, SIZE, spec, PromptSpec(6, closed_box=kind == "sam2"))
        np.testing.assert_allclose(ours["points"][0, :2], given["input_points"].reshape(2, 2), rtol=1e-6)
        np.testing.assert_allclose(ours["points"][0, 2:4], given["input_boxes"].reshape(2, 2), rtol=1e-6)
        assert ours["labels"][0].tolist() == [1, 1, 2, 3, -1 if kind == "sam2" else -10, -10]


def test_a_prompt_without_a_box_is_closed_by_no_point():
    prompts = read_prompts([[[1, 2]], [[3, 4]]], [[1], [0]], None, SIZE)
    arrays = prompt_arrays(prompts, SIZE, SAM, SPEC)
    assert arrays["labels"].tolist() == [[1, -1, *[-10] * 4], [0, -1, *[-10] * 4]]
    assert (arrays["points"].dtype, arrays["points"].shape) == (np.float32, (2, 6, 2))


def test_an_input_that_is_cropped_moves_points():
    spec = PreprocessSpec(30, (30, 30))  # 100x60 becomes 50x30, of which 10 are cut at the left
    arrays = prompt_arrays([Prompt(((50.0, 30.0),), (1,))], SIZE, spec, SPEC)
    assert arrays["points"][0, 0].tolist() == [15, 15]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "no prompt: points or boxes"),
        ({"points": [(100, 3)]}, "x 100, y 3 in an image of 100x60"),
        ({"points": [(3, -1)]}, "x 3, y -1 in an image of 100x60"),
        ({"points": [(3, float("nan"))]}, "prompts have an unexpected shape or type"),
        ({"points": [3, 4]}, "prompts have an unexpected shape or type"),
        ({"points": [(1, 2, 3)]}, "prompts have an unexpected shape or type"),
        ({"points": []}, "prompts have an unexpected shape or type"),
        ({"points": "middle"}, "prompts have an unexpected shape or type"),
        ({"points": [["3", "4"]]}, "prompts have an unexpected shape or type"),
        ({"points": [[True, True]]}, "prompts have an unexpected shape or type"),
        ({"points": [[(1, 2)], [(1, 2), (3, 4)]]}, "prompts have an unexpected shape or type"),
        ({"points": [(1, 2)], "labels": [2]}, "labels do not match the points"),
        ({"points": [(1, 2)], "labels": [1, 0]}, "labels do not match the points"),
        ({"points": [(1, 2)], "labels": ["in"]}, "labels do not match the points"),
        ({"boxes": [1, 2, 3, 4], "labels": [1]}, "labels without points"),
        ({"boxes": [1, 2, 101, 4]}, "1,2,101,4 in an image of 100x60"),
        ({"boxes": [30, 2, 3, 4]}, "30,2,3,4 in an image of 100x60"),
        ({"boxes": [1, 2, 3]}, "prompts have an unexpected shape or type"),
        ({"points": [(1, 2)], "boxes": [[1, 2, 3, 4], [5, 6, 7, 8]]}, "points for 1 prompts, 2 boxes"),
    ],
)
def test_what_is_no_prompt_of_the_image_is_refused(given, told):
    with pytest.raises(InputError) as caught:
        read_prompts(given.get("points"), given.get("labels"), given.get("boxes"), SIZE)
    assert told in f"{caught.value.message} {caught.value.found}"


def test_more_points_than_slots_are_refused():
    with pytest.raises(InputError, match="too many points") as caught:
        prompt_arrays([Prompt(((1.0, 1.0),) * 5, (1,) * 5, (0, 0, 9, 9))], SIZE, SAM, SPEC)
    assert (caught.value.found, caught.value.expected[:9]) == ("5 points and a box", "at most 4")


def test_a_grid_lies_in_the_middle_of_its_cells():
    assert [each.points[0] for each in grid_prompts((60, 30), 2)] == [(15, 7.5), (45, 7.5), (15, 22.5), (45, 22.5)]


# --- from logits to masks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("kind", "spec"), [("sam", SAM), ("sam2", SAM2)])
def test_masks_are_those_of_transformers_processors(kind, spec, size):
    logits = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(2))
    processor, given = processor_of(kind), ([logits[None]], [size[::-1]])
    if kind == "sam":
        given = (*given, processor(Image.fromarray(noise(size)), return_tensors="np")["reshaped_input_sizes"])
    theirs = processor.post_process_masks(*given)[0][0].numpy()
    ours = full_size(logits.numpy(), size, spec)
    assert ours.shape == theirs.shape == (3, *size[::-1])
    np.testing.assert_array_equal(ours, theirs)
    assert 0.1 < ours.mean() < 0.9


def test_the_single_mask_of_sam2_gives_way_where_it_is_not_stable():
    masks = np.full((4, 4, 4), -1, np.float32)
    masks[0, :2], masks[3] = 0.01, 1
    scores = np.array([0.9, 0.2, 0.1, 0.7], np.float32)
    plain, promised = chosen(masks, scores, PromptSpec(6), multimask=False)
    assert (plain is not None, promised.tolist()) == (True, [pytest.approx(0.9)])
    stable = PromptSpec(6, stability=(0.05, 0.98))
    found, promised = chosen(masks, scores, stable, multimask=False)
    assert found[0].min() == 1 and promised.tolist() == [pytest.approx(0.7)]
    masks[0, :2] = 1
    assert chosen(masks, scores, stable, multimask=False)[1].tolist() == [pytest.approx(0.9)]
    assert chosen(masks, scores, stable, multimask=True)[1].tolist() == pytest.approx([0.2, 0.1, 0.7])
    assert chosen(np.full((4, 4, 4), -1.0), scores, stable, multimask=False)[1].tolist() == [pytest.approx(0.9)]


def test_an_answer_tells_its_best_mask():
    masks = np.zeros((2, 6, 8), np.bool_)
    masks[1, 2:5, 3:7] = True
    answer = PromptMasks(Prompt(((4.0, 3.0),), (1,)), masks, (0.25, 0.75))
    both = PromptedMasks((answer, PromptMasks(Prompt(box=(0, 0, 2, 2)), masks[:1], (0.5,))))
    assert (answer.best, answer.score, answer.box, both[1].box) == (1, 0.75, (3, 2, 7, 5), None)
    assert (both.mask.sum(), both.score, len(both)) == (12, 0.75, 2)
    assert str(both).splitlines() == [
        "a mask of 25.0 % of the image in 3,2,7,5, predicted IoU 0.75, the best of 2",
        "a mask of 0.0 % of the image, predicted IoU 0.50",
    ]
    document = both.to_dict()
    assert (document["width"], document["height"], document["prompts"][0]["area"]) == (8, 6, 12)
    assert document["prompts"][0]["points"] == [[4.0, 3.0]] and document["prompts"][1]["box"] == [0, 0, 2, 2]
    assert iou(masks[0], masks[0]) == 1 and iou(masks[0], masks[1]) == 0
