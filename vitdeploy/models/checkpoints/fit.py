"""Match a checkpoint's keys with a model's: wrappers, prefixes, mismatches.

A file's content becomes one flat state dict: no containers, no wrapper prefixes, float32. Training scripts save their
state dict inside a dict, with the optimizer, the epoch and the arguments:

    timm            state_dict, state_dict_ema, optimizer, epoch, args ...
    DeiT, MAE       model, model_ema, optimizer, lr_scheduler, epoch, args ...
    DINO, DINOv2    teacher, student, optimizer, epoch ...; keys `backbone.*` and the training's projection heads
    RT-DETR, YOLO   ema: {module: ..., updates: ...}

Exponential moving averages (a teacher is one) are preferred: they are what such scripts evaluate and publish.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, NonFiniteWeightsError, python_command
from vitdeploy.models.checkpoints import mismatch
from vitdeploy.models.checkpoints.mismatch import FLOAT_FIX, listed, of_training, patterns

AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher")
PLAIN = ("state_dict", "model_state_dict", "model", "module", "student")
# DistributedDataParallel, torch.compile, Lightning modules, self-supervised trainers, I-JEPA.
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "encoder.")
# Projection heads of DINO (arXiv 2104.14294) and DINOv2 (arXiv 2304.07193), used in training only.
FOREIGN_HEADS = ("head.mlp", "head.last_layer.", "dino_head.", "ibot_head.")
# Wrappers that may occur anywhere in a key: torch.compile, FSDP, activation checkpointing, Lightning's strategies.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
_DEEPEST = 4


def unwrap(loaded: object, file: str = "FILE") -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the flat state dict in `loaded`, and notes on what was chosen, dropped or converted.

    A prefix is dropped only if all keys share it; for `backbone.` the known projection heads are dropped first.
    Tensors in float16 or bfloat16 become float32; any other tensor is passed on unchanged.

    Raises:
        CheckpointError: no tensors anywhere, keys that are not text, or several equally likely state dicts.
    """
    notes: list[str] = []
    state = _tensors(_innermost(loaded, notes, file), notes)
    return _in_float32(_unwrapped(_without_prefixes(state, notes), notes), notes), tuple(notes)


def _innermost(loaded: object, notes: list[str], file: str) -> Mapping[Any, Any]:
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            "the checkpoint is not a state dict",
            found=type(loaded).__name__,
            expected="parameter names mapped to tensors, or a dict that holds such a mapping",
            fix="save model.state_dict()",
        )
    container = loaded
    opened = ""
    for _ in range(_DEEPEST):
        name = _chosen(container, opened, file)
        if name is None:
            return container
        beside = [str(other) for other in container if other != name]
        notes.append(f"weights taken from {name!r}{f'; ignored: {listed(beside)}' if beside else ''}")
        container, opened = container[name], f"{opened}[{name!r}]"
    raise CheckpointError(f"the checkpoint nests more than {_DEEPEST} dicts", fix="save model.state_dict() alone")


def _chosen(container: Mapping[Any, Any], opened: str, file: str) -> str | None:
    """Return the key of the weights, None if `container` is the state dict itself. `opened`: the path to it."""
    for names in (AVERAGED, PLAIN):
        found = [name for name in names if _holds_tensors(container.get(name))]
        if len(found) == 1:
            return found[0]
        if found:
            raise _undecided(found, opened, file)
    if any(isinstance(value, Tensor) for value in container.values()):
        return None
    unnamed = [key for key, value in container.items() if isinstance(key, str) and _is_flat(value)]
    if len(unnamed) > 1:
        raise _undecided(unnamed, opened, file)
    return unnamed[0] if unnamed else None


def _undecided(names: list[str], opened: str, file: str) -> CheckpointError:
    state = f"torch.load({file!r}, map_location='cpu', weights_only=True){opened}[{names[0]!r}]"
    return CheckpointError(
        "the checkpoint holds several state dicts, and the choice is ambiguous",
        found=", ".join(repr(name) for name in names),
        expected="one state dict",
        fix="save the right one alone: " + python_command(f"import torch; torch.save({state}, 'weights.pt')"),
    )


def _holds_tensors(value: object, depth: int = _DEEPEST) -> bool:
    if not isinstance(value, Mapping) or depth == 0:
        return False
    return any(isinstance(item, Tensor) or _holds_tensors(item, depth - 1) for item in value.values())


