"""Summarize the screening in words: which of the usual measures pay on this machine, and which do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitdeploy.benchmark.paired import ratio_of_medians
from vitdeploy.workflows.tuning.variants import FLOATS, Variant

Medians = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Traits:
    """What a variant is judged by besides its times: the distance of its answers, and the bytes of its engine."""

    variant: Variant
    distance: float
    bytes: int
    finalist: bool


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


def four_bits_remarks(traits: Sequence[Traits], medians: Medians, unit: str, disturbed: str = "") -> list[str]:
    """A sentence on INT4 weights for each target: what they save and cost against plain INT8.

    Args:
        traits: of everything that was made.
        unit: of distances.
        medians, disturbed: as in `remarks`.
    """
    plain = {each.variant.target: each for each in traits if each.variant == Variant(each.variant.target, "int8")}
    found = []
    for each in traits:
        target = each.variant.target
        if each.variant.precision != "int4" or target not in plain:
            continue
        int8 = plain[target]
        times = "times not decided"
        if not disturbed:
            ratio, low, high = ratio_of_medians(medians[each.variant.name], medians[int8.variant.name]).interval
            times = f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
        end = "a finalist" if each.finalist else "no finalist, as another one is nearer to the original and as fast"
        found.append(
            f"INT4 weights on {target} against INT8: {each.bytes / 1e6:.1f} MB for {int8.bytes / 1e6:.1f}, {times}, "
            f"{unit} {each.distance:.3g} for {int8.distance:.3g}: {end}."
        )
    return found
