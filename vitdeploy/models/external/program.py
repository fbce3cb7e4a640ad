"""A module in memory as a file: the program that PyTorch traces of it, which any process can run.

Stored work is found again by the bytes of that file, which change with the weights and with the code.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, ExportError
from vitdeploy.models.external.libraries import last_line
from vitdeploy.models.family import Signature
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.source import Source
from vitdeploy.publish import storage_errors, temporary_folder
from vitdeploy.spec import DecodeError, PreprocessSpec, decode, encode

FILE, FACTS = "program.pt2", "original.json"
SEED = 0
TOLERANCE = 1e-4
# Where in the user's files an operator comes from: the same program has the same bytes.
ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
FIX = "give it as a function, which each process calls: --model package.module:function"


@dataclass(frozen=True)
class Facts:
    """What is known of an original beside its module."""

    signature: Signature
    preprocess: PreprocessSpec
    labels: tuple[str, ...]
    notes: tuple[str, ...]


class Program(nn.Module):
    """A traced module: what it does in training is not in it."""

    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self.traced = traced

    def train(self, mode: bool = True) -> Program:
        return self

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs: Tensor | tuple[Tensor, ...] = self.traced(image)
        return outputs


def save_program(original: LoadedModel, path: Path) -> Source:
    """Write an original that takes images to `path` (.pt2), and say how it is named from then on.

    Raises:
        ExportError: it cannot be traced for any batch, or what is traced answers otherwise.
        StorageError: the file cannot be written.
    """
    assert original.preprocess is not None, "asked of a model that takes no images"
    signature = original.signature
    shape = signature.channels, *signature.image_size
    batch = ({0: torch.export.Dim.DYNAMIC},)
    try:
        with torch.no_grad():
            program = torch.export.export(
                original.module, (torch.zeros(2, *shape),), dynamic_shapes=batch, strict=False
            )
    except Exception as error:
        raise ExportError(
            f"{original.name} cannot be traced",
            found=f"{type(error).__name__}: {last_line(error)}",
            wanted="operations on tensors of any batch, and no Python branch or loop that depends on their values",
            fix=FIX,
        ) from error
    for node in program.graph.nodes:
        for key in ORIGINS:
            node.meta.pop(key, None)
    _compare(original, program)
    facts = Facts(signature, original.preprocess, original.labels, original.notes)
    with temporary_folder(path.parent) as folder, storage_errors(path):
        # The name is part of the bytes, so it is the same for all.
        torch.export.save(program, folder / FILE, extra_files={FACTS: json.dumps(encode(facts))})
        (folder / FILE).replace(path)
    return Source(program=path)


def _compare(original: LoadedModel, program: torch.export.ExportedProgram) -> None:
    """Raise ExportError where the program's answers to three seeded images are not the module's."""
    signature = original.signature
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(3, signature.channels, *signature.image_size, generator=generator)
    with torch.no_grad():
        pairs = zip(_tensors(original.module(images)), _tensors(program.module()(images)), strict=True)
    for spec, (own, traced) in zip(signature.outputs, pairs, strict=True):
        difference = float((own - traced).abs().max() / own.abs().max().clamp_min(1e-30))
        if not difference <= TOLERANCE:
            raise ExportError(
                f"what PyTorch traces of {original.name} answers otherwise",
                found=f"{spec.name}: max|a-b| / max|b| {difference:.1e}",
                wanted=f"{TOLERANCE:g} at most: answers that depend on the image alone",
                fix=FIX,
            )


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def load_program(path: Path, name: str, image_size: tuple[int, int] | None) -> LoadedModel:
    """What `save_program` wrote.

    Raises:
        CheckpointError: it is no such file; or another image size is asked for, which a traced program does not have.
    """
    facts: dict[str, Any] = {FACTS: ""}
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("no archive" if path.is_file() else "no such file")
        program = torch.export.load(path, extra_files=facts)
        known = decode(Facts, json.loads(facts[FACTS]))
    except (OSError, RuntimeError, ValueError, KeyError, DecodeError) as error:
        raise CheckpointError(
            f"{path} is no program that vitdeploy wrote", found=last_line(error), fix="write it again from the module"
        ) from None
    if image_size not in (None, known.signature.image_size):
        height, width = known.signature.image_size
        raise CheckpointError(
            f"{path} is of one image size alone", found=f"{image_size}", wanted=f"{height}x{width}", fix=FIX
        )
    module = Program(program.module(check_guards=False))
    return LoadedModel(name, "module", module, known.signature, known.preprocess, known.labels, known.notes)
