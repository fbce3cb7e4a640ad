"""Rename the keys of a state dict by a table of rules, each key by one rule.

A rule is the beginning of a key and what stands for it: `*` is one part, the same in both; `{qkv}` takes a third of the
rows for each of query, key and value; several targets get the same tensor. The first rule that fits counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

Rule: TypeAlias = "tuple[str, str | tuple[str, ...]]"


def apply(rules: Sequence[Rule], state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What each key became: tensors by their new names, none where no rule takes it."""
    compiled = [(_pattern(theirs), ours) for theirs, ours in rules]
    return {key: _named(key, tensor, compiled) for key, tensor in state.items()}


def _pattern(beginning: str) -> re.Pattern[str]:
    return re.compile(re.escape(beginning).replace(r"\*", r"([^.]+)") + r"(?P<rest>.*)")


def _named(key: str, tensor: Tensor, rules: list[tuple[re.Pattern[str], str | tuple[str, ...]]]) -> dict[str, Tensor]:
    found = next(((match, target) for pattern, target in rules if (match := pattern.fullmatch(key))), None)
    if found is None:
        return {}
    match, target = found
    named: dict[str, Tensor] = {}
    for each in (target,) if isinstance(target, str) else target:
        name = each
        for part in match.groups()[:-1]:
            name = name.replace("*", part, 1)
        name += match["rest"]
        if "{qkv}" in name:
            named |= {name.format(qkv=part): rows for part, rows in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            named[name] = tensor
    return named


def count_below(state: Mapping[str, Tensor], stem: str) -> int:
    """How many numbered parts there are below a stem."""
    return len({key[len(stem) :].partition(".")[0] for key in state if key.startswith(stem)})
