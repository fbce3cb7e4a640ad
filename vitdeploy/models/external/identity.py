"""The identity of an external module, as digests of all that its answers depend on; equal identities share artifacts.

No checkpoint file stands for such a module. Its code may change with the same weights, and its weights with the same
code; and neither shows what a function reads, draws at random or downloads.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import vitdeploy
from vitdeploy.models.external.working_folder import INSTALLED
from vitdeploy.models.loaded import LoadedModel

SEED = 0
OURS = Path(vitdeploy.__file__).parent
STANDARD = Path(sysconfig.get_path("stdlib"))


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, those too that no checkpoint holds: names, types, shapes and numbers."""
    total = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def identity(original: LoadedModel) -> str:
    """SHA-256 of the weights, the structure as the module prints it, the user's code that is loaded, the versions of
    the packages that its layers are of, and the answers to two seeded images where it takes images."""
    module = original.module
    total = hashlib.sha256(f"{weights_digest(module)}\n{module}\n".encode())
    for line in (*_packages(module), *_code()):
        total.update(f"{line}\n".encode())
    signature = original.signature
    if not signature.channels:
        return total.hexdigest()
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(2, signature.channels, *signature.image_size, generator=generator)
    with torch.no_grad():
        answers = module(images)
    for answer in answers if isinstance(answers, tuple) else (answers,):
        total.update(_bytes(answer))
    return total.hexdigest()


def identity_in_memory(original: LoadedModel) -> str:
    """`identity` of a module whose code may lie in no file, as a notebook's: SHA-256 of the weights and of the program
    that PyTorch traces of its code. Where it cannot be traced: `identity`."""
    signature = original.signature
    images = torch.zeros(2, signature.channels, *signature.image_size)
    batch = ({0: torch.export.Dim.DYNAMIC},)
    try:
        with torch.no_grad():
            program = torch.export.export(original.module, (images,), dynamic_shapes=batch, strict=False)
    except Exception:  # the export says what is wrong with it
        return identity(original)
    total = hashlib.sha256(weights_digest(original.module).encode())
    for name, part in program.graph_module.named_modules():
        if isinstance(part, torch.fx.GraphModule):
            total.update(f"{name}\n{part.graph}\n".encode())
    for name, constant in sorted(program.constants.items()):
        total.update(name.encode())
        if isinstance(constant, Tensor):
            total.update(_bytes(constant))
    return total.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _packages(module: nn.Module) -> list[str]:
    """The installed packages that the layers' classes are of, with the versions of their distributions."""
    names = {type(layer).__module__.partition(".")[0] for layer in module.modules()} - {"torch", "vitdeploy"}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    installed = [name for name, file in files.items() if INSTALLED & set(Path(file).parts)]
    known = importlib.metadata.packages_distributions() if installed else {}
    return sorted(
        {f"{name} {each} {importlib.metadata.version(each)}" for name in installed for each in known.get(name, ())}
    )


def _code() -> list[str]:
    """The files of all loaded modules that are neither Python's, nor installed, nor ours, with their digests."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    own = sorted(file for file in files if file.suffix == ".py" and file.is_file() and not _known(file))
    return sorted(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in own)


def _known(file: Path) -> bool:
    return bool(INSTALLED & set(file.parts)) or file.is_relative_to(OURS) or file.is_relative_to(STANDARD)
