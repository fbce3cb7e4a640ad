"""Images for calibration and evaluation, from any source: a folder, paths, memory, a DataLoader, a Dataset.

Images in memory are written to lossless files once their model is known, so that all later steps read the same bytes,
whatever the source.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitdeploy.api.values import unnamed_folder
from vitdeploy.data.containers.listing import number_of
from vitdeploy.errors import DataError
from vitdeploy.runtime import preprocess, runner
from vitdeploy.spec import LabelKind

if TYPE_CHECKING:
    from PIL import Image

    from vitdeploy.spec import PreprocessSpec
    from vitdeploy.tasks.adapter import Setting

# Usual names of the columns of data sets.
IMAGE_KEYS = ("image", "img", "images", "pixel_values", "x")
LABEL_KEYS = ("label", "labels", "fine_label", "y", "target")
# Maximum distance of de-normalised pixels from whole numbers; float32 keeps them within 1e-4.
ROUNDING = 0.02
FASTEST = 1  # zlib level: the files are read only once or twice


@dataclass(frozen=True)
class Images:
    """Images for calibration and evaluation; `vitdeploy.images` makes one.

    `path` is a folder (or an .npz of tokens) with labels of that `kind`, in `annotations` if that is a file; None for
    images in memory. Their `rows` are pairs of an image and its class (an index, a name, or None), and `names` are the
    class names by index. `texts` and `template` are for models that take texts, `inputs` for models that take more than
    an image.
    """

    path: Path | None
    kind: LabelKind | None = None
    annotations: Path | None = None
    rows: Iterable[tuple[Any, int | str | None]] = ()
    names: tuple[str, ...] = ()
    texts: Path | None = None
    template: str | None = None
    inputs: Path | None = None
    _placed: dict[Any, tuple[Path, LabelKind]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def place(self, setting: Setting) -> tuple[Path, LabelKind]:
        """Return the folder to read and the kind of its labels. Images in memory are first written there, as the model
        of `setting` reads them.

        Raises:
            DataError: no images; values that are not images, images normalised differently from the model's
                preprocessing, or classes that the model does not have.
        """
        if self.path is not None:
            from vitdeploy.tasks.images import labels_in

            return self.path, self.kind or ("none" if self.path.suffix == ".npz" else labels_in(self.path))
        key = (setting.preprocess, setting.labels, setting.classes)
        if key not in self._placed:  # a generator gives its images once
            self._placed[key] = self._written(setting)
        return self._placed[key]

    def _written(self, setting: Setting) -> tuple[Path, LabelKind]:
        folder, rows = unnamed_folder("images"), iter(self.rows)
        first = next(rows, None)
        if first is None:
            raise DataError("the source has no images", found="0 images", expected="at least one image")
        classes = None if first[1] is None else _ClassFolders(self.names, setting)
        count = 0
        for count, (image, label) in enumerate(itertools.chain([first], rows), 1):
            if (label is None) != (classes is None):
                raise DataError(
                    "only some of the images have a label",
                    found=f"image {count} differs from image 1",
                    expected="labels for all images or for none",
                )
            home = folder if classes is None or label is None else folder / classes.name(label)
            _write(image, home, count, setting.images)
        if classes is not None:
            classes.complete(folder)
        return folder, "none" if classes is None else "folders"


ImagesLike = Images | str | Path | Iterable[Any]


def images(
    source: ImagesLike,
    labels: str | Sequence[int | str] | None = None,
    *,
    annotations: str | Path | None = None,
    inputs: str | Path | None = None,
    texts: str | Path | Sequence[str] | None = None,
    template: str | None = None,
) -> Images:
    """Describe images for calibration and evaluation, from any source.

    Args:
        source: the path of a folder, WebDataset tars, Parquet files, a saved Hugging Face data set or a file that lists
            URIs (docs/recipes.md); a list of paths, PIL images, or uint8 arrays [height, width, channels]; a
            `torch.utils.data.DataLoader`, or a torchvision or Hugging Face data set. Float tensors from a DataLoader
            must be resized, cropped and normalised as the model's preprocessing does it; this is checked.
        labels: for a folder, the source of its labels: "folders", "none", "yolo", "coco", "panoptic", "masks", "depth",
            "texts", "mvtec", "columns", "pairs" (default: class folders, or the labels in tars, tables and lists). For
            a list, the class of each image: the model's index, or its name. A data set has its own labels.
        annotations: the folder of YOLO label files, the COCO JSON file, the folder of maps, the JSON list of texts, or
            the table of columns or of pairs.
        inputs: for a model that takes more than the image, the folder with NAME/STEM.npy or .png for each: NAME is the
            name of the input, STEM the path of the image below `source`.
        texts: for an image-text model, the texts to compare images with: a list, or a file with one text per line.
        template: turns the name of a class folder into a text, with {} for the name. Default: "a photo of a {}.".

    Raises:
        DataError: labels that do not fit the images, or an invalid source.

    >>> import vitdeploy as vd
    >>> import numpy as np
    >>> grey = [np.full((32, 32, 1), shade, np.uint8) for shade in (0, 128, 255)]
    >>> vd.images(grey, labels=[0, 1, 1]).names
    ()
    """
    if texts is not None or template is not None or inputs is not None:
        found = images(source, labels, annotations=annotations)
        place = Path(inputs) if inputs is not None else None
        return dataclasses.replace(found, texts=_text_file(texts), template=template, inputs=place)
    if isinstance(source, Images):
        return source
    if isinstance(source, str | Path):
        if labels is not None and not isinstance(labels, str):
            raise DataError(
                "labels of a folder must be a kind", found="a list of labels", expected="a kind, such as 'folders'"
            )
        return Images(Path(source), labels, Path(annotations) if annotations else None)  # type: ignore[arg-type]
    if isinstance(labels, str):
        raise DataError(
            f"labels={labels!r} needs a folder", found=runner.type_name(source), expected="a class for each image"
        )
    if labels is not None:
        items = list(source)
        if len(items) != len(labels):
            raise DataError(
                "labels and images differ in number",
                found=f"{len(items)} images, {len(labels)} labels",
                expected="one label for each image",
            )
        return Images(None, rows=list(zip(items, labels, strict=True)))
    return Images(None, rows=_Rows(source), names=_names_of(source))


def _text_file(texts: str | Path | Sequence[str] | None) -> Path | None:
    if texts is None or isinstance(texts, str | Path):
        return None if texts is None else Path(texts)
    if not texts or any("\n" in text for text in texts):
        raise DataError(
            "texts must be a list of single-line texts",
            found=f"{len(texts)} texts" if all("\n" not in text for text in texts) else "a text with a line break",
            expected="at least one text, each on one line",
        )
    file = unnamed_folder("texts") / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return file


class _Rows:
    """The rows of an iterable; iterated anew each time if the source allows it."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.batched = hasattr(source, "batch_sampler") and hasattr(source, "dataset")

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        source = self.source
        items = source if hasattr(source, "__iter__") else (source[i] for i in range(len(source)))
        for item in items:
            image, label = _split(item)
            if not self.batched:
                yield image, _scalar(label)
                continue
            yield from zip(image, itertools.repeat(None) if label is None else map(_scalar, label), strict=False)


