"""The values of an untrusted YAML document: bounded, without aliases or duplicate keys."""

import collections
from collections.abc import Sequence
from typing import Any

import yaml

# Maximum values, including keys, and nesting levels. The largest of our recipes has 200 values in 4 levels.
MAX_VALUES, MAX_DEPTH = 20_000, 32
# Maximum characters of a number or date; Python would need seconds for a number of a million digits.
MAX_DIGITS = 64
# yaml's constructors let errors of int(), float(), datetime and look-ups through, such as for `2001-13-45`.
NOT_YAML = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)


def read_yaml(text: str, most: int = MAX_VALUES) -> Any:
    """Return the values of one YAML document, at most `most`; raises one of NOT_YAML. The caller bounds its length."""
    _refuse_large(text, most)
    return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506, TID251 - a SafeLoader that also refuses duplicate keys


class Lines:
    """The line numbers of the values of a document that `read_yaml` has read."""

    def __init__(self, text: str) -> None:
        self._root: Any = yaml.compose(text, Loader=_UniqueKeys)

    def of(self, path: Sequence[str | int]) -> int:
        """The line, from 1, of the value under these keys and indices, or of its innermost existing parent."""
        node = self._root
        for part in path:
            if isinstance(node, yaml.MappingNode):
                found = next((value for key, value in node.value if key.value == str(part)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                found = node.value[part]
            else:
                found = None
            if found is None:
                break
            node = found
        return int(node.start_mark.line) + 1


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, without duplicate keys, aliases (an alias bomb grows exponentially), and unintended
    numbers."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = collections.Counter(str(self.construct_object(key, deep=True)) for key, _ in node.value)
        repeated = sorted(key for key, count in keys.items() if count > 1)
        if repeated:
            raise yaml.YAMLError(f"duplicate key {', '.join(repeated)[:200]} in line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> Any:
        _refuse_long(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: Any) -> Any:
        _refuse_long(node)
        return super().construct_yaml_float(node)


_UniqueKeys.add_constructor("tag:yaml.org,2002:int", _UniqueKeys.construct_yaml_int)
_UniqueKeys.add_constructor("tag:yaml.org,2002:float", _UniqueKeys.construct_yaml_float)


class _Plain(yaml.SafeDumper):
    """YAML's safe dumper, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def yaml_text(value: Any) -> str:
    """The text of a value in one line; `read_yaml` reads it back unchanged."""
    text = yaml.dump(value, Dumper=_Plain, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return str(text).removesuffix("...\n").strip()


def _refuse_long(node: Any) -> None:
    if len(node.value) > MAX_DIGITS:
        raise yaml.YAMLError(
            f"a number of {len(node.value):,} characters in line {node.start_mark.line + 1}, over {MAX_DIGITS}"
        )


def _refuse_large(text: str, most: int) -> None:
    """Count values and depth before anything is built."""
    depth = values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        values += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if values > most:
            raise yaml.YAMLError(f"more than {most:,} values")
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH}")
