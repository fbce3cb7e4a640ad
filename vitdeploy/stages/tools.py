"""The versions of installed packages, which the keys of stages hold."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from vitdeploy.backends import TARGETS
from vitdeploy.extensions import extension_versions


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions by package name; "absent" if not installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def backend_versions(target: str) -> dict[str, str]:
    """Versions of the packages that make up the back end of a target."""
    return dict(extension_versions(target, TARGETS[target].backend))
