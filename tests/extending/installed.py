"""A package that adds to the tables of vitdeploy, as pip leaves it: modules on the path, and entry points."""

from collections.abc import Iterable, Mapping
from pathlib import Path


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
