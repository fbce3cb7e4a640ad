"""The class names in a model's config file, each in the place of its class.

timm has `label_names`, a list or {class: name}, and `label_descriptions`, {name: what people call it}; transformers has
`id2label`, whose keys are text in a file, and `label2id`. They are read by number, never in the order of the file.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.model_folder.config import timm_config

Names = dict[int, str]
WORDNET = re.compile(r"n\d{8}")


def labels_for(config: Mapping[str, Any], classes: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One name a class in the order of the model's outputs, each on one line; and notes on what was filled or not used.

    () if the config has none that mean anything, and where the model has no classes (None). A class that the
    config leaves out is called LABEL_<number>, as transformers would.

    Raises:
        CheckpointError: names of classes that the model does not have, or of its first ones only.
    """
    key, names, notes = _names(config)
    if not names or not classes:
        return (), notes if classes else ()
    last = max(names)
    if last >= classes or (len(names) == last + 1 < classes):
        raise CheckpointError(
            f"config.json does not name the classes that the weights have: {key}",
            found=f"{len(names)} names, for classes {min(names)} to {last}",
            wanted=f"{classes} names, for classes 0 to {classes - 1}",
            fix=f"write one name a class, or take {key} out of config.json: classes are then without names",
        )
    absent = [f"LABEL_{number}" for number in range(classes) if number not in names]
    if absent:
        notes = (*notes, f"{key} has no name for {len(absent)} of {classes} classes: called {listed(absent)}")
    return tuple(_one_line(names.get(number, f"LABEL_{number}")) for number in range(classes)), notes


def counted(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The key of the names, and how many classes they are for; None if nothing is said."""
    key, names, _ = _names(config)
    return (key, max(names) + 1) if names else None


def _names(config: Mapping[str, Any]) -> tuple[str, Names, tuple[str, ...]]:
    """The key that has names, the names by class, and notes. Names such as LABEL_0 mean nothing."""
    own = timm_config(config) or {}
    for key, value in (
        ("label_names", config.get("label_names")),
        ("label_names", own.get("label_names")),
        ("labels", own.get("labels")),
    ):
        if names := _listed_or_numbered(value):
            descriptions = config.get("label_descriptions") or own.get("label_descriptions")
            return key, _described(names, descriptions), ()
    of_ids = _numbered(_items(config.get("id2label")))
    of_labels = _numbered([(number, name) for name, number in _items(config.get("label2id"))])
    unread = [
        f"{key} of config.json is passed by: its numbers are not those of classes"
        for key, names in (("id2label", of_ids), ("label2id", of_labels))
        if names is None
    ]
    of_ids, of_labels = _meant(of_ids), _meant(of_labels)
    if of_ids and of_labels and any(of_labels.get(number, name) != name for number, name in of_ids.items()):
        unread.append("id2label and label2id of config.json contradict each other: id2label counts, as in transformers")
    key = "id2label" if of_ids else "label2id"
    return key, of_ids or of_labels, tuple(unread)


def _listed_or_numbered(value: Any) -> Names:
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return dict(enumerate(value))
    return _meant(_numbered(_items(value)))


def _numbered(pairs: list[tuple[Any, Any]]) -> Names | None:
    """Names by their numbers; None if one is no number of a class, or a class has two names."""
    try:
        names = {int(number): str(name) for number, name in pairs}
    except (TypeError, ValueError, OverflowError):  # the last of Infinity
        return None
    return names if len(names) == len(pairs) and min(names, default=0) >= 0 else None


def _meant(names: Names | None) -> Names:
    return names if names and any(name != f"LABEL_{number}" for number, name in names.items()) else {}


def _described(names: Names, descriptions: Any) -> Names:
    """Names that are WordNet's numbers with what people call them behind: "n01440764 tench, Tinca tinca"."""
    told = dict(_items(descriptions))
    return {
        number: f"{name} {told[name]}" if WORDNET.fullmatch(name) and isinstance(told.get(name), str) else name
        for number, name in names.items()
    }


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    return list(mapping.items()) if isinstance(mapping, Mapping) else []


def _one_line(label: str) -> str:
    """Runs of white space, line ends and control characters become one space: labels.txt has a label a line."""
    unprintable = ("Cc", "Cs", "Zl", "Zp")
    return " ".join("".join(" " if unicodedata.category(c) in unprintable else c for c in label).split())
