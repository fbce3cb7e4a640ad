"""Optimisation profiles: planned from the graph's inputs, chosen by batch and image size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.errors import TargetError, TensorError
from vitdeploy.runtime.profiles import Range, choose_profile, plan_profiles
from vitdeploy.spec import TensorSpec

PIXELS = TensorSpec("image", "uint8", ("batch", 224, 224, 3))
PLANES = TensorSpec("image", "float32", ("batch", 3, "height", "width"))
FREE = TensorSpec("image", "uint8", ("batch", "height", "width", 3))


def test_a_fixed_graph_has_no_profile():
    assert plan_profiles([TensorSpec("image", "uint8", (1, 224, 224, 3))], [(1, 2, 4)]) == []


def test_a_dynamic_batch_has_a_profile_for_each_range():
    (first, second) = plan_profiles([PIXELS], [(1, 1, 1), (1, 8, 32)])
    assert first["image"] == Range((1, 224, 224, 3), (1, 224, 224, 3), (1, 224, 224, 3))
    assert second["image"] == Range((1, 224, 224, 3), (8, 224, 224, 3), (32, 224, 224, 3))


@pytest.mark.parametrize(("tensor", "shape"), [(PLANES, (2, 3, 224, 320)), (FREE, (2, 224, 320, 3))])
def test_every_image_size_has_a_profile_of_its_own(tensor, shape):
    profiles = plan_profiles([tensor], [(1, 2, 4)], [(224, 320), (384, 384)])
    assert profiles[0]["image"].best == shape
    assert len(profiles) == 2


@pytest.mark.parametrize("batch", ["batch", 1])
def test_an_image_size_that_a_graph_does_not_have_is_refused(batch):
    fixed = TensorSpec("image", "uint8", (batch, 224, 256, 3))
    assert plan_profiles([fixed], [(1, 1, 1)], [(224, 256)]) == plan_profiles([fixed], [(1, 1, 1)])
    with pytest.raises(TargetError, match="'image' has a fixed image size") as caught:
        plan_profiles([fixed], [(1, 1, 1)], [(224, 256), (256, 224)])
    assert caught.value.expected == "256x224, or dynamic axes"


@pytest.mark.parametrize(
    "tensor", [PLANES, TensorSpec("tokens", "int64", ("batch", "length")), TensorSpec("x", "float32", (1, "n"))]
)
def test_a_dynamic_axis_without_a_range_is_refused(tensor):
    with pytest.raises(TargetError, match=f"range for every dynamic axis of '{tensor.name}'") as caught:
        plan_profiles([tensor], [(1, 2, 4)])
    assert caught.value.found == str(tensor)


def test_the_tightest_profile_that_holds_the_batch_is_chosen():
    profiles = plan_profiles([PIXELS], [(4, 4, 4), (1, 8, 8)])
    assert choose_profile(profiles, [PIXELS], 4, None, "e") == (0, {"image": (4, 224, 224, 3)})
    assert choose_profile(profiles, [PIXELS], 3, None, "e") == (1, {"image": (3, 224, 224, 3)})


def test_the_image_size_chooses_the_profile():
    profiles = plan_profiles([FREE], [(1, 1, 8)], [(224, 224), (384, 512)])
    assert choose_profile(profiles, [FREE], 2, (384, 512), "e") == (1, {"image": (2, 384, 512, 3)})
    assert choose_profile(profiles, [FREE], 2, None, "e") == (0, {"image": (2, 224, 224, 3)})


def test_a_batch_outside_of_every_profile_is_refused_with_the_ranges():
    profiles = plan_profiles([PIXELS], [(4, 4, 4), (1, 8, 8)])
    with pytest.raises(TensorError, match="vit was not built for batch 9") as caught:
        choose_profile(profiles, [PIXELS], 9, None, "vit")
    assert caught.value.found == "image [9, 224, 224, 3]"
    assert caught.value.expected == "image [4, 224, 224, 3] or image [1 to 8, 224, 224, 3]"
    assert "--batch" in caught.value.fix


def test_an_image_size_outside_of_every_profile_is_refused():
    profiles = plan_profiles([FREE], [(1, 1, 8)], [(224, 224)])
    with pytest.raises(TensorError, match="image size 384x384") as caught:
        choose_profile(profiles, [FREE], 1, (384, 384), "vit")
    assert caught.value.expected == "image [1 to 8, 224, 224, 3]"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 64), min_size=3, max_size=3).map(sorted).map(tuple), min_size=1, max_size=4),
    st.integers(1, 70),
)
def test_a_batch_has_a_profile_exactly_where_a_range_holds_it(batches, batch):
    profiles = plan_profiles([PIXELS], batches)
    holding = [high - low for low, _, high in batches if low <= batch <= high]
    if not holding:
        with pytest.raises(TensorError):
            choose_profile(profiles, [PIXELS], batch, None, "e")
        return
    index, shapes = choose_profile(profiles, [PIXELS], batch, None, "e")
    low, _, high = batches[index]
    assert low <= batch <= high
    assert high - low == min(holding)
    assert shapes == {"image": (batch, 224, 224, 3)}
