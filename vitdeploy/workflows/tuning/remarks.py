"""Summarize the screening in words: which of the usual measures pay on this machine, and which do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitdeploy.benchmark.paired import ratio_of_medians
from vitdeploy.workflows.tuning.variants import FLOATS, Variant

Medians = Mapping[str, Sequence[float]]


def remarks(variants: Sequence[Variant], medians: Medians, disturbed: str = "") -> list[str]:
    """A sentence for each pair of variants that a person would ask about.

    Args:
        variants: what was measured.
        medians: milliseconds of each round by name, all measured in the same rounds, in one process of each.
        disturbed: why these are not to be relied on; then nothing is said but that.
    """
    if disturbed:
        return [f"Which variants are faster than others was not decided: {disturbed}."]
    found = []
    for variant in variants:
        if variant.raised:  # it is there for the answers, which the table shows
            continue
        if variant.plain != variant and variant.plain.name in medians:
            found.append(_changed(variant, medians))
        elif variant.precision == "int8":
            found += _int8(variant, variants, medians)
    return found


def _int8(variant: Variant, variants: Sequence[Variant], medians: Medians) -> list[str]:
    """INT8 against the fastest float of the same target."""
    floats = [each for each in variants if each.target == variant.target and each.precision in FLOATS]
    if not floats:
        return []
    best = min(floats, key=lambda each: sorted(medians[each.name])[len(medians[each.name]) // 2])
    ratio, low, high = ratio_of_medians(medians[variant.name], medians[best.name]).interval
    name, shown = best.precision.upper(), f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
    if low > 1:
        return [f"{name} is faster than INT8 on {variant.target} ({shown}): ship {name} there."]
    if high >= 1:
        return [f"INT8 is not provably faster than {name} on {variant.target} ({shown})."]
    return []


def _changed(variant: Variant, medians: Medians) -> str:
    """Say whether a change of the graph pays, compared with the same variant without it."""
    ratio, low, high = ratio_of_medians(medians[variant.name], medians[variant.plain.name]).interval
    word = "pays" if high < 1 else "does not pay" if low > 1 else "is not provably faster"
    merges = ", then ".join(f"to {count} tokens in block {block}" for block, count in variant.merges)
    what = f"Merging {merges}" if variant.merges else f"Computing {variant.rows} rows"
    what = what if variant.prune is None else f"Pruning {100 * variant.prune:g} % of the products"
    return f"{what} {word} on {variant.target}: latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}] to without."
