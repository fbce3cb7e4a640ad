"""`mapping` of documents, which a task adapter makes. It imports no other part: what an adapter imports is part of the
keys of the stages that use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MappingFacts:
    """The mapping of the data's classes to those of the model."""

    how: str
    classes: int
    text: str
