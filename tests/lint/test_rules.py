"""Each rule: the graph that breaks it is found, at its node, with the fix; the same graph fixed has no finding."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from tests.graph.builder import Builder, checked, run
from tests.lint.cases import ALL, CASES, FP8, GOOD, attention, image
from vitdeploy.errors import GraphError, TargetError
from vitdeploy.graph.passes.folds import cast_pixels_first
from vitdeploy.lint.linter import RULES, counts, lint, refuse
from vitdeploy.lint.support import VERSIONS
from vitdeploy.runtime.profiles import Range

ROOT = Path(__file__).parents[2]
BY_CODE = {rule.code: rule for rule in RULES}


def told(code, *, mended=False, versions=VERSIONS):
    case = CASES[code]
    profiles = None if case.profiles is None else case.profiles(mended)
    return lint(ir.from_proto(case.build(mended)), versions, profiles)


def test_every_rule_has_a_graph_that_breaks_it_and_a_code_of_its_own():
    assert set(CASES) == set(BY_CODE)
    assert len(BY_CODE) == len(RULES)


@pytest.mark.parametrize("code", CASES)
def test_a_graph_that_breaks_a_rule(code):
    case, rule = CASES[code], BY_CODE[code]
    finding = next(finding for finding in told(code) if finding.rule == code)
    assert finding.node.startswith(case.node)
    assert case.found in finding.found
    assert finding.expected
    assert finding.fix
    assert (finding.severity, finding.versions) == (rule.severity, case.versions)


@pytest.mark.parametrize("code", CASES)
def test_the_graph_mended_has_no_such_finding_and_no_error(code):
    assert not [finding for finding in told(code, mended=True) if code == finding.rule or finding.severity == "error"]


@settings(max_examples=15, deadline=None)
@given(code=st.sampled_from(sorted(CASES)), mended=st.booleans())
def test_the_model_stays_as_it_is(code, mended):
    proto = CASES[code].build(mended)
    model = ir.from_proto(proto)
    lint(model)
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(proto))


@settings(max_examples=15, deadline=None)
@given(code=st.sampled_from(sorted(CASES)), version=st.sampled_from(VERSIONS))
def test_all_releases_at_once_are_each_alone(code, version):
    def facts(findings):
        return [(each.rule, each.node, each.found, each.expected) for each in findings]

    everywhere = [finding for finding in told(code) if version in finding.versions]
    assert facts(told(code, versions=(version,))) == facts(everywhere)


def test_an_unknown_release():
    with pytest.raises(TargetError, match="no facts about this TensorRT version") as caught:
        lint(ir.from_proto(image(True)), ("9.3",))
    assert (caught.value.found, caught.value.expected) == ("9.3", "10.3, 10.16, 11.4")


def test_errors_are_refused_and_anything_less_is_not():
    refuse(told("TRT402"))
    with pytest.raises(GraphError, match="TensorRT would reject the graph or compute it wrongly") as caught:
        refuse(told("TRT302"))
    assert caught.value.found.startswith("TRT302 quantizelinear_")
    assert caught.value.expected == BY_CODE["TRT302"].expected
    assert caught.value.fix == BY_CODE["TRT302"].fix
    many = [finding for finding in told("TRT302") if finding.severity == "error"] * 7
    with pytest.raises(GraphError, match="would reject the encoder") as caught:
        refuse(many, "the encoder")
    assert caught.value.found.endswith(f"; and {len(many) - 5} more")


def test_findings_are_counted_by_severity():
    assert counts(told("TRT401")) == {"error": 0, "warning": 0, "note": 1}


# --- attention and profiles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "dtype"),
    [((), "float16"), (ALL, "int8"), (("output",), "float16")],
    ids=["half precision", "quantized at every place", "in front of a quantized layer"],
)
def test_attention_that_can_be_fused(places, dtype):
    [finding] = lint(ir.from_proto(attention(places, masks=1)))
    assert (finding.rule, finding.found) == ("TRT401", f"{dtype}, heads of 32 channels, scores of 8 x 8")


@pytest.mark.parametrize(
    ("graph", "code", "found"),
    [
        (lambda: attention(ALL, head=24), "TRT403", "heads of 24 channels in int8"),
        (lambda: attention(masks=2), "TRT408", "2 masks in a row"),
        (lambda: attention(("query", "key", "softmax", "value")), "TRT405", "no quantizer at output"),
        (lambda: attention(ALL, kinds={"softmax": FP8}), "TRT311", "int8 and float8e4m3fn in one attention"),
    ],
)
def test_attention_that_cannot_be_fused(graph, code, found):
    [finding] = [finding for finding in lint(ir.from_proto(graph())) if finding.rule == code and found in finding.found]
    assert finding.node.startswith("softmax_")


def test_a_dynamic_axis_needs_a_profile_only_where_one_asks_for_profiles():
    model = ir.from_proto(image(True))
    assert not lint(model)
    [finding] = lint(model, profiles=[])
    assert (finding.rule, finding.node, finding.found) == ("TRT502", "x", "[batch, 4] without a profile")
    [finding] = lint(model, profiles=[{**GOOD, "y": GOOD["x"]}])
    assert (finding.rule, finding.found, finding.expected) == ("TRT504", "no input of this name", "one of x")
    [finding] = lint(model, profiles=[{"x": Range((1,), (2,), (3,))}])
    assert (finding.rule, finding.found) == ("TRT504", "[1] for [batch, 4]")


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_sizes_of_a_profile_are_in_order(sizes):
    findings = lint(ir.from_proto(image(True)), profiles=[{"x": Range(*((size, 4) for size in sizes))}])
    assert bool(findings) == (sizes != sorted(sizes) or sizes[0] == 0)
    assert {finding.rule for finding in findings} <= {"TRT503"}


# --- an export --------------------------------------------------------------------------------------------------------


def test_a_fresh_export_in_float_has_no_error_once_its_pixels_are_cast_first(small_export):
    from vitdeploy.graph.io.files import load_graph

    model = load_graph(small_export / "model.onnx")
    [error] = [finding for finding in lint(model) if finding.severity == "error"]
    assert (error.rule, error.node, error.found) == ("TRT108", "image", "uint8 read by Transpose (Transpose)")
    assert cast_pixels_first(model) == 1
    findings = lint(model)
    assert counts(findings) == {"error": 0, "warning": 2, "note": 0}
    assert {finding.rule for finding in findings} == {"TRT402"}
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1), np.uint8)
    original = onnx.load(small_export / "model.onnx")
    np.testing.assert_array_equal(run(checked(model), image=pixels), run(original, image=pixels))


def test_pixels_that_something_else_reads_stay():
    b = Builder()
    x = b.add("Transpose", b.input("x", ["batch", 8, 8, 3], TensorProto.UINT8), perm=[0, 3, 1, 2])
    proto = b.model(b.add("Cast", x, to=TensorProto.FLOAT), b.add("Cast", x, to=TensorProto.FLOAT16), types=[1, 10])
    model = ir.from_proto(proto)
    assert cast_pixels_first(model) == 0
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(proto))
