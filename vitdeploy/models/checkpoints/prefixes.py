"""Where in a state dict the model is: training scripts save theirs below names of their own, such as `net.backbone.`.

The prefix is found by what is below it, whatever it is called: by suffixes of keys that are a known module's names, or
by an architecture that is recognised there. Where two parts fit, nothing says which was meant, so none is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed, of_training, patterns

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
    """What `recognise` makes of `state`, or of the one part of it that it knows, and what was dropped; else None.

    Raises:
        CheckpointError: several parts that are alike in whether they fit, or tensors beside the part which may belong
            to the model; or what `recognise` raises of the largest part, where there is nothing better.
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
    """The state under the `names` of a module, as far as a prefix makes the difference, and what was dropped.

    A prefix of the names that a reader of checkpoints took for a wrapper's comes back, where most of the names are then
    there. Where no part of `state` has most of the names it stays as it is.

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
    # What stands beside it keeps its name: the module's are compared with all of them.
    beside = {key: tensor for key, tensor in state.items() if not key.startswith(prefix)}
    notes = (_told(prefix, beside),) if most == len(names) or not beside else ()
    return {**beside, **below(state, prefix)}, notes


def dropped(state: Mapping[str, Tensor], prefix: str, file: str) -> tuple[str, ...]:
    """Notes of a prefix, and of the tensors of the training beside it.

    Raises:
        CheckpointError: tensors beside it that may be part of the model.
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
    return f'python -c "from vitdeploy.models.checkpoints.read import save_part; {call}"'


def _told(prefix: str, beside: Collection[str]) -> str:
    return f"the model is what is below {prefix!r}" if beside else ALL_DROPPED.format(prefix)


def _prefixes(state: Mapping[str, Tensor]) -> Iterable[str]:
    """What keys begin with, up to a dot, the shortest first; without those of too few keys."""
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
