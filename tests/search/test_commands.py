"""`vitdeploy quantize --sensitivity` and `--precision mixed`, and what `vitdeploy run` would do for mixed precision."""

import pytest

from tests.command_line import command_line
from tests.search.planted_layer import PLANTED, table_for
from vitdeploy.graph.io.files import load_graph
from vitdeploy.search.trials import opened

TARGET = "onnxruntime-cpu"


@pytest.fixture
def here(shared_store, tmp_path):
    with command_line(tmp_path, shared_store) as here:
        yield here


@pytest.fixture
def quantize(planted_file, digits):
    return ("quantize", planted_file, "--data", digits, "--target", TARGET, "-o", "out", "--num-samples", 24)


@pytest.fixture
def table(monkeypatch, planted_file, planted_statistics, planted_yardstick):
    """Known costs of the planted model's layers."""
    with opened(load_graph(planted_file), planted_statistics, TARGET, planted_yardstick) as trials:
        table = table_for(trials, TARGET)
    monkeypatch.setattr("vitdeploy.api.quantize.costs_for", lambda target: table)
    return table


def test_sensitivity_names_the_guilty_layer_and_writes_a_page(here, quantize, tmp_path):
    done = here(*quantize, "--sensitivity", "--json")
    found = done.document["sensitivity"]
    assert found["layers"][0]["cost"]["name"] == PLANTED
    assert f"  {PLANTED}" in done.stderr
    assert (tmp_path / "out" / "sensitivity.json").is_file()
    assert f"{PLANTED} causes" in (tmp_path / "out" / "sensitivity.html").read_text(encoding="utf-8")
    assert found["layers"][0]["cost"]["name"] in done.document["int8"]  # said, not overridden


def test_mixed_leaves_the_guilty_layer_in_float_and_the_engine_says_mixed(here, quantize, table, tmp_path):
    done = here(*quantize, "--precision", "mixed", "--json")
    assert done.document["float"][PLANTED] == "float is worth its extra time"
    overrides = [each["override"] for each in done.document["mixed"]["taken"]]
    assert next(override["layer"] for override in overrides if override["kind"] == "float") == PLANTED
    assert f"  {PLANTED} in float: +10.0 us" in done.stderr
    assert done.document["mixed"]["table"] == str(table)
    compiled = here("compile", "out", "--target", TARGET, "-o", "engine", "--json").document
    assert (compiled["precision"], compiled["artifact"]) == ("mixed", f"{TARGET}-mixed")
    assert compiled["kernels"]["int8"] == len(done.document["int8"])
    assert compiled["kernels"]["fp32"] == len(done.document["float"])


def test_a_wanted_agreement_ends_the_search_when_it_is_expected(here, quantize, table):
    done = here(*quantize, "--precision", "mixed", "--min-agreement", 0, "--json").document
    assert (done["mixed"]["taken"], done["mixed"]["met"]) == ([], True)


def test_the_option_of_mixed_precision_needs_it(here, quantize):
    done = here(*quantize, "--min-agreement", 99)
    assert done.returncode == 2
    assert "--min-agreement needs --precision mixed." in done.stderr


def test_a_run_in_mixed_precision_searches_and_compares_with_int8(here, digits):
    recipe = digits.parents[1] / "recipes" / "digits.yaml"
    plan = here("run", recipe, "--set", "precision=mixed", "--dry-run", "--json").document["plan"]
    steps = [each["step"] for each in plan]
    for target in ("openvino-cpu", TARGET):
        assert steps.index(f"search {target}-mixed") < steps.index(f"place {target}-mixed")
        assert {f"verify {target}-{precision}" for precision in ("mixed", "int8", "fp32")} <= set(steps)
