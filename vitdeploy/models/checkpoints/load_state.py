"""Load a state dict into a model, refusing whatever does not fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, NonFiniteWeightsError
from vitdeploy.models.checkpoints import mismatch, prefixes


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
    state, notes = prefixes.towards(state, own.keys(), file or source)
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
