"""Probes whether a target works here: its runtime is not only installed, but loads and reports what it supports."""

from __future__ import annotations

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import COMPILE, TargetState
from vitdeploy.compilation.finding import Finding
from vitdeploy.errors import MissingPackageError


def probe_target(name: str) -> TargetState:
    """Whether one target works here.

    For a GPU target the detail names the first thing that is missing; `examine` lists everything.

    Raises:
        TargetError: an unknown target.
    """
    row, backend = TARGETS[name], COMPILE[name]
    try:
        return backend.probe(name)
    except MissingPackageError as error:
        return TargetState(False, None, (), "not installed", error.fix)
    except Exception as error:  # a broken native library raises whatever it likes
        detail = f"{row.package} does not load: {str(error)[:200]}"
        return TargetState(False, None, (), detail, f"pip install --force-reinstall {row.package}")


def examine(name: str) -> list[Finding]:
    """Everything that one target needs, in the order in which to fix it.

    Raises:
        TargetError: an unknown target.
    """
    if (findings := COMPILE[name].examine) is not None:
        return findings(name)
    found = probe_target(name)
    return [Finding(TARGETS[name].package, found.works, found.detail, found.fix)]
