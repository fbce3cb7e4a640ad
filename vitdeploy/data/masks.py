"""Labels that are pictures: maps of classes, panoptic segments, and masks of defects.

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
# Pillow's modes of one number per pixel.
MODES = ("1", "L", "P", "I", "I;16", "I;16B")
# White of 8 and of 16 bits: how programs write the one class of a mask beside its background.
WHITE = (255, 65535)
NAMED = 5


@dataclass(frozen=True)
class MaskAnnotation:
    """The PNG of one image, which lies as `frame` says. `white`: a value that stands for class 1; None: each is its
    own."""

    file: Path
    frame: Frame
    white: int | None = None

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return self.facts() + self.file.read_bytes()

    def facts(self) -> bytes:
        return repr(self.frame if self.white is None else (self.frame, self.white)).encode()

    def values(self) -> npt.NDArray[np.int32]:
        """int32 [height, width] of the upright image, as the file has them; errors as `load`."""
        return np.asarray(read_map(self.file, "a PNG of class indices", self.frame), np.int32)

    def load(self, classes: int, ignore: int, reduce_labels: bool) -> npt.NDArray[np.int32]:
        """int32 [height, width] of classes, VOID where a pixel has the value `ignore`; with `reduce_labels` the value 0
        has no class either, and 1 is class 0.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is no map of numbers, of another size than the image, or has numbers that are no class.
        """
        values = self.values()
        if self.white is not None:
            return np.where(values == self.white, np.int32(1), values)
        found = np.where(values == ignore, VOID, values - 1 if reduce_labels else values)
        unknown = np.unique(found[found >= classes]) + int(reduce_labels)
        if len(unknown):
            raise DataError(
                f"{self.file} holds numbers that are no class of the model",
                found=", ".join(map(str, unknown[:5].tolist())),
                expected=f"0 to {classes - 1 + int(reduce_labels)}, or {ignore} for no class",
                fix="set postprocess.ignore, or postprocess.reduce_labels (0 is no class, 1 the first)",
            )
        return np.asarray(found, np.int32)


MaskSet = AnnotatedSet[MaskAnnotation]


def read_masks(images: Path, labels: Path, skipped: Skipped | None = None) -> MaskSet:
    """The images below `images` with a PNG of the same relative name below `labels`. The PNGs are read by `load`.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: no such folder. DataError: no image has a map. ImageError: as above.
    """
    samples, missing = with_maps(images, labels, (".png",), skipped)
    found = {path: MaskAnnotation(file, frame) for path, (file, frame) in samples.items()}
    notes = upright_notes((each.frame for each in found.values()), "map")
    return AnnotatedSet(images, tuple(Sample(path, None) for path in found), found, (), missing, notes)


def understood(maps: MaskSet, labels: Sequence[str], classes: int, ignore: int, reduce_labels: bool) -> MaskSet:
    """The maps as a model of so many classes takes them, with a note or a warning where their values may mean another
    thing. All maps are read once.

    With two classes, maps of 0 and white are maps of 0 and 1, unless a map has white beside 1. `labels`: the names of
    the classes, () without.

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
            f"{annotations[whites[0]].file.name}); where {white} is no class, write 254 and set postprocess.ignore: 254"
        )
        (warnings if pixels[1] else notes).append(text)
        annotations |= {path: replace(annotations[path], white=white) for path in whites}
        pixels[1] += pixels.pop(white)
    for path, values in holding.items():
        if white is None and max(values - {ignore}, default=0) >= classes + reduce_labels:
            annotations[path].load(classes, ignore, reduce_labels)  # which names them
    void = 0 if white is not None else pixels.pop(ignore, 0)
    missing = [index for index in range(classes) if not pixels[index + reduce_labels]]
    if missing:
        names = [f"{index}" + (f" ({labels[index]})" if index < len(labels) else "") for index in missing[:NAMED]]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        text = f"no pixel of the labels has class {', '.join(names)}{more} of {classes}: mIoU says nothing about it"
        if void:
            share = 100 * void / (void + pixels.total())
            text += f"; {ignore} is read as no class ({share:.2g} % of the pixels): where it is one, write its number"
            text += " instead, or set postprocess.ignore to another number" if ignore < classes + reduce_labels else ""
        warnings.append(text)
    return replace(maps, annotations=annotations, notes=tuple(notes), warnings=tuple(warnings))


