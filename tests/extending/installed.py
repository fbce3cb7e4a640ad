"""A package that adds to the tables of vitdeploy, as pip leaves it: modules on the path, and entry points."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.command_line import ROOT, Command, command_line
from vitdeploy.extensions import entry_points_of


@contextlib.contextmanager
def command_line_with(site: Path, work: Path, store: Path) -> Iterator[Command]:
    """The command line in `work`, with what is installed in the folder `site`, here and in the processes it starts."""
    with command_line(work, store, short_bench=True) as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
        patch.syspath_prepend(site)
        entry_points_of.cache_clear()
        yield run
    entry_points_of.cache_clear()


def install(folder: Path, name: str, modules: Iterable[Path], entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Put the modules and the metadata of the distribution `name` into `folder`, which is to be on the path.

    Args:
        entry_points: "module:attribute" by name, by group.
    """
    for module in modules:
        (folder / module.name).write_text(module.read_text(encoding="utf-8"), encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [
        line
        for group, rows in entry_points.items()
        for line in (f"[{group}]", *(f"{row} = {value}" for row, value in rows.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
