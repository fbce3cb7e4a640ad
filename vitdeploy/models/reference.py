"""The original PyTorch model behind the same life-cycle as every engine: the reference of all comparisons."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.transformer import KeyValue, Transformer
from vitdeploy.runtime.engine import SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.sequence_runner import example_source
from vitdeploy.spec import SequenceSpec, TensorSpec

PROVIDER = "PyTorch eager"


def torch_runner(original: LoadedModel, *, threads: int = 0) -> Runner:
    """The runner (not loaded yet) of an original, by its task."""
    sequence = original.signature.sequence
    if isinstance(original.module, Transformer) and sequence is not None:
        return TorchSequenceRunner(original.module, sequence, threads=threads)
    return TorchRunner(original, threads=threads)


class TorchSequenceRunner(Runner):
    """Decodes greedily with an encoder-decoder in eager mode; inputs and outputs as `runtime.SequenceRunner`."""

    def __init__(self, module: Transformer, spec: SequenceSpec, *, threads: int = 0) -> None:
        super().__init__("pytorch")
        self.module = module
        self.spec = spec
        self.threads = threads

    def _load(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)
        self.inputs, self.outputs = SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
        self.provider = PROVIDER

    def example(self, batch: int) -> dict[str, Array]:
        return example_source(self.spec, batch)

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        source = torch.from_numpy(feeds["source"])
        with torch.inference_mode():
            encoded = self.module.encode(source)
            past = [KeyValue(read.key[:, :, :0], read.value[:, :, :0]) for read in encoded.cross]
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

    def _close(self) -> None:
        pass


class TorchRunner(Runner):
    """Runs the original module in eager mode, float32, on the CPU.

    Input "image": float32 [batch, channels, height, width], normalised. Outputs: those of the model's signature.
    """

    def __init__(self, original: LoadedModel, *, threads: int = 0) -> None:
        super().__init__("pytorch")
        self.original = original
        self.threads = threads

    def _load(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)
        signature = self.original.signature
        self.inputs = (TensorSpec("image", "float32", ("batch", signature.channels, *signature.image_size)),)
        self.outputs = signature.outputs
        self.provider = PROVIDER

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        with torch.inference_mode():
            result = self.original.module(torch.from_numpy(feeds["image"]))
        tensors = (result,) if isinstance(result, torch.Tensor) else result
        return {spec.name: tensor.numpy() for spec, tensor in zip(self.outputs, tensors, strict=True)}

    def _close(self) -> None:
        pass
