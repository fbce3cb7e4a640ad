"""The figure of hostile devices: conversations, documents, and what is lost when something dies."""

from __future__ import annotations

import time
from pathlib import Path

from tests.faults.devices.conversations import conversations_row
from tests.faults.devices.documents import documents_row
from tests.faults.devices.lost import lost_row
from tests.faults.devices.model import make_small
from tests.faults.gate import Row


def run(full: bool, work: Path) -> list[Row]:
    small, rows = make_small(work), []
    for make in (conversations_row, documents_row, lost_row):
        began = time.monotonic()
        rows.append(make(full, work, small))
        rows[-1].seconds = time.monotonic() - began
    return rows
