"""The measuring process of one artifact, any of the peers; the loop is `vitdeploy.benchmark.worker`'s.

A request has "kind" (a key of `MAKE`) with what that kind needs, "batch", "threads" and "streams". It runs in the
environment of its peer, which need not have more than numpy beside that peer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.benchmark.worker import engine_runner, random_feeds, serve
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import TensorSpec

Request = dict[str, Any]


def make_runner(request: Request) -> Runner:
    """The runner (not loaded yet) of a request."""
    return Streams(request) if request["streams"] > 1 else MAKE[request["kind"]](request)


def _openvino(request: Request) -> Runner:
    file, options = Path(request["file"]), request["options"]
    return OpenVinoRunner(file, name="peer", batch=request["batch"], options=options, threads=request["threads"])


def _onnxruntime(request: Request) -> Runner:
    return OnnxRuntimeRunner(Path(request["file"]), name="peer", batch=request["batch"], threads=request["threads"])


@functools.lru_cache(maxsize=1)
def _original(model: str, checkpoint: str | None, mode: str) -> Any:
    """The original, its module in one of PyTorch's own ways to be run. torch is imported for these only."""
    import torch

    from vitdeploy.models.load import load_model
    from vitdeploy.models.source import Source

    class Bfloat16(torch.nn.Module):
        """Weights and activations in bfloat16; float32 outside."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module.bfloat16()

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.module(image.bfloat16()).float()

    original = load_model(Source(model=model, checkpoint=Path(checkpoint) if checkpoint else None))
    ways: Mapping[str, Callable[[Any], Any]] = {
        "eager": lambda module: module,
        "compile": functools.partial(torch.compile, dynamic=False),  # as the engines: for one batch size each
        "bfloat16": Bfloat16,
    }
    return dataclasses.replace(original, module=ways[mode](original.module))


def _torch(request: Request) -> Runner:
    from vitdeploy.models.torch_runner import TorchRunner

    source = request["source"]
    original = _original(source["model"], source["checkpoint"], request["mode"])
    return TorchRunner(original, threads=request["threads"])


class Function(Runner):
    """A peer's program as a function of its one input, which `open_program` gives for a request.

    The request has the input's "shape" (without the batch) and "dtype".
    """

    def __init__(self, open_program: Callable[[Request], Callable[[Array], Array]], request: Request) -> None:
        super().__init__("peer")
        self._open, self._request = open_program, request

    def _load(self) -> None:
        request = self._request
        self._function: Callable[[Array], Array] | None = self._open(request)
        self.inputs = (TensorSpec("image", request["dtype"], (request["batch"], *request["shape"])),)
        self.outputs = (TensorSpec("logits", "float32", (request["batch"], "classes")),)
        self.provider = request["kind"]

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        assert self._function is not None
        return {"logits": self._function(feeds["image"])}

    def _close(self) -> None:
        self._function = None


@functools.lru_cache(maxsize=1)
def _compiled(file: str) -> Any:
    """One module for all streams, which compiles for every batch size by itself."""
    import torch
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer  # noqa: F401  (its passes of Inductor)

    torch._inductor.config.freezing = True
    return torch.compile(torch.export.load(file).module(), dynamic=False)


def _pt2e(request: Request) -> Callable[[Array], Array]:
    import torch

    torch.set_num_threads(request["threads"])
    compiled = _compiled(request["file"])

    def answer(image: Array) -> Array:
        with torch.no_grad():
            return np.asarray(compiled(torch.from_numpy(image)))

    return answer


def _executorch(request: Request) -> Callable[[Array], Array]:
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    # Methods that are loaded keep the pool of the process, so it is not made again for another stream.
    if portable_lib._threadpool_get_thread_count() != request["threads"]:
        portable_lib._unsafe_reset_threadpool(request["threads"])
    program = Runtime.get().load_program(Path(request["file"]))
    method = program.load_method("forward")
    return lambda image: np.asarray(method.execute([torch.from_numpy(image)])[0])


@functools.lru_cache(maxsize=1)
def _openvino_devices() -> list[Any]:
    """The CPU, of the provider that is registered for this process."""
    import onnxruntime
    import onnxruntime_ep_openvino as plugin

    onnxruntime.register_execution_provider_library("openvino", plugin.get_library_path())
    own = [device for device in onnxruntime.get_ep_devices() if device.ep_name == plugin.get_ep_name()]
    return [device for device in own if device.ep_metadata["ov_device"] == "CPU"]


def _openvino_ep(request: Request) -> Callable[[Array], Array]:
    import onnxruntime

    config = {"INFERENCE_NUM_THREADS": str(request["threads"]), "INFERENCE_PRECISION_HINT": "f32"}
    options = onnxruntime.SessionOptions()
    options.add_free_dimension_override_by_name("batch", request["batch"])
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(_openvino_devices(), {"load_config": json.dumps({"CPU": config})})
    session = onnxruntime.InferenceSession(request["file"], options)
    name = session.get_inputs()[0].name
    return lambda image: np.asarray(session.run(None, {name: image})[0])


MAKE: Mapping[str, Callable[[Request], Runner]] = {
    "engine": engine_runner,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
    "torch": _torch,
    "pt2e": functools.partial(Function, _pt2e),
    "executorch": functools.partial(Function, _executorch),
    "openvino-ep": functools.partial(Function, _openvino_ep),
}


class Streams(Runner):
    """Independent queries of one image, spread over streams that run at the same time with one thread each.

    One call takes a batch, of which every stream computes its share image by image; nothing is batched inside.
    OpenVINO has streams of its own (one compiled model with NUM_STREAMS); for the others each stream is a runner.
    """

    def __init__(self, request: Request) -> None:
        super().__init__("streams")
        self.count, self.batch = int(request["streams"]), int(request["batch"])
        self._runner = make_runner({**request, "batch": 1, "threads": 1, "streams": 1})
        self._request = request

    def _load(self) -> None:
        self._answer: list[Callable[[Mapping[str, Array]], Any]] = []
        if isinstance(self._runner, OpenVinoRunner):
            hints = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": str(self.count)}
            self._runner.options |= hints
            self._runner.threads = self.count
            self._runners = [self._runner.load()]
            requests = [self._runner.compiled.create_infer_request() for _ in range(self.count)]
            self._answer = [functools.partial(_infer, request) for request in requests]
        else:
            others = [make_runner(self._runner_request()) for _ in range(self.count - 1)]
            self._runners = [runner.load() for runner in (self._runner, *others)]
            self._answer = [runner.infer for runner in self._runners]
        first = self._runners[0]
        self.inputs = tuple(TensorSpec(t.name, t.dtype, (self.batch, *t.shape[1:])) for t in first.inputs)
        self.outputs, self.provider = first.outputs, f"{first.provider}, {self.count} streams"
        self._pool = ThreadPoolExecutor(self.count)
        feeds = random_feeds(first.inputs, 1)
        for answer in self._answer:  # one after the other: torch.compile compiles at the first call
            answer(feeds)

    def _runner_request(self) -> Request:
        return {**self._request, "batch": 1, "threads": 1, "streams": 1}

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        def share(stream: int) -> list[Mapping[str, Array]]:
            mine = range(stream, self.batch, self.count)
            return [self._answer[stream]({k: v[i : i + 1] for k, v in feeds.items()}) for i in mine]

        shares = list(self._pool.map(share, range(self.count)))
        names = [tensor.name for tensor in self.outputs]
        answers = [shares[i % self.count][i // self.count] for i in range(self.batch)]
        return {name: np.concatenate([answer[name] for answer in answers]) for name in names}

    def _close(self) -> None:
        self._pool.shutdown()
        for runner in self._runners:
            runner.close()


def _infer(request: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
    result = request.infer(dict(feeds), share_inputs=True)
    return {port.get_any_name(): np.array(value) for port, value in result.items()}


if __name__ == "__main__":
    sys.exit(serve(make_runner))
