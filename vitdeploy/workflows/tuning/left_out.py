"""Why something is not tried, or not shipped."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from vitdeploy.errors import CapabilityError, GraphError, VitdeployError, WorkerError
from vitdeploy.workflows.tuning.variants import Variant

# (what, why)
LeftOut: TypeAlias = tuple[str, str]
NO_TIME = "no time was left for it"


def why_not(owner: Hashable, error: VitdeployError) -> str | None:
    """Why a variant, or what says which ones to try, is left out for an error; None where that ends the search."""
    if isinstance(error, CapabilityError):
        return error.message
    optional = not isinstance(owner, Variant) or owner.precision == "int4"  # anything else takes every graph so far
    if isinstance(error, WorkerError) or (isinstance(error, GraphError) and optional):
        return said(error)
    return None


def said(error: VitdeployError) -> str:
    """What has gone wrong, in one line."""
    return error.message + (f": {error.found}" if error.found else "")
