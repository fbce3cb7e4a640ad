"""TensorRT's build options in recipes and `vitdeploy compile`. The names are those of trtexec and Polygraphy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from vitdeploy.compilation.build_options import BuildOptions
from vitdeploy.recipe.section import Positive, Section
from vitdeploy.runtime.profiles import Batches

Profile = Annotated[tuple[Positive, Positive, Positive], Field(strict=False)]
HardwareCompatibility = Literal["none", "same-compute-capability", "ampere+"]


class TensorRtSection(Section):
    """For the target tensorrt alone; see `compilation.tensorrt.BuildOptions` for what the default does.

    `profiles`: (smallest, best, largest) batch of each. `workspace`: MiB of device memory, at most.
    """

    profiles: Annotated[tuple[Profile, ...], Field(min_length=1, strict=False)] | None = None
    workspace: Positive | None = None
    builder_optimization_level: Annotated[int, Field(ge=0, le=5)] = BuildOptions.level
    hardware_compatibility_level: HardwareCompatibility = "none"
    version_compatible: bool = False

    @field_validator("profiles")
    @classmethod
    def _in_order(cls, profiles: tuple[Batches, ...] | None) -> tuple[Batches, ...] | None:
        for smallest, best, largest in profiles or ():
            if not smallest <= best <= largest:
                raise ValueError("a profile is [smallest, best, largest] batch, in this order")
        return profiles

    def holds(self, batch: int) -> bool:
        """Whether one of the profiles covers the batch."""
        return any(smallest <= batch <= largest for smallest, _, largest in self.profiles or ())

    def to_options(self) -> BuildOptions:
        hardware = self.hardware_compatibility_level
        return BuildOptions(
            batches=self.profiles or (),
            workspace=None if self.workspace is None else self.workspace << 20,
            level=self.builder_optimization_level,
            hardware="this" if hardware == "none" else hardware,
            versions="newer" if self.version_compatible else "this",
        )
