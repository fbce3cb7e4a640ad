"""docs/models.md is in step with the list of names and with what the tests of parity promise."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

from tests.models_page import NOT_RUN, PAGE, measured_text, name_cells, parity_cells, rows_of
from tests.parity import ENGINES, FAMILIES, Recorder, Row, family_of, read_records
from vitdeploy.models.catalog import FAMILIES as CATALOG

AGAIN = "make models-doc writes docs/models.md again"
MEASURED = rf"(?:([\d.e-]+) \(\d+\)|{NOT_RUN})"
RESULTS = re.compile(rf": {MEASURED}(?:, {MEASURED})*")


@pytest.fixture(scope="module")
def lines() -> list[list[str]]:
    """The cells of every line of a table in the page."""
    text = PAGE.read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in text if line.startswith("| ")]


def test_every_family_of_the_catalog_is_in_the_page(lines: list[list[str]]) -> None:
    names = Counter(family_of(name) for family in CATALOG for name in family.names)
    expected = [name_cells(family, names[family]) for family in FAMILIES if names[family]]
    firsts = [cells[0] for cells in lines]
    head, end = firsts.index("Family"), firsts.index("Compared")
    assert [cells[:2] for cells in lines[head + 2 : end]] == expected, AGAIN


def test_every_promised_parity_is_in_the_page_and_nothing_else(lines: list[list[str]]) -> None:
    head = max(i for i, cells in enumerate(lines) if cells[0] == "Family")
    promised = [[RESULTS.sub("", cell) for cell in cells] for cells in lines[head + 2 :]]
    assert promised == [parity_cells(family) for family in FAMILIES], AGAIN


def test_what_the_page_says_was_measured_is_within_the_tolerance(lines: list[list[str]]) -> None:
    cells_of = {cells[0]: cells[1:] for cells in lines}
    measured = []
    for family in FAMILIES:
        for rows, cell in zip(rows_of(family), cells_of[family], strict=True):
            found = re.findall(MEASURED, cell)
            measured += [(row.tolerance, float(each)) for row, each in zip(rows, found, strict=True) if each]
    assert len(measured) > 50
    assert all(difference <= tolerance for tolerance, difference in measured)


def test_a_check_records_the_worst_output_and_what_the_weights_were_called(tmp_path) -> None:
    recorder = Recorder(tmp_path / "rows.jsonl")
    ones = np.ones((2, 3))
    recorder("ViT", "timm", [ones, ones + 3e-11], [ones, ones], keys="timm")
    recorder("ViT", "timm", ones, ones)
    found = read_records(tmp_path / "rows.jsonl")[Row("ViT", "logits", "timm", "PyTorch, float64", 1e-10)]
    assert [record["keys"] for record in found] == ["timm", None]
    assert [record["measured"] for record in found] == [pytest.approx(3e-11, rel=1e-4), 0]
    assert measured_text(found) == "3e-11 (2)"
    assert measured_text([]) == NOT_RUN


@pytest.mark.parametrize(
    "ours", [np.array([[1, 2 + 1e-8]]), np.array([[1, np.nan]]), np.array([1.0, 2.0])], ids=["far", "NaN", "shape"]
)
def test_a_difference_above_the_tolerance_fails(ours: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        Recorder(None)("Swin", "timm", ours, np.array([[1.0, 2.0]]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_check_that_nobody_promised_fails(dtype: type) -> None:
    against = {np.float32: "timm", np.float64: "torchvision"}[dtype]
    with pytest.raises((AssertionError, KeyError)):
        Recorder(None)("MAE", against, np.ones(1, dtype), np.ones(1, dtype))


def test_another_largest_logit_fails_where_the_reference_leads_by_more_than_the_difference() -> None:
    swap = np.array([[-6e-5, 6e-5, 0], [0, 0, 0]], np.float32)
    for lead, fails in ((5e-5, False), (1e-4, True)):
        theirs = np.array([[1, 1 - lead, 0], [9, 0, 0]], np.float32)  # 6e-5 is within the tolerance of 1e-4 * 9
        with pytest.raises(AssertionError) if fails else nullcontext():
            Recorder(None)("ViT", ENGINES[0], theirs + swap, theirs, top1=True)
