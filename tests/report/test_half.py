"""What the page says of half precision: operations in float32 with their reasons, and what is lost."""

import copy

from tests.documents import page_of
from tests.report.test_html import HOSTILE, REPORT, Page

HALF = {
    "type": "fp16",
    "residual_exponent": 3,
    "macs": {"half": 975, "float32": 25},
    "float32": {"blocks.0.norm": "it reads numbers up to 7e+04"},
    "underflow": {"blocks.1.softmax": 0.125},
}


def page(**facts):
    report = copy.deepcopy(REPORT)
    report["engines"][0]["half"] = {**HALF, **facts}
    return page_of(report, {})


def test_types_are_told_with_their_reasons():
    text = Page(page()).text
    assert "float16: 2.5 % of the MACs in float32, 1 operator in float32" in text
    assert "residual stream scaled by 2^-3 (exact)" in text
    assert "blocks.0.norm" in text and "it reads numbers up to 7e+04" in text
    assert "blocks.1.softmax" in text and "12.5 %" in text


def test_nothing_is_said_of_what_is_not_there():
    text = Page(page(type="bf16", residual_exponent=0, float32={}, underflow={}, macs={"half": 1, "float32": 0})).text
    assert "bfloat16: 0.0 % of the MACs in float32, 0 operators in float32" in text
    assert "scaled by" not in text and "underflow to zero" not in text and "Why" not in text
    assert "Types of" not in Page(page_of(REPORT, {})).text


def test_names_are_escaped():
    html = page(float32={HOSTILE: HOSTILE}, underflow={HOSTILE: 0.5})
    assert "<script" not in html and html.count("&lt;script&gt;alert(1)") == 3
