"""Target pictures: for each image the one that a model is to make of it, in a folder of the same names.

targets/a.png belongs to images/a.jpg: what counts is the path below the folder without its suffix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitdeploy.data.annotations import AnnotatedSet, frame_or_skip, nothing_annotated
from vitdeploy.data.folder import Sample, scan
from vitdeploy.data.pixels import Skipped
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.runtime.preprocess import SUFFIXES, image_frame


@dataclass(frozen=True)
class Target:
    """The file of a target, and its size (width, height)."""

    path: Path
    size: tuple[int, int]

    def content(self) -> bytes:
        """Bytes that differ where two targets differ."""
        return self.path.read_bytes()


def read_targets(
    images: Path, targets: Path, size: tuple[int, int], skipped: Skipped | None = None
) -> AnnotatedSet[Target]:
    """The images below `images` with their targets below `targets`.

    All images are to be of `size` (width, height), the model's input, and all targets of one size: an image that is
    resized would be compared with a picture of something else.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: a folder is not there.
        DataError: no image has a target, or one has several; or one is of another size.
        ImageError: an unreadable image and `skipped` is None, or an unreadable target.
    """
    paths, named = [sample.path for sample in scan(images, "none")[0]], _by_name(targets)
    found: dict[Path, Target] = {}
    for path in paths:
        own = named.get(_name(path, images))
        frame = frame_or_skip(path, skipped) if own is not None else None
        if own is None or frame is None:
            continue
        if frame.size != size:
            raise DataError(
                f"{path.name} is not of the size that the model takes, and its target would be of something else",
                found="{}x{} pixels".format(*frame.size),
                wanted=f"{size[0]}x{size[1]}",
                fix="cut images and targets to it, or take the model at their size (--image-size HEIGHTxWIDTH)",
            )
        found[path] = Target(own, image_frame(own).size)
    if not found:
        raise nothing_annotated(images, targets, f"no {_name(paths[0], images)}, nor a file for another image")
    _require_one_size([*found.values()])
    samples = tuple(Sample(path, None) for path in found)
    return AnnotatedSet(images, samples, found, (), len(paths) - len(found))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


def _by_name(targets: Path) -> dict[str, Path]:
    """The files of a folder of targets. Raises DataError where two of them have one name."""
    if not targets.is_dir():
        raise MissingFileError(f"no folder of targets at {targets}", fix="check the path of the targets")
    named: dict[str, Path] = {}
    for path in sorted(targets.rglob("*")):
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            continue
        if (other := named.setdefault(_name(path, targets), path)) != path:
            raise DataError("two targets have one name", found=f"{other}, {path}", fix="leave one for each image")
    return named


def _require_one_size(targets: list[Target]) -> None:
    other = next((each for each in targets if each.size != targets[0].size), None)
    if other is not None:
        raise DataError(
            "the targets are of several sizes, and a model makes pictures of one",
            found=f"{targets[0].path.name} {'{}x{}'.format(*targets[0].size)}, "
            f"{other.path.name} {'{}x{}'.format(*other.size)}",
            wanted="one size",
            fix="take out those of other sizes, with their images",
        )
