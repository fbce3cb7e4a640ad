"""What does not fit: files, folders and state dicts that people take for checkpoints, and how a state dict and a model
differ, briefly: hundreds of keys become a handful of patterns. Without PyTorch."""

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
# What modules compute when they are built; some versions of a library store it, others do not.
COMPUTED = re.compile(
    r"(?:.*\.)?(?:position_ids|relative_position_index|relative_coords_table|attn_mask|num_batches_tracked)"
)
# Parts of names: losses, metrics, counters, and heads that only self-supervised training has. A projector is none of
# these: some models answer with what it gives.
TRAINING = re.compile(
    r"(?:.*_)?(?:loss|losses|loss_fn|criterion|criteria|metrics?|acc|accuracy)|n_averaged|initted|step|queue|queue_ptr|"
    r"(?:dino|ibot|byol|simclr|mim|mlm)_head|total_ops|total_params|mixup_fn"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Mismatch:
    """Keys of a model and of a state dict that have no counterpart, or one that is not alike.

    `shapes` and `kinds`: for a key, what the state dict has and what the model has.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, tuple[str, str]]
    kinds: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.kinds)

    def told(self, expected: Collection[str], found: Collection[str]) -> str:
        """All of it in one line, by kind. `expected` and `found` are all keys of the model and of the state dict."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing: {listed(patterns(self.missing, expected))}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected: {listed(patterns(self.unexpected, found))}")
        for what, pairs in (("of another shape", self.shapes), ("of another type", self.kinds)):
            if pairs:
                parts.append(f"{len(pairs)} {what}: {listed(_alike(pairs, expected))}")
        return "; ".join(parts)


def compare(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Mismatch:
    """What loading `state` into a model with the tensors `own` would leave, drop or distort.

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
    """Keys as they are where they are few, else by what they have in common: `blocks.{2-11}.*`, where all of
    `everything` below these is among them.
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
    """Whether a key's name says that only training needs it."""
    stem, _, _ = key.rpartition(".")
    return any(map(TRAINING.fullmatch, (stem or key).split(".")))


def _whole(chosen: Collection[str], everything: Iterable[str]) -> set[str]:
    """Stems of two keys or more, below which there is no key that is not chosen."""
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
    """Names that differ by their numbers alone as one: `blocks.{0-3,7}.ls1.gamma`."""
    groups: dict[str, list[list[int]]] = {}
    for key in keys:
        groups.setdefault(_NUMBER.sub("\0", key), []).append([int(number) for number in _NUMBER.findall(key)])
    told = []
    for template, numbers in groups.items():
        for column in zip(*numbers, strict=True):
            template = template.replace("\0", _ranges(column), 1)
        told.append(template)
    return told


def _ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "{1-3,7}"; one number alone as it is."""
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
        f"{name} {pair[0]} (the model: {pair[1]})"
        for pair, keys in groups.items()
        for name in patterns(keys, everything)
    ]


def listed(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN_KEYS} more" if len(items) > SHOWN_KEYS else ""
    return ", ".join(items[:SHOWN_KEYS]) + more


# --- What is no checkpoint of a whole float model, and how to get its weights -----------------------------------------


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
            expected=f"at most {MAX_EXPANSION} times the packed size",
            fix="download it again, from a source that you trust",
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
            f"{path} is a zip archive of other files",
            found=listed(names),
            expected="a checkpoint file",
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
            expected="a checkpoint, or this file as the model",
            fix=f"name it as the model, without a checkpoint: vitdeploy export {quoted(path)} -o exported",
        )


def refuse_folder(path: Path) -> None:
    """Raise CheckpointError if a folder is the checkpoint of several processes, or an adapter's."""
    if any(any(path.glob(pattern)) for pattern in _ZERO):
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed, in one file a process",
            expected="one state dict of whole tensors",
            fix=_TO_FP32,
        )
    if (path / ".metadata").is_file() and any(path.glob("*.distcp")):
        raise CheckpointError(
            f"{path} is a checkpoint of torch.distributed (FSDP), in one file a process",
            expected="one state dict of whole tensors",
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
            raise CheckpointError(f"{file} is {what}", found=told, expected="a state dict of whole tensors", fix=fix)
    if len(state) > 1 and not any(tensor.numel() for tensor in state.values()):
        raise CheckpointError(
            f"{file} has the names of a model, but none of its numbers",
            found=f"{len(state)} tensors without elements, as DeepSpeed's ZeRO stage 3 leaves them",
            expected="a state dict of whole tensors",
            fix=_TO_FP32,
        )
