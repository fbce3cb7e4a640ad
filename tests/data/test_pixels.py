"""Images in batches; unreadable ones are an error, or counted."""

import numpy as np
import pytest
from PIL import Image

from vitdeploy.data.decoding import Skipped, batches, decode_images
from vitdeploy.data.folder import Sample
from vitdeploy.errors import DataError, ImageError
from vitdeploy.spec import PreprocessSpec

SPEC = PreprocessSpec(8, (8, 8), "nearest", (0.5,), (0.5,))


@pytest.fixture
def samples(tmp_path):
    """Seven grey 8x8 images whose pixels are their index; the third and sixth are broken."""
    made = []
    for i in range(7):
        path = tmp_path / f"{i}.png"
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(path)
        made.append(Sample(path, i))
    for i in (2, 5):
        made[i].path.write_bytes(b"not an image")
    return made


@pytest.fixture
def whole(samples):
    return [sample for i, sample in enumerate(samples) if i not in (2, 5)]


def test_batches_have_the_size_asked_for_and_the_last_what_is_left(whole):
    found = list(batches(whole, SPEC, 2))
    assert [batch.shape for batch in found] == [(2, 8, 8, 1), (2, 8, 8, 1), (1, 8, 8, 1)]
    assert np.concatenate(found)[:, 0, 0, 0].tolist() == [0, 1, 3, 4, 6]
    assert {batch.dtype for batch in found} == {np.dtype(np.uint8)}


def test_a_whole_number_of_batches_has_no_rest(whole):
    assert [len(batch) for batch in batches(whole[:4], SPEC, 2)] == [2, 2]


def test_an_unreadable_image_is_an_error_that_names_it(samples):
    with pytest.raises(ImageError) as caught:
        list(batches(samples, SPEC, 2))
    assert str(samples[2].path) in caught.value.message


def test_unreadable_images_are_left_out_and_listed_where_that_is_wanted(samples):
    skipped = Skipped([])
    found = list(batches(samples, SPEC, 2, skipped))
    assert [len(batch) for batch in found] == [2, 2, 1]
    assert skipped.paths == [str(samples[2].path), str(samples[5].path)]


def test_samples_keep_their_pixels_when_others_are_skipped(samples):
    found = decode_images(samples, SPEC, Skipped([]), processes=0)
    assert [(sample.label, int(pixels[0, 0, 0])) for sample, pixels, _ in found] == [(i, i) for i in (0, 1, 3, 4, 6)]


def test_not_one_readable_image_is_an_error_even_when_skipping(samples):
    skipped = Skipped([])
    with pytest.raises(DataError, match="no image") as caught:
        list(batches([samples[2], samples[5]], SPEC, 2, skipped))
    assert caught.value.found == "2 unreadable files"
    assert len(skipped.paths) == 2
