"""The names of YOLO's class numbers: `classes.txt` (LabelImg), or `names` in `data.yaml` (Ultralytics, Roboflow)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.data.label_file import read_text
from vitdeploy.errors import DataError
from vitdeploy.yaml_values import NOT_YAML, read_yaml

CLASS_NAMES = "classes.txt"
DATA_FILES = ("data.yaml", "data.yml", "dataset.yaml")
# ImageNet-21k has 21,841 classes, each a number and a name.
MAX_BYTES, MAX_VALUES = 1 << 20, 60_000


def find_names(labels: Path) -> tuple[tuple[str, ...], Path] | None:
    """The class names of a folder of YOLO files, and the file that has them; None if there is none.

    It looks for `classes.txt` in the folder and its parent, and for `data.yaml` in these and the grandparent.

    Raises:
        DataError: a file that has no list of names where one belongs, two files with different names, or a
            `classes.txt` that is not UTF-8.
    """
    above = [labels, *labels.absolute().parents[:2]]
    files = [folder / CLASS_NAMES for folder in above[:2]] + [folder / name for folder in above for name in DATA_FILES]
    found = [(names, file) for file in files if file.is_file() and (names := _read(file))]
    for names, file in found[1:]:
        if names != found[0][0]:
            raise DataError(
                "two files name the classes of the YOLO labels differently",
                found=f"{found[0][1]}: {', '.join(found[0][0][:3])} ...; {file}: {', '.join(names[:3])} ...",
                wanted="one list of names, in the order of the numbers",
                fix="correct the one that is wrong, or take it away",
            )
    return found[0] if found else None


def _read(file: Path) -> tuple[str, ...]:
    """The names in a file; () for a YAML file without `names`, which is then about something else."""
    if file.stat().st_size > MAX_BYTES:
        raise _unreadable(file, f"{file.stat().st_size:,} bytes")
    if file.name == CLASS_NAMES:
        return tuple(line.strip() for line in read_text(file).strip().splitlines())
    try:
        document = read_yaml(file.read_text(encoding="utf-8-sig", errors="replace"), MAX_VALUES)
    except NOT_YAML as error:
        raise _unreadable(file, " ".join(str(error).split())[:200]) from None
    names = document.get("names") if isinstance(document, Mapping) else None
    return _in_order(file, names) if names else ()


def _in_order(file: Path, names: Any) -> tuple[str, ...]:
    """`names` as a list, or as a mapping from number to name."""
    if isinstance(names, Mapping) and sorted(names, key=str) == sorted(range(len(names)), key=str):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise _unreadable(file, f"names: {str(names)[:80]}")
    return tuple(str(name).strip() for name in names)


def _unreadable(file: Path, found: str) -> DataError:
    return DataError(
        f"{file} does not name the classes",
        found=found,
        wanted="one name a line (classes.txt); `names` with a list, or a name for each number from 0 on (data.yaml)",
        fix="correct the file, or take it away",
    )