def _split(item: Any) -> tuple[Any, Any]:
    """(image, label) of an item of a data set, or (images, labels) of a batch."""
    if isinstance(item, Mapping):
        image = next((item[key] for key in IMAGE_KEYS if key in item), None)
        if image is None:
            raise DataError(
                "the data set has no image column with a known name",
                found=", ".join(map(str, item)),
                expected=", ".join(IMAGE_KEYS),
                fix="rename the column, or pass a list of images and a list of labels",
            )
        return image, next((item[key] for key in LABEL_KEYS if key in item), None)
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, tuple | list) and len(item) == 1:
        return item[0], None
    return item, None


def _scalar(label: Any) -> int | str | None:
    if label is None or isinstance(label, str):
        return label
    value = np.asarray(label.numpy(force=True) if hasattr(label, "numpy") else label)
    if value.ndim or not np.issubdtype(value.dtype, np.integer):
        raise DataError(
            "a label is not a class",
            found=runner.type_name(label),
            expected="the index of a class, or its name",
            fix="pass the class of each image: labels=[...]",
        )
    return int(value)


def _names_of(source: Any) -> tuple[str, ...]:
    """The class names of a data set; () if it has none."""
    while hasattr(source, "dataset"):  # a DataLoader, a Subset
        source = source.dataset
    features = getattr(source, "features", None)
    if isinstance(features, Mapping):
        found = next((features[key] for key in LABEL_KEYS if key in features), None)
        return tuple(getattr(found, "names", None) or ())
    names = getattr(source, "classes", None)
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


