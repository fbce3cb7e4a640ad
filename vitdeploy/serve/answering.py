"""Answers to requests, in batches."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from vitdeploy.errors import InputError
from vitdeploy.runtime import predictors, runner
from vitdeploy.runtime.inputs import Further, Inputs, read_further, stacked
from vitdeploy.serve import batcher, forms, guard, protocol
from vitdeploy.serve.engines import Engines
from vitdeploy.serve.metrics import Metrics
from vitdeploy.serve.settings import ServerSettings

# --- From what a request asks to its answer ---------------------------------------------------------------------------
# decoded by helpers, run by the engine with those of others, read, told.


T = TypeVar("T")
# Threads that decode images, and read and write long messages.
HELPERS = 2
# What takes less than this many bytes is done at once: handing it to a thread takes longer.
SMALL = 64 * 1024
# What the log says of a request: filled while it is answered.
Fields = dict[str, Any]


class Answerer:
    """Answers images alone. What other bundles take besides is a class of its own, which names the fields in `takes`.

    Images are decoded by a few threads, the engine runs in one, and the event loop waits for neither.
    """

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, engines: Engines, settings: ServerSettings, metrics: Metrics) -> None:
        self.engines = engines
        self.batcher = batcher.Batcher(
            engines.plan, engines.model.max_batch, settings.max_delay, metrics.ran, engines.workers
        )
        self.helpers = ThreadPoolExecutor(HELPERS, thread_name_prefix="vitdeploy-serve")

    @property
    def waiting(self) -> int:
        """Images that wait for the engine."""
        return self.batcher.waiting

    def close(self) -> None:
        """Answer what waits, and end."""
        self.batcher.close()
        self.helpers.shutdown()

    def require_taken(self, asked: forms.PredictRequest) -> None:
        """Raise Refusal for a field that this model does not take."""
        task, further = self.engines.predictor.task, [tensor.name for tensor in self.engines.predictor.inputs]
        takes = (*self.takes, *(("inputs",) if further else ()))
        if (given := sorted(asked.inputs or ())) != sorted(further) and (further or not asked.inputs):
            raise protocol.Refusal(
                400,
                f"this model takes {' and '.join(['an image', *further])} "
                f"({' '.join(f'-F {name}=@FILE' for name in further)}); found: {' and '.join(['an image', *given])}",
            )
        if other := [name for name in asked.given if name not in takes]:
            known = ", ".join(takes) or f"none of {', '.join(forms.FIELDS)}"
            raise protocol.Refusal(
                400, f"this model takes no {' and no '.join(other)}; found: the task {task}; expected: {known}"
            )

    async def predict(self, asked: forms.PredictRequest, top: int, fields: Fields) -> dict[str, Any]:
        """The answer's document, with the milliseconds of its parts.

        Raises:
            Refusal: what is asked cannot be answered. InputError: the image cannot be used.
        """
        self.require_taken(asked)
        assert asked.image is not None, "only a field that is not taken stands for an image"
        loop = asyncio.get_running_loop()
        started = loop.time()
        tensor, size, further = await loop.run_in_executor(self.helpers, self._prepared, asked.image, asked.inputs)
        prepared = loop.time()
        answer = await self.run(tensor, fields, further)
        inferred = loop.time()
        outputs = {name: output[0] for name, output in answer.outputs.items()}
        result = await self.read(outputs, size, top, asked)
        seconds = {"prepare": prepared - started, "wait": answer.waited, "infer": answer.ran}
        return self.document(result, {**seconds, "answer": loop.time() - inferred})

    def _prepared(self, image: bytes, given: Inputs | None) -> tuple[runner.Array, tuple[int, int], Further]:
        """The engine's input for an image, the size of the image, and what it brings besides, [1, ...] by name."""
        predictor = self.engines.predictor
        tensor, size = predictor.prepare(image)
        return tensor, size, stacked([read_further(given, predictor.inputs)] if predictor.inputs else [])

    async def read(
        self, outputs: Mapping[str, runner.Array], size: tuple[int, int], top: int, asked: forms.PredictRequest
    ) -> dict[str, Any]:
        """What the outputs of one image mean."""

        def work() -> dict[str, Any]:
            return self.engines.predictor.answer(outputs, size, top).to_dict()

        return await self.aside(work, sum(output.nbytes for output in outputs.values()))

    async def infer(self, inputs: Mapping[str, runner.Array], fields: Fields) -> Mapping[str, runner.Array]:
        """The outputs for tensors, by name."""
        further = {tensor.name: inputs[tensor.name] for tensor in self.engines.predictor.inputs}
        return (await self.run(inputs[self.engines.model.inputs[0].name], fields, further)).outputs

    def document(self, result: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
        timings = {stage: round(1e3 * value, 3) for stage, value in seconds.items()}
        return {**result, "model": self.engines.model.name, "timings": timings}

    async def run(self, tensor: runner.Array, fields: Fields, further: Further | None = None) -> batcher.BatchAnswer:
        answer = await asyncio.wrap_future(self.batcher.submit(tensor, further))
        fields.update(images=len(tensor), batch=answer.batch)
        return answer

    async def aside(self, work: Callable[[], T], size: int) -> T:
        """The result of `work` on `size` bytes, in another thread where it takes long."""
        if size <= SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.helpers, work)


