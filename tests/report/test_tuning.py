"""The page of a search."""

import copy
import re

from tests.report.test_html import HOSTILE, REPORT, Page
from vitdeploy.document.sweep import TuneDocument
from vitdeploy.report.html import render_tuning
from vitdeploy.report.page import colours
from vitdeploy.spec import decode

NAMES = [engine["artifact"] for engine in REPORT["engines"]]


def variant(name, distance, latency, finalist, expected=98.5):
    return {
        "name": name,
        "target": name.rsplit("-", 1)[0],
        "precision": "int8",
        "merges": [],
        "latency_ms": latency,
        "rounds_ms": [latency],
        "bytes": 6_100_000,
        "finalist": finalist,
        "images": 128,
        "distance": distance,
        "ci95": [-0.001, 0.02],
        "expected": None if expected is None else {"agreement": expected, "drop": 0.1},
    }


DOCUMENT = {
    **{key: REPORT[key] for key in ("format", "name", "task", "created", "engines", "bench", "environment")},
    "budget": {"max_drop": 1.0},
    "recipe": {},
    "data": {**REPORT["data"], "calibration_images": 128},
    "verdict": {**REPORT["verdict"], "recommended": NAMES[0], "confirmed": NAMES[:1], "stopped": None},
    "unit": "KL, nats",
    "variants": [
        variant(NAMES[0], 0.01, 4.0, True),
        variant("openvino-cpu-fp32", 0.0, 9.0, True, None),
        variant("onnxruntime-cpu-mixed", 0.02, 6.0, False),
    ],
    "merging": {
        "openvino-cpu": {
            "tokens": 197,
            "schedules": [
                {"merges": [[1, 192]], "time": 0.95, "distance": 0.001, "expected": {"agreement": 99.5, "drop": 0.0}},
                {"merges": [[1, 192], [6, 128]], "time": 0.7, "distance": 0.01, "expected": None},
            ],
        },
        "onnxruntime-cpu": {"tokens": 197, "schedules": []},
    },
    "left_out": [{"what": "openvino-cpu-bf16", "why": "this CPU has no bf16 for OpenVINO"}],
    "pruning": [
        {
            **{"asked": 0.1, "share": 0.149, "distance": 0.0011, "expected": {"agreement": 99.5, "drop": 0.0}},
            "widths": {f"blocks.{i}.{name}": 2 for i in range(6) for name in ("attn.proj", "mlp.fc2")},
        },
        {"asked": 0.3, "share": 0.31, "distance": 0.02, "expected": None, "widths": {"blocks.0.mlp.fc2": 384}},
    ],
}


def tuned(document):
    return decode(TuneDocument, document)


def page(**changes):
    return Page(render_tuning(tuned({**DOCUMENT, **changes}), "# Chosen\nvitdeploy: 1\n"))


def rows_of(section, document=DOCUMENT):
    """The cells of each row of a section, as texts."""
    html = render_tuning(tuned(document), "").partition(f'<h2 id="{section}">')[2].partition("</section>")[0]
    rows = re.findall(r"<tr.*?</tr>", html.partition("<tbody>")[2], re.DOTALL)
    return [[Page(cell).text.strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)] for row in rows]


def test_every_variant_is_a_row_the_nearest_first_with_what_became_of_it():
    rows = rows_of("variants")
    assert [row[1] for row in rows] == ["openvino-cpu-fp32", NAMES[0], "onnxruntime-cpu-mixed"]
    assert [row[-1] for row in rows] == [
        "finalist, not considered",
        "★ finalist, confirmed",
        "dominated by another variant",
    ]
    assert rows[1][2] == "0.0100.0 to 0.020"
    assert rows[0][3] == "–"
    stopped = {**DOCUMENT, "verdict": {**DOCUMENT["verdict"], "stopped": "openvino-cpu-fp32"}}
    assert rows_of("variants", stopped)[0][-1] == "finalist, not confirmed"


def test_nothing_has_a_star_where_its_gate_is_not_decided():
    document = copy.deepcopy(DOCUMENT)
    document["engines"][0]["gate"]["status"] = document["verdict"]["gate"] = "undecided"
    assert rows_of("variants", document)[1][-1] == "finalist, confirmed; the best estimate"
    found = Page(render_tuning(tuned(document), ""))
    assert "★" not in found.text.partition("</style>")[2] + found.text[found.text.index("All variants") :]
    assert f"Numbers of {NAMES[0]} (not recommended)" in found.text


def test_a_colour_is_a_target_on_the_whole_page():
    names = ["openvino-cpu-int8", "onnxruntime-cpu-mixed", "openvino-cpu-fp32"]
    of = colours(tuned(DOCUMENT))
    assert [of[name] for name in names] == [1, 2, 1] and of["original"] == 0
    html = render_tuning(tuned(DOCUMENT), "")
    assert html.count("var(--series-1)") > 4 and "var(--series-3)" not in html.partition("</style>")[2]


def test_what_a_remark_or_another_line_has_said_is_not_said_again():
    remarks, reasons = ["x is not confirmed: drop 0.5 [0, 1]."], ["drop 0.5 [0, 1]"]
    verdict = {**DOCUMENT["verdict"], "remarks": remarks, "reasons": reasons}
    left = [{"what": what, "why": "no time was left for it"} for what in ("one", "other")]
    text = page(verdict=verdict, left_out=left).text
    assert text.count("drop 0.5 [0, 1]") == 1
    assert text.count("no time was left for it") == 1 and "one, other: no time" in text


def test_what_pruning_would_cost():
    first, second = rows_of("pruning")
    assert (first[0], *first[2:]) == ("15 %", "0.0011", "99.50")
    assert first[1].startswith("blocks.0.attn.proj 2, blocks.0.mlp.fc2 2, ")
    assert (second[1], second[3]) == ("blocks.0.mlp.fc2 384", "–")
    assert "MACs removed" in page().text
    assert "MACs removed" not in page(pruning=None).text


def test_schedules_of_merging_the_fastest_first():
    assert [row[0] for row in rows_of("merging")] == [
        "192 from block 1 on, 128 from block 6 on",
        "192 from block 1 on",
    ]


def test_the_page_shows_the_search_the_finalists_and_the_recipe():
    text = page().text
    for part in (
        DOCUMENT["verdict"]["sentence"],
        "All variants",
        "Every artifact against the original",
        "Token merging",
        "197 tokens without merging",
        "openvino-cpu-bf16: this CPU has no bf16 for OpenVINO",
        "vitdeploy: 1",
    ):
        assert part in text
    assert text.count("tokens without merging") == 1
    assert "Not tried" not in page(left_out=[]).text


def test_hostile_names_are_text():
    html = render_tuning(tuned({**DOCUMENT, "name": HOSTILE}), HOSTILE)
    assert "<script" not in html
    assert "<img" not in html.replace('<img src="data:', "")
