"""Who loses how much: shares, the cheapest first, and trials of a small model."""

import dataclasses

import numpy as np
import pytest

from tests.search.conftest import BATCH, PREPROCESS
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.prunable import find_prunable
from vitdeploy.graph.io.files import load_graph
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.frame import Expected, ReferenceOutputs
from vitdeploy.search.pruning import (
    Parts,
    PrunedPart,
    Pruning,
    allocate,
    damped,
    measure_parts,
    prunable_parts,
    saved,
    select,
    try_prunings,
    whole_macs,
    widths_to_try,
)
from vitdeploy.stages.rows import input_moments


def part(name, count, macs, *tried):
    """A part whose structures go in their order; `tried`: (width, distance) each."""
    widths, distances = zip(*tried, strict=True)
    return PrunedPart(name, "channels", count, macs, tuple(range(count - 1)), widths, distances)


# Half of b costs as much as half of a, and saves twice as much. A quarter of c alone is dear: the way is over its hull.
PARTS = Parts(
    10_000,
    (
        part("a", 100, 10, (50, 0.1), (25, 0.4)),
        part("b", 100, 20, (50, 0.1), (25, 0.2)),
        part("c", 100, 30, (75, 9.0), (50, 3.0)),
    ),
)


@pytest.mark.parametrize(
    ("share", "widths"),
    [
        (0.01, {"b": 50}),
        (0.1, {"b": 50}),
        (0.11, {"b": 50, "a": 50}),
        (0.16, {"b": 25, "a": 50}),
        (0.21, {"b": 25, "a": 25}),
        (0.3, {"b": 25, "a": 25, "c": 50}),
        (0.375, {"b": 25, "a": 25, "c": 50}),
        (0.376, None),
    ],
)
def test_the_cheapest_loss_for_its_macs_goes_first(share, widths):
    assert allocate(PARTS, share) == widths
    if widths is not None:
        assert saved(PARTS, widths) >= share


def test_what_stays_are_those_that_go_last():
    assert part("a", 6, 1, (3, 0.0)).kept(2) == [4, 5]
    scrambled = PrunedPart("a", "heads", 4, 1, (2, 0, 3), (), ())
    assert (scrambled.kept(3), scrambled.kept(1)) == ([0, 1, 3], [1])


def test_the_nearest_and_the_most_that_are_acceptable_are_chosen():
    trials = [
        Pruning(share, share, {}, distance, Expected(99.0, 0.0)) for share, distance in ((0.1, 1e-3), (0.3, 1e-2))
    ]
    trials.append(Pruning(0.5, 0.5, {}, 0.3, None))
    assert select(trials, lambda each: each.expected is not None, 2e-3) == trials[:2]
    assert select(trials, lambda each: each.expected is not None, 1.0) == [trials[1]]
    assert select(trials, lambda each: True, 1e-9) == [trials[2]]
    assert select(trials, lambda each: False, 1.0) == []


@pytest.fixture(scope="module")
def small(small_export, digits):
    """(file, moments, reference outputs) of the small model, on different images."""
    samples = split(digits, "none", calibration=64, evaluation=1, seed=0).calibration
    file = small_export / "model.onnx"
    moments = input_moments(file, samples)
    [pixels] = batches(samples[-32:], PREPROCESS, 32)
    with OnnxRuntimeRunner(file, name="float", batch=BATCH) as runner:
        return file, moments, ReferenceOutputs(runner, pixels, PREPROCESS, "classification", batch=BATCH)


@pytest.fixture(scope="module")
def parts(small):
    return measure_parts(*small, lambda *_: None)


def test_moments_are_of_the_first_images_and_every_reader(small):
    file, moments, _ = small
    assert moments.keys() == prunable_parts(load_graph(file)).keys()
    for each in moments.values():
        assert each.rows in (32 * 17, 32)  # behind the last attention the class token alone may be left
        assert np.linalg.eigvalsh(damped(each)).min() > 0


def test_parts_are_tried_at_aligned_widths(small, parts):
    found = {each.name: each for each in find_prunable(load_graph(small[0]))}
    assert parts.macs == whole_macs(load_graph(small[0]))
    assert {each.kind for each in parts.parts} == {"heads", "channels"}
    for each in parts.parts:
        assert list(each.widths) == widths_to_try(found[each.name])[: len(each.widths)]
        assert all(width % 16 == 0 for width in each.widths if each.kind == "channels")
        assert sorted({*each.order, *each.kept(1)}) == list(range(each.count))
        assert min(each.distances) > 0


def test_trials_are_those_of_the_graph_that_is_written(small, parts):
    file, moments, reference_outputs = small
    trials = try_prunings(file, parts, moments, reference_outputs, lambda *_: None, steps=(0.05, 0.1, 0.2, 0.99))
    assert trials
    assert [each.share for each in trials] == sorted(each.share for each in trials)
    assert all(each.share >= each.asked for each in trials)
    assert all(each.distance > 0 and each.expected is not None for each in trials)


def test_too_few_rows_are_refused_with_their_number(small):
    file, moments, reference_outputs = small
    few = {name: dataclasses.replace(each, rows=20) for name, each in moments.items()}
    with pytest.raises(GraphError, match="too few calibration images to prune") as caught:
        measure_parts(file, few, reference_outputs, lambda *_: None)
    assert caught.value.found == "20 rows of activations"
    assert caught.value.fix == "use more images: data.calibration.images"