def _is_flat(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


def _tensors(container: Mapping[Any, Any], notes: list[str]) -> dict[str, Tensor]:
    state = {key: value.detach() for key, value in container.items() if isinstance(value, Tensor)}
    others = [f"{key} ({type(value).__name__})" for key, value in container.items() if not isinstance(value, Tensor)]
    if not state:
        raise CheckpointError(
            "the checkpoint holds no tensors",
            found=listed(others) or "an empty dict",
            expected="parameter names mapped to tensors",
            fix="save model.state_dict()",
        )
    wrong = [repr(key) for key in state if not isinstance(key, str)]
    if wrong:
        raise CheckpointError(
            "the checkpoint's keys are not parameter names", found=listed(wrong), fix="save model.state_dict()"
        )
    refuse_unreadable(state)
    if others:
        notes.append(f"ignored, not tensors: {listed(others)}")
    return state


def _without_prefixes(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    dropped = ""
    while True:
        heads = [key for key in state if key.startswith(FOREIGN_HEADS)]
        backbone = {key: tensor for key, tensor in state.items() if key.startswith("backbone.")}
        if heads and backbone and len(heads) + len(backbone) == len(state):
            notes.append(f"left out, used in training only: {listed(heads)}")
            state = backbone
        prefix = next((prefix for prefix in PREFIXES if all(key.startswith(prefix) for key in state)), None)
        if prefix is None:
            break
        dropped += prefix
        state = {key[len(prefix) :]: tensor for key, tensor in state.items()}
    if dropped:
        notes.append(ALL_DROPPED.format(dropped))
    return state


def _unwrapped(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Return the state without wrapper names in its keys, if all keys stay distinct."""
    renamed = {WRAPPERS.sub("", key): tensor for key, tensor in state.items()}
    if renamed.keys() == state.keys() or len(renamed) < len(state):
        return state
    names = sorted({found.rstrip(".") for key in state for found in WRAPPERS.findall(key)})
    notes.append(f"wrapper names dropped from keys: {', '.join(names)}")
    return _without_prefixes(renamed, notes)


def _in_float32(state: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    half = [tensor.dtype for tensor in state.values() if tensor.dtype in (torch.float16, torch.bfloat16)]
    if not half:
        return state
    kinds = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in half}))
    notes.append(f"{len(half)} of {len(state)} tensors converted from {kinds} to float32")
    return {
        key: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for key, tensor in state.items()
    }


# --- Check that the tensors of a checkpoint are plain numbers, and not larger than their storage ----------------------


DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
# A pickle may present one number as a tensor of 10^12. Tensors that share a storage add up to a few times its size.
MAX_REPEATED, SMALL_BYTES = 16, 64 << 20


def refuse_unreadable(state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for tensors that are not dense, have an unsupported type or exceed their storage."""
    foreign = [f"{key} {kind}" for key, tensor in state.items() if (kind := _kind(tensor))]
    if foreign:
        raise CheckpointError(
            "the checkpoint has tensors of an unsupported type",
            found=listed(foreign)[:500],
            expected="dense tensors of float32, float16, bfloat16, float64, or integers",
            fix=FLOAT_FIX,
        )
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state.values()}
    shown, held = sum(tensor.nbytes for tensor in state.values()), sum(storages.values())
    if shown > MAX_REPEATED * held + SMALL_BYTES:
        raise CheckpointError(
            "the checkpoint's tensors are larger than their storage",
            found=f"{shown:,} bytes of tensors, {held:,} stored",
            expected="tensors with storage of their own",
            fix="save each tensor as tensor.clone()",
        )


def _kind(tensor: Tensor) -> str:
    """Describe why a tensor is unsupported; "" for a plain one."""
    if tensor.is_nested or tensor.is_quantized:  # first: other queries raise for these
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.device.type == "meta":
        return "without data (meta)"
    return "" if tensor.dtype in DTYPES else str(tensor.dtype).removeprefix("torch.")


# --- Find the model within a state dict -------------------------------------------------------------------------------
# Training scripts save it below prefixes of their own, such as `net.backbone.`.
#
# The prefix is identified by the keys below it: they are the names of a known module, or an architecture is recognised
# there. If two parts fit, the choice would be a guess, so neither is used.


Found = TypeVar("Found")
FEWEST = 4  # minimum number of keys of a model
ALL_DROPPED = "prefix {!r} dropped from all keys"


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key[len(prefix) :]: tensor for key, tensor in state.items() if key.startswith(prefix)}


def search(
    state: Mapping[str, Tensor],
    recognise: Callable[[Mapping[str, Tensor]], Found | None],
    file: str,
    fits: Callable[[Found], bool],
) -> tuple[Found, tuple[str, ...]] | None:
    """Return the result of `recognise` for `state`, or for the one part that it recognises, and notes; else None.

    Raises:
        CheckpointError: several parts fit equally well, or tensors outside the part may belong to the model; if no part
            fits, the error of `recognise` for the largest part.
    """
    found: dict[str, Found] = {}
    refused: list[CheckpointError] = []
    for prefix in ("", *_prefixes(state)):
        if prefix.startswith(tuple(found)):
            continue  # within a part that was already recognised
        try:
            result = recognise(below(state, prefix))
        except CheckpointError as error:
            refused.append(error)
            continue
        if result is not None:
            found[prefix] = result
    if not found and refused:
        raise refused[0]
    if not found:
        return None
    prefix = _only(state, [prefix for prefix in found if fits(found[prefix])] or list(found), file)
    try:
        return found[prefix], dropped(state, prefix, file) if prefix else ()
    except CheckpointError as error:
        raise (refused or [error])[0] from None


def towards(
    state: Mapping[str, Tensor], names: Collection[str], file: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the state under the `names` of a module if they differ only by a prefix, and notes.

    A prefix that a reader dropped as a wrapper's is restored if most names then match. If no part of `state` has most
    of the names, it stays unchanged.

    Raises:
        CheckpointError: several parts have all names.
    """
    if all(name in state for name in names):
        return dict(state), ()
    some = next(iter(names))
    above = ["", *(some[: at + 1] for at, character in enumerate(some) if character == ".")]
    counts = {prefix: sum(prefix + key in names for key in state) for prefix in above}
    prefix = max(above, key=counts.__getitem__)
    if prefix and 2 * counts[prefix] >= len(names):
        return {prefix + key: tensor for key, tensor in state.items()}, ()
    votes: Counter[str] = Counter()
    for key in state:
        parts = key.split(".")
        votes.update(key[: len(key) - len(end)] for at in range(len(parts)) if (end := ".".join(parts[at:])) in names)
    most = max(votes.values(), default=0)
    best = [prefix for prefix, count in votes.items() if count == most]
    if 2 * most < len(names) or "" in best:
        return dict(state), ()
    prefix = _only(state, best, file)
    # Other tensors keep their names, since all are compared with the module's names.
    beside = {key: tensor for key, tensor in state.items() if not key.startswith(prefix)}
    notes = (_told(prefix, beside),) if most == len(names) or not beside else ()
    return {**beside, **below(state, prefix)}, notes


def dropped(state: Mapping[str, Tensor], prefix: str, file: str) -> tuple[str, ...]:
    """Return notes on a dropped prefix, and on dropped training tensors outside it.

    Raises:
        CheckpointError: tensors outside the prefix may be part of the model.
    """
    beside = [key for key in state if not key.startswith(prefix)]
    unknown = [key for key in beside if not of_training(key)]
    if unknown:
        raise CheckpointError(
            f"{file} has a model below {prefix!r} and unknown tensors outside it",
            found=f"{len(unknown)} outside it: {listed(patterns(unknown, state))}",
            expected="the tensors of one model",
            fix=f"if the model does not need them: {keeping(file, prefix)}; otherwise use --model "
            "package.module:function with a module that has them",
        )
    training = [f"left out, used in training only: {listed(patterns(beside, state))}"] if beside else []
    return (*training, _told(prefix, beside))


def keeping(file: str, prefix: str) -> str:
    """Return a command that writes the tensors below a prefix as a separate checkpoint."""
    out = f"{prefix.strip('.').replace('.', '_')}.safetensors"
    call = f"save_part({file!r}, {prefix!r}, {out!r})"
    return python_command(f"from vitdeploy.models.checkpoints.read import save_part; {call}")


def _told(prefix: str, beside: Collection[str]) -> str:
    return f"using the tensors below {prefix!r}" if beside else ALL_DROPPED.format(prefix)


def _prefixes(state: Mapping[str, Tensor]) -> Iterable[str]:
    """Return the prefixes of keys, up to a dot, shortest first; without those with too few keys."""
    counts: Counter[str] = Counter()
    for key in state:
        counts.update(key[: at + 1] for at, character in enumerate(key) if character == ".")
    fitting = [prefix for prefix, count in counts.items() if count >= FEWEST]
    return sorted(fitting, key=lambda prefix: prefix.count("."))


def _only(state: Mapping[str, Tensor], prefixes: list[str], file: str) -> str:
    if len(prefixes) == 1:
        return prefixes[0]
    raise CheckpointError(
        f"{file} holds several matching models",
        found=listed([f"{prefix!r} ({len(below(state, prefix))} tensors)" for prefix in prefixes]),
        expected="one model",
        fix=f"extract the right one and use that file: {keeping(file, prefixes[0])}",
    )


# --- Load a state dict into a model, strictly -------------------------------------------------------------------------


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str, file: str = "") -> tuple[str, ...]:
    """Load `state` into `model`, strictly; returns notes on the differences that were accepted, one per line.

    A prefix that the model's names lack is dropped. Only these differences are accepted: buffers that a module
    computes, on either side; a tensor with several names in the model, stored under one of them; and tensors in the
    state that only training needs. `file` is where the state was read from, `source` its name in errors.

    Raises:
        CheckpointError: missing, unexpected or differently shaped tensors; all of them, grouped.
        NonFiniteWeightsError: NaN or infinity in a tensor.
    """
    own = model.state_dict(keep_vars=True)
    state, notes = towards(state, own.keys(), file or source)
    state, remarks = _reconciled(own, state, source)
    found = mismatch.compare(own, state)
    if found:
        raise CheckpointError(
            f"{source} does not fit the architecture",
            found=found.told(own, state),
            expected=f"{len(own)} tensors with the model's names and shapes",
            fix=_mend(found),
        )
    for key, tensor in state.items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise NonFiniteWeightsError(
                f"{source}: {key} has non-finite values",
                found=f"{bad} of {tensor.numel()} values are NaN or infinite",
                fix="use another checkpoint: this one cannot be repaired",
            )
    model.load_state_dict(state, strict=True)
    return (*notes, *remarks)


def _mend(found: mismatch.Mismatch) -> str:
    if found.kinds:
        return "save the float weights: integers are meaningless without their scales"
    if found.missing or found.shapes:
        return "choose the model that the checkpoint was made for (size, patch, image size)"
    return "save the state dict without the unexpected tensors, or use a module that has them (--model)"


def _reconciled(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the state with the model's tensor names, adding or dropping tensors that make no difference."""
    whole, notes = dict(state), []
    groups: dict[int, list[str]] = {}
    for key, tensor in own.items():
        groups.setdefault(id(tensor), []).append(key)
    for names in groups.values():
        there = [name for name in names if name in state]
        if any(not torch.equal(state[name], state[there[0]]) for name in there[1:]):
            raise CheckpointError(
                f"{source} has different values for a shared tensor of the model",
                found=" and ".join(there),
                expected="the same values under all names of the shared tensor",
                fix="save the state dict of the model as it is built now",
            )
        if there and len(there) < len(names):
            whole |= dict.fromkeys(names, state[there[0]])
            notes.append(f"shared with {there[0]}: {mismatch.listed([name for name in names if name not in there])}")
    # A learned tensor with such a name still counts as missing.
    buffers = [key for key in own if key not in whole and not isinstance(own[key], nn.Parameter)]
    absent = [key for key in buffers if mismatch.COMPUTED.fullmatch(key)]
    whole |= {key: own[key].detach() for key in absent}
    if absent:
        summary = mismatch.listed(mismatch.patterns(absent, own))
        notes.append(f"not in the checkpoint, computed by the model itself: {summary}")
    extra = [key for key in whole if key not in own]
    computed = [key for key in extra if mismatch.COMPUTED.fullmatch(key)]
    training = [key for key in extra if key not in computed and mismatch.of_training(key)]
    for keys, why in ((computed, "computed by the model itself"), (training, "used in training only")):
        if keys:
            notes.append(f"left out, {why}: {mismatch.listed(mismatch.patterns(keys, state))}")
    return {key: tensor for key, tensor in whole.items() if key not in {*computed, *training}}, tuple(notes)
