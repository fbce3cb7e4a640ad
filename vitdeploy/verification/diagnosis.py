"""Diagnoses where a difference comes from: the proven cause, or "unknown".

A cause is named if the two agree without it and differ with it. Both are first fed the same tensor, then the same
image, each through its own preprocessing.
"""

from __future__ import annotations

from vitdeploy.spec import PreprocessSpec
from vitdeploy.verification.comparison import Comparison

FLOAT_TOLERANCE = 1e-3
# The lowest percent of equal answers that rounding alone is known to cause; below, something else may be wrong as well.
ROUNDING = 90.0
FIELDS = ("resize", "crop", "fit", "crop_rounding", "fill", "interpolation", "mean", "std", "channel_order")
BISECT = "verify --bisect against the float graph that it was made of says where it enters"


def diagnose(
    tensor: Comparison | None,
    image: Comparison,
    ours: PreprocessSpec | None,
    theirs: PreprocessSpec | None,
    precision: str,
) -> str:
    """One sentence on where a difference comes from.

    Args:
        tensor: the comparison with both models fed the artifact's preprocessed tensor; None if the original does not
            accept it.
        image: the comparison with each model fed the image through its own preprocessing.
        ours, theirs: preprocessing of the artifact and of the original; None if the input is not an image.
    """
    if ours == theirs:
        return _of_graph(image, precision)
    named = f"preprocessing differs: {_fields(ours, theirs)}"
    if tensor is None:
        return (
            f"unknown: {named}; on the same image {_percent(image)} agree, but the original cannot be fed the "
            "artifact's tensor, so whether that is the cause is not shown"
        )
    both = f"on the same tensor {_percent(tensor)} agree, on the same image {_percent(image)}"
    if nothing := _proves_nothing(tensor):
        return f"unknown: {named}; on the same tensor {nothing}"
    if not _same_function(tensor, precision):
        return f"unknown: {named}; but {both}, so that is not all of it"
    if tensor.agreement_ci95[0] > image.agreement_ci95[1]:
        return f"{named}; {both}"
    if tensor.max_difference <= FLOAT_TOLERANCE < image.max_difference:
        return f"{named}; {both}: it moves the outputs, and is not shown to move the answers"
    return f"{named}; {both}: it is not shown to make a difference"


def _of_graph(facts: Comparison, precision: str) -> str:
    """What a difference on the same tensor implies."""
    difference = f"largest difference {facts.max_difference:.1e}"
    if nothing := _proves_nothing(facts):
        return f"unknown: {difference}; {nothing}"
    if facts.max_difference <= FLOAT_TOLERANCE:
        return f"the same function: {difference}"
    if precision == "fp32":
        return f"the graph differs: {difference} on the same tensor, which float32 does not explain"
    if facts.agreement >= ROUNDING:
        return f"{precision} rounding, as far as is shown: {difference} of the largest output"
    return (
        f"unknown: {_percent(facts)} agree, which {precision} rounding alone does not explain; another model, other "
        f"weights or a broken layer are not told apart; {BISECT}"
    )


def same_outputs(facts: Comparison) -> bool:
    """Whether the outputs are the original's, and change from image to image by more than what they may be off by."""
    return facts.max_difference <= FLOAT_TOLERANCE < _changes(facts) / 2


def follows(facts: Comparison) -> bool:
    """Whether outputs are nearer to the original's than a quarter of what they change by from image to image, as those
    of no other model are, whatever the answers say."""
    return facts.max_difference <= _changes(facts) / 4


def _changes(facts: Comparison) -> float:
    return facts.control.difference if facts.control is not None else 0.0


def _proves_nothing(facts: Comparison) -> str:
    """Why two that are alike may be any two; "" where they are not, or where outputs or answers tell images apart."""
    control = facts.control
    if same_outputs(facts):
        return ""
    if facts.max_difference <= FLOAT_TOLERANCE:
        away = "" if control is None else f", where outputs for other images are {control.difference:.1e} apart"
        return f"that proves nothing{away or ': ' + facts.proves_nothing}"
    alike = facts.agreement >= ROUNDING and facts.proves_nothing
    return f"the agreement proves nothing: {alike}" if alike else ""


def _same_function(tensor: Comparison, precision: str) -> bool:
    """Whether the two appear to be the same function except for rounding."""
    return bool(tensor.max_difference <= FLOAT_TOLERANCE or (precision != "fp32" and tensor.agreement >= ROUNDING))


def _fields(ours: PreprocessSpec | None, theirs: PreprocessSpec | None) -> str:
    return ", ".join(
        f"{name} {getattr(ours, name)} instead of {getattr(theirs, name)}"
        for name in FIELDS
        if getattr(ours, name, None) != getattr(theirs, name, None)
    )


def _percent(facts: Comparison) -> str:
    return f"{facts.agreement:.1f} %"
