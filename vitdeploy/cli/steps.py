"""What `run` and `tune` say of the steps they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitdeploy.cli.console import Console

if TYPE_CHECKING:
    from vitdeploy.stages.step import Step


def tell_finished(console: Console, name: str, step: Step, reused: bool) -> None:
    """A step for -v; times that were measured earlier are never used without a word."""
    if step.measured and reused:
        console.note(f"{name}: chosen by times that were measured earlier on this device; --no-resume measures again")
    console.detail(f"{'reused' if reused else 'made'} {name}")
