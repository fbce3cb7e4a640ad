"""Describe briefly how a state dict and a model differ: hundreds of keys become a handful of patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHOWN_KEYS = 5
# What modules compute when they are built; some versions of a library store it, others do not.
COMPUTED = re.compile(
    r"(?:.*\.)?(?:position_ids|relative_position_index|relative_coords_table|attn_mask|num_batches_tracked)"
)
# Parts of names: losses, metrics, counters, and heads that only self-supervised training has. A projector is none of
# these: some models answer with what it gives.
TRAINING = re.compile(
    r"(?:.*_)?(?:loss|losses|loss_fn|criterion|criteria|metrics?|acc|accuracy)|n_averaged|initted|step|queue|queue_ptr|"
    r"(?:dino|ibot|byol|simclr|mim|mlm)_head|total_ops|total_params|mixup_fn"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Mismatch:
    """Keys of a model and of a state dict that have no counterpart, or one that is not alike.

    `shapes` and `kinds`: for a key, what the state dict has and what the model has.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, tuple[str, str]]
    kinds: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.kinds)

    def told(self, wanted: Collection[str], found: Collection[str]) -> str:
        """All of it in one line, by kind. `wanted` and `found` are all keys of the model and of the state dict."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing: {listed(patterns(self.missing, wanted))}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected: {listed(patterns(self.unexpected, found))}")
        for what, pairs in (("of another shape", self.shapes), ("of another type", self.kinds)):
            if pairs:
                parts.append(f"{len(pairs)} {what}: {listed(_alike(pairs, wanted))}")
        return "; ".join(parts)


def compare(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Mismatch:
    """What loading `state` into a model with the tensors `own` would leave, drop or distort.

    Integers instead of weights come from a quantised model: without their scales they are different numbers.
    """
    both = [key for key in own if key in state]
    return Mismatch(
        missing=tuple(key for key in own if key not in state),
        unexpected=tuple(key for key in state if key not in own),
        shapes={k: (_shape(state[k]), _shape(own[k])) for k in both if own[k].shape != state[k].shape},
        kinds={k: (_dtype(state[k]), _dtype(own[k])) for k in both if _distorted(state[k].dtype, own[k].dtype)},
    )


def _distorted(found: torch.dtype, wanted: torch.dtype) -> bool:
    if not wanted.is_floating_point:
        return found.is_floating_point or found.is_complex
    return not found.is_floating_point or found.itemsize < 2


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def patterns(keys: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Keys as they are where they are few, else by what they have in common: `blocks.{2-11}.*`, where all of
    `everything` below these is among them.
    """
    chosen = dict.fromkeys(keys)
    if len(chosen) <= SHOWN_KEYS:
        return list(chosen)
    whole = _whole(chosen, everything)
    shortest = []
    for key in chosen:
        parts = key.split(".")
        stems = (".".join(parts[:cut]) for cut in range(1, len(parts)))
        stem = next((stem for stem in stems if stem in whole), None)
        shortest.append(key if stem is None else f"{stem}.*")
    return _numbered(dict.fromkeys(shortest))


def of_training(key: str) -> bool:
    """Whether a key's name says that only training needs it."""
    stem, _, _ = key.rpartition(".")
    return any(map(TRAINING.fullmatch, (stem or key).split(".")))


def _whole(chosen: Collection[str], everything: Iterable[str]) -> set[str]:
    """Stems of two keys or more, below which there is no key that is not chosen."""
    counts: dict[str, int] = {}
    broken: set[str] = set()
    for key in {*everything, *chosen}:
        parts = key.split(".")
        for cut in range(1, len(parts)):
            stem = ".".join(parts[:cut])
            counts[stem] = counts.get(stem, 0) + 1
            if key not in chosen:
                broken.add(stem)
    return {stem for stem, count in counts.items() if count > 1 and stem not in broken}


def _numbered(keys: Iterable[str]) -> list[str]:
    """Names that differ by their numbers alone as one: `blocks.{0-3,7}.ls1.gamma`."""
    groups: dict[str, list[list[int]]] = {}
    for key in keys:
        groups.setdefault(_NUMBER.sub("\0", key), []).append([int(number) for number in _NUMBER.findall(key)])
    told = []
    for template, numbers in groups.items():
        for column in zip(*numbers, strict=True):
            template = template.replace("\0", _ranges(column), 1)
        told.append(template)
    return told


def _ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "{1-3,7}"; one number alone as it is."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return texts[0] if len(runs) == 1 and runs[0][0] == runs[0][1] else "{" + ",".join(texts) + "}"


def _alike(pairs: Mapping[str, tuple[str, str]], everything: Collection[str]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for key, pair in pairs.items():
        groups.setdefault(pair, []).append(key)
    return [
        f"{name} {pair[0]} (the model: {pair[1]})"
        for pair, keys in groups.items()
        for name in patterns(keys, everything)
    ]


def listed(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN_KEYS} more" if len(items) > SHOWN_KEYS else ""
    return ", ".join(items[:SHOWN_KEYS]) + more
