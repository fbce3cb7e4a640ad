"""Every task has its rows: on the device, in the workshop, and the class of data that says what its outputs mean."""

from __future__ import annotations

import dataclasses

import pytest

from vitdeploy.document.verified import verified_class
from vitdeploy.runtime.tasks.registry import TASKS as ON_DEVICES
from vitdeploy.runtime.tasks.task import DeviceTask
from vitdeploy.spec import postprocess_classes, task_names
from vitdeploy.tasks.registry import TASKS
from vitdeploy.verification.comparison import Comparison


@pytest.mark.parametrize("task", task_names())
def test_a_task_has_all_of_its_rows(task):
    adapter = TASKS[task]
    assert issubclass(adapter.compared, Comparison) and adapter.measures and 90 <= adapter.guard < 100
    assert isinstance(ON_DEVICES[task], DeviceTask)
    assert bool(adapter.metrics) == (task != "tensors")


@pytest.mark.parametrize("task", task_names())
def test_what_a_report_shows_of_a_task_are_fields_of_its_comparison(task):
    adapter, fields = TASKS[task], {field.name for field in dataclasses.fields(TASKS[task].compared)}
    keys = {measure.key for measure in adapter.measures}
    keys |= {f"reference_{measure.key}" for measure in adapter.measures if measure.original}
    keys |= {measure.interval for measure in adapter.measures if measure.interval}
    assert {key.partition(".")[0] for key in (*keys, *filter(None, [adapter.counts]))} <= fields


def test_what_outputs_mean_is_told_apart_by_its_fields():
    classes = postprocess_classes(task_names())
    assert len({frozenset(field.name for field in dataclasses.fields(kind)) for kind in classes}) == len(classes) > 10


@pytest.mark.parametrize("task", task_names())
def test_a_report_takes_all_that_a_comparison_says(task):
    comparison = TASKS[task].compared
    taken = {field.name for field in dataclasses.fields(verified_class(comparison))}
    assert {field.name for field in dataclasses.fields(comparison)} < taken
