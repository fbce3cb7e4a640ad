"""Rows that other packages add: found by entry point, loaded late, refused where they do not fit."""

import contextlib
import sys
from importlib.metadata import EntryPoint

import pytest

from vitdeploy.errors import HostError
from vitdeploy.extensions import entry_points_of, extension_versions, load_row
from vitdeploy.stages.step import backend_versions, target_tools

GROUP = "vitdeploy.toys"


def forget():
    """What this process knows of the packages that are installed."""
    entry_points_of.cache_clear()
    extension_versions.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution with these entry points (name, value) of GROUP on the path, as a wheel leaves it there."""

    def put(package, *rows, code=""):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(f"{name} = {value}\n" for name, value in rows))
        (tmp_path / f"{package}.py").write_text(code)
        forget()

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    forget()
    for name in ("one_toy", "two_toys"):
        with contextlib.suppress(KeyError):
            del sys.modules[name]


def test_a_row_is_found_by_name_and_loaded_late(install):
    install("one_toy", ("seven", "one_toy:ROW"), code="ROW = 7\n")
    found = entry_points_of(GROUP)
    assert list(found) == ["seven"] and "one_toy" not in sys.modules
    assert load_row(found["seven"], int) == 7


def test_nothing_is_there_without_a_package(install):
    assert dict(entry_points_of(GROUP)) == {}


def test_two_packages_that_give_one_name_are_refused(install):
    install("one_toy", ("seven", "one_toy:ROW"))
    install("two_toys", ("seven", "two_toys:ROW"))
    with pytest.raises(HostError, match=r"two packages register 'seven'") as raised:
        entry_points_of(GROUP)
    assert raised.value.found == "one_toy:ROW and two_toys:ROW"


@pytest.mark.parametrize(
    ("value", "told"),
    [("absent_toy:ROW", "cannot be loaded"), ("sys:no_such_thing", "cannot be loaded"), ("sys:path", "wrong type")],
)
def test_what_does_not_load_or_fit_is_an_error_that_names_it(value, told):
    with pytest.raises(HostError, match=told) as raised:
        load_row(EntryPoint("seven", value, GROUP), int)
    assert value in raised.value.found and "'seven' of vitdeploy.toys" in raised.value.message


def test_who_brings_a_row_is_known_with_its_version_and_its_code(install, tmp_path):
    install("one_toy", ("seven", "one_toy:ROW"), ("eight", "one_toy:ROW"), code="ROW = 7\n")
    [(row, text)] = extension_versions("seven", "nobody's").items()
    distribution, version, digest = text.split()
    assert (row, distribution, version, len(digest)) == ("vitdeploy.toys seven", "one_toy", "1.0", 64)
    assert "one_toy" not in sys.modules
    (tmp_path / "one_toy.py").write_text("ROW = 8\n")
    forget()
    assert extension_versions("seven") != {row: text}
    assert extension_versions("nobody's") == {}


def test_the_code_of_a_row_is_all_of_its_package(install, tmp_path):
    (tmp_path / "two_toys").mkdir()
    for name in ("__init__", "rows", "helpers"):
        (tmp_path / "two_toys" / f"{name}.py").write_text("ROW = 7\n")
    install("one_toy", ("seven", "two_toys.rows:ROW"))
    before = dict(extension_versions("seven"))
    (tmp_path / "two_toys" / "helpers.py").write_text("ROW = 8\n")
    forget()
    assert before.keys() == extension_versions("seven").keys() and before != extension_versions("seven")


def test_an_engine_depends_on_who_adds_to_its_back_end(install):
    plain = target_tools("onnxruntime-cpu")
    install("one_toy", ("onnxruntime", "one_toy:ROW"), ("openvino-cpu", "one_toy:ROW"), code="ROW = 7\n")
    assert target_tools("onnxruntime-cpu").keys() - plain.keys() == {"vitdeploy.toys onnxruntime"}
    assert backend_versions("openvino-cpu").keys() == {"vitdeploy.toys openvino-cpu"}
    assert backend_versions("tensorrt") == {}
