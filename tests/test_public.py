"""The public names: docs/python.md lists them, users' code needs no others, and their attributes are described."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitdeploy
import vitdeploy.errors
import vitdeploy.qat
import vitdeploy.runtime
from tests.extending import toy_backend

ROOT = Path(__file__).parent.parent
LISTED = (vitdeploy, vitdeploy.runtime, vitdeploy.qat)
MODULES = {module.__name__: set(module.__all__) for module in (*LISTED, vitdeploy.errors)}
NAMED = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.MULTILINE)
PYTHON = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "extending.md")]


def section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_page_lists_exactly_the_public_names() -> None:
    rows = dict(NAMED.findall(section("python.md", "What is stable")))
    assert list(rows) == list(MODULES)
    listed = {name: re.findall(r"`(\w+)`", rows[name]) for name in (module.__name__ for module in LISTED)}
    assert listed == {module.__name__: list(module.__all__) for module in LISTED}
    assert all(isinstance(getattr(vitdeploy.errors, name), type) for name in vitdeploy.errors.__all__)


def test_the_page_lists_exactly_the_modules_that_extensions_import() -> None:
    files = list(Path(toy_backend.__file__).parent.glob("toy_*.py"))
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    imported = {module for tree in trees for module, _ in names_of(tree) if module.startswith("vitdeploy.")}
    listed = re.findall(r"`([a-z_.]+)`", section("extending.md", "What an extension imports"))
    assert {f"vitdeploy.{name}" for name in listed if name != "vitdeploy"} == imported


def names_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that code imports from vitdeploy, or reads as an attribute of its modules."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vitdeploy":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                modules |= {alias.asname or alias.name: whole} if whole in MODULES else {}
                yield from () if whole in MODULES else [(node.module or "", alias.name)]
        elif isinstance(node, ast.Import):
            names = {alias.asname or "vitdeploy": alias for alias in node.names if alias.name.startswith("vitdeploy")}
            modules |= {name: alias.name if alias.asname else "vitdeploy" for name, alias in names.items()}
            yield from ((alias.name, "") for alias in names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whole, name = ast.unparse(node).rpartition(".")[::2]
            first, dot, rest = whole.partition(".")
            module = f"{modules.get(first, '')}{dot}{rest}"
            if module in MODULES and f"{module}.{name}" not in MODULES:
                yield module, name


def is_public(module: str, name: str) -> bool:
    return name in MODULES.get(module, set()) | ({""} if module in MODULES else set())


def code_of_users() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "examples").glob("*.py")):
        yield file.name, file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        yield file.name, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for page in PAGES:
        yield page.name, "\n".join(PYTHON.findall(page.read_text(encoding="utf-8")))


def test_examples_and_pages_use_public_names_only() -> None:
    uses = {
        (file, module, name)
        for file, code in code_of_users()
        for module, name in names_of(ast.parse("import vitdeploy as vd\n" + code))
    }
    assert len(uses) > 50
    assert [use for use in sorted(uses) if not is_public(*use[1:])] == []


@pytest.mark.parametrize(
    "code", ["from vitdeploy.spec import within", "import vitdeploy as v\nv.within", "import vitdeploy.limits"]
)
def test_a_name_that_is_not_public_is_noticed(code: str) -> None:
    assert [use for use in names_of(ast.parse(code)) if not is_public(*use)]


def test_no_module_imports_a_private_name_of_another() -> None:
    files = [
        file for folder in ("vitdeploy", "benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(files) > 400
    private = re.compile(r"_(?!_)")
    assert [
        f"{file.relative_to(ROOT)}:{node.lineno}: {alias.name}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitdeploy")
        for alias in node.names
        if private.match(alias.name) or any(map(private.match, (node.module or "").split(".")))
    ] == []


def public_classes() -> list[type]:
    """The public classes but exceptions, and those that public functions return."""
    found: dict[type, None] = {}
    for module in LISTED:
        for value in (getattr(module, name) for name in module.__all__):
            stub = inspect.signature(value).return_annotation if inspect.isfunction(value) else value
            if isinstance(stub, str) and inspect.isfunction(value):
                home = importlib.import_module(value.__module__)
                stub = vars(home).get(stub.rpartition(".")[2], stub)
            found |= dict.fromkeys(each for each in (stub, *typing.get_args(stub)) if inspect.isclass(each))
    return [kind for kind in found if kind.__module__.startswith("vitdeploy.")]


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__name__)
def test_every_public_attribute_is_described(kind: type) -> None:
    """By its own docstring, or by its name in that of the class."""
    family = [each for each in (*kind.__mro__, vitdeploy.runtime.Result) if each.__module__.startswith("vitdeploy.")]
    words = set(re.findall(r"\w+", " ".join(each.__doc__ or "" for each in family)))
    names = {name for each in family for name in (*vars(each), *inspect.get_annotations(each)) if name[0] != "_"}
    described = {name for each in family for name, value in vars(each).items() if inspect.getdoc(own(value))}
    assert names - words - described == set()


def own(value: object) -> object:
    """What has the docstring of an attribute; None for a plain value, whose type has one."""
    for name in ("fget", "func", "__func__"):
        value = getattr(value, name, value)
    return value if inspect.isfunction(value) else None
