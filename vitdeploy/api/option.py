"""What an option is: a field of a frozen dataclass, with its type, default, range and help.

The API function takes the fields as keyword arguments (`calls.takes`), and the command line makes its options from them
(`cli.options.command_of`). Both use the documentation, the ranges, and the checks of combined options. Nothing heavy is
imported, and nothing of the command line.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vitdeploy.errors import InputError

T = TypeVar("T")
Chosen = TypeVar("Chosen", bound="Options")


@dataclass(frozen=True)
class Option:
    """The description of a field, besides its name, type and default.

    `help`: the help text; without it the command line has no such option. `doc`: the text for the API, if it differs.
    `flag`: the flag, if it is not derived from the name; "--x/--no-x" for both sides of a bool. `kind`: the parser of
    the command line, a row of `cli.options.KINDS`; by default derived from the type. `complete`: the shell completion,
    a row of `cli.complete.COMPLETE`. `above`: `min` itself is not allowed. `required`: required by the command line,
    although the API has a default. `default`: the text of the default on the command line. `place`: an argument without
    a flag: "one", "many" or "optional". `advanced`: rarely needed; --help of a command with many options lists it last.
    """

    help: str = ""
    doc: str = ""
    flag: str = ""
    kind: str = ""
    complete: str = ""
    metavar: str | None = None
    min: Any = None  # a number of the field's type
    max: Any = None
    above: bool = False
    required: bool = False
    default: str | None = None
    place: Literal["", "one", "many", "optional"] = ""
    advanced: bool = False

    def allows(self, value: float) -> bool:
        least, most = self.min, self.max
        return (least is None or value > least or (value == least and not self.above)) and (
            most is None or value <= most
        )

    def range(self) -> str:
        """The values that are allowed, in words."""
        least = [] if self.min is None else [f"{'above' if self.above else 'at least'} {self.min:,}"]
        return " and ".join([*least, *([] if self.max is None else [f"at most {self.max:,}"])])


def option(default: T, about: str | Option, /, **more: Any) -> T:
    """Return a field with a default; `about` is its help text or a shared option, `more` the differences from it."""
    described_by = Option(about, **more) if isinstance(about, str) else dataclasses.replace(about, **more)
    return field(default=default, metadata={"option": described_by})


def advanced(default: T, about: str | Option, /, **more: Any) -> T:
    """Return an `option` that is rarely needed."""
    return option(default, about, advanced=True, **more)


def required(about: str | Option = "", /, **more: Any) -> dict[str, Option]:
    """`option` for a field without a default: `field(metadata=required(...))`."""
    return {"option": Option(about, **more) if isinstance(about, str) else dataclasses.replace(about, **more)}


class OptionError(InputError):
    """Options that are out of range or cannot be combined. `text` has their names as <name>."""

    def __init__(self, text: str) -> None:
        super().__init__(re.sub(r"<(\w+)>", r"\1", text).rstrip("."))
        self.text = text

    def worded(self, name: Callable[[str], str]) -> str:
        """The text with each <name> replaced by `name(...)`."""
        return re.sub(r"<(\w+)>", lambda match: name(match[1]), self.text)


@dataclass(frozen=True)
class Options:
    """The options of a function or a command."""

    def __post_init__(self) -> None:
        for each, about in described(type(self)):
            value = getattr(self, each.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and value != each.default and not about.allows(value):
                self.refuse(f"<{each.name}> is {value}; it must be {about.range()}.")
        self.check()

    def check(self) -> None:
        """Check combinations of options."""

    def refuse(self, text: str) -> None:
        raise OptionError(text)

    def passed_on(self, to: type[Chosen], **changes: Any) -> Chosen:
        """The options of another function: the fields with the same names, and `changes`."""
        names = {each.name for each in dataclasses.fields(self)} - {*changes}
        same = {each.name: getattr(self, each.name) for each in dataclasses.fields(to) if each.name in names}
        return to(**same, **changes)


def described(options: type[Options]) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields in their order, each with its description."""
    for each in dataclasses.fields(options):
        yield each, each.metadata.get("option", Option())
