"""Label images: class maps, panoptic segments, and defect masks.

Semantic labels: for each image a PNG of class indices, of the same name below another folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.bundle.read import file_sha256
from vitdeploy.data.annotations import (
    AnnotatedSet,
    CocoFile,
    check_keys,
    frame_or_skip,
    nothing_annotated,
    read_coco,
    turn_map,
    upright_notes,
)
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.folder import DataSplit, Sample, scan, split_places
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_dir
from vitdeploy.runtime.preprocess import Frame, decode

VOID = -1
# Pillow's modes with one number per pixel.
MODES = ("1", "L", "P", "I", "I;16", "I;16B")
# White in 8 and 16 bits, often used for the foreground class of a mask.
WHITE = (255, 65535)
NAMED = 5


@dataclass(frozen=True)
class MaskAnnotation:
    """The PNG of one image with the orientation `frame`. `white`: a value that means class 1; None: values are class
    numbers."""

    file: Path
    frame: Frame
    white: int | None = None

    def content(self) -> bytes:
        return self.facts() + self.file.read_bytes()

    def facts(self) -> bytes:
        return repr(self.frame if self.white is None else (self.frame, self.white)).encode()

    def values(self) -> npt.NDArray[np.int32]:
        """Return int32 [height, width] of the upright image, unmapped; errors as `load`."""
        return np.asarray(read_map(self.file, "a PNG of class indices", self.frame), np.int32)

    def load(self, classes: int, ignore: int, reduce_labels: bool) -> npt.NDArray[np.int32]:
        """Return int32 [height, width] of classes, VOID where a pixel has the value `ignore`. With `reduce_labels`, 0
        is VOID too, and 1 is class 0.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is not a map of numbers, its size differs from the image's, or it contains numbers that are
                not classes.
        """
        values = self.values()
        if self.white is not None:
            return np.where(values == self.white, np.int32(1), values)
        found = np.where(values == ignore, VOID, values - 1 if reduce_labels else values)
        unknown = np.unique(found[found >= classes]) + int(reduce_labels)
        if len(unknown):
            raise DataError(
                f"{self.file} contains numbers that are not classes of the model",
                found=", ".join(map(str, unknown[:5].tolist())),
                expected=f"0 to {classes - 1 + int(reduce_labels)}, or {ignore} for unlabelled pixels",
                fix="set postprocess.ignore, or postprocess.reduce_labels (0: unlabelled, 1: first class)",
            )
        return np.asarray(found, np.int32)


MaskSet = AnnotatedSet[MaskAnnotation]


def read_masks(images: Path, labels: Path, skipped: Skipped | None = None) -> MaskSet:
    """Return the images below `images` with a PNG of the same relative name below `labels`. The PNGs are read by
    `load`.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: no such folder. DataError: no image has a map. ImageError: as above.
    """
    samples, missing = with_maps(images, labels, (".png",), skipped)
    found = {path: MaskAnnotation(file, frame) for path, (file, frame) in samples.items()}
    notes = upright_notes((each.frame for each in found.values()), "map")
    return AnnotatedSet(images, tuple(Sample(path, None) for path in found), found, (), missing, notes)


def understood(maps: MaskSet, labels: Sequence[str], classes: int, ignore: int, reduce_labels: bool) -> MaskSet:
    """Return the maps for a model with `classes` classes, with a note or a warning if values are ambiguous. All maps
    are read once.

    With two classes, white means 1, unless a map contains both white and 1. `labels`: the class names, or ().

    Raises:
        ImageError, DataError: as `MaskAnnotation.load`.
    """
    pixels: Counter[int] = Counter()
    holding: dict[Path, set[int]] = {}
    for path, annotation in maps.annotations.items():
        counts = _counts(annotation.values())
        pixels.update(counts)
        holding[path] = set(counts)
    annotations, notes, warnings = dict(maps.annotations), list(maps.notes), list(maps.warnings)
    white = None if reduce_labels or classes != 2 or not ignore else _white(holding.values())
    if white is not None:
        whites = [path for path, values in holding.items() if white in values]
        text = (
            f"labels: maps of 0 and {white}, read as 0 and 1: {len(whites):,} of {len(holding):,} (first: "
            f"{annotations[whites[0]].file.name}); if {white} means unlabelled, write 254 instead and set "
            "postprocess.ignore: 254"
        )
        (warnings if pixels[1] else notes).append(text)
        annotations |= {path: replace(annotations[path], white=white) for path in whites}
        pixels[1] += pixels.pop(white)
    for path, values in holding.items():
        if white is None and max(values - {ignore}, default=0) >= classes + reduce_labels:
            annotations[path].load(classes, ignore, reduce_labels)  # raises an error that names them
    void = 0 if white is not None else pixels.pop(ignore, 0)
    missing = [index for index in range(classes) if not pixels[index + reduce_labels]]
    if missing:
        names = [f"{index}" + (f" ({labels[index]})" if index < len(labels) else "") for index in missing[:NAMED]]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        text = f"no pixel of the labels has class {', '.join(names)}{more} of {classes}: mIoU does not cover it"
        if void:
            share = 100 * void / (void + pixels.total())
            text += (
                f"; {ignore} is read as unlabelled ({share:.2g} % of the pixels): if it is a class, write its number"
            )
            text += " instead, or set postprocess.ignore to another number" if ignore < classes + reduce_labels else ""
        warnings.append(text)
    return replace(maps, annotations=annotations, notes=tuple(notes), warnings=tuple(warnings))


def _counts(values: npt.NDArray[np.int32]) -> dict[int, int]:
    """Return the number of pixels with each value."""
    if values.min() < 0 or values.max() >= 1 << 16:
        present, counts = np.unique(values, return_counts=True)
        return dict(zip(present.tolist(), counts.tolist(), strict=True))
    every = np.bincount(values.ravel())
    return {int(value): int(every[value]) for value in np.flatnonzero(every)}


def _white(maps: Collection[set[int]]) -> int | None:
    """Return the value that means class 1 in maps of two classes: white, if no map contains it together with 1."""
    for white in WHITE:
        several = any({1, white} <= values for values in maps)
        if set().union(*maps) in ({0, white}, {0, 1, white}) and not several:
            return white
    return None


def with_maps(
    images: Path, labels: Path, suffixes: tuple[str, ...], skipped: Skipped | None
) -> tuple[dict[Path, tuple[Path, Frame]], int]:
    """Return the images below `images` that have a file of the same relative name below `labels`, with one of the
    suffixes: the file and the image's frame; and the number of images without. Errors as `read_masks`."""
    if not is_dir(labels):
        raise MissingFileError(f"no label folder at {labels}", fix="check the path of --annotations")
    found: dict[Path, tuple[Path, Frame]] = {}
    missing = 0
    every = [sample.path for sample in scan(images, "none")[0] if labels not in sample.path.parents]
    for path in every:
        names = [labels / path.relative_to(images).with_suffix(suffix) for suffix in suffixes]
        file = next((name for name in names if name.is_file()), None)
        if file is None:
            missing += 1
        elif (frame := frame_or_skip(path, skipped)) is not None:
            found[path] = file, frame
    if not found:
        names_of = " or ".join(suffixes)
        raise nothing_annotated(images, labels, f"{len(every)} images, but no {names_of} with a matching name")
    return found, missing


