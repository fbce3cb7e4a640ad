"""A graph error and a preprocessing error, told apart: first the same tensor for both models, then the same image."""

from __future__ import annotations

from vitdeploy.spec import PreprocessSpec
from vitdeploy.verify.agreement import Agreement

FLOAT_TOLERANCE = 1e-3


def diagnose(tensor: Agreement, image: Agreement, ours: PreprocessSpec, theirs: PreprocessSpec, precision: str) -> str:
    """One sentence on where a difference comes from.

    Args:
        tensor: both models fed the artifact's preprocessed tensor.
        image: each model fed the image through its own preprocessing.
        ours, theirs: preprocessing of the artifact and of the original.
    """
    if ours != theirs:
        fields = ", ".join(
            f"{name} {getattr(ours, name)} instead of {getattr(theirs, name)}"
            for name in ("resize", "crop", "interpolation", "mean", "std")
            if getattr(ours, name) != getattr(theirs, name)
        )
        return (
            f"preprocessing differs: {fields}; on the same tensor {tensor.agreement:.1f} % agree, "
            f"on the same image {image.agreement:.1f} %"
        )
    if tensor.max_difference <= FLOAT_TOLERANCE:
        return f"the same function: largest difference {tensor.max_difference:.1e}"
    if precision != "fp32":
        return f"{precision} rounding: largest difference {tensor.max_difference:.1e} of the largest logit"
    return f"the graph differs: largest difference {tensor.max_difference:.1e} on the same tensor"
