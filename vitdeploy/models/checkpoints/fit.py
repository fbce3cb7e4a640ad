"""A checkpoint's keys against a model's: wrappings, prefixes, what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, NonFiniteWeightsError, python_command
from vitdeploy.models.checkpoints import mismatch
from vitdeploy.models.checkpoints.mismatch import listed, of_training, patterns

# --- Find the model within a state dict -------------------------------------------------------------------------------
# training scripts save it below names of their own, such as `net.backbone.`.
#
# The prefix is found by what is below it, whatever it is called: by suffixes of keys that are a known module's names,
# or by an architecture that is recognised there. If two parts fit, the choice would be a guess, so neither is taken.


Found = TypeVar("Found")
FEWEST = 4  # keys of a model
ALL_DROPPED = "prefix {!r} dropped from all keys"


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key[len(prefix) :]: tensor for key, tensor in state.items() if key.startswith(prefix)}


def search(
    state: Mapping[str, Tensor],
    recognise: Callable[[Mapping[str, Tensor]], Found | None],
    file: str,
    fits: Callable[[Found], bool],
) -> tuple[Found, tuple[str, ...]] | None:
    """The result of `recognise` for `state`, or for the one part that it recognises, and what was dropped; else None.

    Raises:
        CheckpointError: several parts fit equally well, or tensors outside the part may belong to the model; or the
            error of `recognise` for the largest part, if there is nothing better.
    """
    found: dict[str, Found] = {}
    refused: list[CheckpointError] = []
    for prefix in ("", *_prefixes(state)):
        if prefix.startswith(tuple(found)):
            continue  # a part of what is found already, as all are of the whole
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
    """The state under the `names` of a module, if they differ by a prefix only, and what was dropped.

    A prefix of the names that a checkpoint reader took for a wrapper's is restored if this makes most names match. If
    no part of `state` has most of the names, it stays unchanged.

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
    # Other tensors keep their names: the module's names are compared with all of them.
    beside = {key: tensor for key, tensor in state.items() if not key.startswith(prefix)}
    notes = (_told(prefix, beside),) if most == len(names) or not beside else ()
    return {**beside, **below(state, prefix)}, notes


def dropped(state: Mapping[str, Tensor], prefix: str, file: str) -> tuple[str, ...]:
    """Notes on a dropped prefix, and on dropped training tensors outside it.

    Raises:
        CheckpointError: tensors outside the prefix may be part of the model.
    """
    beside = [key for key in state if not key.startswith(prefix)]
    unknown = [key for key in beside if not of_training(key)]
    if unknown:
        raise CheckpointError(
            f"{file} has a model below {prefix!r}, and tensors beside it whose use cannot be known",
            found=f"{len(unknown)} beside it: {listed(patterns(unknown, state))}",
            wanted="the tensors of one model",
            fix=f"where the model does without them: {keeping(file, prefix)}; else --model package.module:function, "
            "your own module that has them",
        )
    training = [f"left out, used in training only: {listed(patterns(beside, state))}"] if beside else []
    return (*training, _told(prefix, beside))


def keeping(file: str, prefix: str) -> str:
    """A command that writes what is below a prefix as a checkpoint of its own."""
    out = f"{prefix.strip('.').replace('.', '_')}.safetensors"
    call = f"save_part({file!r}, {prefix!r}, {out!r})"
    return python_command(f"from vitdeploy.models.checkpoints.read import save_part; {call}")


def _told(prefix: str, beside: Collection[str]) -> str:
    return f"the model is what is below {prefix!r}" if beside else ALL_DROPPED.format(prefix)


def _prefixes(state: Mapping[str, Tensor]) -> Iterable[str]:
    """Prefixes of keys, up to a dot, the shortest first; without those of too few keys."""
    counts: Counter[str] = Counter()
    for key in state:
        counts.update(key[: at + 1] for at, character in enumerate(key) if character == ".")
    fitting = [prefix for prefix, count in counts.items() if count >= FEWEST]
    return sorted(fitting, key=lambda prefix: prefix.count("."))


def _only(state: Mapping[str, Tensor], prefixes: list[str], file: str) -> str:
    if len(prefixes) == 1:
        return prefixes[0]
    raise CheckpointError(
        f"{file} holds several models that fit",
        found=listed([f"{prefix!r} ({len(below(state, prefix))} tensors)" for prefix in prefixes]),
        wanted="one of them",
        fix=f"keep the one you mean, and give that file: {keeping(file, prefixes[0])}",
    )


# --- Load a state dict into a model, refusing whatever does not fit ---------------------------------------------------


def load_state(model: nn.Module, state: Mapping[str, Tensor], source: str, file: str = "") -> tuple[str, ...]:
    """Load `state` into `model`, strictly; returns notes on the differences that were accepted, one per line.

    A prefix that the model's names do not have is found and dropped. Accepted are: buffers that a module computes, on
    one side only; a tensor with several names in the model, under one of them; and tensors in the state that only the
    training needs. Nothing else is. `file` is where the state was read from, `source` its name in errors.

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
            wanted=f"{len(own)} tensors named and shaped as the model's",
            fix=_mend(found),
        )
    for key, tensor in state.items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise NonFiniteWeightsError(
                f"{source}: {key} has values that are not finite",
                found=f"{bad} of {tensor.numel()} are NaN or infinite",
                fix="use another checkpoint: no step can fix this one",
            )
    model.load_state_dict(state, strict=True)
    return (*notes, *remarks)


def _mend(found: mismatch.Mismatch) -> str:
    if found.kinds:
        return "save the float weights: integers without their scales are other numbers"
    if found.missing or found.shapes:
        return "choose the model that the checkpoint was made for (size, patch, image size)"
    return "save the state dict without the unexpected tensors, or bring the module that has them (--model)"


def _reconciled(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state with the names of the model's tensors, where what is more or less of them makes no difference."""
    whole, notes = dict(state), []
    groups: dict[int, list[str]] = {}
    for key, tensor in own.items():
        groups.setdefault(id(tensor), []).append(key)
    for names in groups.values():
        there = [name for name in names if name in state]
        if any(not torch.equal(state[name], state[there[0]]) for name in there[1:]):
            raise CheckpointError(
                f"{source} has different numbers for what is one tensor in the model",
                found=" and ".join(there),
                wanted="the same numbers under all names of a shared tensor",
                fix="save the state dict of the model as it is built now",
            )
        if there and len(there) < len(names):
            whole |= dict.fromkeys(names, state[there[0]])
            notes.append(f"shared with {there[0]}: {mismatch.listed([name for name in names if name not in there])}")
    # What was learned under such a name is missing like any other.
    buffers = [key for key in own if key not in whole and not isinstance(own[key], nn.Parameter)]
    absent = [key for key in buffers if mismatch.COMPUTED.fullmatch(key)]
    whole |= {key: own[key].detach() for key in absent}
    if absent:
        told = mismatch.listed(mismatch.patterns(absent, own))
        notes.append(f"not in the checkpoint, computed by the model itself: {told}")
    extra = [key for key in whole if key not in own]
    computed = [key for key in extra if mismatch.COMPUTED.fullmatch(key)]
    training = [key for key in extra if key not in computed and mismatch.of_training(key)]
    for keys, why in ((computed, "computed by the model itself"), (training, "used in training only")):
        if keys:
            notes.append(f"left out, {why}: {mismatch.listed(mismatch.patterns(keys, state))}")
    return {key: tensor for key, tensor in whole.items() if key not in {*computed, *training}}, tuple(notes)
