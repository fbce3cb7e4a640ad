"""A matplotlib figure as inline SVG that follows the page: its colours, its font, its dark mode."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.figure import Figure

from vitdeploy.report.figures import VARIABLES, plot_style

_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
# Only what a static drawing needs: metadata, style sheets (their "*" rule would reach the whole page) and anything
# unforeseen are left out.
_ELEMENTS = {"svg", "g", "path", "defs", "use", "clipPath", "rect", "circle", "text", "tspan"}
_ATTRIBUTES = {"d", "x", "y", "width", "height", "transform", "clip-path", "style", "cx", "cy", "r"}
_DECIMALS = re.compile(r"-?\d+\.\d+")
_REFERENCE = re.compile(r"#([\w.-]+)")


@dataclass(frozen=True)
class Plot:
    """One plot in its two variants, and what it shows in words."""

    title: str
    caption: str
    wide: Markup
    narrow: Markup


def both_variants(draw: Callable[[bool], Figure], name: str, description: str) -> tuple[Markup, Markup]:
    """The wide and the narrow variant of a plot as inline SVG."""
    with plot_style():
        wide = inline_svg(draw(False), f"{name}-wide", description)
        narrow = inline_svg(draw(True), f"{name}-narrow", description)
    return wide, narrow


def inline_svg(figure: Figure, prefix: str, description: str) -> Markup:
    """The figure as an <svg> element, with every text and attribute escaped; `prefix` keeps its ids apart from those of
    the page's other plots."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())  # noqa: S314 - matplotlib wrote it just now
    body = "".join(_serialise(child, prefix) for child in root)
    box = html.escape(root.attrib["viewBox"])
    label = html.escape(description)
    text = f'<svg viewBox="{box}" role="img" aria-label="{label}" class="{prefix}">{body}</svg>'
    return Markup(text)  # noqa: S704


def _serialise(element: ElementTree.Element, prefix: str) -> str:
    """One element and its children as HTML text."""
    tag = element.tag.removeprefix(_SVG)
    if tag not in _ELEMENTS:
        return ""
    inner = html.escape((element.text or "").strip()) + "".join(_serialise(child, prefix) for child in element)
    if tag in ("g", "defs") and not inner:
        return ""
    attributes = "".join(
        f' {name}="{html.escape(value)}"' for name, value in _attributes(element.attrib, tag, prefix) if value
    )
    # Groups only carry ids and clip paths; without either they are noise.
    return inner if tag == "g" and not attributes else f"<{tag}{attributes}>{inner}</{tag}>"


def _attributes(attributes: dict[str, str], tag: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The attributes to keep: numbers rounded, ids made unique, colours made variables."""
    for name, value in attributes.items():
        if name == "id" and tag != "g":
            yield "id", f"{prefix}-{value}"
        elif name in (_HREF, "clip-path"):
            yield name.rsplit("}", 1)[-1], _REFERENCE.sub(rf"#{prefix}-\1", value)
        elif name == "style":
            yield name, _style(value)
        elif name == "transform" and tag == "text" and value.startswith("rotate(-0 "):
            continue
        elif name in _ATTRIBUTES:
            yield name, _DECIMALS.sub(_rounded, " ".join(value.split()))


def _style(value: str) -> str:
    """A style attribute in the page's colours, without the font family: text inherits that of the page."""
    parts = [part.strip() for part in value.split(";") if part.strip()]
    kept = (part for part in parts if not part.startswith("font-family"))
    return "; ".join(re.sub(r"#[0-9a-f]{6}", lambda match: VARIABLES.get(match[0], match[0]), part) for part in kept)


def _rounded(match: re.Match[str]) -> str:
    """A coordinate to a hundredth of a pixel."""
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
