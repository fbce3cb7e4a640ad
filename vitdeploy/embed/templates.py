"""Sources and settings from templates: no HTML, so nothing is escaped except what a template quotes itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jinja2


def render(folder: Path, template: str, facts: Mapping[str, object]) -> str:
    """The text of a template in `folder`. Whoever gives the facts has reduced names of others to harmless characters;
    the filter `quoted` writes a JSON string."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # no HTML
    )
    environment.filters["quoted"] = json.dumps
    return environment.get_template(template).render(facts)
