"""The original PyTorch model with the life cycle of an engine: the reference of all comparisons."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vitdeploy.bundle.layout import PartTensors
from vitdeploy.errors import CapabilityError
from vitdeploy.models import family, towers
from vitdeploy.models.architectures.transformer import Transformer
from vitdeploy.models.external import image_text, prompted
from vitdeploy.runtime import flow, flows, host, prompts, runner, text_decoder
from vitdeploy.runtime.prompts import PromptSpec
from vitdeploy.runtime.sequence import SEQUENCE_INPUTS, SEQUENCE_OUTPUTS, example_source
from vitdeploy.runtime.tokenizer import OpenVocabularySpec, ZeroShotSpec
from vitdeploy.spec import SequenceSpec, TensorSpec

EAGER, COMPILED = "PyTorch eager", "PyTorch torch.compile, float16"


def torch_runner(original: family.LoadedModel, *, threads: int = 0) -> runner.Runner:
    """Return the runner of an original, chosen by its task and not loaded yet."""
    sequence = original.signature.sequence
    if isinstance(original.module, Transformer) and sequence is not None:
        return _TorchSequenceRunner(original.module, sequence, threads=threads)
    if isinstance(original.module, towers.Towers):
        return _towers_runner(original, original.module, threads)
    if isinstance(original.module, prompted.Prompted):
        return _prompted_runner(original, original.module, threads)
    if isinstance(original.module, image_text.ImageText) and sequence is not None:
        return _text_runner(original, original.module, sequence, threads)
    return TorchRunner(original, threads=threads)


def _text_runner(
    original: family.LoadedModel, module: image_text.ImageText, sequence: SequenceSpec, threads: int
) -> runner.Runner:
    """Return a runner of encoder and decoder step: the engines' search, over PyTorch modules."""
    signature = original.signature

    def encode(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for pair in module.encode(image) for tensor in pair)

    with torch.no_grad():
        cross = encode(torch.zeros(1, signature.channels, *signature.image_size))

    def step(token: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = list(zip(caches[::2], caches[1::2], strict=True))
        blocks = len(cross) // 2
        logits, present = module.step(token, pairs[:blocks], pairs[blocks:])
        return (logits, *(tensor for pair in present for tensor in pair))

    def specs(kind: str, length: str | None = None) -> tuple[TensorSpec, ...]:
        names = (f"{kind}_{part}_{i}" for i in range(len(cross) // 2) for part in ("key", "value"))
        return tuple(
            TensorSpec(name, "float32", ("batch", tensor.shape[1], length or tensor.shape[2], tensor.shape[3]))
            for name, tensor in zip(names, cross, strict=True)
        )

    logits = TensorSpec("logits", "float32", ("batch", module.model.decoder.config.vocab_size))
    token, kept, length = TensorSpec(flows.TOKEN, "int64", ("batch", 1)), specs("cross"), "past_length"
    return text_decoder.TextRunner(
        _TorchParts(encode, _image(signature), kept, threads),
        _TorchParts(step, (token, *kept, *specs("past", length)), (logits, *specs("present", length)), threads),
        sequence,
        name="pytorch",
    )


def _image(signature: family.Signature) -> tuple[TensorSpec]:
    return (TensorSpec("image", "float32", ("batch", signature.channels, *signature.image_size)),)


def _towers_runner(original: family.LoadedModel, module: towers.Towers, threads: int) -> runner.Runner:
    """Return the image and text encoders as a flow, like their engines."""
    signature, spec = original.signature, original.signature.postprocess
    assert isinstance(spec, ZeroShotSpec | OpenVocabularySpec)
    *images, text = signature.outputs
    own = {flows.IMAGE_FEATURES: "features"}
    image = [dataclasses.replace(each, name=own.get(each.name, each.name)) for each in images]
    parts: dict[str, runner.Runner] = {
        flows.IMAGE_TOWER: _TorchParts(module.image_tower, _image(signature), tuple(image), threads),
        flows.TEXT_TOWER: _TorchParts(
            module.text_tower,
            (TensorSpec("text", "int64", ("batch", spec.length)),),
            (TensorSpec("features", "float32", ("batch", *text.shape[1:])),),
            threads,
        ),
    }
    return _flow(parts)


def _prompted_runner(original: family.LoadedModel, module: prompted.Prompted, threads: int) -> runner.Runner:
    """Return image encoder and prompt decoder as a flow, like their engines."""
    signature = original.signature
    embedded = prompted.embeddings_of(module, signature.channels, signature.image_size)
    assert isinstance(signature.postprocess, PromptSpec)
    prompt = prompts.prompt_tensors(signature.postprocess)
    return _flow(
        {
            flows.IMAGE_ENCODER: _TorchParts(module.image_encoder, _image(signature), embedded, threads),
            flows.PROMPT_DECODER: _TorchParts(module.prompt_decoder, (*embedded, *prompt), signature.outputs, threads),
        }
    )


def _flow(parts: Mapping[str, runner.Runner]) -> flow.FlowRunner:
    graphs = {name: PartTensors(part.inputs, part.outputs) for name, part in parts.items()}
    return flow.FlowRunner(flows.flow_of_graphs(graphs), parts, name="pytorch")


class _TorchParts(runner.Runner):
    """A function of tensors, such as a module, run eagerly as part of a flow; inputs and outputs by position."""

    def __init__(
        self,
        function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        threads: int,
    ) -> None:
        super().__init__("pytorch")
        self.function, self.threads = function, threads
        self.inputs, self.outputs = inputs, outputs

    def _load(self) -> None:
        if threads := self.threads or host.default_threads():
            torch.set_num_threads(threads)
        self.provider, self.engine_threads = EAGER, torch.get_num_threads()

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        with torch.inference_mode():
            result = self.function(*(torch.from_numpy(feeds[tensor.name]) for tensor in self.inputs))
        tensors = (result,) if isinstance(result, torch.Tensor) else result
        return {spec.name: tensor.numpy() for spec, tensor in zip(self.outputs, tensors, strict=True)}

    def _close(self) -> None:
        pass


class _TorchSequenceRunner(_TorchParts):
    """Decodes greedily with an encoder-decoder in eager mode; inputs and outputs as `runtime.SequenceRunner`."""

    def __init__(self, module: Transformer, spec: SequenceSpec, *, threads: int = 0) -> None:
        super().__init__(module, SEQUENCE_INPUTS, SEQUENCE_OUTPUTS, threads)
        self.module, self.spec = module, spec

    def example(self, batch: int) -> dict[str, runner.Array]:
        return example_source(self.spec, batch)

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        source = torch.from_numpy(feeds["source"])
        with torch.inference_mode():
            encoded = self.module.encode(source)
            past = [(key[:, :, :0], value[:, :, :0]) for key, value in encoded.cross]
            token = torch.full((len(source), 1), self.spec.start)
            ended = torch.zeros(len(source), dtype=torch.bool)
            tokens: list[torch.Tensor] = []
            logits: list[torch.Tensor] = []
            while len(tokens) < self.spec.max_length and not bool(ended.all()):
                scores, past = self.module.step(token, encoded.mask, encoded.cross, past)
                best = torch.where(ended, self.spec.pad, scores.argmax(dim=-1))
                ended |= best == self.spec.end
                tokens.append(best)
                logits.append(scores)
                token = best[:, None]
        return {"tokens": torch.stack(tokens, 1).numpy(), "logits": torch.stack(logits, 1).numpy()}


class TorchRunner(_TorchParts):
    """Runs the original module in eager mode, float32, on the CPU.

    Input "image": float32 [batch, channels, height, width], normalised; the others and the outputs: those of the
    model's signature.
    """

    def __init__(self, original: family.LoadedModel, *, threads: int = 0) -> None:
        signature = original.signature
        super().__init__(original.module, (*_image(signature), *signature.inputs), signature.outputs, threads)
        self.original = original


class CompiledRunner(TorchRunner):
    """The original in PyTorch's fastest GPU configuration: FP16, compiled, as a CUDA graph.

    Inputs and outputs are those of `TorchRunner`, float32 in host memory: copies to and from the GPU count.

    The original's module becomes a half-precision one on the device.
    """

    def __init__(self, original: family.LoadedModel, *, device: str = "cuda") -> None:
        super().__init__(original)
        self.device = device
        self._compiled: Any = None

    def _load(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise CapabilityError(
                "PyTorch here has no CUDA device",
                found=f"torch {torch.__version__}",
                expected="a build of PyTorch for CUDA, and a GPU",
                fix="install PyTorch for CUDA: https://pytorch.org/get-started/locally",
            )
        super()._load()
        module = self.original.module.to(self.device, torch.float16)
        # "reduce-overhead" replays CUDA graphs, like the engines that it is compared with. Without `dynamic=False`, a
        # second batch size would compile kernels for any batch, which are slower.
        self._compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
        self.provider = COMPILED

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        with torch.no_grad():
            result = self._compiled(*(self._on_device(feeds[tensor.name]) for tensor in self.inputs))
        tensors = (result,) if isinstance(result, torch.Tensor) else result
        return {spec.name: tensor.float().cpu().numpy() for spec, tensor in zip(self.outputs, tensors, strict=True)}

    def _on_device(self, array: runner.Array) -> torch.Tensor:
        tensor = torch.from_numpy(array).to(self.device)
        return tensor.to(torch.float16) if tensor.is_floating_point() else tensor

    def _close(self) -> None:
        self._compiled = None
