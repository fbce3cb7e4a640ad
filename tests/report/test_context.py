"""The part of a page that says where the time goes: every number once, nothing where nothing was measured."""

import copy
import dataclasses

from tests.documents import page_of
from tests.pipeline.test_roofline import LAYERS, MEMORY, RATES, row, work
from tests.report.test_html import ALLOWED, HOSTILE, REPORT, Page
from vitdeploy.benchmark.context import Context, LeftOut, Profile
from vitdeploy.pipeline.measure import context_facts
from vitdeploy.spec import encode

NAME = "openvino-cpu-int8"


def bench(layers=LAYERS, latency=10.0):
    context = Context(
        RATES, MEMORY, (Profile(NAME, 1, 30, layers, latency),), (LeftOut("rate", "openvino-cpu fp16", "no <FP16>"),)
    )
    found = context_facts(context, [row(artifact="original"), row(latency, NAME)], {NAME: work()})
    return {**copy.deepcopy(REPORT["bench"]), "context": encode(found)}


def section_of(found):
    """The section of a page, None without one."""
    page = page_of({**REPORT, "bench": found}, {})
    return page.partition('<h2 id="context">')[2].partition("</section>")[0] or None


def test_a_page_shows_where_the_time_goes():
    page = page_of({**REPORT, "bench": bench()}, {})
    assert "Where the time goes" in page
    assert "openvino-cpu INT8 500, FP32 100 GFLOP/s; memory 20 GB/s copied by 2 threads" in page
    assert "compute: 60 % of the peak GEMM rates" in page
    assert "Not measured: rate of openvino-cpu fp16: no &lt;FP16&gt;" in page
    assert page.count('class="time-wide"') == page.count('class="time-narrow"') == 1
    assert "Slowest layers of openvino-cpu-int8" in page
    assert "products in INT8 4.00 ms, products in FP32 2.00 ms, layers without products 2.00 ms" in page


def test_an_artifact_without_layers_has_no_bar():
    found = section_of(bench(layers=()))
    assert "<svg" not in found
    assert found.count("<h3>") == 1 and f"<h3>{NAME}</h3>\n  <p>compute: 60 %" in found


def test_a_bar_shows_what_reaches_beyond_the_latency():
    found = section_of(bench(latency=5.0))
    assert "outside the layers" not in found.partition("<figcaption>")[0]
    assert "its layers take 8.00 ms, slowed down by the profiler; its latency is 5.00 ms; " in found
    assert "work per query: 2.20 GFLOP, and at least 6.15 MB" in found


def test_layers_beyond_the_slowest_are_counted():
    many = [dataclasses.replace(layer, name=f"{layer.name}{i}") for i in range(4) for layer in LAYERS]
    slowest = section_of(bench(layers=(*many, *many[:3]))).partition("<details")[0]
    assert slowest.count('class="layer"') == 10 and "6 more layers." in slowest


def test_without_context_there_is_no_such_part():
    assert section_of(None) is None
    assert section_of(REPORT["bench"]) is None
    assert section_of({**REPORT["bench"], "context": None}) is None


def test_hostile_names_of_layers_stay_text():
    spoilt = [
        dataclasses.replace(each, name=HOSTILE, kind=HOSTILE, precision=HOSTILE, fuses=(HOSTILE,)) for each in LAYERS
    ]
    page = Page(page_of({**REPORT, "bench": bench(layers=tuple(spoilt))}, {}))
    assert all(ALLOWED.fullmatch(each) for each in page.loads)
    assert "script" not in [tag for tag, _ in page.elements]
    assert "<script>alert(1)</script>" in page.text