def _counts(values: npt.NDArray[np.int32]) -> dict[int, int]:
    """How many pixels have each value."""
    if values.min() < 0 or values.max() >= 1 << 16:
        present, counts = np.unique(values, return_counts=True)
        return dict(zip(present.tolist(), counts.tolist(), strict=True))
    every = np.bincount(values.ravel())
    return {int(value): int(every[value]) for value in np.flatnonzero(every)}


def _white(maps: Collection[set[int]]) -> int | None:
    """The value that stands for class 1 in maps of two classes: white, where no map has it beside 1."""
    for white in WHITE:
        several = any({1, white} <= values for values in maps)
        if set().union(*maps) in ({0, white}, {0, 1, white}) and not several:
            return white
    return None


def with_maps(
    images: Path, labels: Path, suffixes: tuple[str, ...], skipped: Skipped | None
) -> tuple[dict[Path, tuple[Path, Frame]], int]:
    """The images below `images` that have a file of the same relative name, with one of the suffixes, below `labels`:
    the file and how the image lies; and how many have none. Errors as `read_masks`."""
    if not is_dir(labels):
        raise MissingFileError(f"no folder of labels at {labels}", fix="check the path of --annotations")
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
        raise nothing_annotated(images, labels, f"{len(every)} images, and no {names_of} of the same name for any")
    return found, missing


def read_map(path: Path, expected: str, frame: Frame) -> npt.NDArray[Any]:
    """The numbers of a picture of one channel, a palette's indices, for an image that lies as `frame` says.

    Raises:
        MissingFileError, ImageError: unreadable. DataError: a picture of several channels, or of another size.
    """
    image = decode(path, None)
    if image.mode not in MODES:
        raise DataError(f"{path} is no map of numbers", found=f"a picture of mode {image.mode}", expected=expected)
    return fit_map(path, np.asarray(image), frame)


