"""Embeddings of images that requests have sent: kept for further prompts, as many as fit."""

from __future__ import annotations

import threading
from collections import OrderedDict

from vitdeploy.runtime.prompted_predictor import EmbeddedImage


class Embeddings:
    """At most `limit` bytes of embeddings by the digest of the image's file; those that nobody asked for longest go
    first. Safe to call from several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, EmbeddedImage] = OrderedDict()
        self._bytes = 0
        self._turn = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: str) -> EmbeddedImage | None:
        with self._turn:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def put(self, digest: str, image: EmbeddedImage) -> None:
        """Keep an embedding, if it is not larger than all that may be kept."""
        with self._turn:
            if digest in self._kept or image.nbytes > self.limit:
                return
            self._kept[digest] = image
            self._bytes += image.nbytes
            while self._bytes > self.limit:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
