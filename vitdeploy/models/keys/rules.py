"""Rename the keys of a state dict by a table of rules, one rule per key.

A line of a table is a rule: a key, and its new name, or several names that get the same tensor, or `-` to drop it. A
key that ends in "." or "_" is a prefix. In a key, `*` is one part, copied to the names, and `**` any number of parts;
`{a,b}` stands for each alternative, matched by position with those in the names; `(a|b)` is either. `<a,b,b>` in a
name splits the rows of the tensor into equal shares, of which b gets two. The first matching rule applies.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Rule: TypeAlias = "tuple[re.Pattern[str], tuple[str, ...]]"
LEFT_OUT = "-"
_GROUP, _SHARES = re.compile(r"\{([^}]*)\}"), re.compile(r"<([^>]*)>")


def rules(table: str, **words: str) -> tuple[Rule, ...]:
    """Return the rules of a table, after replacing `$WORD` by the text of `words`."""
    for word, text in words.items():
        table = table.replace(f"${word}", text)
    lines = [line.split() for line in table.splitlines() if line.strip()]
    return tuple((_pattern(key), tuple(names)) for line in lines for key, *names in _expanded(line))


def _expanded(columns: Sequence[str]) -> Iterator[Sequence[str]]:
    if (group := _GROUP.search(columns[0])) is None:
        assert "{" not in "".join(columns), columns
        yield columns
        return
    for place in range(len(group[1].split(","))):
        yield from _expanded([_GROUP.sub(_alternative(place), text, count=1) for text in columns])


def _alternative(place: int) -> Callable[[re.Match[str]], str]:
    return lambda group: group[1].split(",")[place]


def _pattern(key: str) -> re.Pattern[str]:
    text = key.replace(".", r"\.").replace("(", "(?:").replace("**", "\0").replace("*", "([^./]+)").replace("\0", ".+")
    return re.compile(text + ("(.*)" if key[-1] in "./_" else "()"))


def apply(table: Sequence[Rule], state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor] | None]:
    """Return for each key its tensors by new name, {} if it is dropped, None if no rule matches."""
    return {key: _named(key, tensor, table) for key, tensor in state.items()}


def _named(key: str, tensor: Tensor, table: Sequence[Rule]) -> dict[str, Tensor] | None:
    match, names = next(((m, names) for pattern, names in table if (m := pattern.fullmatch(key))), (None, ()))
    if match is None:
        return None
    *parts, end = match.groups()
    named: dict[str, Tensor] = {}
    for name in names:
        if name == LEFT_OUT:
            continue
        for part in parts:
            name = name.replace("*", part, 1)
        name, shares = name + end, _SHARES.search(name)
        if shares is None:
            named[name] = tensor
            continue
        if not tensor.ndim:
            return None
        words = shares[1].split(",")
        rows = tensor.chunk(len(words))
        for word in dict.fromkeys(words):
            taken = [row for row, other in zip(rows, words, strict=False) if other == word]
            named[_SHARES.sub(word, name)] = taken[0] if len(taken) == 1 else torch.cat(taken)
    return named


def renamed(table: Sequence[Rule], state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return the tensors by new name, the dropped keys, and the keys without a rule or with a name already in use."""
    named: dict[str, Tensor] = {}
    unused, unknown = [], []
    for key, tensors in apply(table, state).items():
        if tensors is None or not named.keys().isdisjoint(tensors):
            unknown.append(key)
        elif not tensors:
            unused.append(key)
        else:
            named |= tensors
    return named, unused, unknown


def count_below(state: Iterable[str], stem: str) -> int:
    """Return the number of numbered parts below a stem: one more than the largest number."""
    parts = (key[len(stem) :].partition(".")[0] for key in state if key.startswith(stem))
    return 1 + max((int(part) for part in parts if part.isdecimal()), default=-1)
