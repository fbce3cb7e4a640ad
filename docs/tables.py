"""Reference pages made of the package's own tables when the documentation is built: a page writes {{ commands }}."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx

from vitdeploy.cli.main import cli
from vitdeploy.known_bad.entries import DONE, table
from vitdeploy.known_bad.find import releases
from vitdeploy.lint.linter import RULES
from vitdeploy.recipe.recipe import Recipe


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the names of tables in the text of a page."""
    if page.startswith("reference/"):
        source[0] = re.sub(r"\{\{ (\w+) \}\}", lambda name: TABLES[name[1]](), source[0])


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


# --- The command line -------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments, options, defaults and example."""
    return "\n".join(_command(cli, click.Context(cli, info_name="vitdeploy")))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            assert member is not None
            yield from _command(member, click.Context(member, info_name=name, parent=context))
        return
    words, _, example = inspect.cleandoc(command.help or "").partition("\b\nExample:\n")
    yield f"## {context.command_path}\n"
    yield f"```\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    for paragraph in words.split("\n\n"):
        shown = paragraph.removeprefix("\b\n")
        if shown != paragraph:  # help keeps its lines
            yield f"```\n{shown}\n```\n"
        else:
            yield re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", re.sub(r"([*<])", r"\\\1", shown)) + "\n"
    if example:
        yield f"```\n{textwrap.dedent(example).strip()}\n```\n"
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    yield "\n".join(
        [
            "| option | meaning |",
            "|---|---|",
            *(_row(f"`{names}`", meaning) for names, meaning in filter(None, records) if meaning),
        ]
    )
    yield ""


# --- The recipe -------------------------------------------------------------------------------------------------------


def recipe() -> str:
    """Every key of a recipe with its values and default, and what its section says."""
    return "\n".join(_section(Recipe, ""))


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    inner = [
        (f"{path}{name}", member)
        for name, field in section.model_fields.items()
        for member in _members(field.annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]
    yield f"## {path.rstrip('.') or 'The recipe'}\n"
    yield "| key | values | default |"
    yield "|---|---|---|"
    for name, field in section.model_fields.items():
        default = "required" if field.is_required() else _default(field.default)
        yield _row(f"`{path}{name}`", _values(field.annotation), default)
    yield f"\n{_described(section)}\n"
    for name, member in inner:
        if name == "postprocess":
            continue  # one section per task, whose fields `vitdeploy.spec` describes
        yield from _section(member, f"{name}.")


def _described(section: type[BaseModel]) -> str:
    """The docstring of a section, and those of the classes that it refers to."""
    words = inspect.cleandoc(section.__doc__ or "")
    for module, name in re.findall(r"`([a-z_.]+)\.([A-Z]\w+)`", words):
        described = getattr(importlib.import_module(f"vitdeploy.{module}"), name, None)
        if described is not None and described.__doc__:
            words += f"\n\n`{name}`: {inspect.cleandoc(described.__doc__)}"
    return re.sub(r"([*<])", r"\\\1", words)


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union, without annotations."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


NAMES = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "none"}


def _values(annotation: Any) -> str:
    words = []
    for member in _members(annotation):
        origin, inner = typing.get_origin(member), typing.get_args(member)
        if origin is typing.Literal:
            words += [f"`{value}`" for value in inner]
        elif isinstance(member, type) and issubclass(member, BaseModel):
            words.append("a section")
        elif origin in (tuple, list):
            values = dict.fromkeys(_values(value) for value in inner if value is not Ellipsis)
            words.append(f"list of {', '.join(values)}")
        elif origin is not None:
            words.append(f"mapping from {' to '.join(_values(value) for value in inner)}")
        else:
            words.append(NAMES.get(member, getattr(member, "__name__", str(member))))
    return ", ".join(dict.fromkeys(words))


def _default(value: Any) -> str:
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "its own defaults"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


# --- The rules of the linter ------------------------------------------------------------------------------------------


def linter_rules() -> str:
    rows = [_row(rule.code, rule.severity, rule.expected, rule.fix) for rule in RULES]
    return "\n".join(["| rule | | expected | fix |", "|---|---|---|---|", *rows])


# --- Runtimes known to be wrong ---------------------------------------------------------------------------------------


def known_bad() -> str:
    head = ("entry", "release and device", "defect", "vitdeploy", "fix", "sources", "reproduced")
    rows = []
    for entry in table():
        links = (
            os.path.relpath(each, "docs/reference") if each.startswith("docs/") else each for each in entry.sources
        )
        sources = ", ".join(f"[{number}]({link})" for number, link in enumerate(links, 1))
        cells = (f"`{entry.id}`", releases(entry), entry.wrong, DONE[entry.action], entry.way_out)
        rows.append(_row(*cells, sources, entry.reproduced))
    return "\n".join([_row(*head), "|" + "---|" * len(head), *rows])


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "recipe": recipe,
    "linter_rules": linter_rules,
    "known_bad": known_bad,
}
