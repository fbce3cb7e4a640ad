"""The targets and the tables of their back ends: what is unknown is an error everywhere."""

import importlib

import pytest

from vitdeploy.backends import TARGETS, BackendTable, Target
from vitdeploy.benchmark.context import BENCH
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.errors import MissingPackageError, TargetError
from vitdeploy.quantization.placement import QUANTIZE
from vitdeploy.runtime.backend import RUNTIME, require_runtime

TABLES = (RUNTIME, COMPILE, QUANTIZE, BENCH)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.layer)
def test_every_row_is_there_and_of_the_right_type(table):
    for path in table.rows.values():
        module, _, attribute = path.partition(":")
        assert isinstance(getattr(importlib.import_module(module), attribute), table.kind)
    assert set(table.rows) <= {target.backend for target in TARGETS.values()}


@pytest.mark.parametrize("table", (RUNTIME, COMPILE, QUANTIZE), ids=lambda table: table.layer)
def test_every_target_has_a_row_where_it_needs_one(table):
    for target in TARGETS:
        assert isinstance(table[target], table.kind)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.layer)
def test_an_unknown_target_is_refused_with_the_nearest_name(table):
    with pytest.raises(TargetError, match=r"unknown target 'openvino-cpus'") as caught:
        table["openvino-cpus"]
    assert caught.value.fix == "did you mean openvino-cpu?" and "onnxruntime-cpu" in caught.value.expected
    assert "openvino-cpus" not in TARGETS and TARGETS.get("openvino-cpus") is None


def test_a_back_end_without_a_row_says_in_which_layer(monkeypatch):
    target = Target("toy-cpu", "toy", "CPU", "", "toy", "toy", ("fp32",))
    monkeypatch.setattr("vitdeploy.backends.TARGETS.ours", {"toy-cpu": target})
    table = BackendTable("runtime", int, {})
    assert table.find("toy-cpu") is None
    with pytest.raises(TargetError, match=r"the back end 'toy' of target toy-cpu does not support runtime"):
        table["toy-cpu"]


def test_a_runtime_that_no_extra_installs_is_named_by_its_package(monkeypatch):
    target = Target("toy-cpu", "onnxruntime", "CPU", "", "toy-runtime", "no_such_runtime", ("fp32",))
    monkeypatch.setattr("vitdeploy.backends.TARGETS.ours", {"toy-cpu": target})
    with pytest.raises(MissingPackageError, match="needs the package toy-runtime") as caught:
        require_runtime("toy-cpu")
    assert caught.value.fix == "pip install toy-runtime"
