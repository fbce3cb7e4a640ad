"""docs/extending.md shows what is tested here, and nothing inside of vitdeploy knows the extensions."""

import re
from pathlib import Path

import pytest

import vitdeploy
from tests.extending import test_backend, test_family, test_option, test_rows, test_task

PACKAGE = Path(vitdeploy.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "extending.md").read_text(encoding="utf-8")
# By the section of the page: all files of the extension, and where else its examples stand.
EXTENSIONS = {
    "A back end": (test_backend.FILES, ()),
    "A model family": (test_family.FILES, ()),
    "A task": (test_task.FILES, ()),
    "A fold": (test_rows.FOLD_FILES, (PACKAGE / "quantization" / "prepare.py",)),
    "A graph rewrite": (test_rows.REWRITE_FILES, ()),
    "An option": (test_option.FILES, ()),
    "A section of the report": (test_rows.SECTION_FILES, ()),
}
ENTRY_POINTS = {
    "A back end": test_backend.ENTRY_POINTS,
    "A model family": test_family.ENTRY_POINTS,
    "A task": test_task.ENTRY_POINTS,
}
CHANGES = "Changes inside vitdeploy"
# What each extension brings, which nobody could use without naming it.
BROUGHT = ("numpy-cpu", "toymixer", "RatingSpec", "equalise_relu", "merge_transposes", "opacity", "slowest_first")


def blocks(title, *languages):
    """The blocks of code of one section of the page."""
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return [code for language, code in re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL) if language in languages]


def test_the_page_has_these_sections():
    assert re.findall(r"^## (.*)", PAGE, re.MULTILINE) == [
        CHANGES,
        *EXTENSIONS,
        "What an extension imports",
        "What another package cannot do yet",
    ]


def test_the_files_that_an_errand_changes_are_there():
    [table] = re.findall(rf"^## {CHANGES}\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
    files = [
        cell for row in table.splitlines() if "NAME.py" not in row for cell in re.findall(r"`(\w+/[\w/]+\.py)`", row)
    ]
    assert len(files) > 6
    assert [file for file in files if not (PACKAGE / file).is_file() and not (PACKAGE.parent / file).is_file()] == []


@pytest.mark.parametrize("title", EXTENSIONS)
def test_the_page_shows_the_code_that_is_tested(title):
    files, others = EXTENSIONS[title]
    texts = [file.read_text(encoding="utf-8") for file in (*files, *others)]
    code = blocks(title, "python", "jinja")
    assert [block for block in code if not any(block in text for text in texts)] == []
    assert [file.name for file, text in zip(files, texts, strict=False) if not any(b in text for b in code)] == []


@pytest.mark.parametrize("title", EXTENSIONS)
def test_the_page_shows_the_entry_points_that_are_tested(title):
    groups = [
        f'[project.entry-points."{group}"]\n' + "".join(f'{name} = "{value}"\n' for name, value in rows.items())
        for group, rows in ENTRY_POINTS.get(title, {}).items()
    ]
    assert blocks(title, "toml") == (["\n".join(groups)] if groups else [])


def test_nothing_inside_of_the_package_knows_the_extensions():
    """So that they are their own files and their rows, and no file of the package has changed for them."""
    assert all(PACKAGE not in file.parents for files, _ in EXTENSIONS.values() for file in files)
    own = "".join(file.read_text(encoding="utf-8") for files, _ in EXTENSIONS.values() for file in files)
    assert [name for name in BROUGHT if name not in own] == []
    names = (*BROUGHT, *(file.stem for files, _ in EXTENSIONS.values() for file in files))
    texts = {
        file.relative_to(PACKAGE): file.read_text(encoding="utf-8")
        for file in PACKAGE.rglob("*")
        if file.suffix in (".py", ".pyi", ".jinja")
    }
    assert len(texts) > 300
    assert [(str(file), name) for file, text in texts.items() for name in names if name in text] == []
