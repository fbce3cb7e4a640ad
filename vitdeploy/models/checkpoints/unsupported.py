"""Files, folders and state dicts that people take for checkpoints: what each is, and how to get its weights."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

from vitdeploy.errors import CheckpointError, quoted
from vitdeploy.models.checkpoints.mismatch import listed, patterns
from vitdeploy.zip_members import MAX_EXPANSION, members

FLOAT_FIX = "take the float weights that it was made from: vitdeploy quantises them itself"
# How files begin, what they are, and what to do.
_BEGINNINGS = (
    (b"\x89HDF\r\n", "an HDF5 file, as Keras and TensorFlow write", "load it there and export it to ONNX: FILE.onnx"),
    (b"GGUF", "a GGUF file of llama.cpp", "take the weights that it was made from, as .safetensors"),
    (b"\x1f\x8b", "compressed by gzip", "gunzip it first"),
    (b"\xfd7zXZ", "compressed by xz", "unxz it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unzstd it first"),
)
_ONNX = re.compile(rb"\x08[\x03-\x1f][\x12\x1a\x22\x3a\x42]", re.DOTALL)
_ZERO = ("zero_to_fp32.py", "mp_rank_*_model_states.pt", "*zero_pp_rank_*", "*/mp_rank_*_model_states.pt")
_TO_FP32 = "where it was made, in that folder: python zero_to_fp32.py . fp32; then --checkpoint fp32/pytorch_model.bin"
# What loads a program or a pickle may run what its maker put there: no fix proposes that here.
ALONE = "where it was made, save the weights alone: torch.save(model.state_dict(), 'weights.pt')"
_MERGE = "merge it where it was trained: model.merge_and_unload().save_pretrained('merged'); then hf:merged"
# Keys that only such state dicts have, what they are, and what to do.
_KEYS = (
    (r"(^|\.)lora_(A|B|embedding_[AB])(\.|$)", "an adapter (LoRA) and not a model's own weights", _MERGE),
    (
        r"(^|\.)_?flat_param(_\d+)?$",
        "flattened by FSDP: shapes and names of its parameters are not in it",
        "save it whole: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True))",
    ),
    (
        r"\.(SCB|quant_state\.\S+|absmax|qweight|qzeros|_packed_params\S*)$",
        "quantised already: its weights are codes",
        "take the float weights that it was made from; vitdeploy quantises them itself",
    ),
    (
        r"\.weight_mask$",  # `weight_orig` alone is of a spectral norm
        "of a model that is being pruned: weights and masks apart",
        "torch.nn.utils.prune.remove(module, 'weight') for each pruned module, then save its state dict",
    ),
)


def refuse_archive(path: Path) -> None:
    """Raise CheckpointError if a zip file is something else than `torch.save` writes, or not whole."""
    try:
        found = members(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole PyTorch checkpoint", found=str(error)[:200], fix="download it again"
        ) from None
    names, expanded = [member.filename for member in found], sum(member.file_size for member in found)
    if expanded > MAX_EXPANSION * path.stat().st_size:
        raise CheckpointError(
            f"{path} would expand to an absurd size",
            found=f"{expanded:,} bytes from {path.stat().st_size:,}",
            wanted=f"at most {MAX_EXPANSION} times the packed size",
            fix="download it again, from a source that you trust",
        )
    ends = {name.partition("/")[2] for name in names}
    if "constants.pkl" in ends and any(end.startswith("code/") for end in ends):
        raise CheckpointError(
            f"{path} is a TorchScript archive, a program with its weights",
            found="code/ and constants.pkl",
            wanted="a state dict of tensors",
            fix=ALONE,
        )
    if "models/model.json" in ends or "serialized_exported_program.json" in names:
        raise CheckpointError(
            f"{path} is an archive of torch.export, a program with its weights",
            found=listed(names),
            wanted="a state dict of tensors",
            fix=ALONE,
        )
    if names and not any(name.endswith("data.pkl") for name in names):
        raise CheckpointError(
            f"{path} is a zip archive of other files",
            found=listed(names),
            wanted="a checkpoint file",
            fix=f"unpack it, and name the file with the weights: unzip {quoted(path)}",
        )


def refuse_beginning(path: Path, start: bytes) -> None:
    """Raise CheckpointError if the first bytes are those of another kind of file."""
    for beginning, what, fix in _BEGINNINGS:
        if start.startswith(beginning):
            raise CheckpointError(f"{path} is {what}, not a checkpoint", found=f"it begins with {beginning!r}", fix=fix)
    if _ONNX.match(start):
        raise CheckpointError(
            f"{path} is an ONNX file: a graph with its weights",
            found=f"a file that begins with {start[:24]!r}",
            wanted="a checkpoint, or this file as the model",
            fix=f"name it as the model, without a checkpoint: vitdeploy export {quoted(path)} -o exported",
        )


def refuse_folder(path: Path) -> None:
    """Raise CheckpointError if a folder is the checkpoint of several processes, or an adapter's."""
    if any(any(path.glob(pattern)) for pattern in _ZERO):
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed, in one file a process",
            wanted="one state dict of whole tensors",
            fix=_TO_FP32,
        )
    if (path / ".metadata").is_file() and any(path.glob("*.distcp")):
        raise CheckpointError(
            f"{path} is a checkpoint of torch.distributed (FSDP), in one file a process",
            wanted="one state dict of whole tensors",
            fix="where it was made: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{quoted(path)} weights.pt; then --checkpoint weights.pt",
        )
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} is an adapter (LoRA) and not a model's own weights", found="adapter_config.json", fix=_MERGE
        )


def refuse_state(file: str, state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the keys or the tensors are not those of a whole float model."""
    for pattern, what, fix in _KEYS:
        found = [key for key in state if re.search(pattern, key)]
        if found:
            told = f"{len(found)} of {len(state)} tensors: {listed(patterns(found, found))}"
            raise CheckpointError(f"{file} is {what}", found=told, wanted="a state dict of whole tensors", fix=fix)
    if len(state) > 1 and not any(tensor.numel() for tensor in state.values()):
        raise CheckpointError(
            f"{file} has the names of a model, but none of its numbers",
            found=f"{len(state)} tensors without elements, as DeepSpeed's ZeRO stage 3 leaves them",
            wanted="a state dict of whole tensors",
            fix=_TO_FP32,
        )
