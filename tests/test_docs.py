"""`make docs`: the pages of docs/ and the reference build without a warning, and are read without a network."""

from __future__ import annotations

import html
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
from pydantic import BaseModel

import vitdeploy.errors
import vitdeploy.qat
import vitdeploy.runtime
from vitdeploy.cli.main import cli
from vitdeploy.known_bad.entries import table
from vitdeploy.lint.linter import RULES
from vitdeploy.recipe.recipe import Recipe

pytest.importorskip("sphinx", reason="the dependency group `docs` needs Python 3.11")

ROOT = Path(__file__).parent.parent
# Public names that the page of another module describes, and where.
LINKED = {
    "Predictor": "vitdeploy.runtime.Predictor",
    "load": "vitdeploy.runtime.load",
    "Monitor": "vitdeploy.runtime.Monitor",
    "Preprocess": "vitdeploy.spec.PreprocessSpec",
    "Postprocess": "vitdeploy.runtime.tasks.detection.PostprocessSpec",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    arguments = ["-q", "-W", "--keep-going", "-d", out / "doctrees", ROOT / "docs", out / "site"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / "site"


PUBLIC = (vitdeploy, vitdeploy.qat, vitdeploy.runtime, vitdeploy.errors)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_the_reference_describes_all_that_is_public(module: ModuleType, site: Path) -> None:
    page = (site / "reference" / f"{module.__name__.rpartition('.')[2]}.html").read_text(encoding="utf-8")
    missing = [name for name in public(module) if f'id="{module.__name__}.{name}"' not in page]
    assert set(missing) <= set(LINKED)
    assert all(f'id="{where}"' in text(site) for where in LINKED.values())


def text(site: Path) -> str:
    return "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))


def public(module: ModuleType) -> list[str]:
    """The classes and functions that a module offers: those in `__all__`, or of its own."""
    found = {name: getattr(module, name) for name in getattr(module, "__all__", ())} or {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    return [name for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)]


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []


def test_the_reference_has_every_command_option_key_and_rule(site: Path) -> None:
    context = click.Context(cli, info_name="vitdeploy")
    text = page(site, "commands")
    for path, command in commands(cli, context):
        options = [parameter.opts[0] for parameter in command.params if isinstance(parameter, click.Option)]
        assert [name for name in (path, *options) if name not in text] == []
    text = page(site, "recipe")
    assert [key for key in keys(Recipe, "") if key not in text] == []
    text = page(site, "linter-rules")
    assert [rule.code for rule in RULES if rule.code not in text] == []
    text = page(site, "known-bad")
    assert [entry.id for entry in table() if entry.id not in text] == []


def page(site: Path, name: str) -> str:
    """The text of a page of the reference."""
    text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
    return html.unescape(re.sub("<[^>]+>", "", text))


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        member = group.get_command(context, name)
        assert member is not None
        inner = click.Context(member, info_name=name, parent=context)
        if isinstance(member, click.Group):
            yield from commands(member, inner)
        else:
            yield inner.command_path, member


def keys(section: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{path}{name}.")


# Words of all pages, with results and decisions; the bound may only fall.
MAX_WORDS = 44_850


def test_the_documentation_keeps_its_budget_of_words() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").rglob("*.md")) < MAX_WORDS
