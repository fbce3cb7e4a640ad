"""Which changes of the package change the keys of its artifacts."""

import re
import shutil

import pytest

from tests.conftest import ROOT
from vitdeploy.store.key import ABOVE, PACKAGE, code_version

version = code_version.__wrapped__


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package") / "vitdeploy"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_a_copy_elsewhere_has_the_version_of_the_package(copy):
    assert version(copy) == code_version()
    assert version(copy, everything=True) == code_version(everything=True) != code_version()


@pytest.mark.parametrize("folder", sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("[!_]*.py")}))
def test_one_line_in_any_folder_is_another_version_but_above_the_stages(copy, folder):
    place = copy / folder
    path = place if place.is_file() else sorted(place.rglob("*.py"))[-1]
    before, text = version(copy), path.read_bytes()
    whole = version(copy, everything=True)
    path.write_bytes(text + b"\n# more\n")
    try:
        assert (version(copy) == before) == (folder in ABOVE)
        assert version(copy, everything=True) != whole
    finally:
        path.write_bytes(text)
    assert version(copy) == before


def test_another_name_is_another_version_and_other_line_endings_are_not(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\ny = 2\n")
    before = version(tmp_path)
    (tmp_path / "a.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").touch()
    (tmp_path / ".a.py.swp").touch()
    assert version(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert version(tmp_path) != before


def test_no_stage_imports_what_keys_leave_out():
    """By the contract that `tests/test_imports.py` checks."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [names] = re.findall(r'^id = "keys"\n(?:.+\n)*?forbidden_modules = \[(.+)\]$', text, re.MULTILINE)
    assert names.replace('"', "").split(", ") == [f"vitdeploy.{name}" for name in ABOVE]
