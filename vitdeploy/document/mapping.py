"""`mapping` and `copies` of documents, which a task adapter makes. It imports no other part: what an adapter imports is
part of the keys of the stages that use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MappingFacts:
    """The mapping of the data's classes to those of the model."""

    how: str
    classes: int
    text: str


@dataclass(frozen=True)
class Copies:
    """Images that have the same bytes as another. `evaluation`: so many were left out, as each counts once, and so many
    of these, `relabelled`, had another label than the one that counts. `calibration`: so many are copies of others.
    `shared`: so many of the images to evaluate on are among those for calibration."""

    evaluation: int = 0
    calibration: int = 0
    shared: int = 0
    relabelled: int = 0
