"""A data set of images as a list of samples, and its split into calibration and evaluation images.

images/<class>/x.jpg            labels: folders; the sorted folder names are the classes of the data
images/x.jpg                    labels: none
images/calibration/<class>/...  a folder with `calibration` and `evaluation` has its own split
images/evaluation/<class>/...

`data.classes` maps them to a model's classes. Hidden files and folders (.ipynb_checkpoints, ._x.jpg) are ignored.
Instead of image files there may be tars, tables, or a list of URIs (`containers`), which have their own labels.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from vitdeploy.data.containers.find import EXPECTED, find_containers
from vitdeploy.data.containers.held import HeldImage
from vitdeploy.data.containers.listing import ClassKind, DataClasses, Holder, Listing, NameColumn, joined
from vitdeploy.errors import DataError, ImageError, MissingFileError, quoted
from vitdeploy.paths import is_dir, name_bytes, shown_name
from vitdeploy.remote import shown_uri
from vitdeploy.runtime import preprocess, topdown

# Files next to images that are not images.
TEXTS = {".txt", ".json", ".csv", ".xml", ".yaml", ".yml", ".md", ".html", ".npy", ".npz", ".db", ".ini"}
OWN_SPLIT = ("calibration", "evaluation")
USUAL_CALIBRATION = 128
# Usual names for parts of a data set. Used as classes, they would give meaningless numbers.
PARTS = {"train", "training", "val", "valid", "validation", "test", "testing", "eval", *OWN_SPLIT}

Labels = Literal["folders", "none"]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One image with the index of its class (None without labels). `path`: its file; or, if it is `held` elsewhere, its
    name below the data folder. `box`: the region to use, (left, top, right, bottom) in pixels, for models that see one
    object; None for the whole image."""

    path: Path
    label: int | None
    box: topdown.Box | None = None
    held: HeldImage | None = field(default=None, kw_only=True)

    @property
    def shown(self) -> str:
        """The name for messages."""
        uri = None if self.held is None else self.held.uri
        return str(self.path) if uri is None else shown_uri(uri)

    def name_below(self, root: Path) -> str:
        """Return its path below a folder, with slashes; its name if it is not there."""
        if self.held is not None and self.held.uri is not None:
            return self.shown
        return self.path.relative_to(root).as_posix() if self.path.is_relative_to(root) else self.path.name

    def content(self) -> bytes:
        """Return its bytes. Raises OSError for a file, and the errors of `HeldImage.read`."""
        return self.path.read_bytes() if self.held is None else self.held.read(self.shown)


class Samples(Sequence[Sample]):
    """Images below a folder in little memory: 20 bytes each besides its name. A `Sample` is created on access.

    `root`: the folder. `places`: int64 [n], the index of each in the order of `scan`. `labels`: int32 [n], or None.
    `left_out`: other files below the folder, counted by suffix.
    """

    def __init__(self, root: Path, groups: Iterable[tuple[int | None, Sequence[str]]]) -> None:
        """`groups`: a label or None, and the names below `root` of its images."""
        self.root, self._names = root, NameColumn()
        counts, known = list[int](), list[int]()
        for label, names in groups:
            for name in names:
                self._names.add(name)
            known += [] if label is None else [label]
            counts.append(len(names))
        self._labels = np.repeat(np.array(known, np.int32), counts) if known else None
        self._holder: Holder | None = None
        self.places: Ints = np.arange(sum(counts))
        self.left_out = ""

    @classmethod
    def listed(cls, listing: Listing) -> Samples:
        """Return the images of a listing, in its order; 20 more bytes each."""
        found = cls(listing.root, [])
        found._names, found._labels, found._holder = listing.names, listing.labels, listing.holder
        found.places = np.arange(len(listing.names))
        return found

    @classmethod
    def of(cls, samples: Sequence[Sample], root: Path) -> Samples:
        """Return image files below `root` without labels, in their order."""
        names = [sample.path.relative_to(root).as_posix() for sample in samples]
        order = sorted(range(len(names)), key=names.__getitem__)
        found = cls(root, [(None, [names[i] for i in order])])
        found.places = np.argsort(np.array(order, np.int64))
        return found

    @property
    def labels(self) -> npt.NDArray[np.int32] | None:
        return None if self._labels is None else self._labels[self.places]

    @property
    def names(self) -> Iterator[str]:
        """The path of each below `root`, with slashes."""
        return map(self._names.__getitem__, self.places.tolist())

    def pick(self, indices: Ints | slice) -> Samples:
        """Return a selection, in that order; the names are shared."""
        picked = object.__new__(Samples)
        picked.__dict__ |= {**self.__dict__, "places": self.places[indices]}
        return picked

    def packed(self) -> Samples:
        """Return a copy without the names of other samples, to send to another process; `places` are renumbered."""
        labels, names = self.labels, list(self.names)
        samples = Samples(self.root, [(None, names)])
        samples._labels = labels
        samples._holder = None if self._holder is None else self._holder.picked(self.places)
        return samples

    def renumbered(self, index: Sequence[int]) -> Samples:
        """Return the samples with label `index[i]` for i; unchanged without labels."""
        found = self.pick(slice(None))
        if self._labels is not None:
            found._labels = np.array(index, np.int32)[self._labels]
        return found

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Samples: ...

    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return self.pick(index)
        place = int(self.places[index])
        label = None if self._labels is None else int(self._labels[place])
        name = self._names[place]
        return Sample(self.root / name, label, held=None if self._holder is None else self._holder.at(place, name))


