"""Position tables against their papers' formulas and against timm's resizing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references import reference
from vitdeploy.models.architectures.layers import resize_positions, sincos_2d, sinusoidal


def test_sinusoidal_is_the_formula_of_the_paper():
    table = sinusoidal(11, 12)
    assert (table.shape, table.dtype) == ((1, 11, 12), torch.float32)
    for position in range(11):
        for i in range(6):
            angle = position / math.pow(10000, 2 * i / 12)
            assert float(table[0, position, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-7)
            assert float(table[0, position, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-7)


def mae_table(rows: int, columns: int, width: int) -> np.ndarray:
    """MAE's: half of the width for the column, half for the row; sines before cosines in each half."""
    table = np.zeros((rows * columns, width))
    quarter = width // 4
    for patch in range(rows * columns):
        for half, coordinate in enumerate((patch % columns, patch // columns)):
            for i in range(quarter):
                angle = coordinate * np.exp(-np.log(10000.0) * i / quarter)
                table[patch, 2 * half * quarter + i] = np.sin(angle)
                table[patch, (2 * half + 1) * quarter + i] = np.cos(angle)
    return table


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5)])
def test_sincos_2d_is_that_of_mae_with_zeros_for_prefix_tokens(rows, columns):
    table = sincos_2d((rows, columns), 16, prefix=2)
    assert (table.shape, table.dtype) == ((1, 2 + rows * columns, 16), torch.float32)
    assert not table[:, :2].any()
    np.testing.assert_allclose(table[0, 2:].numpy(), mae_table(rows, columns, 16), atol=1e-7)


def test_sincos_2d_is_timms_with_the_row_and_column_halves_exchanged():
    reference("timm")
    from timm.layers import build_sincos2d_pos_embed

    theirs = build_sincos2d_pos_embed([3, 5], dim=24, interleave_sin_cos=True)
    rows, columns = theirs.chunk(2, dim=1)
    torch.testing.assert_close(sincos_2d((3, 5), 24)[0], torch.cat([columns, rows], dim=1), rtol=0, atol=1e-6)


def cubic(distance: np.ndarray) -> np.ndarray:
    """The kernel of cubic convolution with A = -0.75 (Keys 1981), PyTorch's and OpenCV's."""
    x, a = np.abs(distance), -0.75
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def along(table: np.ndarray, new: int) -> np.ndarray:
    """The first axis of a table at `new` places, by the scale of DINOv2's code: (new + 0.1) / old."""
    old = len(table)
    places = (np.arange(new) + 0.5) * old / (new + 0.1) - 0.5
    around = np.floor(places).astype(int)[:, None] + np.arange(-1, 3)
    weights = cubic(places[:, None] - around)
    return np.einsum("nk,nk...->n...", weights, table[around.clip(0, old - 1)])


@pytest.mark.parametrize("new", [(7, 9), (3, 4), (37, 16)])
def test_dinov2_samples_at_a_scale_that_is_a_tenth_of_a_patch_too_large(new):
    table = torch.randn(1, 1 + 25, 8, generator=torch.Generator().manual_seed(0))
    found = resize_positions(table, (5, 5), new, 1, "offset")
    grid = along(table[0, 1:].numpy().reshape(5, 5, 8), new[0])
    expected = along(grid.swapaxes(0, 1), new[1]).swapaxes(0, 1)
    np.testing.assert_allclose(found[0, 1:].numpy(), expected.reshape(-1, 8), atol=1e-5)
    assert torch.equal(found[:, :1], table[:, :1])
    plain = resize_positions(table, (5, 5), new, 1, "plain")
    assert float((plain - found).abs().max()) > 0.01


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda: sinusoidal(3, 5), "even width"), (lambda: sincos_2d((2, 2), 6), "divisible by 4, not 6")],
)
def test_a_width_without_room_for_the_formula_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


sides = st.integers(1, 9)


@settings(max_examples=30, deadline=None)
@given(old=st.tuples(sides, sides), new=st.tuples(sides, sides), prefix=st.integers(0, 3), seed=st.integers(0, 99))
def test_resized_tables_are_timms_to_the_bit(old, new, prefix, seed):
    reference("timm")
    from timm.layers import resample_abs_pos_embed

    table = torch.randn(1, prefix + old[0] * old[1], 8, generator=torch.Generator().manual_seed(seed))
    theirs = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)
    assert torch.equal(resize_positions(table, old, new, prefix), theirs)


@pytest.mark.parametrize(
    ("model", "classes", "method", "another"),
    [
        ("vit", ("ViTConfig", "ViTEmbeddings"), "plain", "antialias"),
        ("dinov2", ("Dinov2Config", "Dinov2Embeddings"), "plain", "antialias"),
        (
            "dinov2_with_registers",
            ("Dinov2WithRegistersConfig", "Dinov2WithRegistersEmbeddings"),
            "antialias",
            "plain",
        ),
    ],
)
@pytest.mark.parametrize("size", [(24, 64), (48, 16)])
def test_resized_tables_are_those_of_transformers(model, classes, method, another, size):
    reference("transformers")
    from importlib import import_module

    modelling = import_module(f"transformers.models.{model}.modeling_{model}")
    config, embeddings = (getattr(modelling, name) for name in classes)
    theirs = embeddings(config(image_size=32, patch_size=8, hidden_size=16))
    table = torch.randn(1, 1 + 16, 16, generator=torch.Generator().manual_seed(0))
    theirs.position_embeddings = torch.nn.Parameter(table)
    grid = (size[0] // 8, size[1] // 8)
    expected = theirs.interpolate_pos_encoding(torch.zeros(1, 1 + grid[0] * grid[1], 16), *size)
    assert torch.equal(resize_positions(table, (4, 4), grid, 1, method), expected)
    assert not torch.equal(resize_positions(table, (4, 4), grid, 1, another), expected)


@pytest.mark.parametrize("side", [1, 3, 7])
def test_resized_tables_are_those_of_torchvision(side):
    resizing = reference("torchvision.models").vision_transformer.interpolate_embeddings
    table = torch.randn(1, 1 + 16, 16, generator=torch.Generator().manual_seed(0))
    expected = resizing(8 * side, 8, {"encoder.pos_embedding": table})["encoder.pos_embedding"]
    assert torch.equal(resize_positions(table, (4, 4), (side, side), 1, "align_corners"), expected)


def test_half_precision_tables_are_resized_in_float32_and_stay_half():
    table = torch.randn(1, 1 + 16, 8, generator=torch.Generator().manual_seed(0)).half()
    resized = resize_positions(table, (4, 4), (6, 3), 1)
    assert (resized.dtype, resized.shape) == (torch.float16, (1, 19, 8))
    assert torch.equal(resized, resize_positions(table.float(), (4, 4), (6, 3), 1).half())
    assert torch.equal(resized[:, :1], table[:, :1])


def test_the_same_grid_keeps_the_table():
    table = torch.randn(1, 12, 8)
    assert resize_positions(table, (3, 4), (3, 4), 0) is table
