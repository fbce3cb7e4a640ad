"""The ASGI application and its routes."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.serve import answering, forms, guard, metrics, prompts, protocol
from vitdeploy.serve.engines import Engines
from vitdeploy.serve.settings import ServerSettings

T = TypeVar("T")
# By the content of requests.
ANSWERERS: Mapping[str, type[answering.Answerer]] = {
    "images": answering.Answerer,
    "texts": answering.TextAnswerer,
    "prompts": prompts.PromptAnswerer,
}


class Service:
    """Loaded engines behind HTTP. `app` is the ASGI application; `close` first answers the waiting requests."""

    def __init__(self, engines: Engines, settings: ServerSettings) -> None:
        self.engines = engines
        self.settings = settings
        self.metrics = metrics.Metrics()
        self._working = 0
        self._answerer = ANSWERERS[TASKS[engines.predictor.task].takes](engines, settings, self.metrics)
        self.metrics.watch(lambda: self._answerer.waiting, lambda: self._working)
        if engines.predictor.monitor is not None:
            metrics.MonitorMetrics(self.metrics.registry, engines.predictor.monitor)
        self.app = guard.Guard(self._routes(), settings, self.metrics)

    def _routes(self) -> Starlette:
        routes = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/predict", self.predict, methods=["POST"]),
            Route("/metrics", self.counts),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                Route(model, self.metadata),
                Route(f"{model}/ready", self.model_ready),
                Route(f"{model}/infer", self.infer, methods=["POST"]),
            ]
        return Starlette(routes=routes, exception_handlers=guard.HANDLERS)

    def close(self) -> None:
        self._answerer.close()

    async def server(self, request: Request) -> Response:
        return JSONResponse(protocol.server_metadata())

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"ready": True})  # the guard answers 503 while the server stops

    async def metadata(self, request: Request) -> Response:
        self._require_model(request.path_params)
        return JSONResponse(protocol.model_metadata(self.engines.model))

    async def model_ready(self, request: Request) -> Response:
        self._require_model(request.path_params)
        return JSONResponse({"name": self.engines.model.name, "ready": True})

    async def counts(self, request: Request) -> Response:
        text = self.metrics.text()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def infer(self, request: Request) -> Response:
        """POST .../infer: tensors in, tensors out."""
        self._require_model(request.path_params)
        length = forms.header_length(request.headers)
        body = await request.body()
        with self._slot():
            return await self._in_time(request, self._infer(request, body, length))

    async def predict(self, request: Request) -> Response:
        """POST /predict: an image file in, the answer of the bundle's task out, with the milliseconds of each step."""
        top = forms.top_of(request.query_params)
        asked = await forms.asked_of(request)
        with self._slot():
            return await self._in_time(request, self._predict(request, asked, top))

    async def _infer(self, request: Request, body: bytes, length: int | None) -> Response:
        model, aside = self.engines.model, self._answerer.aside
        parse = partial(protocol.parse_infer, body, length, model)
        message = await aside(parse, len(body) if length is None else length)
        outputs = await self._answerer.infer(message.inputs, request.scope["vitdeploy"].fields)
        in_json = sum(outputs[name].nbytes for name, binary in message.outputs.items() if not binary)
        content, head = await aside(partial(protocol.encode_infer, model, message, outputs), in_json)
        if head is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={protocol.HEADER_LENGTH: str(head)}, media_type="application/octet-stream")

    async def _predict(self, request: Request, asked: forms.PredictRequest, top: int) -> Response:
        return JSONResponse(await self._answerer.predict(asked, top, request.scope["vitdeploy"].fields))

    async def _in_time(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which is cancelled when the client disconnects or the deadline passes.

        Raises:
            Refusal: 504.
            ClientGone: the connection was closed.
        """
        task, gone = asyncio.create_task(work), asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({task, gone}, timeout=self.settings.deadline, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise protocol.ClientGone
            raise protocol.Refusal(504, f"no answer within {self.settings.deadline:g} s")
        finally:
            task.cancel()
            gone.cancel()

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Occupy a slot among the active requests.

        Raises:
            Refusal: 429.
        """
        if self._working >= self.settings.max_queue:
            raise protocol.busy(f"the server is busy: {self._working} active requests")
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def _require_model(self, path: Mapping[str, str]) -> None:
        name = self.engines.model.name
        if path["model"] != name or path.get("version", protocol.VERSION) != protocol.VERSION:
            requested = " version ".join(path.values())
            raise protocol.Refusal(404, f"no model {requested}; available: {name}, version {protocol.VERSION}")
