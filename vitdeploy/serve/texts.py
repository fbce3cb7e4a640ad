"""Requests of an image with texts: those that it is compared with, or that are looked for in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vitdeploy.errors import InputError
from vitdeploy.runtime.runner import Array
from vitdeploy.runtime.zero_shot_predictor import TextsPredictor
from vitdeploy.serve.answering import Answerer, Fields, unprocessable
from vitdeploy.serve.engines import Engines
from vitdeploy.serve.forms import Asked
from vitdeploy.serve.metrics import Metrics
from vitdeploy.serve.refusal import Refusal
from vitdeploy.serve.settings import Settings

# Texts that run together: between two of these a request that nobody waits for ends.
TOGETHER = 32
# Characters of a text: no model reads a tenth of it, and each is kept with its features.
LONGEST = 4000


class TextAnswerer(Answerer):
    """Compares images with the texts of each request, or with the bundle's labels. The features of texts are kept, and
    new ones run in a thread of their own, while the image runs in another."""

    takes = ("texts",)

    def __init__(self, engines: Engines, settings: Settings, metrics: Metrics) -> None:
        super().__init__(engines, settings, metrics)
        assert isinstance(engines.predictor, TextsPredictor)
        self.predictor, self.most = engines.predictor, settings.max_texts
        self._tower = ThreadPoolExecutor(1, thread_name_prefix="vitdeploy-texts")

    def close(self) -> None:
        super().close()
        self._tower.shutdown()

    async def predict(self, asked: Asked, top: int, fields: Fields) -> dict[str, Any]:
        self.require_taken(asked)
        try:
            self.predictor.require(asked.texts)
        except InputError as error:
            raise unprocessable(error) from None
        given = asked.texts or ()
        if len(given) > self.most:
            raise Refusal(422, f"too many texts; found: {len(given)}; wanted: at most {self.most}")
        if (longest := max(map(len, given), default=0)) > LONGEST:
            raise Refusal(422, f"too long a text; found: {longest} characters; wanted: at most {LONGEST}")
        return await super().predict(asked, top, fields)

    async def read(self, outputs: Mapping[str, Array], size: tuple[int, int], top: int, asked: Asked) -> dict[str, Any]:
        if asked.texts is None:
            return await super().read(outputs, size, top, asked)
        texts, loop = asked.texts, asyncio.get_running_loop()
        for start in range(0, len(texts), TOGETHER):
            await loop.run_in_executor(self._tower, self.predictor.text_features, texts[start : start + TOGETHER])

        def work() -> dict[str, Any]:
            cuts = self.predictor.tokenizer.cuts(texts)
            return {**self.predictor.among(outputs, texts, size, top).to_dict(), **({"warnings": cuts} if cuts else {})}

        return await loop.run_in_executor(self.helpers, work)