def read_map(path: Path, expected: str, frame: Frame) -> npt.NDArray[Any]:
    """Return the numbers of a one-channel picture (palette indices if it has a palette) for an image with the
    orientation `frame`.

    Raises:
        MissingFileError, ImageError: unreadable. DataError: several channels, or the wrong size.
    """
    image = decode(path, None)
    if image.mode not in MODES:
        raise DataError(f"{path} is not a map of numbers", found=f"a picture with mode {image.mode}", expected=expected)
    return fit_map(path, np.asarray(image), frame)


def fit_map(path: Path, values: npt.NDArray[Any], frame: Frame) -> npt.NDArray[Any]:
    """Return [height, width, ...] for the upright image, from a map with its size or with that of the stored pixels.

    Raises:
        DataError: it has the wrong size.
    """
    size = values.shape[1::-1]
    if size == frame.size:
        return values
    if size != frame.stored:
        stored = f", or {'{}x{}'.format(*frame.stored)} as stored, before EXIF orientation {frame.orientation}"
        raise DataError(
            f"{path} does not have the size of its image",
            found="x".join(map(str, size)),
            expected="{}x{} pixels (upright)".format(*frame.size) + (stored if frame.stored != frame.size else ""),
        )
    return turn_map(values, frame.orientation)


# --- Panoptic annotations in COCO's form: one JSON file, and a PNG of segment ids for each image ----------------------
# https://cocodataset.org/#format-data, section "Panoptic Segmentation": the PNGs lie in a folder of the JSON's name
# without its suffix; a pixel's segment id is R + 256 G + 65536 B, and 0 is NO_SEGMENT: unlabelled.


