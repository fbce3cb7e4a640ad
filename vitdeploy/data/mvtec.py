"""Images of good and of defective parts in the layout of MVTec AD (Bergmann et al., CVPR 2019):

ROOT/train/good/*.png                     normal images, to fit and to calibrate on
ROOT/test/good/*.png                      normal images to judge by
ROOT/test/DEFECT/NAME.png                 anomalous ones, by the kind of the defect
ROOT/ground_truth/DEFECT/NAME_mask.png    where the defect is: not 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.bundle.read import file_sha256
from vitdeploy.data.annotations import AnnotatedSet, frame_or_skip, upright_notes
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.folder import DataSplit, Sample, scan, split_places
from vitdeploy.data.masks import read_map
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.runtime.preprocess import Frame

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
                f"{self.mask} shows no defect", found="0 in all pixels", wanted=f"a pixel that is part of {self.defect}"
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
        raise DataError(f"{root} has another layout", found=f"no {' and no '.join(lacking)}", wanted=LAYOUT)
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
            wanted="a mask for each image of a defect, or no folder ground_truth at all",
        )
    refuse_shared(list(found), [sample.path for sample in normal], f"{root / TEST}", f"{root / NORMAL}")
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
            wanted="some of each",
            fix="add images below test, or evaluate on all of them (data.evaluation.images: all)",
        )
    return DataSplit(tuple(normal[i] for i in chosen), rest, ())


def refuse_shared(seen: Sequence[Path], known: Sequence[Path], where: str, other: str) -> None:
    """Raise DataError where a file of `seen` has the content of one of `known`."""
    contents = {file_sha256(path) for path in known}
    refuse_contents(seen, contents, where, other)


def refuse_contents(seen: Sequence[Path], contents: set[str], where: str, other: str) -> None:
    """Raise DataError where the SHA-256 of a file is among `contents`: what is judged must not be known before."""
    shared = [path for path in seen if file_sha256(path) in contents]
    if not shared:
        return
    more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
    raise DataError(
        f"{where} holds images that are among {other} too",
        found=", ".join(map(str, shared[:3])) + more,
        wanted="images that the model has never seen: its distances to what it knows are 0",
        fix=f"take them out of {other}",
    )


def _mask(root: Path, path: Path) -> Path | None:
    return next((name for name in _names(root, path) if name.is_file()), None)


def _names(root: Path, path: Path) -> list[Path]:
    """Where the mask of a test image may lie: MVTec AD's name first, then the image's own."""
    place = root / TRUTH / path.relative_to(root / TEST).parent
    return [place / f"{path.stem}_mask.png", place / f"{path.stem}.png"]
