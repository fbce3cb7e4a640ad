"""The platform of an engine: the facts that the table's entries refer to."""

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vitdeploy.backends import TARGETS, Target
from vitdeploy.errors import HostError
from vitdeploy.extensions import installed_version
from vitdeploy.known_bad.entries import Device, KnownBadEntry, table
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import EngineSpec

# The key of `EngineSpec.device` with the release of a runtime.
VERSION_FACTS = {
    "openvino": "openvino",
    "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "tensorrt": "tensorrt",
}


@dataclass(frozen=True)
class Platform:
    """`runtime`: the package of a target. `device`, `version`, `precision`: None if unknown, which matches any value.
    `isa`: instruction sets."""

    runtime: str
    device: str | None
    version: str | None
    isa: frozenset[str]
    precision: str | None


def platform_here(target: str, precision: str | None = None) -> Platform:
    """Return the platform of a target on this machine, by its device and the installed package; raises TargetError."""
    row, facts = TARGETS[target], describe_host()
    with contextlib.suppress(HostError):  # no such device here; compiling for it reports that
        facts |= RUNTIME[target].describe_device()
    version = facts.get(VERSION_FACTS.get(row.package, row.package)) or _installed(row)
    return Platform(row.package, _device(row), version, instruction_sets(facts), precision)


def _device(target: Target) -> str | None:
    """Return the kind of a target's device, without its vendor; None if the runtime chooses."""
    kind = target.device.rpartition(" ")[2]
    return kind if kind in get_args(Device) else None


def _installed(target: Target) -> str | None:
    """Return the release of a target's package; without package metadata, the module's own version."""
    if version := installed_version(target.package):
        return version
    try:
        return str(importlib.import_module(target.module).__version__).split("-")[0]
    except (ImportError, AttributeError):
        return None


def platform_of(engine: EngineSpec) -> Platform:
    """Return the platform that an engine was compiled on, from the facts that it records."""
    return platform_there(engine.target, engine.device, engine.precision)


def platform_there(target: str, facts: Mapping[str, str], precision: str | None) -> Platform:
    """Return the platform of a target on a machine with these `facts`: its host, and the release of its runtime under
    the package name or under the key that engines record."""
    row = TARGETS[target]
    version = facts.get(VERSION_FACTS.get(row.package, row.package)) or facts.get(row.package)
    return Platform(row.package, _device(row), _release(version), instruction_sets(facts), precision)


def _release(version: str | None) -> str | None:
    """Return a version without its build suffix: "2025.4.1-19342-..."."""
    return (version or "").split("-")[0] or None


def instruction_sets(facts: Mapping[str, str]) -> frozenset[str]:
    """Return the instruction sets of a CPU, and the architecture of a GPU as "sm_90"."""
    found = set(facts.get("isa", "").split())
    if capability := facts.get("compute_capability", ""):
        found.add(f"sm_{capability.replace('.', '')}")
    return frozenset(found)


def for_target(target: str) -> Sequence[KnownBadEntry]:
    """Return the entries for the runtime and device kind of a target, for all releases and machines; errors as
    `entries.table`."""
    row = TARGETS[target]
    return [entry for entry in table() if _is_about(entry, row.package, _device(row))]


def _is_about(entry: KnownBadEntry, runtime: str, device: str | None) -> bool:
    return entry.runtime == runtime and (entry.device == "any" or device in (None, entry.device))


def concerns(entry: KnownBadEntry, platform: Platform) -> bool:
    """Whether an entry applies to this platform, for any graph."""
    return (
        _is_about(entry, platform.runtime, platform.device)
        and set(entry.isa) <= platform.isa
        and not set(entry.without) & platform.isa
        and (not entry.precisions or platform.precision in (None, *entry.precisions))
        and holds_for(entry.versions, platform.version)
    )


def holds_for(versions: str, version: str | None) -> bool:
    """Whether a release, or pre-release, is among `versions`; true if it is unknown or not a version."""
    try:
        return version is None or SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def entries_for(platform: Platform) -> Sequence[KnownBadEntry]:
    """Return the entries for a platform; errors as `entries.table`."""
    return [entry for entry in table() if concerns(entry, platform)]
