"""Files with additional model inputs per image: FOLDER/NAME/STEM.npy or .png, where STEM is the path of the image below
the image folder, without its suffix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy.typing as npt

from vitdeploy.bundle.read import file_sha256
from vitdeploy.data.containers.find import find_containers, root_of
from vitdeploy.data.folder import Sample
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_dir, is_file
from vitdeploy.runtime.inputs import SUFFIXES, read_input
from vitdeploy.runtime.preprocess import SUFFIXES as IMAGE_SUFFIXES
from vitdeploy.spec import TensorSpec


@dataclass(frozen=True)
class InputFiles:
    """The files below `folder` for the additional inputs `tensors` of images below `root`."""

    folder: Path
    root: Path
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of_images(cls, folder: Path | None, images: Path, tensors: tuple[TensorSpec, ...]) -> InputFiles | None:
        """Return the input files; None for a model that takes only images.

        Raises:
            DataError: inputs that the model does not have, no folder for its inputs, or images that are not files.
            MissingFileError: no such folder.
        """
        if not tensors and folder is None:
            return None
        names = [tensor.name for tensor in tensors]
        if not tensors or folder is None:
            raise DataError(
                "the model needs additional inputs" if tensors else "the model takes only images",
                found=f"inputs at {folder}" if folder is not None else "only images",
                expected=f"{', '.join(map(str, tensors))} for each image" if tensors else "no additional inputs",
                fix=f"data.inputs of a recipe, or --inputs: a folder with {names[0]}/STEM.npy for each image"
                if tensors
                else "remove data.inputs (--inputs)",
            )
        for place in [folder / name for name in names]:
            if not is_dir(place):
                raise MissingFileError(
                    f"no folder {place} with the input {place.name} of each image",
                    expected="a .npy or .png for each image, named by its path below the image folder",
                    fix="check data.inputs (--inputs): it names the parent of this folder",
                )
        if not is_dir(images) or find_containers(images, IMAGE_SUFFIXES) is not None:
            raise DataError(
                "additional inputs require a folder of image files",
                found=f"tars, tables or a list at {images}",
                expected="image files, whose names identify the input files",
                fix="save the images as files in a folder",
            )
        return cls(folder, root_of(images), tensors)

    def of(self, sample: Sample) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of one image, by name, without a batch axis.

        Raises:
            MissingFileError: an input has no file. ImageError, TensorError: as `read_input`.
        """
        return {tensor.name: read_input(self._file(sample, tensor), tensor) for tensor in self.tensors}

    def each(self, samples: Sequence[Sample]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Return an iterator over the arrays of several images, one image in memory at once; errors as `of`."""
        return map(self.of, samples)

    def content(self, sample: Sample) -> str:
        """Return a digest of the inputs. Reads all files, so that invalid ones are reported before any work; errors as
        `of`."""
        self.of(sample)
        return " ".join(file_sha256(self._file(sample, tensor)) for tensor in self.tensors)

    def require_own(self, samples: Iterable[Sample]) -> None:
        """Raise DataError if two images would share input files."""
        known: dict[str, str] = {}
        for sample in samples:
            stem = self._stem(sample)
            if known.setdefault(stem, sample.shown) != sample.shown:
                raise DataError(
                    f"two images share the input files {stem}.npy",
                    found=f"{known[stem]} and {sample.shown}",
                    expected="a unique name, without the suffix, for each image",
                )

    def _stem(self, sample: Sample) -> str:
        return PurePosixPath(sample.name_below(self.root)).with_suffix("").as_posix()

    def _file(self, sample: Sample, tensor: TensorSpec) -> Path:
        stem = self._stem(sample)
        files = [path for suffix in SUFFIXES if is_file(path := self.folder / tensor.name / f"{stem}{suffix}")]
        if len(files) == 1:
            return files[0]
        expected = self.folder / tensor.name / f"{stem}.npy"
        if files:
            raise DataError(
                f"{sample.shown} has two files for the input {tensor.name}",
                found=" and ".join(map(str, files)),
                expected="one file",
            )
        raise MissingFileError(
            f"{sample.shown} has no file for the input {tensor.name}",
            found=f"neither {expected} nor {expected.with_suffix('.png').name} next to it",
            expected=f"{tensor.dtype} {list(tensor.shape[1:])}, without the batch axis",
            fix="add the file, or remove the image",
        )
