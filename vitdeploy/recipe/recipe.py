"""The whole recipe, and what holds between its sections."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vitdeploy.backends import TARGETS, near_target
from vitdeploy.compilation.backend import BuildOptions, default_batches
from vitdeploy.errors import RecipeError
from vitdeploy.known_bad.entries import table
from vitdeploy.recipe.sections import (
    AnyPostprocess,
    BenchSection,
    BudgetSection,
    BundleSection,
    DataSection,
    ExportSection,
    OptimizeSection,
    PreprocessSection,
    Section,
    SourceSection,
    TensorRtSection,
)
from vitdeploy.spec import Budget, Precision


class Recipe(Section):
    """The whole pipeline, schema version 1.

    `vnni`: whether the CPU that runs INT8 has it; auto: as this machine. `float_parts`: graphs of a model of several
    that stay in float where the others are in INT8; `ignore`: layers that do, with * for any, as `quantize --ignore`
    takes them; of a model of several graphs as graph/layer. `high_precision`: percent of the latency that layers out of
    plain INT8 may add, where they bring the answers nearer to the original's, as measured on this machine; 0 leaves all
    in plain INT8. `accept_known_bad`: entries of the table of runtimes known
    to be wrong that are no reason to refuse an engine.
    """

    vitdeploy: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    source: SourceSection
    preprocess: PreprocessSection | None = None
    postprocess: AnyPostprocess | None = None
    data: DataSection
    export: ExportSection = ExportSection()
    optimize: OptimizeSection = OptimizeSection()
    precision: Precision = "int8"
    vnni: Literal["auto"] | bool = "auto"
    float_parts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    ignore: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    high_precision: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 5.0
    accept_known_bad: Annotated[tuple[str, ...], Field(strict=False)] = ()
    targets: Annotated[tuple[str, ...], Field(strict=False)]
    budget: BudgetSection = BudgetSection()
    bench: BenchSection = BenchSection()
    bundle: BundleSection = BundleSection()
    tensorrt: TensorRtSection = TensorRtSection()

    @field_validator("vitdeploy", mode="before")
    @classmethod
    def _no_boolean(cls, version: Any) -> Any:
        if version is True:  # equal to 1 for pydantic's Literal
            raise ValueError("input should be 1")
        return version

    @field_validator("targets")
    @classmethod
    def _known_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets:
            raise ValueError(f"wanted at least one of {', '.join(TARGETS)}")
        for target in targets:
            if target not in TARGETS:
                hint = f"; did you mean {near}?" if (near := near_target(target)) else ""
                raise ValueError(f"{target!r} is not a target; there are {', '.join(TARGETS)}{hint}")
        if len(set(targets)) != len(targets):
            raise ValueError("a target is named twice")
        return targets

    @field_validator("accept_known_bad")
    @classmethod
    def _known_entries(cls, ids: tuple[str, ...]) -> tuple[str, ...]:
        known = [entry.id for entry in table()]
        if unknown := [each for each in ids if each not in known]:
            raise ValueError(f"no entry is called {', '.join(unknown)}; there are {', '.join(known)}")
        return ids

    @model_validator(mode="after")
    def _batches_fit(self) -> Recipe:
        fixed = self.export.batch
        if isinstance(fixed, int) and set(self.bench.batch) != {fixed}:
            raise ValueError(f"export.batch is fixed to {fixed}, so bench.batch must be [{fixed}]")
        return self

    @model_validator(mode="after")
    def _profiles_fit(self) -> Recipe:
        if self.tensorrt.profiles is None or "tensorrt" not in self.targets:
            return self
        if isinstance(self.export.batch, int):
            raise ValueError(f"export.batch is fixed to {self.export.batch}, so tensorrt.profiles must be left out")
        lost = [str(batch) for batch in self.bench.batch if not self.tensorrt.holds(batch)]
        if lost:
            raise ValueError(f"no profile of tensorrt.profiles holds bench.batch {', '.join(lost)}")
        return self

    def at_batch(self, batch: int) -> Recipe:
        """The recipe of a model that runs at one batch alone, where it leaves that open.

        Raises:
            RecipeError: it asks for engines of another batch.
        """
        if "batch" in self.bench.model_fields_set and set(self.bench.batch) != {batch}:
            told = f"$.bench.batch: {list(self.bench.batch)}, and the model is of batch {batch} alone; give [{batch}]"
            raise RecipeError("the recipe", [told])
        if self.tensorrt.profiles is not None and "tensorrt" in self.targets:
            raise RecipeError("the recipe", [f"$.tensorrt.profiles: the model is of batch {batch} alone; leave it out"])
        export = self.export.model_copy(update={"batch": batch})
        return self.model_copy(update={"export": export, "bench": self.bench.model_copy(update={"batch": (batch,)})})

    @property
    def engine_batch(self) -> int:
        """The batch that engines are compiled at: the fixed one, or that of the single stream."""
        return self.bench.batch[0]

    def to_build(self) -> BuildOptions:
        """TensorRT's build options; without explicit profiles, for all batches up to the largest that is benched."""
        options = self.tensorrt.to_options()
        profiles = options.batches or default_batches(self.engine_batch, max(self.bench.batch))
        return dataclasses.replace(options, batches=profiles)

    def to_budget(self) -> Budget:
        return Budget(**self.budget.model_dump())
