"""The figure of hostile devices: conversations, documents, and what is lost when something dies."""

from __future__ import annotations

from pathlib import Path

from tests.faults.devices.conversations import conversations_row
from tests.faults.devices.documents import documents_row
from tests.faults.devices.lost import lost_row
from tests.faults.devices.model import make_small
from tests.faults.gate import Row, timed


def run(full: bool, work: Path) -> list[Row]:
    small = make_small(work)
    return [timed(make, full, work, small) for make in (conversations_row, documents_row, lost_row)]