def unprocessable(error: InputError) -> protocol.Refusal:
    """Prompts or texts that are well-formed, and that the predictor refuses: with its own words."""
    return protocol.Refusal(422, guard.in_words(error))


# --- Embeddings of images that requests have sent: kept for further prompts, as many as fit ---------------------------


class Embeddings:
    """At most `limit` bytes of embeddings by the digest of the image's file; those that nobody asked for longest go
    first. Safe to call from several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, predictors.EmbeddedImage] = OrderedDict()
        self._bytes = 0
        self._turn = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: str) -> predictors.EmbeddedImage | None:
        with self._turn:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def put(self, digest: str, image: predictors.EmbeddedImage) -> None:
        """Keep an embedding, if it is not larger than all that may be kept."""
        with self._turn:
            if digest in self._kept or image.nbytes > self.limit:
                return
            self._kept[digest] = image
            self._bytes += image.nbytes
            while self._bytes > self.limit:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


# --- Requests of an image with texts: those that it is compared with, or that are looked for in it --------------------


# Texts that run together: between two of these a request that nobody waits for ends.
TOGETHER = 32
# Characters of a text: no model reads a tenth of it, and each is kept with its features.
LONGEST = 4000


class TextAnswerer(Answerer):
    """Compares images with the texts of each request, or with the bundle's labels. The features of texts are kept, and
    new ones run in a thread of their own, while the image runs in another."""

    takes = ("texts",)

    def __init__(self, engines: Engines, settings: ServerSettings, metrics: Metrics) -> None:
        super().__init__(engines, settings, metrics)
        assert isinstance(engines.predictor, predictors.TextsPredictor)
        self.predictor, self.most = engines.predictor, settings.max_texts
        self._tower = ThreadPoolExecutor(1, thread_name_prefix="vitdeploy-texts")

    def close(self) -> None:
        super().close()
        self._tower.shutdown()

    async def predict(self, asked: forms.PredictRequest, top: int, fields: Fields) -> dict[str, Any]:
        self.require_taken(asked)
        try:
            self.predictor.require(asked.texts)
        except InputError as error:
            raise unprocessable(error) from None
        given = asked.texts or ()
        if len(given) > self.most:
            raise protocol.Refusal(422, f"too many texts; found: {len(given)}; expected: at most {self.most}")
        if (longest := max(map(len, given), default=0)) > LONGEST:
            raise protocol.Refusal(422, f"too long a text; found: {longest} characters; expected: at most {LONGEST}")
        return await super().predict(asked, top, fields)

    async def read(
        self, outputs: Mapping[str, runner.Array], size: tuple[int, int], top: int, asked: forms.PredictRequest
    ) -> dict[str, Any]:
        if asked.texts is None:
            return await super().read(outputs, size, top, asked)
        texts, loop = asked.texts, asyncio.get_running_loop()
        for start in range(0, len(texts), TOGETHER):
            await loop.run_in_executor(self._tower, self.predictor.text_features, texts[start : start + TOGETHER])

        def work() -> dict[str, Any]:
            cuts = self.predictor.tokenizer.cuts(texts)
            return {**self.predictor.among(outputs, texts, size, top).to_dict(), **({"warnings": cuts} if cuts else {})}

        return await loop.run_in_executor(self.helpers, work)
