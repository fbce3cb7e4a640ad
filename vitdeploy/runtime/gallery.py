"""The predictor of embedding models: compares two images, and searches a small gallery."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.bundle.checked import MAX_READ
from vitdeploy.errors import DataError, ImageError, InputError, MissingFileError
from vitdeploy.runtime.predictor import OpenedBundle, Predictor, require_top
from vitdeploy.runtime.preprocess import SUFFIXES, ImageSource
from vitdeploy.runtime.tasks.embedding import Embedding, direction
from vitdeploy.spec import ChannelOrder, Manifest, encode
from vitdeploy.zip_members import DAMAGED, members_of

# Brute-force search is meant for at most this many vectors; beyond it, use a vector database.
MOST = 1_000_000
# Errors while reading a file that is not a gallery.
UNREADABLE: tuple[type[Exception], ...] = (*DAMAGED, MemoryError)
# Images per batch when a folder is embedded.
TOGETHER = 64


@dataclass(frozen=True)
class GalleryMatch:
    """An image of a gallery. name: its path relative to the gallery's folder, with slashes. identity: its subfolder, ""
    for an image directly in the gallery's folder. similarity: the cosine with the query, -1..1."""

    name: str
    identity: str
    similarity: float


@dataclass(frozen=True, eq=False, repr=False)
class Gallery:
    """Embedded images to search in.

    names: each image's path relative to the folder, with slashes. vectors: float32 [n, width], each of length 1. model:
    the digest of the model that made them (`model_digest`), the same for all engines of a bundle.
    """

    names: tuple[str, ...]
    vectors: npt.NDArray[np.float32]
    model: str

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<Gallery: {len(self)} images, {self.vectors.shape[1]} numbers each>"

    def search(self, embedding: Embedding, top: int = 5) -> list[GalleryMatch]:
        """Return the `top` images most similar to an embedding of the same model, best first; ties in the gallery's
        order.

        Raises:
            InputError: a vector of the wrong width or of length 0, or an invalid `top`.
        """
        require_top(top)
        if len(embedding.vector) != self.vectors.shape[1]:
            raise InputError(
                "the embedding and the gallery come from different models",
                found=f"{len(embedding.vector)} numbers",
                expected=f"{self.vectors.shape[1]} numbers",
                fix="use search(image, gallery) of the predictor that made the gallery",
            )
        cosines = np.clip(self.vectors @ direction(embedding.vector).astype(np.float32), -1, 1)
        best = np.argsort(-cosines, kind="stable")[:top].tolist()
        return [GalleryMatch(self.names[i], self.names[i].rpartition("/")[0], float(cosines[i])) for i in best]

    def save(self, file: str | Path) -> None:
        """Write the gallery as an .npz file for `EmbeddingPredictor.gallery` of the same model."""
        facts = json.dumps({"names": self.names, "model": self.model}).encode()
        with Path(file).open("wb") as stream:
            np.savez(stream, vectors=self.vectors, facts=np.frombuffer(facts, np.uint8))