NO_SEGMENT = 0
KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "file_name", "segments_info"),
    "categories": ("id", "name", "isthing"),
}


@dataclass(frozen=True)
class PanopticMap:
    """An image cut into segments.

    ids: int32 [height, width], the segment of each pixel, `NO_SEGMENT` for none. classes: the class of each
    segment. crowd: the segments that stand for too many instances to count.
    """

    ids: npt.NDArray[np.int32]
    classes: Mapping[int, int]
    crowd: frozenset[int] = field(default=frozenset())


@dataclass(frozen=True)
class PanopticAnnotation:
    """The PNG of one image, and its segments: id -> category id. `frame`: the image's orientation; `stored`: the PNG
    matches the pixels before EXIF rotation."""

    png: Path
    frame: Frame
    segments: Mapping[int, int]
    crowd: frozenset[int]
    stored: bool = False

    def content(self) -> bytes:
        facts = (sorted(self.segments.items()), sorted(self.crowd), *((self.frame,) if self.stored else ()))
        return repr(facts).encode() + self.png.read_bytes()

    def turned(self, frame: Frame) -> PanopticAnnotation:
        return replace(self, frame=frame, stored=True)

    def load(self, mapping: Mapping[int, int]) -> PanopticMap:
        """Return the map with the class numbers of a model; `mapping` is from `classes.match_categories`.

        Raises:
            ImageError: the PNG cannot be read.
            DataError: it does not have the image's size, or contains ids that are not in the JSON.
        """
        pixels = np.asarray(decode(self.png, 3), np.int32)
        pixels = fit_map(self.png, pixels, Frame(self.frame.stored, 1) if self.stored else self.frame)
        pixels = turn_map(pixels, self.frame.orientation) if self.stored else pixels
        ids = pixels @ np.array([1, 256, 65536], np.int32)
        unknown = sorted({int(i) for i in np.unique(ids)} - set(self.segments) - {NO_SEGMENT})
        if unknown:
            raise DataError(
                f"{self.png} contains segments that are not in its JSON",
                found=f"ids {', '.join(map(str, unknown[:5]))}",
                expected="ids from segments_info, or 0 for no segment",
            )
        return PanopticMap(ids, {id: mapping[category] for id, category in self.segments.items()}, self.crowd)


PanopticSet = AnnotatedSet[PanopticAnnotation]


def read_panoptic(images: Path, labels: Path, skipped: Skipped | None = None) -> PanopticSet:
    """Return the images below `images` that the JSON file `labels` annotates. The PNGs are read by `load`, one by one.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: `images`, `labels` or a PNG does not exist.
        DataError: the JSON file has the wrong form, or refers to other images, sizes or categories.
        ImageError: an unreadable image and `skipped` is None.
    """
    file = read_coco(images, labels, KEYS)
    annotated = replace(file, entries={path: file.entries[path] for path in file.annotations})
    return annotated.annotated(lambda path, frame, entries: _annotation(file, entries, frame), skipped)


