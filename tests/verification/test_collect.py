"""Answers are collected through a Predictor; what is not a number is never counted as an answer; a file keeps them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vitdeploy.errors import EngineError
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import PreprocessSpec, TensorSpec
from vitdeploy.verification.records import Answers, collect, everything, gather

SPEC = PreprocessSpec(2, (2, 2), "bicubic", (0.5,), (0.5,))


class MeanPixel(Runner):
    """Two logits an image: its mean pixel, and the negative; and which class is larger. An image of 255 gives NaN."""

    batch: int | str = "batch"

    def _load(self) -> None:
        self.inputs = (TensorSpec("image", "uint8", (self.batch, 2, 2, 1)),)
        self.outputs = (
            TensorSpec("logits", "float32", (self.batch, 2)),
            TensorSpec("labels", "int64", (self.batch,)),
        )
        self.provider = "numpy"

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        mean = feeds["image"].reshape(len(feeds["image"]), -1).mean(axis=1).astype(np.float32)
        mean[mean == 255] = np.nan
        logits = np.stack([mean, -mean], axis=1)
        return {"logits": logits, "labels": logits.argmax(axis=1)}

    def _close(self) -> None:
        pass


class BatchOfThree(MeanPixel):
    batch = 3


def images(*values: int) -> list[tuple[np.ndarray, tuple[int, int]]]:
    """Grey images of one value each, as if cut from originals of (value, 2 * value) pixels."""
    return [(np.full((2, 2, 1), value, np.uint8), (value, 2 * value)) for value in values]


@pytest.mark.parametrize("runner", [MeanPixel, BatchOfThree])
def test_every_image_has_its_answer_and_its_size_in_order(runner: type[Runner]) -> None:
    seen: list[int] = []
    answers = collect(runner("mean"), images(*range(19)), SPEC, everything, seen.append)
    assert len(answers) == 19
    assert answers.stacked("logits")[:, 0].tolist() == list(range(19))
    assert answers.stacked("labels").tolist() == [0] * 19
    assert answers.stacked("size").tolist() == [[value, 2 * value] for value in range(19)]
    assert seen == [8, 8, 3]


def test_images_are_read_as_they_are_needed() -> None:
    held: list[int] = []
    most: list[int] = []

    def stream():
        for image in images(*range(20)):
            held.append(1)
            yield image

    def shown(count: int) -> None:
        most.append(len(held))
        held.clear()

    collect(MeanPixel("mean"), stream(), SPEC, everything, shown)
    assert most == [8, 8, 4]


def test_only_what_is_to_be_kept_is_kept() -> None:
    answers = collect(MeanPixel("mean"), images(3, 4), SPEC, lambda outputs, size: {"first": outputs["logits"][:1]})
    assert set(answers.columns) == {"first"}
    assert answers.stacked("first").tolist() == [[3.0], [4.0]]


def test_without_images_there_are_no_answers() -> None:
    assert len(collect(MeanPixel("mean"), [], SPEC)) == 0


@pytest.mark.parametrize("keep", [everything, lambda outputs, size: {"size": np.array(size)}])
def test_a_nan_is_an_error_and_not_an_answer_whether_it_would_be_kept_or_not(keep) -> None:
    with pytest.raises(EngineError) as caught:
        collect(MeanPixel("mean"), images(1, 255, 3, *range(9), 255), SPEC, keep)
    assert "NaN or infinity for 2 of 13 images" in caught.value.found


@pytest.mark.parametrize("runner", [MeanPixel, BatchOfThree])
def test_the_runner_is_closed_also_after_an_error(runner: type[Runner]) -> None:
    used = runner("mean")
    with pytest.raises(EngineError):
        collect(used, images(255), SPEC)
    with pytest.raises(RuntimeError, match="is closed"):
        used.infer({})


# --- the file ---------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
kinds = st.sampled_from([np.float32, np.int64, np.uint8])
columns = st.tuples(kinds, st.integers(1, 12)).flatmap(
    lambda drawn: st.lists(
        shapes.flatmap(lambda shape: arrays.arrays(drawn[0], shape, elements=st.integers(0, 200))),
        min_size=drawn[1],
        max_size=drawn[1],
    )
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(["logits", "masks", "patch_features"]), columns, min_size=1))
def test_a_file_gives_back_what_was_saved(tmp_path_factory, found) -> None:
    """Columns of one shape and of several, of more than ten images: their order is that of numbers, not of names."""
    answers = Answers({name: tuple(column) for name, column in found.items()})
    path = tmp_path_factory.mktemp("answers") / "answers.npz"
    answers.save(path)
    loaded = Answers.load(path)
    assert loaded.columns.keys() == answers.columns.keys()
    for name, column in answers.columns.items():
        assert len(loaded.columns[name]) == len(column)
        for ours, theirs in zip(loaded.columns[name], column, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(ours, theirs)


def test_the_same_answers_give_the_same_bytes(tmp_path) -> None:
    answers = collect(MeanPixel("mean"), images(*range(3)), SPEC)
    for name in ("a", "b"):
        answers.save(tmp_path / f"{name}.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(("count", "fill", "batches"), [(19, False, [8, 8, 8]), (3, False, [3]), (3, True, [8])])
def test_the_last_images_run_in_a_batch_like_all_others(count: int, fill: bool, batches: list[int]) -> None:
    ran: list[int] = []

    class Counting(MeanPixel):
        def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
            ran.append(len(feeds["image"]))
            return super()._infer(feeds)

    with Predictor(Counting("mean"), SPEC) as predictor:
        answers = gather(predictor, images(*range(count)), fill=fill)
    assert (answers.stacked("logits")[:, 0].tolist(), ran) == (list(range(count)), batches)
