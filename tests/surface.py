"""What users hold on to, of one checkout: `python -m tests.surface FILE` writes it as JSON, and with `--against OTHER`
prints every line that differs.

It has the commands with their options and help texts, the Python API with its parameters and attributes, the keys of
recipes, the codes and exit codes of errors, and the fields of every JSON document. Two checkouts are compared by
running it in each of them, so that a change of the structure can show that it changed nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

import vitdeploy
import vitdeploy.document
from vitdeploy import errors
from vitdeploy.cli.main import cli
from vitdeploy.recipe.recipe import Recipe

# Dataclasses that are a whole document; all that they hold is in their schema.
DOCUMENT = re.compile(r"^(Report|Verification|DeviceBench|.*Document)$")


def surface() -> dict[str, list[str]]:
    """Lines of text by kind."""
    return {
        "commands": list(commands(cli, click.Context(cli, info_name="vitdeploy"))),
        "api": [line for name in vitdeploy.__all__ for line in public(name, getattr(vitdeploy, name))],
        "recipe": keys(TypeAdapter(Recipe).json_schema()),
        "errors": sorted(f"{kind.code} {kind.__name__} exit {kind.exit_code}" for kind in kinds(errors.VitdeployError)),
        "codes": sorted({code for path in sources() for code in re.findall(r"\bVD\d{4}\b", path.read_text("utf-8"))}),
        "documents": [line for name, kind in documents() for line in (name, *keys(TypeAdapter(kind).json_schema()))],
    }


def commands(command: click.Command, context: click.Context) -> Iterator[str]:
    """The options of a command and its help text, then those of its sub-commands."""
    for option in sorted(command.get_params(context), key=lambda option: option.opts):
        facts = option.to_info_dict()
        shown = {key: facts[key] for key in ("secondary_opts", "required", "nargs", "multiple", "default")}
        shown |= {key: value for key, value in facts["type"].items() if key in ("choices", "min", "max", "min_open")}
        yield f"{context.command_path} {' '.join(option.opts)}: {json.dumps(shown, default=str, sort_keys=True)}"
    yield from (f"{context.command_path} | {line}" for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, click.Context(child, info_name=name, parent=context))


def public(name: str, thing: Any) -> Iterator[str]:
    """A function with its parameters and defaults, or a class with its fields and public attributes."""
    if inspect.isclass(thing):
        fields = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
        yield f"{name}({', '.join(fields)})"
        for attribute in sorted(each for each in dir(thing) if not each.startswith("_")):
            value = inspect.getattr_static(thing, attribute)
            yield f"{name}.{attribute}{parameters(value) if inspect.isfunction(value) else ''}"
    elif callable(thing):
        yield f"{name}{parameters(thing)}"
    else:
        yield name


def parameters(function: Any) -> str:
    bare = inspect.Parameter.empty
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=bare) for parameter in signature.parameters.values()]
    ordered = sorted(plain, key=lambda each: (each.kind, each.name if each.kind == each.KEYWORD_ONLY else ""))
    return str(signature.replace(parameters=ordered, return_annotation=bare))


def kinds(kind: type[errors.VitdeployError]) -> Iterator[type[errors.VitdeployError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from kinds(child)


def sources() -> Iterator[Path]:
    return Path(vitdeploy.__file__).parent.rglob("*.py")


def documents() -> list[tuple[str, Any]]:
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.iter_modules(vitdeploy.document.__path__, "vitdeploy.document.")
    ]
    classes = {name: value for module in modules for name, value in vars(module).items() if DOCUMENT.match(name)}
    return sorted((name, value) for name, value in classes.items() if dataclasses.is_dataclass(value))


def keys(schema: dict[str, Any]) -> list[str]:
    """Every key of a JSON schema with its types, by its path; classes are looked through, as their names may change."""
    lines: set[str] = set()

    def walk(part: Any, path: str, inside: tuple[str, ...]) -> None:
        if not isinstance(part, dict):
            return
        name = str(part.get("$ref", "")).rpartition("/")[2]
        if name:
            if name not in inside:
                walk(schema["$defs"][name], path, (*inside, name))
            return
        kept = {key: part[key] for key in ("type", "enum", "const", "default", "minimum", "maximum") if key in part}
        lines.add(f"{path} {json.dumps(kept, sort_keys=True, default=str)}")
        for key, value in part.get("properties", {}).items():
            walk(value, f"{path}.{key}", inside)
        for key in ("items", "additionalProperties"):
            walk(part.get(key), f"{path}[]", inside)
        for key in ("anyOf", "oneOf", "prefixItems"):
            for value in part.get(key, ()):
                walk(value, path, inside)

    walk(schema, "$", ())
    return sorted(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path, help="what another checkout wrote")
    options = parser.parse_args()
    here = surface()
    options.file.write_text(json.dumps(here, indent=1) + "\n", encoding="utf-8")
    before = json.loads(options.against.read_text(encoding="utf-8")) if options.against else here
    for section, lines in here.items():
        print(f"{section}: {len(lines)} lines")
        differences = difflib.unified_diff(before[section], lines, "before", "after", lineterm="", n=0)
        print("\n".join(line for line in differences if not line.startswith("@@")))
