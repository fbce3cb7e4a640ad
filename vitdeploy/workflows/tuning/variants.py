"""Variants to try: a target, a precision, and further changes of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.backends import TARGETS
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.spec import Precision
from vitdeploy.stages.step import Candidate

FLOATS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Variant:
    """One way to run a model. `merges`: of tokens, (block, tokens that remain) each. `rows`: that the blocks compute,
    None for one per token. `prune`: the least share of MACs that goes, None for none. `raised`: with the layers
    out of plain INT8 that the recipe's `high_precision` allows."""

    target: str
    precision: Precision
    merges: tuple[tuple[int, int], ...] = ()
    rows: int | None = None
    prune: float | None = None
    raised: bool = False

    @property
    def name(self) -> str:
        """The artifact name, with the further changes."""
        merged = "+".join(f"{block}:{count}" for block, count in self.merges)
        changes = [f"tokens {merged}"] * bool(merged) + [f"rows {self.rows}"] * (self.rows is not None)
        changes += [] if self.prune is None else [f"pruned {self.prune:g}"]
        changes += ["high precision"] * self.raised
        return " ".join([f"{self.target}-{self.precision}", *changes])

    @property
    def plain(self) -> Variant:
        """The same without what changes the graph, and all in plain INT8."""
        return Variant(self.target, self.precision)

    @property
    def changes_answers(self) -> bool:
        """Whether its float graph is another one, with other answers."""
        return bool(self.merges) or self.prune is not None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.target, self.precision, True)

    def recipe(self, base: Recipe) -> Recipe:
        """The recipe that makes this variant, for the target alone."""
        changes = {
            "token_merging": dict(self.merges) or "none",
            "align_rows": self.rows or "none",
            "prune": self.prune or "none",
        }
        further = {
            "precision": self.precision,
            "targets": (self.target,),
            "optimize": base.optimize.model_copy(update=changes),
            "high_precision": base.high_precision if self.raised else 0.0,
        }
        return base.model_copy(update=further)


def float_variants(target: str) -> list[Variant]:
    """A variant for every float precision of the target; the runtime tells whether this machine supports it."""
    return [Variant(target, precision) for precision in FLOATS if precision in TARGETS[target].precisions]
