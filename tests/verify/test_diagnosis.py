"""One sentence tells a graph error, a preprocessing error and rounding apart."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from vitdeploy.spec import PreprocessSpec
from vitdeploy.verify.agreement import compare
from vitdeploy.verify.diagnosis import diagnose

SPEC = PreprocessSpec(248, (224, 224), "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
REFERENCE = np.eye(4, dtype=np.float32) * 8


def shifted(by):
    """Every logit moved by a part of the largest one."""
    return asdict(compare(REFERENCE + np.float32(8 * by), REFERENCE, None))


def rotated(wrong):
    """Another answer for the first `wrong` images."""
    ours = REFERENCE.copy()
    ours[:wrong] = np.roll(ours[:wrong], 1, axis=1)
    return asdict(compare(ours, REFERENCE, None))


SAME, ROUNDED = shifted(2.0**-10), shifted(0.02)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_difference_within_float_rounding_is_the_same_function(precision):
    assert diagnose(SAME, SAME, SPEC, SPEC, precision) == "the same function: largest difference 9.8e-04"


def test_a_larger_difference_of_a_float_artifact_is_the_graphs():
    sentence = diagnose(ROUNDED, ROUNDED, SPEC, SPEC, "fp32")
    assert sentence == "the graph differs: largest difference 2.0e-02 on the same tensor"


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16"])
def test_a_larger_difference_of_a_reduced_precision_is_its_rounding(precision):
    sentence = diagnose(ROUNDED, ROUNDED, SPEC, SPEC, precision)
    assert sentence == f"{precision} rounding: largest difference 2.0e-02 of the largest output"


def test_other_preprocessing_is_named_field_by_field_with_both_agreements():
    ours = replace(SPEC, interpolation="bilinear", mean=(0.485, 0.456, 0.406))
    sentence = diagnose(rotated(0), rotated(1), ours, SPEC, "fp32")
    assert sentence == (
        "preprocessing differs: interpolation bilinear instead of bicubic, "
        "mean (0.485, 0.456, 0.406) instead of (0.5, 0.5, 0.5); "
        "on the same tensor 100.0 % agree, on the same image 75.0 %"
    )


@pytest.mark.parametrize(
    ("field", "value"), [("resize", 256), ("crop", (192, 192)), ("interpolation", "nearest"), ("std", (0.2, 0.2, 0.2))]
)
def test_every_field_of_preprocessing_is_compared(field, value):
    sentence = diagnose(SAME, SAME, replace(SPEC, **{field: value}), SPEC, "int8")
    assert sentence.startswith(f"preprocessing differs: {field} {value} instead of {getattr(SPEC, field)};")


@pytest.mark.parametrize(("facts", "cause"), [(SAME, "the same function"), (ROUNDED, "the graph differs")])
def test_a_model_that_takes_no_images_has_no_preprocessing_to_differ(facts, cause):
    assert diagnose(facts, facts, None, None, "fp32").startswith(cause)