def _annotation(file: CocoFile, entries: Sequence[tuple[int, Mapping[str, Any]]], frame: Frame) -> PanopticAnnotation:
    labels, entry = file.labels, entries[0][1]
    if len(entries) > 1:
        raise DataError(
            f"{labels}: an image has two different annotations",
            found=" and ".join(f"annotations[{index}]" for index, _ in entries[:2]),
            expected="one per image",
            fix="remove the wrong one",
        )
    png = labels.with_suffix("") / entry["file_name"].replace("\\", "/")
    if not png.is_file():
        raise MissingFileError(
            f"no segment map at {png}", fix=f"put the PNG files into a folder {labels.stem}/ next to {labels.name}"
        )
    known = {category.id for category in file.categories}
    segments: dict[int, int] = {}
    crowd: set[int] = set()
    for index, segment in enumerate(entry["segments_info"]):
        where = f"{entry['file_name']}, segments_info[{index}]"
        check_keys(labels, where, segment, ("id", "category_id"))
        if segment["category_id"] not in known:
            raise DataError(
                f"{labels}: {where} has a category that is not listed", found=f"category_id {segment['category_id']}"
            )
        before = segments.setdefault(segment["id"], segment["category_id"])
        if before != segment["category_id"]:
            raise DataError(
                f"{labels}: {where} has a duplicate id",
                found=f"id {segment['id']} in the categories {before} and {segment['category_id']}",
                expected="a unique id for each segment of an image",
                fix="correct the wrong one",
            )
        if segment.get("iscrowd"):
            crowd.add(segment["id"])
    return PanopticAnnotation(png, frame, segments, frozenset(crowd))


# --- Images of good and of defective parts in the layout of MVTec AD --------------------------------------------------
# ROOT/train/good/*.png                     normal images for fitting and calibration
# ROOT/test/good/*.png                      normal images for evaluation
# ROOT/test/DEFECT/NAME.png                 anomalous images, by kind of defect
# ROOT/ground_truth/DEFECT/NAME_mask.png    nonzero where the defect is


GOOD = "good"
NORMAL, TEST, TRUTH = f"train/{GOOD}", "test", "ground_truth"
LAYOUT = f"{NORMAL}, {TEST}/{GOOD}, {TEST}/DEFECT and {TRUTH}/DEFECT, the layout of MVTec AD"


@dataclass(frozen=True)
class DefectAnnotation:
    """One test image with the orientation `frame`: the kind of its defect, None for a good part, and the PNG of its
    mask, or None."""

    defect: str | None
    mask: Path | None
    frame: Frame

    def content(self) -> bytes:
        return repr(self.defect).encode() + (self.mask.read_bytes() if self.mask is not None else b"")

    def load(self) -> npt.NDArray[np.bool_] | None:
        """Return bool [height, width], where the defect is; None if unknown.

        Raises:
            ImageError: the mask cannot be read. DataError: its size differs from its image's, or it marks no defect.
        """
        if self.defect is None:
            return np.zeros(self.frame.size[::-1], np.bool_)
        if self.mask is None:
            return None
        values = read_map(self.mask, "a PNG with one channel, nonzero where the defect is", self.frame)
        found = np.asarray(values != 0)
        if not found.any():
            raise DataError(
                f"{self.mask} marks no defect", found="all pixels are 0", expected=f"nonzero pixels of {self.defect}"
            )
        return found


DefectSet = AnnotatedSet[DefectAnnotation]


def normal_folder(path: Path) -> Path:
    """Return the folder of normal images: train/good in MVTec AD's layout, or the folder itself."""
    return path / NORMAL if (path / NORMAL).is_dir() else path


