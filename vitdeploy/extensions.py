"""Rows that other packages add to the tables of vitdeploy, by entry points (packaging.python.org, "Entry points").

A package that provides a back end or a model family declares it in its pyproject.toml:

    [project.entry-points."vitdeploy.runtime"]
    toy = "vitdeploy_toy.runtime:BACKEND"

Another package is imported only when a table needs a row that vitdeploy lacks, or all rows.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vitdeploy.errors import CapabilityError, HostError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Row = TypeVar("Row")


@functools.lru_cache
def entry_points_of(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group in the installed packages, by name; none of them is loaded.

    Raises:
        HostError: two packages register the same name.
    """
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        if point.name in points and points[point.name].value != point.value:
            raise HostError(
                f"two packages register {point.name!r} in {group}",
                found=f"{points[point.name].value} and {point.value}",
                expected="one",
                fix="uninstall one of the two packages",
            )
        points[point.name] = point
    return MappingProxyType(points)


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.lru_cache
def extension_versions(*names: str) -> Mapping[str, str]:
    """The providers of the rows with these names in any table, by group and name: the distribution with its version,
    and the SHA-256 of the Python files of the package with the row's module. None of them is loaded."""
    from importlib.metadata import entry_points

    groups = sorted(group for group in entry_points().groups if group.startswith("vitdeploy."))
    rows = (row for group in groups for name, row in sorted(entry_points_of(group).items()) if name in names)
    found = {}
    for row in rows:
        made_by = f"{row.dist.name} {row.dist.version} " if row.dist else ""
        found[f"{row.group} {row.name}"] = made_by + _package_digest(row.module.partition(".")[0])
    return MappingProxyType(found)


def _package_digest(package: str) -> str:
    """The digest of a package's Python files with their paths, or of a single-file module; of nothing if not found."""
    spec = importlib.util.find_spec(package)
    total = hashlib.sha256()
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin)
        for path in sorted(file.parent.rglob("*.py")) if spec.submodule_search_locations else [file]:
            name, text = path.relative_to(file.parent).as_posix(), path.read_text(encoding="utf-8")
            total.update(f"{name}\n{text}\n".encode())
    return total.hexdigest()


def load_row(entry: EntryPoint, kind: type[Any]) -> Any:
    """Load the object of an entry point: an instance of `kind`, or a subclass of it.

    Raises:
        HostError: it cannot be imported, or does not have the type that its group requires.
    """
    what = f"the extension {entry.name!r} of {entry.group}"
    try:
        row = entry.load()
    except Exception as error:  # another package's code may raise anything
        raise HostError(
            f"{what} cannot be loaded",
            found=f"{entry.value}: {type(error).__name__}: {str(error)[:300]}",
            fix="install its dependencies, or uninstall the package that provides it",
        ) from error
    if not isinstance(row, kind) and not (isinstance(row, type) and issubclass(row, kind)):
        raise HostError(
            f"{what} has the wrong type", found=f"{entry.value}: {type(row).__name__}", expected=kind.__qualname__
        )
    return row


def row_at(place: str) -> Any:
    """A built-in row by its location, "module:attribute". Called for every answer of a model, so an imported module is
    taken from `sys.modules`: an import statement would take longer than the rest."""
    module, _, attribute = place.partition(":")
    return getattr(sys.modules.get(module) or importlib.import_module(module), attribute)


class RowTable(Mapping[str, Row]):
    """Rows by name: built-in ones, then those of other packages, each loaded on first use.

    Args:
        group: the group of the entry points that add to the table, by the names of their rows.
        kind: the class of a row; rows that are classes are subclasses of it.
        ours: the built-in rows, or their locations as "module:attribute".
    """

    def __init__(self, group: str, kind: type[Any], ours: Mapping[str, Row | str]) -> None:
        self.group, self.kind, self.ours = group, kind, ours

    def added(self) -> list[str]:
        """The names of the rows of other packages."""
        return [name for name in entry_points_of(self.group) if name not in self.ours]

    def __getitem__(self, name: str) -> Row:
        """Raises: HostError: the row of another package cannot be loaded."""
        if (row := self.ours.get(name)) is not None:
            return row_at(row) if isinstance(row, str) else row
        if (entry := entry_points_of(self.group).get(name)) is not None:
            return cast(Row, load_row(entry, self.kind))
        raise self.unknown(name)

    def unknown(self, name: str) -> Exception:
        """The error for an unknown name."""
        return KeyError(name)

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in entry_points_of(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from (*self.ours, *self.added())

    def __len__(self) -> int:
        return len(self.ours) + len(self.added())


class _Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def lazy(module: str) -> Any:
    """A heavy module that is imported on first use, for the top of a file that is imported without it. For types, the
    file also imports it under TYPE_CHECKING."""
    return _Lazy(module)


# --- Wings: optional packages of vitdeploy, which no other package imports --------------------------------------------


WINGS = ("devices", "embed", "history", "qat", "releases", "serve")


def has_wing(module: str) -> bool:
    """Whether the wing of a module, such as "history.api", is installed."""
    return importlib.util.find_spec(f"vitdeploy.{module.partition('.')[0]}") is not None


def wing(module: str) -> Any:
    """A module of a wing.

    Raises:
        CapabilityError: the wing is not installed.
    """
    if not has_wing(module):
        raise CapabilityError(
            f"this vitdeploy was installed without vitdeploy.{module.partition('.')[0]}", fix="install all of vitdeploy"
        )
    return importlib.import_module(f"vitdeploy.{module}")
