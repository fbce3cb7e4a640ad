"""A change of a series in one sentence: when, by how much, and what changed with it."""

from __future__ import annotations

from vitdeploy.document.history import ChangeFacts, Difference, ShareFacts

# What facts of a row are called within a sentence.
_CALLED = {
    "runtime": "the runtime",
    "driver": "the driver",
    "vitdeploy": "vitdeploy",
    "model digest": "the model",
    "host": "the host",
    "system": "the system",
    "Python": "Python",
    "command": "the command",
}


def change_sentence(name: str, change: ChangeFacts) -> str:
    """The sentence about the series called `name`."""
    amount, bounds = _share(change.ratio), sorted(_share(each) for each in change.ci95)
    slower = change.direction == "slower"
    low, high = bounds if slower else (-bounds[1], -bounds[0])
    begin = (
        f"{name} got {abs(amount):.1f} % {change.direction} ({low:.1f} to {high:.1f}) "
        f"at result {change.number} of {change.time[:10]}"
    )
    return f"{begin}{_reasons(change)}."


def _reasons(change: ChangeFacts) -> str:
    parts = []
    if change.differences:
        several = "; which of these it was, the series does not say" if len(change.differences) > 1 else ""
        parts.append(", when " + _and([_difference(each) for each in change.differences]) + several)
    if change.shares:
        parts.append(", " + _and([_share_of(each) for each in change.shares]))
    return "".join(parts) or ", and nothing that is recorded changed with it"


def _difference(found: Difference) -> str:
    before, after = (_value(found.what, each) for each in (found.before, found.after))
    return f"{_CALLED[found.what]} changed from {before} to {after}"


def _share_of(found: ShareFacts) -> str:
    value = f"{'model' if found.what == 'model digest' else found.what} {_value(found.what, found.value)}"
    text = f"with {value} in {found.after} of {found.of_after} results from there on, in {found.before} of "
    text += f"{found.of_before} before"
    if found.ratio is not None:
        share = _share(found.ratio)
        text += f" ({abs(share):.1f} % {'slower' if share > 0 else 'faster'} than the others)"
    return text


def _value(what: str, value: str) -> str:
    return (f"sha256:{value}" if what == "model digest" else value) if value else "unknown"


def _share(ratio: float) -> float:
    return 100 * (ratio - 1)


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
