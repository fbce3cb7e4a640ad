"""Requests for promptable segmentation: an image, or the id of one that was sent before, and prompts."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitdeploy.errors import InputError
from vitdeploy.runtime import flows, predictors, runner
from vitdeploy.runtime.prompts import Prompt, read_listed
from vitdeploy.serve import answering, forms, protocol
from vitdeploy.serve.engines import Engines
from vitdeploy.serve.metrics import Metrics, PromptMetrics
from vitdeploy.serve.settings import ServerSettings

KEYS = ("points", "labels", "box")
EXPECTED = '[{"points": [[x, y], ...], "labels": [1, 0, ...], "box": [left, top, right, bottom]}, ...]'


@dataclass
class _Going:
    """The task that embeds an image, and the number of requests waiting for it."""

    task: asyncio.Task[predictors.EmbeddedImage]
    waiting: int = 0


@dataclass(frozen=True)
class _Image:
    """The image of a request: already embedded, or prepared for the encoder."""

    id: str
    size: tuple[int, int]
    embedded: predictors.EmbeddedImage | None = None
    tensor: runner.Array | None = None


class PromptAnswerer(answering.Answerer):
    """Answers prompts. An image is embedded once, even if several requests send it at the same time, and its embedding
    is cached. The decoder has its own thread, so that prompts do not wait for other images."""

    takes = ("image_id", "prompts", "multimask", "masks")

    def __init__(self, engines: Engines, settings: ServerSettings, metrics: Metrics) -> None:
        super().__init__(engines, settings, metrics)
        assert isinstance(engines.predictor, predictors.PromptedPredictor)
        self.predictor, self.most = engines.predictor, settings.max_prompts
        self.kept = answering.Embeddings(settings.kept)
        self.metrics = PromptMetrics(metrics.registry, lambda: self.kept.nbytes)
        self._going: dict[str, _Going] = {}
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="vitdeploy-decoder")
        batch = self.predictor.flow.linked.runners[flows.PROMPT_DECODER].inputs[0].shape[0]
        self._together = batch if isinstance(batch, int) else 1
        # Embeddings are cached here, so the predictor need not keep the last one too.
        self.predictor.flow.linked.keep = False

    def close(self) -> None:
        super().close()
        self._decoder.shutdown()

    async def predict(self, asked: forms.PredictRequest, top: int, fields: answering.Fields) -> dict[str, Any]:
        self.require_taken(asked)
        entries = self._entries(asked.prompts)
        loop = asyncio.get_running_loop()
        started = loop.time()
        image = await self._image(asked)
        try:
            prompts = read_listed(entries, image.size)
            self.predictor.require(prompts)
        except InputError as error:
            raise answering.unprocessable(error) from None
        prepared = loop.time()
        self.metrics.asked(image.embedded is not None)
        embedded = image.embedded or await self._embedded(image, fields)
        ready = loop.time()
        answers, seconds = await self._answers(embedded, prompts, asked)
        width, height = image.size
        facts = {"image_id": image.id, "kept": image.embedded is not None}
        fields.update(prompts=len(prompts), kept=facts["kept"])
        result = {"width": width, "height": height, "prompts": answers, **facts}
        return self.document(result, {"prepare": prepared - started, "embed": ready - prepared, **seconds})

    async def infer(self, inputs: Mapping[str, runner.Array], fields: answering.Fields) -> Mapping[str, runner.Array]:
        """Return the outputs for rows of images with one prompt each."""
        fields.update(images=len(next(iter(inputs.values()))))
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._decoder, self.predictor.flow.infer, inputs)

    def _entries(self, given: Any) -> Sequence[Mapping[str, Any]]:
        """Return the prompts of a request; raise Refusal if they are malformed or too many."""
        if given is None:
            raise protocol.Refusal(
                422, f"no prompts: the request does not say which object to segment; expected: prompts, {EXPECTED}"
            )
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise protocol.Refusal(400, f"prompts must be a list of objects; expected: {EXPECTED}")
        unknown = dict.fromkeys(key for each in given for key in each if key not in KEYS)
        if unknown:
            raise protocol.Refusal(
                400, f"prompts have unknown keys {', '.join(unknown)[:80]}; expected: {', '.join(KEYS)}"
            )
        if len(given) > self.most:
            more = "send the others with the image_id of the answer"
            raise protocol.Refusal(
                422, f"too many prompts; found: {len(given)}; expected: at most {self.most} per request; {more}"
            )
        return given

    async def _image(self, asked: forms.PredictRequest) -> _Image:
        """Return the image; raise Refusal if its id is not cached, InputError if the file is not an image."""
        run = asyncio.get_running_loop().run_in_executor
        if asked.image is None:
            assert asked.image_id is not None
            embedded = self.kept.get(asked.image_id)
            if embedded is None:
                raise protocol.Refusal(404, f"image {asked.image_id} is not cached: send the file again")
            return _Image(asked.image_id, embedded.size, embedded)
        name = "sha256:" + (await run(self.helpers, hashlib.sha256, asked.image)).hexdigest()
        if (embedded := self.kept.get(name)) is not None:
            return _Image(name, embedded.size, embedded)
        tensor, size = await run(self.helpers, self.predictor.prepare, asked.image)
        return _Image(name, size, tensor=tensor)

    async def _embedded(self, image: _Image, fields: answering.Fields) -> predictors.EmbeddedImage:
        """Return the embedding, from one run for all waiting requests; it is cancelled if all of them disconnect."""
        if (found := self.kept.get(image.id)) is not None:  # cached by a concurrent request
            return found
        going = self._going.get(image.id)
        if going is None:
            going = self._going[image.id] = _Going(asyncio.create_task(self._embed(image, fields)))
        going.waiting += 1
        try:
            return await asyncio.shield(going.task)
        finally:
            going.waiting -= 1
            if not going.waiting:
                self._going.pop(image.id, None)
                going.task.cancel()

    async def _embed(self, image: _Image, fields: answering.Fields) -> predictors.EmbeddedImage:
        assert image.tensor is not None
        answer = await self.run(image.tensor, fields)
        # Copies: otherwise the arrays of a whole batch would stay in memory with one of its images.
        found = predictors.EmbeddedImage(
            self.predictor, {name: rows.copy() for name, rows in answer.outputs.items()}, image.size
        )
        self.kept.put(image.id, found)
        return found

    async def _answers(
        self, image: predictors.EmbeddedImage, prompts: Sequence[Prompt], asked: forms.PredictRequest
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Return the answers to prompts, and the seconds of the decoder and of the masks. The decoder runs as many at
        once as it takes, so that other requests run in between, and abandoned ones are cancelled."""
        loop = asyncio.get_running_loop()
        answers: list[dict[str, Any]] = []
        seconds = {"decode": 0.0, "answer": 0.0}
        for start in range(0, len(prompts), self._together):
            some = prompts[start : start + self._together]
            began = loop.time()
            outputs = await loop.run_in_executor(self._decoder, self._decode, image, some)
            decoded = loop.time()
            tell = partial(self.predictor.tell, outputs, some, image.size, asked.multimask, asked.masks)
            answers += await loop.run_in_executor(self.helpers, tell)
            seconds["decode"] += decoded - began
            seconds["answer"] += loop.time() - decoded
        return answers, seconds

    def _decode(self, image: predictors.EmbeddedImage, prompts: Sequence[Prompt]) -> dict[str, runner.Array]:
        with self.metrics.decoding():
            return self.predictor.decode(image, prompts)
