"""The values of a YAML document that anybody may have written: bounded, without aliases or duplicate keys."""

from __future__ import annotations

import collections
from typing import Any

import yaml

MAX_DEPTH = 32
# yaml's constructors let errors of int(), float(), datetime and their own look-ups through, as of `2001-13-45`.
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


def read_yaml(text: str) -> Any:
    """The values of one YAML document; raises one of NOT_YAML."""
    _refuse_deep(text)
    return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506, TID251 - a SafeLoader that also refuses duplicate keys


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, without duplicate keys and without aliases (an alias bomb grows exponentially)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = collections.Counter(str(self.construct_object(key, deep=True)) for key, _ in node.value)
        repeated = sorted(key for key, count in keys.items() if count > 1)
        if repeated:
            raise yaml.YAMLError(f"duplicate key {', '.join(repeated)} in line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _refuse_deep(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH}")