class _ClassFolders:
    """The folder of each class: named like the class of the data if the model has labels to match it with, else by its
    number, which is then the model's index."""

    def __init__(self, names: tuple[str, ...], setting: Setting) -> None:
        self._names = names if setting.labels else ()
        self._count = len(setting.labels) or setting.classes or len(names)
        self._labels = setting.labels
        self._by_name = False

    def name(self, label: int | str) -> str:
        if isinstance(label, str) or self._names:
            self._by_name = True
            name = label if isinstance(label, str) else self._names[label] if label < len(self._names) else ""
            if not name or name.startswith(".") or "/" in name or "\\" in name:
                raise DataError(
                    f"the name of class {label!r} cannot be a folder name",
                    found=repr(name),
                    expected="a name without / or \\ that does not begin with a dot",
                    fix="pass the model's class index of each image: images(..., labels=[...])",
                )
            return name
        if not 0 <= label < self._count:
            raise DataError(
                "a label is not a class index of the model", found=str(label), expected=f"0 to {self._count - 1}"
            )
        if any(number_of(name) is not None for name in self._labels):  # else a number would be read as such a name
            return self.name(self._labels[label])
        return self._number(label)

    def complete(self, folder: Path) -> None:
        """Make sure that folders named by class number exist for all classes."""
        if not self._by_name:
            for index in range(self._count):
                (folder / self._number(index)).mkdir(exist_ok=True)

    def _number(self, index: int) -> str:
        return str(index).zfill(len(str(self._count - 1)))


def _write(image: Any, home: Path, number: int, spec: PreprocessSpec) -> None:
    """Write an image as a file with the same pixels; a path becomes a link."""
    home.mkdir(parents=True, exist_ok=True)
    if isinstance(image, str | Path):
        path = Path(image).resolve()
        ending = path.suffix if path.suffix.lower() in preprocess.SUFFIXES else ".png"  # the bytes determine the format
        (home / f"{number:07}{ending}").symlink_to(path)
        return
    _opened(image, number, spec).save(home / f"{number:07}.png", compress_level=FASTEST)


def _opened(image: Any, number: int, spec: PreprocessSpec) -> Image.Image:
    tensor = hasattr(image, "numpy") and not isinstance(image, np.ndarray)
    if not tensor and not isinstance(image, np.ndarray):
        return preprocess.decode(image, spec.channels)
    array: npt.NDArray[Any] = image.numpy(force=True) if tensor else image
    if array.dtype == np.uint8:
        return preprocess.decode(array.transpose(1, 2, 0) if tensor and array.ndim == 3 else array, spec.channels)
    return _from_input(array, number, spec)


def _from_input(array: npt.NDArray[Any], number: int, spec: PreprocessSpec) -> Image.Image:
    """The image that the model's preprocessing turns into this input, float [channels, height, width]."""
    from PIL import Image

    expected = (spec.channels, *spec.crop)
    fix = "pass images before preprocessing (PIL images or uint8), or correct the model's preprocess"
    if not np.issubdtype(array.dtype, np.floating) or array.shape != expected:
        raise DataError(
            f"image {number} does not have the type and shape of the model's input",
            found=f"{array.dtype} {list(array.shape)}",
            expected=f"float32 {list(expected)}, or an image: uint8, a PIL image, a path",
            fix=fix,
        )
    mean, std = (np.array(values, np.float64)[:, None, None] for values in spec.statistics)
    ordered = array[::-1] if spec.channel_order == "bgr" else array
    pixels = (ordered.astype(np.float64) * std + mean) * 255
    whole = np.rint(pixels)
    if not np.isfinite(pixels).all() or np.abs(pixels - whole).max() > ROUNDING or whole.min() < 0 or whole.max() > 255:
        raise DataError(
            f"image {number} is not normalised like the model's input, or its float values were changed",
            found=f"values from {array.min():.4g} to {array.max():.4g}",
            expected=f"(pixels / 255 - mean) / std, with mean {list(spec.mean)} and std {list(spec.std)}",
            fix=fix,
        )
    crop = whole.astype(np.uint8).transpose(1, 2, 0)
    canvas = _canvas(crop, spec)
    if not np.array_equal(preprocess.resize_and_crop(canvas, spec), crop):
        raise DataError(
            f"image {number} cannot be the result of the model's preprocessing",
            found=f"resize {spec.resize}, crop {list(spec.crop)}",
            expected="a resize that is at least as large as the crop",
            fix=fix,
        )
    assert isinstance(canvas, Image.Image)
    return canvas


def _canvas(crop: npt.NDArray[np.uint8], spec: PreprocessSpec) -> Image.Image:
    """An image of the preprocessing's resize size, which resizing leaves unchanged, with `crop` at its position."""
    from PIL import Image

    height, width = (max(spec.resize, *spec.crop),) * 2 if isinstance(spec.resize, int) else spec.resize
    top, left = (
        max(preprocess.crop_start(side, size, spec.crop_rounding), 0)
        for side, size in zip((height, width), spec.crop, strict=True)
    )
    below, right = max(height - top - spec.crop[0], 0), max(width - left - spec.crop[1], 0)
    padded = np.pad(crop, ((top, below), (left, right), (0, 0)), mode="edge")
    return Image.fromarray(padded[:, :, 0] if spec.channels == 1 else padded)
