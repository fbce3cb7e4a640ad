"""The two sides of a comparison: how each is read, and the document of both."""

from __future__ import annotations

import dataclasses

from vitdeploy.data.classes import differing
from vitdeploy.document.verification import Verification
from vitdeploy.document.verified import Verified
from vitdeploy.errors import InputError
from vitdeploy.tasks.adapter import Data, Setting
from vitdeploy.verification.gate import Gate
from vitdeploy.workflows.subjects import Subject


def settings_of(ours: Subject, theirs: Subject) -> tuple[Setting, Setting]:
    """The setting of each side; a side without preprocessing of its own takes the other's."""
    own, other = ours.setting, theirs.setting
    if not ours.own and not theirs.own and own.preprocess is not None:
        raise InputError(
            "neither side says how images are prepared",
            found="two built-in models",
            wanted="at least one exported graph or bundle",
        )
    if own.task != other.task or own.classes != other.classes:
        raise InputError(
            "the tasks or classes of the two models differ",
            found=f"{own.task} with {own.classes} classes against {other.task} with {other.classes}",
            wanted="the same task, and the same number of classes",
        )
    if (differs := differing(own.labels, other.labels)) is not None:
        raise InputError(
            "the two models count their classes in another order",
            found=differs,
            wanted="the same classes in the same order: answers are compared by their numbers",
            fix="take the original that the artifact was made of, or correct the labels.txt that is wrong",
        )
    own = dataclasses.replace(own, labels=own.labels or other.labels, claim=other.claim)
    if not ours.own:
        own = _taken(ours.name, own, other)
    if not theirs.own:
        other = _taken(theirs.name, other, own)
    return own, other


def _taken(name: str, setting: Setting, other: Setting) -> Setting:
    """The setting of an original that does not say how its images are prepared, with the other side's preprocessing.

    Raises:
        InputError: it takes images of another size.
    """
    ours, theirs = setting.preprocess, other.preprocess
    if ours is not None and theirs is not None and ours.crop != theirs.crop:
        raise InputError(
            f"{name} takes images of another size than the other side",
            found=f"{ours.crop[0]}x{ours.crop[1]}",
            wanted=f"{theirs.crop[0]}x{theirs.crop[1]}",
            fix=f"--image-size {theirs.crop[0]}x{theirs.crop[1]}, where the model takes that size",
        )
    return dataclasses.replace(setting, preprocess=theirs)


def verification(
    ours: Subject, theirs: Subject, found: Verified, data: Data, gate: Gate, doubt: str | None
) -> Verification:
    """The document of what was found."""
    return Verification(
        artifact=ours.name,
        against=theirs.name,
        verified=found,
        mapping=data.mapping_facts,
        skipped=tuple(data.skipped),
        remarks=(*ours.remarks, *theirs.remarks, *data.notes),
        warnings=(*data.warnings, *([doubt] if doubt is not None else [])),
        gate=gate,
        copies=data.copies,
    )
