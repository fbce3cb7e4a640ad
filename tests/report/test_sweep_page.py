"""The page of a sweep: one that goes on reloads itself, and each device has a plot of its own."""

import copy

import pytest

from tests.report.pages import sweep_document
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.report.html import render_sweep
from vitdeploy.spec import decode

RUNNING = {"text": "make", "done": 3, "total": 12, "at": "2025-01-02T03:04:05+00:00", "seconds_left": None}
WAITING = {"name": "next", "recipe": "c.yaml", "report": None, "error": None, "not_begun": "not measured yet"}


def page(**changes):
    return render_sweep(decode(SweepDocument, {**sweep_document(), **changes}))


@pytest.mark.parametrize(("seconds", "told"), [(None, "time left unknown"), (600.0, "about 10 min left")])
def test_a_sweep_that_goes_on_reloads_its_page(seconds, told):
    rows = [*sweep_document()["recipes"], WAITING]
    found = " ".join(page(recipes=rows, running={**RUNNING, "seconds_left": seconds}).split())
    assert '<meta http-equiv="refresh" content="10">' in found and "<script" not in found
    assert "2 of 3 recipes are done" in found and told in found and "Now: make, 3 of 12." in found
    assert "Not measured yet." in found and "Not started" in found


def test_the_page_of_one_that_is_done_stays():
    found = page()
    assert "refresh" not in found and "<progress" not in found


def test_each_device_has_its_plot():
    first = sweep_document()["recipes"][0]
    other = copy.deepcopy(first) | {"name": "elsewhere", "host": "node-7"}
    other["report"]["environment"]["cpu"] = "Another CPU"
    found = page(recipes=[first, other])
    titles = [line for line in found.splitlines() if "Agreement with the original and latency" in line]
    assert sum("Another CPU" in line for line in titles) >= 1 and "Measured on node-7." in found
    # Recipes are measured at different times: a front of their milliseconds would be noise.
    assert "Pareto front" not in found
