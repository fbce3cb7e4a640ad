"""One way from JPEG files to labels, in a separate process; its one argument is JSON.

Each line on standard input is a number of files to answer next; a line of JSON reports how long they took, and their
classes. The peers' ways run under an interpreter that need not have vitdeploy.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

Payload = dict[str, Any]
Way = Callable[[Iterable[str]], Iterator[int]]


def one_by_one(payload: Payload) -> Way:
    from vitdeploy.runtime import load

    predictor = load(payload["bundle"], payload["target"], threads=payload["threads"])
    return lambda files: (predictor.predict(file, top=1).top[0].index for file in files)


def streaming(payload: Payload) -> Way:
    from vitdeploy.runtime import load

    streams = payload["threads"]
    predictor = load(payload["bundle"], payload["target"], threads=streams, streams=streams)
    return lambda files: (answer.top[0].index for answer in predictor.stream(files, top=1))


def compiled(payload: Payload, hint: str) -> Any:
    """The same INT8 graph, compiled as OpenVINO's own documentation does."""
    import openvino

    config = {**payload["options"], "PERFORMANCE_HINT": hint, "INFERENCE_NUM_THREADS": str(payload["threads"])}
    core = openvino.Core()
    model = core.read_model(payload["graph"])
    model.reshape({port: [1, *list(port.get_partial_shape())[1:]] for port in model.inputs})
    return core.compile_model(model, "CPU", config)


def pillow_pixels(file: str, payload: Payload) -> Any:
    """Short side, then the centre, as timm's evaluation transform does it with Pillow."""
    from PIL import Image

    with Image.open(file) as opened:
        image = opened.convert("RGB")
    (width, height), short, crop = image.size, payload["resize"], payload["crop"]
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    image = image.resize(size, Image.Resampling[payload["interpolation"].upper()])
    left, top = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
    return np.asarray(image.crop((left, top, left + crop, top + crop)))[None]


def opencv_pixels(file: str, payload: Payload) -> Any:
    """What programs with OpenCV do: bilinear without a filter, short side, centre, RGB."""
    import cv2

    image = cv2.imread(file)
    (height, width), short, crop = image.shape[:2], payload["resize"], payload["crop"]
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    image = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
    left, top = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
    return np.ascontiguousarray(image[top : top + crop, left : left + crop, ::-1])[None]


def plain(pixels: Callable[[str, Payload], Any]) -> Callable[[Payload], Way]:
    def make(payload: Payload) -> Way:
        model = compiled(payload, "LATENCY")
        return lambda files: (int(np.argmax(model(pixels(file, payload))[0])) for file in files)

    return make


def queued(pixels: Callable[[str, Payload], Any]) -> Callable[[Payload], Way]:
    """Decoded in the main thread, while OpenVINO's AsyncInferQueue runs."""

    def make(payload: Payload) -> Way:
        import openvino

        queue = openvino.AsyncInferQueue(compiled(payload, "THROUGHPUT"))
        found: dict[int, int] = {}

        def answered(request: Any, number: int) -> None:
            found[number] = int(np.argmax(request.get_output_tensor().data))

        queue.set_callback(answered)

        def run(files: Iterable[str]) -> Iterator[int]:
            found.clear()
            for number, file in enumerate(files):
                queue.start_async([pixels(file, payload)], number)
            queue.wait_all()
            return iter([found[number] for number in sorted(found)])

        return run

    return make


def model_api(payload: Payload) -> Any:
    """OpenVINO Model API, which resizes within the graph; OpenCV reads, as its documentation does."""
    import openvino
    from model_api.adapters import OpenvinoAdapter
    from model_api.models import ClassificationModel

    hint = "LATENCY" if payload["requests"] == 1 else "THROUGHPUT"
    config = {**payload["options"], "PERFORMANCE_HINT": hint, "INFERENCE_NUM_THREADS": str(payload["threads"])}
    adapter = OpenvinoAdapter(
        openvino.Core(), payload["graph"], plugin_config=config, max_num_requests=payload["requests"]
    )
    adapter.model.reshape({port: [1, *list(port.get_partial_shape())[1:]] for port in adapter.model.inputs})
    configuration = {"resize_type": "crop", "interpolation_mode": "CUBIC", "reverse_input_channels": True, "topk": 1}
    return ClassificationModel(adapter, configuration, preload=True)


def model_api_one_by_one(payload: Payload) -> Way:
    import cv2

    model = model_api({**payload, "requests": 1})
    return lambda files: (int(model(cv2.imread(file)).top_labels[0].id) for file in files)


def model_api_pipeline(payload: Payload) -> Way:
    import cv2
    from model_api.pipelines import AsyncPipeline

    model = model_api({**payload, "requests": 0})

    def run(files: Iterable[str]) -> Iterator[int]:
        pipeline, given, next_one = AsyncPipeline(model), 0, 0
        for file in files:
            while not pipeline.is_ready():
                pipeline.await_any()
            pipeline.submit_data(cv2.imread(file), given)
            given += 1
            while (found := pipeline.get_result(next_one)) is not None:
                next_one += 1
                yield int(found[0].top_labels[0].id)
        pipeline.await_all()
        for number in range(next_one, given):
            yield int(pipeline.get_result(number)[0].top_labels[0].id)

    return run


WAYS: dict[str, Callable[[Payload], Way]] = {
    "one by one": one_by_one,
    "streaming": streaming,
    "pillow": plain(pillow_pixels),
    "pillow, queued": queued(pillow_pixels),
    "opencv": plain(opencv_pixels),
    "opencv, queued": queued(opencv_pixels),
    "model api": model_api_one_by_one,
    "model api, pipeline": model_api_pipeline,
}


def main() -> None:
    payload = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    files = itertools.cycle(payload["files"])
    way = WAYS[payload["way"]](payload)
    for line in sys.stdin:
        block = list(itertools.islice(files, int(line)))
        start = time.perf_counter()
        found = list(way(block))
        answers.write(json.dumps({"seconds": time.perf_counter() - start, "classes": found}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
