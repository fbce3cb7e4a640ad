"""Writes docs/report.schema.json: `make report-schema`, or `python -m tests.report_schema` in the root folder.

It is made of the dataclasses that report.json is written and read by, and as strict as reading is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitdeploy.document.report import FORMAT, Report

FILE = Path(__file__).parent.parent / "docs" / "report.schema.json"


def schema_text() -> str:
    """The JSON Schema (draft 2020-12) of report.json."""
    found = TypeAdapter(Report).json_schema()
    for each in (found, *found["$defs"].values()):
        each["additionalProperties"] = False
        for field in each["properties"].values():
            field.pop("title", None)  # pydantic's spelling of the key
        if "description" in each:
            each["description"] = " ".join(each["description"].split())
    top: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"report.json of vitdeploy, format {FORMAT}",
    }
    return json.dumps({**top, **{key: value for key, value in found.items() if key != "title"}}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
