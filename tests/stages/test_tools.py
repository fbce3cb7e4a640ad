"""Which package a version is said of, where two bring one module."""

from __future__ import annotations

import importlib
import sys

import pytest

from vitdeploy.stages.step import package_versions


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Packages in folders of their own, the first found first, and nothing of what is really installed."""

    def install(*packages: tuple[str, str]) -> None:
        folders = []
        for name, version in packages:
            folder = tmp_path / name
            (folder / "onnxruntime").mkdir(parents=True)
            (folder / "onnxruntime" / "__init__.py").touch()
            about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            folders.append(str(folder))
        monkeypatch.setattr(sys, "path", folders)
        monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
        importlib.invalidate_caches()

    return install


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ([("onnxruntime", "1.30.0")], "1.30.0"),
        ([("onnxruntime-gpu", "1.31.1")], "onnxruntime-gpu 1.31.1"),
        ([("onnxruntime-gpu", "1.31.1"), ("onnxruntime", "1.30.0")], "onnxruntime-gpu 1.31.1"),
        ([("onnxruntime", "1.30.0"), ("onnxruntime-gpu", "1.31.1")], "1.30.0"),
        ([], "absent"),
    ],
)
def test_the_version_is_that_of_the_package_whose_module_is_imported(packages, expected, installed):
    installed(*packages)
    assert package_versions(["onnxruntime", "nothing-of-this-name"]) == {
        "onnxruntime": expected,
        "nothing-of-this-name": "absent",
    }
