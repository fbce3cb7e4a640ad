"""A bundle behind your own FastAPI app.

    python examples/fastapi_app.py out/digits
    curl -F file=@seven.png http://127.0.0.1:8000/predict

One Predictor for all requests. A bounded pool of threads decodes images and runs the engine, so that the event loop
stays free; who comes while too many wait is sent away at once, with 503. `vitdeploy serve` is a service that you need
not write.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Query, UploadFile
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

import vitdeploy.runtime
from vitdeploy.errors import InputError

AT_ONCE = 4  # images decoded at the same time; the engine runs them one by one
MAX_PENDING = 64  # requests that are waiting or running
MAX_BODY = 16 * 1024 * 1024  # bytes


def make_app(bundle: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with vitdeploy.runtime.load(bundle) as app.state.predictor, ThreadPoolExecutor(AT_ONCE) as app.state.pool:
            yield

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY)  # 413, before the body arrives
    pending = 0

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"engine": app.state.predictor.why, "pending": pending}

    @app.post("/predict")
    async def predict(file: UploadFile, top: Annotated[int, Query(ge=1, le=100)] = 5) -> dict[str, Any]:
        nonlocal pending  # only the event loop's thread changes it
        if pending >= MAX_PENDING:
            raise HTTPException(503, "too many requests wait", headers={"Retry-After": "1"})
        pending += 1
        try:
            image, loop = await file.read(), asyncio.get_running_loop()
            answer = await loop.run_in_executor(app.state.pool, app.state.predictor.predict, image, top)
        except InputError as error:  # the image is broken, too large, or not a JPEG, PNG or WebP
            raise HTTPException(400, f"{error.message}: {error.found}") from None
        finally:
            pending -= 1
        return answer.to_dict()

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answers for images over HTTP.")
    parser.add_argument("bundle", help="folder of a bundle, as vitdeploy run makes it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(make_app(options.bundle), host=options.host, port=options.port)
