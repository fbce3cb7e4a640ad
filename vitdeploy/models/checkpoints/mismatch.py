"""Mismatches, without PyTorch: files, folders and state dicts that are not checkpoints, and short summaries of how a
state dict differs from a model, in which hundreds of keys become a few patterns."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.errors import CheckpointError, quoted
from vitdeploy.zip_members import MAX_EXPANSION, members

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHOWN_KEYS = 5
# Buffers that modules compute when they are built; some versions of a library store them, others do not.
COMPUTED = re.compile(
    r"(?:.*\.)?(?:position_ids|relative_position_index|relative_coords_table|attn_mask|num_batches_tracked)"
)
# Parts of names: losses, metrics, counters, and heads that only self-supervised training uses. A projector is not
# among them: some models return its output.
TRAINING = re.compile(
    r"(?:.*_)?(?:loss|losses|loss_fn|criterion|criteria|metrics?|acc|accuracy)|n_averaged|initted|step|queue|queue_ptr|"
    r"(?:dino|ibot|byol|simclr|mim|mlm)_head|total_ops|total_params|mixup_fn"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Mismatch:
    """Keys of a model and of a state dict without a counterpart, or with a different one.

    `shapes` and `kinds`: for a key, what the state dict has and what the model has.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, tuple[str, str]]
    kinds: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.kinds)

    def told(self, expected: Collection[str], found: Collection[str]) -> str:
        """Return a one-line summary by kind. `expected`, `found`: all keys of the model and of the state dict."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing: {listed(patterns(self.missing, expected))}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected: {listed(patterns(self.unexpected, found))}")
        for what, pairs in (("with a different shape", self.shapes), ("with a different type", self.kinds)):
            if pairs:
                parts.append(f"{len(pairs)} {what}: {listed(_alike(pairs, expected))}")
        return "; ".join(parts)


def compare(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Mismatch:
    """Return what loading `state` into a model with the tensors `own` would leave unset, drop or distort.

    Integers instead of weights come from a quantised model: without their scales they are different numbers.
    """
    both = [key for key in own if key in state]
    return Mismatch(
        missing=tuple(key for key in own if key not in state),
        unexpected=tuple(key for key in state if key not in own),
        shapes={k: (_shape(state[k]), _shape(own[k])) for k in both if own[k].shape != state[k].shape},
        kinds={k: (_dtype(state[k]), _dtype(own[k])) for k in both if _distorted(state[k].dtype, own[k].dtype)},
    )


def _distorted(found: torch.dtype, expected: torch.dtype) -> bool:
    if not expected.is_floating_point:
        return found.is_floating_point or found.is_complex
    return not found.is_floating_point or found.itemsize < 2


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def patterns(keys: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Return few keys as they are, many keys as patterns: `blocks.{2-11}.*` if they include all of `everything` below
    that stem.
    """
    chosen = dict.fromkeys(keys)
    if len(chosen) <= SHOWN_KEYS:
        return list(chosen)
    whole = _whole(chosen, everything)
    shortest = []
    for key in chosen:
        parts = key.split(".")
        stems = (".".join(parts[:cut]) for cut in range(1, len(parts)))
        stem = next((stem for stem in stems if stem in whole), None)
        shortest.append(key if stem is None else f"{stem}.*")
    return _numbered(dict.fromkeys(shortest))


def of_training(key: str) -> bool:
    """Whether a key's name shows that only training needs it."""
    stem, _, _ = key.rpartition(".")
    return any(map(TRAINING.fullmatch, (stem or key).split(".")))


def _whole(chosen: Collection[str], everything: Iterable[str]) -> set[str]:
    """Return the stems of two or more keys below which every key is chosen."""
    counts: dict[str, int] = {}
    broken: set[str] = set()
    for key in {*everything, *chosen}:
        parts = key.split(".")
        for cut in range(1, len(parts)):
            stem = ".".join(parts[:cut])
            counts[stem] = counts.get(stem, 0) + 1
            if key not in chosen:
                broken.add(stem)
    return {stem for stem, count in counts.items() if count > 1 and stem not in broken}


def _numbered(keys: Iterable[str]) -> list[str]:
    """Merge names that differ only by their numbers: `blocks.{0-3,7}.ls1.gamma`."""
    groups: dict[str, list[list[int]]] = {}
    for key in keys:
        groups.setdefault(_NUMBER.sub("\0", key), []).append([int(number) for number in _NUMBER.findall(key)])
    merged = []
    for template, numbers in groups.items():
        for column in zip(*numbers, strict=True):
            template = template.replace("\0", _ranges(column), 1)
        merged.append(template)
    return merged


