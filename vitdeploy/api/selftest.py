"""One target proven on this machine, and one folder to send back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.progress import Progress

if TYPE_CHECKING:
    from vitdeploy.document.selftest import SelftestDocument


def selftest(target: str, folder: Path, duration: float, progress: Progress) -> tuple[SelftestDocument, list[str]]:
    """Build, verify and bench engines of built-in models; the report is in `folder`. A step that fails is recorded.

    Args:
        duration: seconds an artifact and scenario of the bench.

    Raises:
        TargetError: an unknown target. OutputError: `folder` holds something else.
    """
    from vitdeploy.benchmark.protocol import Protocol
    from vitdeploy.stages.capability import check_target

    check_target(target)
    from vitdeploy.publish import replacing, temporary_folder
    from vitdeploy.store.store import Store
    from vitdeploy.workflows.selftest.cases import default_cases
    from vitdeploy.workflows.selftest.run import REPORT_NAMES, run_selftest

    with replacing(folder, REPORT_NAMES) as work, temporary_folder(folder.parent) as store:
        protocol = Protocol(duration=duration)
        document = run_selftest(target, default_cases(), work, Store(store), protocol=protocol, progress=progress)
    lines = (folder / "doctor.txt").read_text(encoding="utf-8").splitlines()
    for row in document.steps:
        seconds = f"{row.seconds:.1f} s" if row.status == "done" else row.detail
        lines.append(f"{row.status:<7}  {row.model:<16} {row.step:<28} {seconds}")
    return document, [*lines, document.sentence]
