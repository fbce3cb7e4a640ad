"""From what a request asks to its answer: decoded by helpers, run by the engine with those of others, read, told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from vitdeploy.errors import InputError
from vitdeploy.runtime.runner import Array
from vitdeploy.serve.batcher import Answer, Batcher
from vitdeploy.serve.engines import Engines
from vitdeploy.serve.failures import in_words
from vitdeploy.serve.forms import FIELDS, Asked
from vitdeploy.serve.metrics import Metrics
from vitdeploy.serve.refusal import Refusal
from vitdeploy.serve.settings import Settings

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

    def __init__(self, engines: Engines, settings: Settings, metrics: Metrics) -> None:
        self.engines = engines
        self.batcher = Batcher(engines.plan, engines.model.max_batch, settings.max_delay, metrics.ran, engines.workers)
        self.helpers = ThreadPoolExecutor(HELPERS, thread_name_prefix="vitdeploy-serve")

    @property
    def waiting(self) -> int:
        """Images that wait for the engine."""
        return self.batcher.waiting

    def close(self) -> None:
        """Answer what waits, and end."""
        self.batcher.close()
        self.helpers.shutdown()

    def require_taken(self, asked: Asked) -> None:
        """Raise Refusal for a field that this model does not take."""
        task = self.engines.predictor.task
        if other := [name for name in asked.given if name not in self.takes]:
            known = ", ".join(self.takes) or f"none of {', '.join(FIELDS)}"
            raise Refusal(400, f"this model takes no {' and no '.join(other)}; found: the task {task}; wanted: {known}")

    async def predict(self, asked: Asked, top: int, fields: Fields) -> dict[str, Any]:
        """The answer's document, with the milliseconds of its parts.

        Raises:
            Refusal: what is asked cannot be answered. InputError: the image cannot be used.
        """
        self.require_taken(asked)
        assert asked.image is not None, "only a field that is not taken stands for an image"
        loop = asyncio.get_running_loop()
        started = loop.time()
        tensor, size = await loop.run_in_executor(self.helpers, self.engines.predictor.prepare, asked.image)
        prepared = loop.time()
        answer = await self.run(tensor, fields)
        inferred = loop.time()
        outputs = {name: output[0] for name, output in answer.outputs.items()}
        result = await self.read(outputs, size, top, asked)
        seconds = {"prepare": prepared - started, "wait": answer.waited, "infer": answer.ran}
        return self.document(result, {**seconds, "answer": loop.time() - inferred})

    async def read(self, outputs: Mapping[str, Array], size: tuple[int, int], top: int, asked: Asked) -> dict[str, Any]:
        """What the outputs of one image mean."""

        def work() -> dict[str, Any]:
            return self.engines.predictor.answer(outputs, size, top).to_dict()

        return await self.aside(work, sum(output.nbytes for output in outputs.values()))

    async def infer(self, inputs: Mapping[str, Array], fields: Fields) -> Mapping[str, Array]:
        """The outputs for tensors, by name."""
        return (await self.run(inputs[self.engines.model.inputs[0].name], fields)).outputs

    def document(self, result: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
        timings = {stage: round(1e3 * value, 3) for stage, value in seconds.items()}
        return {**result, "model": self.engines.model.name, "timings": timings}

    async def run(self, tensor: Array, fields: Fields) -> Answer:
        answer = await asyncio.wrap_future(self.batcher.submit(tensor))
        fields.update(images=len(tensor), batch=answer.batch)
        return answer

    async def aside(self, work: Callable[[], T], size: int) -> T:
        """The result of `work` on `size` bytes, in another thread where it takes long."""
        if size <= SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.helpers, work)


def unprocessable(error: InputError) -> Refusal:
    """Prompts or texts that are well-formed, and that the predictor refuses: with its own words."""
    return Refusal(422, in_words(error))