@dataclass(frozen=True)
class DataSplit:
    """Calibration images, disjoint evaluation images, and the class names.

    `empty`: classes without images in the folder. `kind`: the kind of names. `notes`: skipped and repaired items.
    """

    calibration: Sequence[Sample]
    evaluation: Sequence[Sample]
    classes: tuple[str, ...] = ()
    empty: frozenset[str] = frozenset()
    kind: ClassKind = "folders"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ListedSplit(DataSplit):
    """A split of data of any size."""

    calibration: Samples
    evaluation: Samples


def scan(folder: Path, labels: Labels) -> tuple[Samples, tuple[str, ...]]:
    """Return all images below `folder`, sorted by class and file name, with the class names.

    Raises:
        MissingFileError: no such folder.
        DataError: no image in it; or labels are class folders, which are missing or are parts of a data set.
    """
    if not is_dir(folder):
        raise MissingFileError(f"no image folder at {folder}", expected=EXPECTED, fix="check the path of the images")
    classes = _class_folders(folder) if labels == "folders" else ()
    others = Counter[str]()
    if labels == "folders" and not classes:
        raise DataError(
            f"{folder} has no class folders",
            found=f"{len(_images(folder, '.', others))} images directly in it",
            expected="one subfolder per class",
            fix="sort the images into class folders, or set data.labels to none",
        )
    if labels == "folders":
        _check_parts(folder, classes)
        samples = Samples(folder, ((i, _images(folder, name, others)) for i, name in enumerate(classes)))
        beside = sum(_is_image(str(folder), entry.name) for entry in folder.iterdir())
        others.update({"images outside the class folders": beside} if beside else {})
    else:
        samples = Samples(folder, [(None, _images(folder, ".", others))])
    samples.left_out = _counted(others)
    if not samples:
        raise DataError(
            f"{folder} contains no images",
            found=other_files(folder) or "no files",
            expected=f"files ending in {', '.join(sorted(preprocess.SUFFIXES))}",
            fix="check the folder, or convert its files",
        )
    return samples, tuple(map(shown_name, classes))


def list_images(path: Path, labels: Labels) -> tuple[Samples, DataClasses]:
    """Return all images of a data set of any kind, with its classes: as `scan`, but including `containers`.

    Raises:
        MissingFileError, DataError: as `scan` and `containers.find`.
        MissingPackageError: the package that reads it is not installed.
    """
    containers = find_containers(path, preprocess.SUFFIXES)
    if containers is None or (containers.beside and labels == "none"):
        samples, names = scan(path, labels)
        return samples, DataClasses(names)
    listing = containers.listed(labelled=labels == "folders")
    if not len(listing.names):
        raise DataError(f"{path} contains no images", found="no samples, rows or lines", expected="at least one image")
    classes = listing.classes
    if containers.beside:
        name, left = containers.files[0].name, len(scan(path, "none")[0]) - len(listing.names)
        notes = (f"labels: read from {name} next to the images", *classes.notes)
        if left > 0:
            notes = (*notes, f"labels: images not listed in {name}, ignored: {left:,}")
        classes = replace(classes, notes=notes)
    return Samples.listed(listing), classes


