"""What an option is: a field of a frozen dataclass, with its type, default, range and help.

The API function takes the fields as keyword arguments (`calls.takes`), the command line makes its options of them
(`cli.options.command_of`), and both get from here the documentation, the range, and the checks of options that go
together. Nothing heavy is imported, and nothing of the command line.
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
    """What a field says of itself beside its name, type and default.

    `help`: its text; without it the command line has no such option. `doc`: of the API, where that needs another text.
    `flag`: where it is not made of the name; "--x/--no-x" for both sides of a bool. `kind`: how the command line reads
    it, a row of `cli.options.KINDS`; by default the type says it. `complete`: what a shell offers, a row of
    `cli.complete.COMPLETE`. `above`: `min` itself is not allowed. `required`: by the command line, although the API has
    a default. `default`: the text of the default on the command line. `place`: an argument without a flag, which may
    be "one", "many" or "optional".
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
    """A field with a default; its text, or an option that others have too, with what differs."""
    said = Option(about, **more) if isinstance(about, str) else dataclasses.replace(about, **more)
    return field(default=default, metadata={"option": said})


def required(about: str | Option = "", /, **more: Any) -> dict[str, Option]:
    """The same for a field without a default: `field(metadata=required(...))`."""
    return {"option": Option(about, **more) if isinstance(about, str) else dataclasses.replace(about, **more)}


class OptionError(InputError):
    """Options out of their range, or that do not go together. `text` has their names as <name>."""

    def __init__(self, text: str) -> None:
        super().__init__(re.sub(r"<(\w+)>", r"\1", text).rstrip("."))
        self.text = text

    def worded(self, name: Callable[[str], str]) -> str:
        """The text with the names as they are called elsewhere."""
        return re.sub(r"<(\w+)>", lambda match: name(match[1]), self.text)


@dataclass(frozen=True)
class Options:
    """The options of a function or a command."""

    def __post_init__(self) -> None:
        for each, about in described(type(self)):
            value = getattr(self, each.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and value != each.default and not about.allows(value):
                self.refuse(f"<{each.name}> is {value}, and must be {about.range()}.")
        self.check()

    def check(self) -> None:
        """What must hold of several options together."""

    def refuse(self, text: str) -> None:
        raise OptionError(text)

    def passed_on(self, to: type[Chosen], **changes: Any) -> Chosen:
        """The options of another function: those of the same names, and `changes`."""
        names = {each.name for each in dataclasses.fields(self)} - {*changes}
        same = {each.name: getattr(self, each.name) for each in dataclasses.fields(to) if each.name in names}
        return to(**same, **changes)


def described(options: type[Options]) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields in their order, with what each says of itself."""
    for each in dataclasses.fields(options):
        yield each, each.metadata.get("option", Option())
