"""100 OpenVINO models (.xml and .bin) of damaged structure, in bundles whose digests are those of the damaged files."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tests.faults.malformed import bytewise
from tests.faults.malformed.bundle_files import copied
from tests.faults.malformed.kinds import Attempt, Kind, Table
from tests.faults.seeds import relisted

TARGET = "openvino-cpu"
# Through the command line, whose parent outlives a crash of a native library.
PREDICT = ("predict", "given/bundle", "given/image.png", "--target", TARGET)
IR = Table()
Change = Callable[[random.Random, str, bytes], tuple[str | bytes, bytes]]


def case(name: str) -> Callable[[Change], Change]:
    """A class of damage: (chance, the xml, the weights) -> both."""

    def added(change: Change) -> Change:
        @IR.add(name)
        def make(attempt: Attempt) -> None:
            folder, _ = copied(attempt)
            home = folder / "engines" / TARGET
            text, weights = (home / "model.xml").read_text(encoding="utf-8"), (home / "model.bin").read_bytes()
            changed, data = change(attempt.random, text, weights)
            (home / "model.xml").write_bytes(changed if isinstance(changed, bytes) else changed.encode())
            (home / "model.bin").write_bytes(data)
            relisted(folder)

        return change

    return added


def _sub(chance: random.Random, pattern: str, new: str, text: str) -> str:
    """One of the places that match, replaced."""
    places = list(re.finditer(pattern, text))
    found = chance.choice(places)
    return text[: found.start()] + new + text[found.end() :]


case("bytes of the model")(
    lambda chance, text, data: (chance.choice(list(bytewise.MUTATIONS.values()))(chance, text.encode()), data)
)
case("bytes of the weights")(
    lambda chance, text, data: (text, chance.choice(list(bytewise.MUTATIONS.values()))(chance, data))
)
case("weights cut short")(lambda chance, text, data: (text, data[: chance.randrange(len(data))]))
case("no weights")(lambda chance, text, data: (text, b""))


@case("offsets and sizes that lie")
def _offsets(chance, text, data):
    wrong = chance.choice(("-1", "99999999999", "18446744073709551615", "18446744073709551616", "1e3", "", "0x10"))
    return _sub(chance, r'(offset|size)="\d+"', f'{chance.choice(("offset", "size"))}="{wrong}"', text), data


@case("shapes that lie")
def _shapes(chance, text, data):
    wrong = chance.choice(("-5", "0", "1000000000000", "9" * 30, "x", "", "1,1,1", "-1", "?", "1000000"))
    return _sub(chance, r"<dim>-?\d+</dim>", f"<dim>{wrong}</dim>", text), data


@case("shapes in attributes")
def _attributes(chance, text, data):
    wrong = chance.choice(
        ("-5,3", "1000000,1000000", "9" * 30, "", "a,b", "," * 5000, "?,3,8,8", "...", "1000000,3,8,8")
    )
    return _sub(chance, r'shape="[^"]*"', f'shape="{wrong}"', text), data


@case("types of elements")
def _types(chance, text, data):
    wrong = chance.choice(("f64", "u1", "string", "nf4", "f8e4m3", "", "\u202e", "dynamic", "i4", "undefined"))
    return _sub(chance, r'element_type="[^"]*"', f'element_type="{wrong}"', text), data


@case("edges to nowhere, in circles, doubled")
def _edges(chance, text, data):
    how = chance.randrange(3)
    if how == 0:
        return _sub(chance, r'to-layer="\d+"', f'to-layer="{chance.choice((999, -1, 0, "x"))}"', text), data
    if how == 1:
        return _sub(chance, r'from-layer="\d+"', f'from-layer="{chance.choice((999, 3, 12, 14))}"', text), data
    edge = chance.choice(re.findall(r"<edge [^>]*>", text))
    return text.replace("</edges>", edge * chance.choice((1, 5000)) + "</edges>"), data


@case("layers that nobody knows, doubled or gone")
def _layers(chance, text, data):
    how = chance.randrange(3)
    if how == 0:
        kinds = ("Loop", "TensorIterator", "If", "ReadValue", "Rotate", "", "NonZero", "Const", "Result")
        return _sub(chance, r' type="[A-Z]\w*"', f' type="{chance.choice(kinds)}"', text), data
    layers = re.findall(r"<layer .*?</layer>", text, re.DOTALL)
    chosen = chance.choice(layers)
    return text.replace(chosen, chosen * 2 if how == 1 else "", 1), data


@case("versions of layers and of the format")
def _versions(chance, text, data):
    wrong = f'version="{chance.choice(("0", "9", "99", "-1", "opset99", "", "experimental", "9" * 30))}"'
    return _sub(chance, r'version="[^"]*"', wrong, text), data


@case("entities that grow")
def _entities(chance, text, data):
    """Each is ten of the one before."""
    lines = [f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 30)]
    declared = f'<!DOCTYPE net [<!ENTITY e0 "x">{"".join(lines)}]>'
    return re.sub(r'name="[^"]*"', 'name="&e29;"', declared + text.partition("?>")[2], count=1), data


@case("entities that read files")
def _external(chance, text, data):
    declared = '<!DOCTYPE net [<!ENTITY e SYSTEM "file:///etc/passwd">]>'
    return re.sub(r'name="[^"]*"', 'name="&e;"', declared + text.partition("?>")[2], count=1), data


@case("deep and wide text")
def _deep(chance, text, data):
    tags = chance.choice((1000, 100_000))
    how = chance.randrange(3)
    if how == 0:
        return text.replace("<layers>", "<layers>" + "<a>" * tags + "</a>" * tags), data
    if how == 1:
        return text.replace("<layers>", "<layers>" + "<a/>" * tags), data
    return text.replace("<layers>", f'<layers a="{"x" * 5_000_000}">'), data


@case("numbers in attributes")
def _numbers(chance, text, data):
    wrong = chance.choice(("-1", "0", "99", "1000000", "9" * 30, "nan", "", "1,2,3,4,5"))
    pattern = r'(strides|pads_begin|pads_end|dilations|axis|keep_dims|eps|transpose_a|special_zero)="[^"]*"'
    place = chance.choice(re.findall(pattern, text))
    return re.sub(rf'{place}="[^"]*"', f'{place}="{wrong}"', text, count=1), data


@case("another file")
def _other(chance, text, data):
    return bytewise.another_file(chance, data), data


KIND = Kind(
    "OpenVINO IR",
    full=100,
    damages=tuple(IR),
    words=lambda number: PREDICT,
    whole=lambda attempt: copied(attempt) and None,
    commands=(PREDICT,),
)
