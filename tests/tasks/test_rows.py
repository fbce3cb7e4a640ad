"""Every task has a row in each table that asks something of tasks."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from vitdeploy.document.verified import _VERIFIED
from vitdeploy.report.measures import _MEASURES
from vitdeploy.runtime.answers import TASKS
from vitdeploy.spec import POSTPROCESS, Postprocess, Task
from vitdeploy.tasks.adapters import KITS
from vitdeploy.verification.gate import GUARD


@pytest.mark.parametrize("task", typing.get_args(Task))
def test_a_task_has_all_of_its_rows(task):
    assert task in KITS
    assert task in GUARD
    assert task in _MEASURES
    assert (task in TASKS) == (task != "sequence")


def test_what_outputs_mean_is_that_of_a_task():
    assert set(POSTPROCESS.values()) == set(typing.get_args(Postprocess))


@pytest.mark.parametrize("comparison", _VERIFIED, ids=lambda each: each.__name__)
def test_a_report_takes_all_that_a_comparison_says(comparison):
    taken = {field.name for field in dataclasses.fields(_VERIFIED[comparison])}
    assert {field.name for field in dataclasses.fields(comparison)} < taken
