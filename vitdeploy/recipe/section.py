"""The base of every section of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from vitdeploy.spec import MAX_BATCH

Positive = Annotated[int, Field(ge=1)]
Batch = Annotated[int, Field(ge=1, le=MAX_BATCH)]
# Of a text: the longest path of Linux. What is longer names nothing, and errors would quote it.
MAX_TEXT = 4096


class Section(BaseModel):
    """A frozen value without unknown fields, whose fields have the types that they are given in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, str_max_length=MAX_TEXT)
