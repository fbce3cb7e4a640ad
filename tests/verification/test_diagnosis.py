"""One sentence tells a graph error, a preprocessing error and rounding apart, where that was shown."""

from dataclasses import replace

import numpy as np
import pytest

from vitdeploy.spec import PreprocessSpec
from vitdeploy.verification.agreement import compare
from vitdeploy.verification.comparison import diagnose

SPEC = PreprocessSpec(248, (224, 224), "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
REFERENCE = np.tile(np.eye(4, dtype=np.float32) * 8, (25, 1))


def shifted(by):
    """Every logit moved by a part of the largest one."""
    return compare(REFERENCE + np.float32(8 * by), REFERENCE, None)


def rotated(wrong):
    """Another answer for the first `wrong` images."""
    ours = REFERENCE.copy()
    ours[:wrong] = np.roll(ours[:wrong], 1, axis=1)
    return compare(ours, REFERENCE, None)


SAME, ROUNDED = shifted(2.0**-10), shifted(0.02)
TURNED = replace(SPEC, interpolation="bilinear", mean=(0.485, 0.456, 0.406))
NAMED = (
    "preprocessing differs: interpolation bilinear instead of bicubic, "
    "mean (0.485, 0.456, 0.406) instead of (0.5, 0.5, 0.5)"
)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_difference_within_float_rounding_is_the_same_function(precision):
    assert diagnose(SAME, SAME, SPEC, SPEC, precision) == "the same function: largest difference 9.8e-04"


def test_a_larger_difference_of_a_float_artifact_is_the_graphs():
    sentence = diagnose(ROUNDED, ROUNDED, SPEC, SPEC, "fp32")
    assert sentence == (
        "the graph differs: largest difference 2.0e-02 on the same tensor, more than float32 rounding explains"
    )


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16"])
def test_a_reduced_precision_that_keeps_the_answers_is_rounding_as_far_as_is_shown(precision):
    sentence = diagnose(rotated(10), rotated(10), SPEC, SPEC, precision)
    assert sentence == f"{precision} rounding (likely): largest difference 1.0e+00 of the largest output"


def test_answers_that_rounding_does_not_explain_have_an_unknown_cause():
    """As of an unrelated model, or of an INT8 engine that is broken: 40 % of the answers are left."""
    sentence = diagnose(rotated(60), rotated(60), SPEC, SPEC, "int8")
    assert sentence.startswith("unknown: 40.0 % agree, less than int8 rounding alone explains: another model")
    assert "verify --bisect" in sentence


@pytest.mark.parametrize(("precision", "tensor"), [("fp32", rotated(0)), ("int8", rotated(2))])
def test_preprocessing_is_the_cause_where_the_same_tensor_has_the_same_answers(precision, tensor):
    sentence = diagnose(tensor, rotated(25), TURNED, SPEC, precision)
    assert sentence == f"{NAMED}; on the same tensor {tensor.agreement:.1f} % agree, on the same image 75.0 %"


@pytest.mark.parametrize(("precision", "tensor"), [("fp32", rotated(2)), ("fp32", rotated(60)), ("int8", rotated(60))])
def test_preprocessing_is_not_blamed_for_what_the_same_tensor_shows_too(precision, tensor):
    sentence = diagnose(tensor, rotated(60), TURNED, SPEC, precision)
    both = f"on the same tensor {tensor.agreement:.1f} % agree, on the same image 40.0 %"
    assert sentence == f"unknown: {NAMED}; but {both}, so preprocessing is not the only cause"


def test_preprocessing_is_not_blamed_where_the_original_cannot_be_fed_the_tensor():
    sentence = diagnose(None, rotated(60), replace(SPEC, crop=(192, 192)), SPEC, "fp32")
    assert sentence == (
        "unknown: preprocessing differs: crop (192, 192) instead of (224, 224); on the same image 40.0 % agree, "
        "but the original does not accept the artifact's tensor, so the cause is not confirmed"
    )


@pytest.mark.parametrize(
    ("image", "end"),
    [
        (rotated(0), "no effect is shown"),
        (ROUNDED, "it changes the outputs; an effect on the answers is not shown"),
        (rotated(2), "it changes the outputs; an effect on the answers is not shown"),
    ],
)
def test_preprocessing_that_moves_no_answer_is_not_said_to(image, end):
    assert diagnose(rotated(0), image, TURNED, SPEC, "fp32").endswith(f" %: {end}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resize", 256),
        ("crop", (192, 192)),
        ("interpolation", "nearest"),
        ("std", (0.2, 0.2, 0.2)),
        ("fit", "cover"),
        ("crop_rounding", "down"),
    ],
)
def test_every_field_of_preprocessing_is_compared(field, value):
    sentence = diagnose(SAME, SAME, replace(SPEC, **{field: value}), SPEC, "int8")
    assert sentence.startswith(f"preprocessing differs: {field} {value} instead of {getattr(SPEC, field)};")


@pytest.mark.parametrize(("facts", "cause"), [(SAME, "the same function"), (ROUNDED, "the graph differs")])
def test_a_model_that_takes_no_images_has_no_preprocessing_to_differ(facts, cause):
    assert diagnose(facts, facts, None, None, "fp32").startswith(cause)