def has_container_labels(path: Path) -> bool | None:
    """Whether images in tars, tables or a list have labels; None for image files. Errors as `list_images`."""
    containers = find_containers(path, preprocess.SUFFIXES)
    return None if containers is None else containers.has_labels


def other_files(folder: Path, known: Set[str] = frozenset()) -> str:
    """Return the files in a folder without a `known` suffix, counted by suffix: "12 .heic, 1 .txt"; "" for none."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return _counted(Counter(path.suffix.lower() or path.name for path in files if path.suffix.lower() not in known))


def _counted(files: Counter[str]) -> str:
    more = f", {len(files) - 5} more kinds" if len(files) > 5 else ""
    return ", ".join(f"{count} {shown_name(suffix)}" for suffix, count in files.most_common(5)) + more


def _class_folders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of subfolders, without hidden ones such as .ipynb_checkpoints."""
    return tuple(sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")))


def _check_parts(folder: Path, classes: tuple[str, ...]) -> None:
    """Raise DataError if the folders are the parts of a data set, each with class folders inside."""
    if all(name.lower() in PARTS and _class_folders(folder / name) for name in classes):
        part = next((name for name in classes if name.lower().startswith(("val", "eval", "test"))), classes[0])
        raise DataError(
            f"the folders in {folder} are parts of a data set, not classes",
            found=", ".join(classes),
            expected="one subfolder per class, or `calibration` and `evaluation` with class folders inside",
            fix=f"pass one of them: {quoted(folder / part)}",
        )


def _images(root: Path, folder: str, others: Counter[str]) -> list[str]:
    """Return the names below `root` of all images in one of its folders ("." is `root`), in order of their path parts.
    Links to folders are not followed. `others` counts other files by suffix, except text files, which are labels."""
    top = os.path.join(root, folder)  # noqa: PTH118 - not a Path for each of a million files
    found = []
    for place, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(place, root)
        prefix = "" if below == "." else f"{below.replace(os.sep, '/')}/"
        images = [name for name in files if _is_image(place, name)]
        found += [prefix + name for name in images]
        if len(images) < len(files):
            endings = (os.path.splitext(name)[1].lower() for name in files if not name.startswith("."))  # noqa: PTH122
            others.update(ending for ending in endings if ending and ending not in preprocess.SUFFIXES | TEXTS)
    return sorted(found, key=lambda name: os.path.normcase(name).replace(os.sep, "\0"))


def _is_image(place: str, name: str) -> bool:
    known = os.path.splitext(name)[1].lower() in preprocess.SUFFIXES and not name.startswith(".")  # noqa: PTH122
    return known and os.path.isfile(os.path.join(place, name))  # noqa: PTH113, PTH118


def split(
    folder: Path, labels: Labels, *, calibration: int | None, evaluation: int | Literal["all"], seed: int
) -> DataSplit:
    """Choose calibration and evaluation images, as `list_split`, but with all samples in memory."""
    found = list_split(folder, labels, calibration=calibration, evaluation=evaluation, seed=seed)
    return DataSplit(**{**vars(found), "calibration": tuple(found.calibration), "evaluation": tuple(found.evaluation)})


def list_split(
    folder: Path, labels: Labels, *, calibration: int | None, evaluation: int | Literal["all"], seed: int
) -> ListedSplit:
    """Choose calibration and evaluation images.

    Files in sorted order (in containers: members, rows and lines in file order) are permuted by
    `numpy.random.RandomState(seed)`, whose stream is frozen for all versions of numpy (NEP 19; that of `default_rng` is
    not); the first `calibration` of them (None: `usual_calibration`) calibrate, the next `evaluation` (or all others)
    evaluate. A folder with its own split is sampled within each part, and has the classes of both.

    Raises:
        MissingFileError, DataError, MissingPackageError: as `list_images`; fewer images than requested.
    """
    if has_own_split(folder):
        scanned = [list_images(folder / part, labels) for part in OWN_SPLIT]
        classes = joined([known for _, known in scanned], folder)
        places = {name: index for index, name in enumerate(classes.names)}
        first, second = (samples.renumbered([places[name] for name in known.names]) for samples, known in scanned)
        chosen, rest = split_places((folder, folder), (len(first), len(second)), calibration, evaluation, seed)
    else:
        first, classes = list_images(folder, labels)
        second = first
        chosen, rest = split_places((folder, folder), len(first), calibration, evaluation, seed)
    seen = {int(label) for part in (first, second) if part.labels is not None for label in np.unique(part.labels)}
    empty = frozenset(name for index, name in enumerate(classes.names) if index not in seen)
    others = ", ".join(dict.fromkeys(part.left_out for part in (first, second) if part.left_out))
    notes = (*([f"{folder}: ignored {others}"] if others else []), *classes.notes)
    return ListedSplit(first.pick(chosen), second.pick(rest), classes.names, empty, classes.kind, notes)


def split_places(
    folders: tuple[Path, Path],
    counts: int | tuple[int, int],
    calibration: int | None,
    evaluation: int | Literal["all"],
    seed: int,
) -> tuple[Ints, Ints]:
    """Return the indices of the images that `list_split` chooses for each part, among `counts`: one for both parts, or
    one each.

    Raises:
        DataError: fewer images than requested; it names `folders`.
    """
    generator = np.random.RandomState(seed)
    if isinstance(counts, int):
        calibration = usual_calibration(counts) if calibration is None else calibration
        enough(folders[0], counts - 1, calibration, "calibration (and at least one more to evaluate)")
        chosen, rest = np.split(generator.permutation(counts), [calibration])
    else:
        calibration = usual_calibration(counts[0], own=True) if calibration is None else calibration
        enough(folders[0], counts[0], calibration, "calibration")
        chosen, rest = generator.permutation(counts[0])[:calibration], generator.permutation(counts[1])
    if evaluation != "all":
        enough(folders[1], len(rest), evaluation, "evaluation")
        rest = rest[:evaluation]
    return chosen, rest


def has_own_split(folder: Path) -> bool:
    """Whether a folder has two parts, `calibration` and `evaluation`."""
    return all((folder / part).is_dir() for part in OWN_SPLIT)


def usual_calibration(count: int, *, own: bool = False) -> int:
    """Return the default number of calibration samples out of `count`: 128, or fewer if an `own` part has fewer.
    Without an own part, a quarter of fewer than 512, so that enough are left to evaluate on."""
    return min(USUAL_CALIBRATION, count if own else max(1, count // 4))


def enough(folder: Path, found: int, expected: int, what: str) -> None:
    """Raise DataError if there are fewer than `expected` images."""
    if found < expected:
        raise DataError(
            f"{folder} has too few images for {what}",
            found=f"{max(found, 0)} images",
            expected=f"{expected} images",
            fix="add images, or request fewer (--num-samples, data.calibration.images, data.evaluation.images)",
        )


def contents(samples: Sequence[Sample]) -> list[str]:
    """Return the SHA-256 of each image's bytes and box; a unique value for an unreadable image."""
    found = []
    for index, sample in enumerate(samples):
        try:
            content = hashlib.sha256(sample.content()).hexdigest()
        except (OSError, ImageError):
            content = f"unread {index}"
        found.append(content if sample.box is None else f"{content}\t{sample.box}")
    return found


def first_of_copies(samples: Sequence[Sample], order: Ints, contents: Iterable[str]) -> Ints:
    """Return int64 [n]: for each image the index of the first image with the same content in `order`; `contents` in
    that order. An unreadable file is its own content. Takes a few bytes per image."""
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    marks = np.fromiter((int.from_bytes(digest[:8], "big") for digest in digests), np.uint64)
    _, places, which = np.unique(marks, return_index=True, return_inverse=True)
    every, first = np.arange(len(marks)), np.empty(len(marks), np.int64)
    first[order] = np.asarray(order, np.int64)[places[which]]
    broken = [index for index in np.unique(first[first != every]).tolist() if not _is_whole(samples[index])]
    return np.where(np.isin(first, broken), every, first)


def _is_whole(sample: Sample) -> bool:
    try:
        preprocess.image_frame(sample.path if sample.held is None else sample.content(), sample.shown)
    except (OSError, ImageError, MissingFileError):
        return False
    return True


def digest(samples: Sequence[Sample], root: Path, known: Sequence[str] | None = None) -> str:
    """Return the SHA-256 over the relative paths, labels and bytes of the images, in order; `known`: their
    `contents`."""
    total = hashlib.sha256()
    for sample, content in zip(samples, known or contents(samples), strict=True):
        total.update(name_bytes(f"{sample.name_below(root)}\t{sample.label}\t{content}\n"))
    return total.hexdigest()


# --- Cut a sorted list of names into shards where the names themselves say so -----------------------------------------
# Adding or removing one name changes only a few shards.
#
# This is content-dependent chunking, as of backups and file systems that store equal parts of files once
# (Muthitacharoen, Chen and Mazieres 2001, "A low-bandwidth network file system"), with names instead of bytes. A cut
# follows each name whose hash is the least among those of `WINDOW` names before and after it, the local extreme of
# Bjorner, Blass and Gurevich 2010 ("Content-dependent chunking for differential compression, the local maximum
# approach"). With a threshold on the hash, as in the former, minimum and maximum sizes must be enforced, and one more
# name can move all cuts after it; here it moves only cuts less than a window away.


# Shards contain more than WINDOW names, 2 * WINDOW + 1 on average, and at most MOST.
WINDOW, MOST = 256, 2048

Hashes = npt.NDArray[np.uint64]


def cut(names: Iterable[str], window: int = WINDOW, most: int = MOST) -> list[range]:
    """Return the shards of a list of names, as ranges of its indices: in order, and equal on every machine.

    One name more or less changes at most three shards, or more where a stretch without cuts exceeds `most` and is
    divided. A list of up to 2 * `window` names is one shard.

    Args:
        window: every shard has more names than that; the last one may have exactly that many, or all names of a shorter
            list.
        most: at least 4 * `window` + 4.
    """
    if window < 1 or most < 4 * window + 4:
        raise ValueError(f"shards of at most {most} names with windows of {window}")
    hashes = _hashes(names)
    bounds = [0, *_cuts(hashes, window), len(hashes)]
    found: list[range] = []
    for start, end in itertools.pairwise(bounds):
        found += _divided(hashes, range(start, end), most)
    return [shard for shard in found if shard]


def _hashes(names: Iterable[str]) -> Hashes:
    """Return the first 64 bits of each name's BLAKE2b; invalid UTF-8 in a name counts by its bytes."""
    digests = (hashlib.blake2b(name_bytes(name), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def _cuts(hashes: Hashes, window: int) -> list[int]:
    """Return the index after the last name of each shard. Two such names are more than a window apart, so any window +
    1 names contain at most one: the one with the smallest hash."""
    found = []
    for start in range(0, len(hashes), window + 1):
        index = start + int(hashes[start : start + window + 1].argmin())
        if window <= index < len(hashes) - window:
            around = hashes[index - window : index + window + 1]
            if int((around <= hashes[index]).sum()) == 1:
                found.append(index + 1)
    return found


def _divided(hashes: Hashes, shard: range, most: int) -> list[range]:
    """Return the shard; if it is longer than `most`, split it recursively into two parts of at least a quarter each."""
    if len(shard) <= most:
        return [shard]
    quarter = len(shard) // 4
    inner = hashes[shard.start + quarter : shard.stop - quarter]
    middle = shard.start + quarter + int(inner.argmin()) + 1
    both = (range(shard.start, middle), range(middle, shard.stop))
    return [part for each in both for part in _divided(hashes, each, most)]