def fit_map(path: Path, values: npt.NDArray[Any], frame: Frame) -> npt.NDArray[Any]:
    """[height, width, ...] of the upright image, of a map of its size, or of that of its pixels as they are stored.

    Raises:
        DataError: it is of another size.
    """
    size = values.shape[1::-1]
    if size == frame.size:
        return values
    if size != frame.stored:
        stored = f", or {'{}x{}'.format(*frame.stored)} as it is stored before EXIF's orientation {frame.orientation}"
        raise DataError(
            f"{path} is not of the size of its image",
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
    segment. crowd: the segments that stand for more instances than could be counted.
    """

    ids: npt.NDArray[np.int32]
    classes: Mapping[int, int]
    crowd: frozenset[int] = field(default=frozenset())


@dataclass(frozen=True)
class PanopticAnnotation:
    """The PNG of one image, and its segments: id -> category id. `frame`: how the image lies; `stored`:
    the PNG is of its pixels before EXIF turns them."""

    png: Path
    frame: Frame
    segments: Mapping[int, int]
    crowd: frozenset[int]
    stored: bool = False

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        facts = (sorted(self.segments.items()), sorted(self.crowd), *((self.frame,) if self.stored else ()))
        return repr(facts).encode() + self.png.read_bytes()

    def turned(self, frame: Frame) -> PanopticAnnotation:
        return replace(self, frame=frame, stored=True)

    def load(self, mapping: Mapping[int, int]) -> PanopticMap:
        """The map with the class numbers of a model: `mapping` is that of `classes.match_categories`.

        Raises:
            ImageError: the PNG cannot be read.
            DataError: it is not of the image's size, or holds ids that are not in the JSON.
        """
        pixels = np.asarray(decode(self.png, 3), np.int32)
        pixels = fit_map(self.png, pixels, Frame(self.frame.stored, 1) if self.stored else self.frame)
        pixels = turn_map(pixels, self.frame.orientation) if self.stored else pixels
        ids = pixels @ np.array([1, 256, 65536], np.int32)
        unknown = sorted({int(i) for i in np.unique(ids)} - set(self.segments) - {NO_SEGMENT})
        if unknown:
            raise DataError(
                f"{self.png} holds segments that its JSON does not know",
                found=f"ids {', '.join(map(str, unknown[:5]))}",
                expected="the ids of segments_info, or 0 for no segment",
            )
        return PanopticMap(ids, {id: mapping[category] for id, category in self.segments.items()}, self.crowd)


PanopticSet = AnnotatedSet[PanopticAnnotation]


def read_panoptic(images: Path, labels: Path, skipped: Skipped | None = None) -> PanopticSet:
    """The images below `images` that the JSON file `labels` annotates. The PNGs are read by `load`, one by one.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: `images`, `labels` or a PNG is not there.
        DataError: the JSON file has another form, or refers to other images, sizes or categories.
        ImageError: an unreadable image and `skipped` is None.
    """
    file = read_coco(images, labels, KEYS)
    annotated = replace(file, entries={path: file.entries[path] for path in file.annotations})
    return annotated.annotated(lambda path, frame, entries: _annotation(file, entries, frame), skipped)


def _annotation(file: CocoFile, entries: Sequence[tuple[int, Mapping[str, Any]]], frame: Frame) -> PanopticAnnotation:
    labels, entry = file.labels, entries[0][1]
    if len(entries) > 1:
        raise DataError(
            f"{labels}: an image has two annotations that differ",
            found=" and ".join(f"annotations[{index}]" for index, _ in entries[:2]),
            expected="one for each image",
            fix="take out the one that is wrong",
        )
    png = labels.with_suffix("") / entry["file_name"].replace("\\", "/")
    if not png.is_file():
        raise MissingFileError(
            f"no segment map at {png}", fix=f"put the PNG files into a folder {labels.stem}/ beside {labels.name}"
        )
    known = {category.id for category in file.categories}
    segments: dict[int, int] = {}
    crowd: set[int] = set()
    for index, segment in enumerate(entry["segments_info"]):
        where = f"{entry['file_name']}, segments_info[{index}]"
        check_keys(labels, where, segment, ("id", "category_id"))
        if segment["category_id"] not in known:
            raise DataError(
                f"{labels}: {where} is of a category that is not listed", found=f"category_id {segment['category_id']}"
            )
        before = segments.setdefault(segment["id"], segment["category_id"])
        if before != segment["category_id"]:
            raise DataError(
                f"{labels}: {where} has an id that is there before",
                found=f"id {segment['id']} of the categories {before} and {segment['category_id']}",
                expected="an id for each segment of an image",
                fix="correct the one that is wrong",
            )
        if segment.get("iscrowd"):
            crowd.add(segment["id"])
    return PanopticAnnotation(png, frame, segments, frozenset(crowd))


# --- Images of good and of defective parts in the layout of MVTec AD --------------------------------------------------
# ROOT/train/good/*.png                     normal images, to fit and to calibrate on
# ROOT/test/good/*.png                      normal images to judge by
# ROOT/test/DEFECT/NAME.png                 anomalous ones, by the kind of the defect
# ROOT/ground_truth/DEFECT/NAME_mask.png    where the defect is: not 0


GOOD = "good"
NORMAL, TEST, TRUTH = f"train/{GOOD}", "test", "ground_truth"
LAYOUT = f"{NORMAL}, {TEST}/{GOOD}, {TEST}/DEFECT and {TRUTH}/DEFECT, as MVTec AD has them"


@dataclass(frozen=True)
class DefectAnnotation:
    """One test image, which lies as `frame` says: the kind of its defect, None of a good part, and the PNG that shows
    where it is, None where no mask is known."""

    defect: str | None
    mask: Path | None
    frame: Frame

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return repr(self.defect).encode() + (self.mask.read_bytes() if self.mask is not None else b"")

    def load(self) -> npt.NDArray[np.bool_] | None:
        """bool [height, width], where the defect is; None where that is not known.

        Raises:
            ImageError: the mask cannot be read. DataError: it is of another size than its image, or shows nothing.
        """
        if self.defect is None:
            return np.zeros(self.frame.size[::-1], np.bool_)
        if self.mask is None:
            return None
        values = read_map(self.mask, "a PNG of one channel, not 0 where the defect is", self.frame)
        found = np.asarray(values != 0)
        if not found.any():
            raise DataError(
                f"{self.mask} shows no defect", found="0 in all pixels", expected=f"a pixel that is part of {self.defect}"
            )
        return found


DefectSet = AnnotatedSet[DefectAnnotation]


def normal_folder(path: Path) -> Path:
    """The folder of normal images that a user means: train/good of MVTec AD's layout, or the folder itself."""
    return path / NORMAL if (path / NORMAL).is_dir() else path


def read_mvtec(root: Path, skipped: Skipped | None = None) -> tuple[Sequence[Sample], DefectSet]:
    """The normal images of train/good, and the test images with their defects. Masks are read by `load`.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: no such folder. DataError: another layout, a mask is missing, or an image is in both parts.
        ImageError: as above.
    """
    if not root.is_dir():
        raise MissingFileError(f"no image folder at {root}", fix="check the path of the images")
    lacking = [name for name in (NORMAL, f"{TEST}/{GOOD}") if not (root / name).is_dir()]
    if lacking:
        raise DataError(f"{root} has another layout", found=f"no {' and no '.join(lacking)}", expected=LAYOUT)
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
            found=f"{missing[0]}, and no {_names(root, missing[0])[0]}",
            expected="a mask for each image of a defect, or no folder ground_truth at all",
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
    """Choose calibration images among the normal ones and evaluation images among those of test, as `folder.split`
    does within a part.

    Raises:
        DataError: fewer images than asked for; or those to evaluate on are all good, or all defective.
    """
    counts = len(normal), len(test.samples)
    chosen, places = split_places((root / NORMAL, root / TEST), counts, calibration, evaluation, seed)
    rest = tuple(test.samples[i] for i in places)
    defective = sum(test.annotations[sample.path].defect is not None for sample in rest)
    if defective in (0, len(rest)):
        raise DataError(
            "the images to evaluate on are all of one kind, and AUROC compares two",
            found=f"{len(rest) - defective} good and {defective} defective images",
            expected="some of each",
            fix="add images below test, or evaluate on all of them (data.evaluation.images: all)",
        )
    return DataSplit(tuple(normal[i] for i in chosen), rest, ())


def refuse_contents(seen: Sequence[Path], contents: set[str], where: str, other: str) -> None:
    """Raise DataError where the SHA-256 of a file is among `contents`: what is judged must not be known before."""
    shared = [path for path in seen if file_sha256(path) in contents]
    if not shared:
        return
    more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
    raise DataError(
        f"{where} holds images that are among {other} too",
        found=", ".join(map(str, shared[:3])) + more,
        expected="images that the model has never seen: its distances to what it knows are 0",
        fix=f"take them out of {other}",
    )


def _mask(root: Path, path: Path) -> Path | None:
    return next((name for name in _names(root, path) if name.is_file()), None)


def _names(root: Path, path: Path) -> list[Path]:
    """Where the mask of a test image may lie: MVTec AD's name first, then the image's own."""
    place = root / TRUTH / path.relative_to(root / TEST).parent
    return [place / f"{path.stem}_mask.png", place / f"{path.stem}.png"]
