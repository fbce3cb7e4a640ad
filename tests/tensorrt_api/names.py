"""Which names of a library a source file uses, and which of them a module lacks. No import of the library itself.

    python names.py MODULE      reads a JSON list of dotted names from standard input, prints those that are not there
"""

from __future__ import annotations

import ast
import importlib
import json
import sys


def used_names(source: str, alias: str) -> set[str]:
    """Every chain of attributes of the variable `alias`, as "BuilderFlag.VERSION_COMPATIBLE", and its beginnings.

    For "cudart" also those of a module that a function gives: require().cudaMalloc.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        named = isinstance(node, ast.Name) and node.id == alias
        given = alias == "cudart" and isinstance(node, ast.Call) and ast.unparse(node.func).endswith("require")
        if parts and (named or given):
            found.add(".".join(reversed(parts)))
    return found


def missing(module: str, names: list[str]) -> list[str]:
    def is_there(name: str) -> bool:
        value = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True

    return [name for name in names if not is_there(name)]


if __name__ == "__main__":
    print(json.dumps(missing(sys.argv[1], json.load(sys.stdin))))