def read_mvtec(root: Path, skipped: Skipped | None = None) -> tuple[Sequence[Sample], DefectSet]:
    """Return the normal images of train/good, and the test images with their defects. Masks are read by `load`.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: no such folder. DataError: the layout differs, a mask is missing, or an image is in both
            parts.
        ImageError: as above.
    """
    if not root.is_dir():
        raise MissingFileError(f"no image folder at {root}", fix="check the path of the images")
    lacking = [name for name in (NORMAL, f"{TEST}/{GOOD}") if not (root / name).is_dir()]
    if lacking:
        raise DataError(
            f"{root} does not have the layout of MVTec AD", found=f"no {' and no '.join(lacking)}", expected=LAYOUT
        )
    normal, _ = scan(root / NORMAL, "none")
    samples, kinds = scan(root / TEST, "folders")
    found, missing = {}, []
    for sample in samples:
        assert sample.label is not None
        kind = kinds[sample.label]
        mask = None if kind == GOOD else _mask(root, sample.path)
        if kind != GOOD and mask is None and (root / TRUTH).is_dir():
            missing.append(sample.path)
        elif (frame := frame_or_skip(sample.path, skipped)) is not None:
            found[sample.path] = DefectAnnotation(None if kind == GOOD else kind, mask, frame)
    if missing:
        raise DataError(
            f"{len(missing)} of {len(samples)} images below {root / TEST} have no mask",
            found=f"{missing[0]}, but no {_names(root, missing[0])[0]}",
            expected="a mask for each image with a defect, or no folder ground_truth",
        )
    contents = {file_sha256(sample.path) for sample in normal}
    refuse_contents(list(found), contents, f"{root / TEST}", f"{root / NORMAL}")
    notes = upright_notes((each.frame for each in found.values() if each.mask is not None), "mask")
    return normal, AnnotatedSet(root / TEST, tuple(Sample(path, None) for path in found), found, (), 0, notes)


def split_mvtec(
    root: Path,
    normal: Sequence[Sample],
    test: DefectSet,
    *,
    calibration: int | None,
    evaluation: int | Literal["all"],
    seed: int,
) -> DataSplit:
    """Choose calibration images from the normal ones and evaluation images from test, as `folder.split` does within a
    part.

    Raises:
        DataError: fewer images than requested; or the evaluation images are all good, or all defective.
    """
    counts = len(normal), len(test.samples)
    chosen, places = split_places((root / NORMAL, root / TEST), counts, calibration, evaluation, seed)
    rest = tuple(test.samples[i] for i in places)
    defective = sum(test.annotations[sample.path].defect is not None for sample in rest)
    if defective in (0, len(rest)):
        raise DataError(
            "AUROC needs both good and defective evaluation images",
            found=f"{len(rest) - defective} good and {defective} defective images",
            expected="at least one of each",
            fix="add images below test, or evaluate on all of them (data.evaluation.images: all)",
        )
    return DataSplit(tuple(normal[i] for i in chosen), rest, ())


def refuse_contents(seen: Sequence[Path], contents: set[str], where: str, other: str) -> None:
    """Raise DataError if the SHA-256 of a file is in `contents`: the model must not have seen evaluation images."""
    shared = [path for path in seen if file_sha256(path) in contents]
    if not shared:
        return
    more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
    raise DataError(
        f"{where} contains images that are also in {other}",
        found=", ".join(map(str, shared[:3])) + more,
        expected="images that the model has never seen: its distance to a known image is 0",
        fix=f"remove them from {other}",
    )


def _mask(root: Path, path: Path) -> Path | None:
    return next((name for name in _names(root, path) if name.is_file()), None)


def _names(root: Path, path: Path) -> list[Path]:
    """Return the possible mask paths of a test image: MVTec AD's name first, then the image's own."""
    place = root / TRUTH / path.relative_to(root / TEST).parent
    return [place / f"{path.stem}_mask.png", place / f"{path.stem}.png"]
