"""Parity finds a graph that is another function than its model, or that runs at one batch only."""

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from vitdeploy.errors import ExportError
from vitdeploy.export.parity import check_parity, relative_difference
from vitdeploy.models.reference import TorchRunner
from vitdeploy.models.source import Source, load_original
from vitdeploy.spec import PreprocessSpec

PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))


@pytest.fixture(scope="module")
def reference(small_checkpoint):
    with TorchRunner(load_original(Source("vit_w32d2h2_patch8_32", small_checkpoint))) as runner:
        yield runner


@pytest.fixture
def proto(small_export):
    return onnx.load(str(small_export / "model.onnx"))


def change(proto, name, function):
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(function(numpy_helper.to_array(tensor)), name))


def check(proto, reference, tmp_path, preprocess=PREPROCESS, **options):
    onnx.save(proto, str(tmp_path / "model.onnx"))
    return check_parity(tmp_path / "model.onnx", reference, preprocess, **options)


def test_the_untouched_graph_passes(proto, reference, tmp_path):
    assert max(row.max_relative_difference for row in check(proto, reference, tmp_path)) <= 1e-5


def test_one_changed_bias_is_found(proto, reference, tmp_path):
    change(proto, "head.bias", lambda bias: bias + np.float32(0.01) * (np.arange(10) == 3).astype(np.float32))
    with pytest.raises(ExportError, match="not the same function") as caught:
        check(proto, reference, tmp_path)
    assert caught.value.wanted == "at most 1e-04"


def test_a_nan_is_found(proto, reference, tmp_path):
    change(proto, "head.bias", lambda bias: np.full_like(bias, np.nan))
    with pytest.raises(ExportError, match="not the same function"):
        check(proto, reference, tmp_path)


def test_other_preprocessing_in_the_graph_is_found(proto, reference, tmp_path):
    with pytest.raises(ExportError, match="not the same function"):
        check(proto, reference, tmp_path, dataclasses.replace(PREPROCESS, mean=(0.4,)))


def test_a_reshape_with_a_constant_batch_is_found(proto, reference, tmp_path):
    """The kind of graph that other exporters make: it runs at the batch of its example only."""
    reshape = next(node for node in proto.graph.node if node.name == "blocks.0.attn/Reshape")
    change(proto, reshape.input[1], lambda shape: np.where(shape == -1, 2, shape))
    with pytest.raises(ExportError, match="does not run at batch 1: a batch is baked into a constant") as caught:
        check(proto, reference, tmp_path)
    assert caught.value.found


def test_a_graph_with_a_fixed_batch_is_refused_where_every_batch_is_wanted(proto, reference, tmp_path):
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(ExportError, match="does not run at batch 1") as caught:
        check(proto, reference, tmp_path)
    assert caught.value.found == "uint8 [1, 32, 32, 1]"


def test_a_fixed_batch_is_run_thrice_on_other_pixels(proto, reference, tmp_path):
    rows = check(proto, reference, tmp_path, fixed_batch=3)
    assert [row.batch for row in rows] == [3, 3, 3]
    assert len({row.max_relative_difference for row in rows}) > 1


@pytest.mark.parametrize(
    ("ours", "reference", "wanted"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, -2.0], 2.25),
        ([3.0, -4.0], [3.0, -5.0], 0.2),
    ],
)
def test_relative_difference_is_the_largest_error_over_the_largest_value(ours, reference, wanted):
    assert relative_difference(np.array(ours, np.float32), np.array(reference, np.float32)) == pytest.approx(wanted)


def test_relative_difference_of_a_nan_is_nan():
    assert np.isnan(relative_difference(np.array([np.nan, 1.0]), np.array([1.0, 1.0])))