class EmbeddingPredictor(Predictor):
    """Embeds images, and compares them by the cosine of their vectors.

    >>> predictor = load("out/faces")                                        # doctest: +SKIP
    >>> predictor.similarity("anna1.jpg", "anna2.jpg")                       # doctest: +SKIP
    0.8134
    >>> people = predictor.gallery("people/")      # people/anna/1.jpg ...     # doctest: +SKIP
    >>> predictor.search("visitor.jpg", people, top=1)[0].identity           # doctest: +SKIP
    'anna'
    """

    model = ""

    @classmethod
    def of_bundle(cls, opened: OpenedBundle) -> Predictor:
        predictor = super().of_bundle(opened)
        assert isinstance(predictor, EmbeddingPredictor)
        predictor.model = model_digest(opened.files.manifest)
        return predictor

    def similarity(self, a: ImageSource, b: ImageSource, *, channels: ChannelOrder = "rgb") -> float:
        """Return the cosine of the vectors of two images, -1..1. The app chooses the threshold for a match; the
        bundle's report shows the one that best separates the pairs of its data.

        Raises:
            ImageError, MissingFileError, TensorError: an image cannot be used.
            InputError: the model's vector has length 0 or is not finite.
        """
        first, second = self._embeddings([a, b], channels)
        return first.similarity(second)

    def gallery(self, source: str | Path) -> Gallery:
        """Embed the images below a folder, or read a gallery that `Gallery.save` wrote.

        Raises:
            MissingFileError: neither a folder nor a file.
            DataError: a folder without images, or not a gallery file.
            InputError: a gallery of another model's embeddings.
            ImageError, TensorError: an image of the folder cannot be used; the error names it.
        """
        path = Path(source)
        if path.is_dir():
            return self._embedded(path)
        found = _read(path)
        self._require_own(found, str(path))
        return found

    def search(
        self, image: ImageSource, gallery: Gallery, top: int = 5, *, channels: ChannelOrder = "rgb"
    ) -> list[GalleryMatch]:
        """Return the `top` images of a gallery most similar to an image, best first.

        Raises:
            InputError: a gallery of another model's embeddings; else as `similarity`.
        """
        self._require_own(gallery, "the gallery")
        [found] = self._embeddings([image], channels)
        return gallery.search(found, top)

    def _embeddings(self, images: Sequence[ImageSource], channels: ChannelOrder = "rgb") -> list[Embedding]:
        answers = self.predict_batch(images, channels=channels)
        return [answer for answer in answers if isinstance(answer, Embedding)]

    def _embedded(self, folder: Path) -> Gallery:
        names = sorted(_images(folder))
        if not names or len(names) > MOST:
            raise DataError(
                f"{folder} cannot be used as a gallery",
                found=f"{len(names):,} images",
                expected=f"1 to {MOST:,} images, ending in {', '.join(sorted(SUFFIXES))}",
            )
        vectors = []
        for start in range(0, len(names), TOGETHER):
            some = names[start : start + TOGETHER]
            for name, found in zip(some, self._embeddings([folder / name for name in some]), strict=True):
                try:
                    vectors.append(direction(found.vector).astype(np.float32))
                except InputError as error:
                    raise ImageError(f"{folder / name} cannot be searched for: {error.message}") from None
        return Gallery(tuple(names), np.stack(vectors), self.model)

    def _require_own(self, gallery: Gallery, name: str) -> None:
        if not self.model or gallery.model != self.model:
            raise InputError(
                f"{name} was made with another model; its embeddings cannot be compared",
                found=f"model {gallery.model[:12] or 'without a digest'}",
                expected=f"model {self.model[:12] or 'of a bundle'}",
                fix="embed the images again: predictor.gallery(FOLDER).save(FILE)",
            )


def model_digest(manifest: Manifest) -> str:
    """Return the SHA-256 of everything that determines an embedding except rounding: the float graph that all engines
    of a bundle are made from, with its weights, and the preprocessing."""
    places = sorted(graph.file for graph in manifest.graphs.values())
    files = {entry.path: entry.sha256 for entry in manifest.files if entry.path.startswith(tuple(places))}
    facts = {"files": files, "preprocess": encode(manifest.preprocess)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _images(folder: Path) -> Iterator[str]:
    """Relative paths of the images below the folder, without hidden files and folders."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(place, name)
            if not name.startswith(".") and path.suffix.lower() in SUFFIXES:
                yield path.relative_to(folder).as_posix()


def _read(path: Path) -> Gallery:
    """Read a gallery from an untrusted file."""
    if not path.is_file():
        raise MissingFileError(f"no gallery at {path}", expected="a folder of images, or the file of a saved gallery")
    try:
        with path.open("rb") as file:
            size = max(path.stat().st_size, sum(member.file_size for member in members_of(file)))
        if size > MAX_READ:
            raise _no_gallery(path, f"{size:,} bytes, more than {MAX_READ:,}")
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            vectors, facts = arrays["vectors"], arrays["facts"]
        header: Any = json.loads(facts.tobytes())
        names, model = tuple(header["names"]), header["model"]
    except UNREADABLE as error:
        raise _no_gallery(path, f"{type(error).__name__}: {str(error)[:160]}") from None
    if vectors.dtype != np.float32 or vectors.ndim != 2 or not 0 < len(vectors) == len(names):
        raise _no_gallery(path, f"{vectors.dtype} {list(vectors.shape)}, {len(names)} names")
    texts = all(isinstance(text, str) for text in (*names, model))
    if not texts or not np.allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, atol=1e-3):
        raise _no_gallery(path, "names that are not strings, or vectors whose length is not 1")
    return Gallery(names, vectors, model)


def _no_gallery(path: Path, found: str) -> DataError:
    return DataError(f"{path} is not a gallery", found=found, expected="a file that Gallery.save wrote")
