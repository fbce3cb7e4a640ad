"""Formatting of numbers and texts in reports, and comparisons as JUnit XML."""

import dataclasses
import math
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar, cast
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from vitdeploy.document.comparison import ComparisonDocument

# --- Numbers, sizes and dates in words. Missing values become an en dash, never "None" --------------------------------


MISSING = "–"
_OVERRIDES = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def known(value: float | None) -> bool:
    """Whether a value is present and finite."""
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 2) -> str:
    """A number with a fixed number of decimals, thousands separators, and a true minus sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:,.{digits}f}"
    # A small negative number must not be shown as "-0.00".
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")


def significant(value: float | None, digits: int = 3) -> str:
    """A number with about this many significant digits, never in exponent form."""
    if value is None or not math.isfinite(value):
        return MISSING
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return number(value, max(0, digits - 1 - magnitude))


def small(value: float | None, digits: int = 2) -> str:
    """A number that may be tiny: plain from 0.001 on, else as 1.2×10⁻⁵."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return significant(value, digits)
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.replace('-', '−')}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def interval(bounds: Sequence[float] | None, digits: int = 2) -> str:
    """A confidence interval in words, which is readable with negative bounds."""
    if bounds is None or not all(known(bound) for bound in bounds):
        return MISSING
    return f"{number(bounds[0], digits)} to {number(bounds[1], digits)}"


def ratio_interval(bounds: Sequence[float] | None) -> str:
    """The interval of a ratio, both bounds with three significant digits."""
    if bounds is None or not all(known(bound) for bound in bounds):
        return MISSING
    return f"{significant(bounds[0])} to {significant(bounds[1])}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction between 0 and 1 as a percentage."""
    return MISSING if fraction is None or not math.isfinite(fraction) else f"{number(100 * fraction, digits)} %"


def megabytes(count: float | None) -> str:
    """A count of bytes in decimal megabytes, without the unit."""
    return MISSING if count is None else significant(count / 1e6)


def size(count: float | None) -> str:
    """A number of bytes with a suitable unit."""
    if count is None:
        return MISSING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{count} bytes"


def count(value: float, singular: str, plural: str | None = None) -> str:
    """A counted noun: "1 image", "1,000 images"."""
    return f"{number(value, 0)} {singular if value == 1 else plural or singular + 's'}"


def capital(words: str) -> str:
    """The words with a capital first letter; words that contain capitals are unchanged."""
    return words if any(letter.isupper() for letter in words) else words[:1].upper() + words[1:]


def parameters(value: float | None) -> str:
    """A number of parameters, in millions from a million on."""
    if value is None:
        return MISSING
    return f"{significant(value / 1e6)} million" if value >= 1e6 else number(value, 0)


def date(iso: str) -> str:
    """An ISO date as "4 March 2025, 10:20 UTC"; the text itself if it is not one."""
    # Python supports the suffix "Z" from 3.11 on.
    plain = f"{iso[:-1]}+00:00" if iso.endswith("Z") else iso
    try:
        moment = datetime.fromisoformat(plain)
    except ValueError:
        return iso
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".rstrip()


def clean(value: str) -> str:
    """Text without control characters and lone surrogates, which UTF-8 or XML do not allow, and without direction
    overrides, which can disguise a name."""
    return "".join(
        "\ufffd" if unicodedata.category(char) in ("Cc", "Cs") or char in _OVERRIDES else char for char in value
    )


T = TypeVar("T")


def cleaned(document: T) -> T:
    """The document with every text in it cleaned, keys included."""
    return cast(T, _cleaned(document))


def _cleaned(value: object) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_cleaned, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: _cleaned(item) for name, item in vars(value).items()})
    return value


def shorten(text: str, limit: int = 32) -> str:
    """A text of at most `limit` characters, cut in the middle, because both ends distinguish artifacts."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


# --- A comparison as JUnit XML, which CI systems show: a test case for each engine and check --------------------------
# The format has no official standard; this is the common part of Jenkins' xunit schema (junit-10.xsd) and its readers.


SUITE = "vitdeploy compare"


def render_junit(document: ComparisonDocument) -> bytes:
    """The JUnit XML of a comparison, in UTF-8. An undecided check is a failure, as for the exit code; a check without a
    limit is skipped. `document` is untrusted."""
    found = cleaned(document)
    checks = [(engine.engine, check) for engine in found.engines for check in engine.checks]
    failed = sum(check.status in ("fail", "undecided") for _, check in checks)
    skipped = sum(check.status == "none" for _, check in checks)
    counts = {"tests": str(len(checks)), "failures": str(failed), "skipped": str(skipped), "errors": "0"}
    root = Element("testsuites", counts)
    suite = SubElement(root, "testsuite", {"name": SUITE, "timestamp": found.created[:19], **counts})
    for engine, check in checks:
        case = SubElement(suite, "testcase", {"classname": engine, "name": check.name})
        reasons = "; ".join(check.reasons)
        if check.status in ("fail", "undecided"):
            SubElement(case, "failure", {"type": check.status, "message": reasons}).text = reasons
        elif check.status == "none":
            SubElement(case, "skipped", {"message": "no limit was set"})
    indent(root)
    xml: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"
