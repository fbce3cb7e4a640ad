"""Answer requests, in batches."""

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

# --- From a request to its answer -------------------------------------------------------------------------------------
# Helper threads decode the image, the engine runs it together with other requests, and the outputs become an answer.


T = TypeVar("T")
# Threads that decode images, and read and write long messages.
HELPERS = 2
# Work on less than this many bytes is done directly: handing it to a thread takes longer.
SMALL = 64 * 1024
# Fields of a request's log entry, filled while it is answered.
Fields = dict[str, Any]


class Answerer:
    """Answers requests with an image. Subclasses support further fields, listed in `takes`.

    A few threads decode images, one thread runs the engine, and the event loop never blocks on either.
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
        """The number of images that wait for the engine."""
        return self.batcher.waiting

    def close(self) -> None:
        """Answer all waiting requests, then stop."""
        self.batcher.close()
        self.helpers.shutdown()

    def require_taken(self, asked: forms.PredictRequest) -> None:
        """Raise Refusal for a field that this model does not accept."""
        task, further = self.engines.predictor.task, [tensor.name for tensor in self.engines.predictor.inputs]
        takes = (*self.takes, *(("inputs",) if further else ()))
        if (given := sorted(asked.inputs or ())) != sorted(further) and (further or not asked.inputs):
            raise protocol.Refusal(
                400,
                f"this model takes {' and '.join(['an image', *further])} "
                f"({' '.join(f'-F {name}=@FILE' for name in further)}); found: {' and '.join(['an image', *given])}",
            )
        if other := [name for name in asked.given if name not in takes]:
            known = ", ".join(takes) or "no further fields"
            raise protocol.Refusal(
                400, f"this model does not accept {' or '.join(other)}; found: the task {task}; expected: {known}"
            )

    async def predict(self, asked: forms.PredictRequest, top: int, fields: Fields) -> dict[str, Any]:
        """Return the answer's document, with the milliseconds of each step.

        Raises:
            Refusal: the request cannot be answered. InputError: the image cannot be used.
        """
        self.require_taken(asked)
        assert asked.image is not None, "only an unsupported field can replace an image"
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
        """Return the engine's input for an image, the size of the image, and further inputs [1, ...] by name."""
        predictor = self.engines.predictor
        tensor, size = predictor.prepare(image)
        return tensor, size, stacked([read_further(given, predictor.inputs)] if predictor.inputs else [])

    async def read(
        self, outputs: Mapping[str, runner.Array], size: tuple[int, int], top: int, asked: forms.PredictRequest
    ) -> dict[str, Any]:
        """Return the answer for the outputs of one image."""

        def work() -> dict[str, Any]:
            return self.engines.predictor.answer(outputs, size, top).to_dict()

        return await self.aside(work, sum(output.nbytes for output in outputs.values()))

    async def infer(self, inputs: Mapping[str, runner.Array], fields: Fields) -> Mapping[str, runner.Array]:
        """Return the outputs for input tensors, by name."""
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
        """Return the result of `work` on `size` bytes, run in another thread if large."""
        if size <= SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.helpers, work)


def unprocessable(error: InputError) -> protocol.Refusal:
    """Return the refusal of well-formed prompts or texts, with the predictor's message."""
    return protocol.Refusal(422, guard.in_words(error))


# --- Cached embeddings of images, for further prompts -----------------------------------------------------------------


class Embeddings:
    """A cache of at most `limit` bytes of embeddings, by the digest of the image file; evicts the least recently used.
    Safe to call from several threads."""

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
        """Cache an embedding, unless it exceeds the limit alone."""
        with self._turn:
            if digest in self._kept or image.nbytes > self.limit:
                return
            self._kept[digest] = image
            self._bytes += image.nbytes
            while self._bytes > self.limit:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


# --- Requests of an image with texts to compare with, or to search for ------------------------------------------------


# Texts per run; an abandoned request is cancelled between runs.
TOGETHER = 32
# The most characters of a text. No model reads a tenth of that, and each text is cached with its features.
LONGEST = 4000


class TextAnswerer(Answerer):
    """Compares images with the texts of each request, or with the bundle's labels. Text features are cached; new texts
    run in their own thread, in parallel with the image."""

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
            raise protocol.Refusal(422, f"a text is too long; found: {longest} characters; expected: at most {LONGEST}")
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
