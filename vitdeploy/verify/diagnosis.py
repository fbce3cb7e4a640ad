"""A graph error and a preprocessing error, told apart: first the same tensor for both models, then the same image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitdeploy.spec import PreprocessSpec

FLOAT_TOLERANCE = 1e-3


def diagnose(
    tensor: Mapping[str, Any],
    image: Mapping[str, Any],
    ours: PreprocessSpec | None,
    theirs: PreprocessSpec | None,
    precision: str,
) -> str:
    """One sentence on where a difference comes from.

    Args:
        tensor: the facts ("agreement", "max_difference") with both models fed the artifact's preprocessed tensor.
        image: the facts with each model fed the image through its own preprocessing.
        ours, theirs: preprocessing of the artifact and of the original; None where the input is no image.
    """
    if ours != theirs:
        fields = ", ".join(
            f"{name} {getattr(ours, name)} instead of {getattr(theirs, name)}"
            for name in ("resize", "crop", "interpolation", "mean", "std")
            if getattr(ours, name) != getattr(theirs, name)
        )
        return (
            f"preprocessing differs: {fields}; on the same tensor {tensor['agreement']:.1f} % agree, "
            f"on the same image {image['agreement']:.1f} %"
        )
    if tensor["max_difference"] <= FLOAT_TOLERANCE:
        return f"the same function: largest difference {tensor['max_difference']:.1e}"
    if precision != "fp32":
        return f"{precision} rounding: largest difference {tensor['max_difference']:.1e} of the largest output"
    return f"the graph differs: largest difference {tensor['max_difference']:.1e} on the same tensor"
