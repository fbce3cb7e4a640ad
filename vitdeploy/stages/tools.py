"""The versions of installed packages, which the keys of stages hold."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from vitdeploy.backends import TARGETS
from vitdeploy.extensions import extension_versions

# Packages of other names that bring the module of the same name as a package.
SUBSTITUTES = {"onnxruntime": ("onnxruntime-gpu",)}


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions by package name; "absent" if not installed.

    Of a package with substitutes that of the one whose module is imported, with its name where it is a substitute, as
    in "onnxruntime-gpu 1.31.1".
    """
    return {package: _substituted(package) if package in SUBSTITUTES else _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _substituted(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "absent"
    home = Path(spec.origin).parent.parent
    # Substitutes first: where both fill one folder, as they should not, the package itself was there before.
    for name in (*SUBSTITUTES[package], package):
        for found in importlib.metadata.distributions(name=name):
            if Path(str(found.locate_file(""))).resolve() == home.resolve():
                return found.version if name == package else f"{name} {found.version}"
    return _version(package)


def backend_versions(target: str) -> dict[str, str]:
    """Versions of the packages that make up the back end of a target."""
    return dict(extension_versions(target, TARGETS[target].backend))
