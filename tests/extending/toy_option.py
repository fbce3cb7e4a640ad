"""A toy option: `tint`, of a command of its own, declared in one place."""

# Annotations of options are evaluated: no future import.

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from vitdeploy.api.calls import takes
from vitdeploy.api.option import Options, option, required


@dataclass(frozen=True)
class Paint(Options):
    image: str = field(metadata=required(place="one"))
    _: KW_ONLY
    tint: Literal["red", "blue"] | None = option(None, "Colour of all that is drawn.")
    opacity: float = option(50.0, "Percent of it.", min=0, max=100)

    def check(self) -> None:
        if self.tint is None and self.opacity == 0:
            self.refuse("<opacity> 0 needs a <tint>.")


@takes(Paint)
def paint(options: Paint) -> str:
    """Paint an image.

    Raises:
        InputError: options that do not go together.
    """
    return f"{options.image} {options.tint} {options.opacity:g}"