def _ranges(numbers: Iterable[int]) -> str:
    """Format 1, 2, 3, 7 as "{1-3,7}"; a single number without braces."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return texts[0] if len(runs) == 1 and runs[0][0] == runs[0][1] else "{" + ",".join(texts) + "}"


def _alike(pairs: Mapping[str, tuple[str, str]], everything: Collection[str]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for key, pair in pairs.items():
        groups.setdefault(pair, []).append(key)
    return [
        f"{name} {pair[0]} (model: {pair[1]})" for pair, keys in groups.items() for name in patterns(keys, everything)
    ]


def listed(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN_KEYS} more" if len(items) > SHOWN_KEYS else ""
    return ", ".join(items[:SHOWN_KEYS]) + more


# --- Files that are not checkpoints of a whole float model, and how to get their weights ------------------------------


FLOAT_FIX = "use the float weights that it was made from: vitdeploy quantises them itself"
# First bytes of a file, its kind, and the fix.
_BEGINNINGS = (
    (b"\x89HDF\r\n", "an HDF5 file (Keras, TensorFlow)", "export it to ONNX with its own framework: FILE.onnx"),
    (b"GGUF", "a GGUF file of llama.cpp", "use the weights that it was made from, as .safetensors"),
    (b"\x1f\x8b", "compressed with gzip", "gunzip it first"),
    (b"\xfd7zXZ", "compressed with xz", "unxz it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unzstd it first"),
)
_ONNX = re.compile(rb"\x08[\x03-\x1f][\x12\x1a\x22\x3a\x42]", re.DOTALL)
_ZERO = ("zero_to_fp32.py", "mp_rank_*_model_states.pt", "*zero_pp_rank_*", "*/mp_rank_*_model_states.pt")
_TO_FP32 = "where it was made, in that folder: python zero_to_fp32.py . fp32; then --checkpoint fp32/pytorch_model.bin"
# Loading a program or a pickle may run its author's code, so no fix suggests loading the file here.
ALONE = "where it was trained, save the weights alone: torch.save(model.state_dict(), 'weights.pt')"
_MERGE = "merge it where it was trained: model.merge_and_unload().save_pretrained('merged'); then use hf:merged"
# Keys that identify a kind of state dict, the kind, and the fix.
_KEYS = (
    (r"(^|\.)lora_(A|B|embedding_[AB])(\.|$)", "an adapter (LoRA), not a whole model", _MERGE),
    (
        r"(^|\.)_?flat_param(_\d+)?$",
        "flattened by FSDP, without the names and shapes of the parameters",
        "save the full state dict: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True))",
    ),
    (
        r"\.(SCB|quant_state\.\S+|absmax|qweight|qzeros|_packed_params\S*)$",
        "already quantised: its weights are integer codes",
        "use the float weights that it was made from; vitdeploy quantises them itself",
    ),
    (
        r"\.weight_mask$",  # `weight_orig` alone belongs to a spectral norm
        "from a model that is being pruned, with separate weights and masks",
        "torch.nn.utils.prune.remove(module, 'weight') for each pruned module, then save its state dict",
    ),
)


def refuse_archive(path: Path) -> None:
    """Raise CheckpointError if a zip file was not written by `torch.save`, or is incomplete."""
    try:
        found = members(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete PyTorch checkpoint", found=str(error)[:200], fix="download it again"
        ) from None
    names, expanded = [member.filename for member in found], sum(member.file_size for member in found)
    if expanded > MAX_EXPANSION * path.stat().st_size:
        raise CheckpointError(
            f"{path} expands to an implausible size",
            found=f"{expanded:,} bytes from {path.stat().st_size:,}",
            expected=f"at most {MAX_EXPANSION} times the packed size",
            fix="download it again from a trusted source",
        )
    ends = {name.partition("/")[2] for name in names}
    if "constants.pkl" in ends and any(end.startswith("code/") for end in ends):
        raise CheckpointError(
            f"{path} is a TorchScript archive, a program with its weights",
            found="code/ and constants.pkl",
            expected="a state dict of tensors",
            fix=ALONE,
        )
    if "models/model.json" in ends or "serialized_exported_program.json" in names:
        raise CheckpointError(
            f"{path} is an archive of torch.export, a program with its weights",
            found=listed(names),
            expected="a state dict of tensors",
            fix=ALONE,
        )
    if names and not any(name.endswith("data.pkl") for name in names):
        raise CheckpointError(
            f"{path} is a zip archive, not a checkpoint",
            found=listed(names),
            expected="a checkpoint file",
            fix=f"unpack it and name the weight file: unzip {quoted(path)}",
        )


def refuse_beginning(path: Path, start: bytes) -> None:
    """Raise CheckpointError if the first bytes identify another kind of file."""
    for beginning, what, fix in _BEGINNINGS:
        if start.startswith(beginning):
            raise CheckpointError(f"{path} is {what}, not a checkpoint", found=f"it begins with {beginning!r}", fix=fix)
    if _ONNX.match(start):
        raise CheckpointError(
            f"{path} is an ONNX file, not a checkpoint",
            found=f"a file that begins with {start[:24]!r}",
            expected="a checkpoint, or this file as the model",
            fix=f"use it as the model, without a checkpoint: vitdeploy export {quoted(path)} -o exported",
        )


def refuse_folder(path: Path) -> None:
    """Raise CheckpointError if a folder is a checkpoint written by several processes, or an adapter."""
    if any(any(path.glob(pattern)) for pattern in _ZERO):
        raise CheckpointError(
            f"{path} is a DeepSpeed checkpoint with one file per process",
            expected="one state dict of whole tensors",
            fix=_TO_FP32,
        )
    if (path / ".metadata").is_file() and any(path.glob("*.distcp")):
        raise CheckpointError(
            f"{path} is a torch.distributed (FSDP) checkpoint with one file per process",
            expected="one state dict of whole tensors",
            fix="where it was trained: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{quoted(path)} weights.pt; then --checkpoint weights.pt",
        )
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} is an adapter (LoRA), not a whole model", found="adapter_config.json", fix=_MERGE
        )


def refuse_state(file: str, state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the keys or tensors do not belong to a whole float model."""
    for pattern, what, fix in _KEYS:
        found = [key for key in state if re.search(pattern, key)]
        if found:
            summary = f"{len(found)} of {len(state)} tensors: {listed(patterns(found, found))}"
            raise CheckpointError(f"{file} is {what}", found=summary, expected="a state dict of whole tensors", fix=fix)
    if len(state) > 1 and not any(tensor.numel() for tensor in state.values()):
        raise CheckpointError(
            f"{file} has a model's tensor names, but no values",
            found=f"{len(state)} empty tensors, as from DeepSpeed's ZeRO stage 3",
            expected="a state dict of whole tensors",
            fix=_TO_FP32,
        )
