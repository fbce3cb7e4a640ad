"""What an engine runs on, as far as the table asks for it."""

import contextlib
import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vitdeploy.backends import TARGETS, Target
from vitdeploy.errors import HostError
from vitdeploy.known_bad.entries import Device, KnownBadEntry, table
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import EngineSpec

# The fact of `EngineSpec.device` that is the release of a runtime.
VERSION_FACTS = {
    "openvino": "openvino",
    "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "tensorrt": "tensorrt",
}


@dataclass(frozen=True)
class Platform:
    """`runtime` is the package of a target. `device`, `version` and `precision` are None where they are not known: then
    any may be meant. `isa` are instruction sets."""

    runtime: str
    device: str | None
    version: str | None
    isa: frozenset[str]
    precision: str | None


def platform_here(target: str, precision: str | None = None) -> Platform:
    """The platform of a target on this machine, as its device and the installed package say; raises TargetError."""
    row, facts = TARGETS[target], describe_host()
    with contextlib.suppress(HostError):  # no such device here, which whoever compiles for it is told
        facts |= RUNTIME[target].describe_device()
    version = facts.get(VERSION_FACTS.get(row.package, row.package)) or _installed(row)
    return Platform(row.package, _device(row), version, instruction_sets(facts), precision)


def _device(target: Target) -> str | None:
    """What a target computes on, without its maker; None where the runtime chooses."""
    kind = target.device.rpartition(" ")[2]
    return kind if kind in get_args(Device) else None


def _installed(target: Target) -> str | None:
    """The release of a target's package; of a runtime that no package manager installed, what it says itself."""
    try:
        return importlib.metadata.version(target.package)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return str(importlib.import_module(target.module).__version__).split("-")[0]
    except (ImportError, AttributeError):
        return None


def platform_of(engine: EngineSpec) -> Platform:
    """The platform that an engine was compiled on, by the facts that it records."""
    return platform_there(engine.target, engine.device, engine.precision)


def platform_there(target: str, facts: Mapping[str, str], precision: str | None) -> Platform:
    """The platform of a target on a machine that says `facts` of itself: its host, and the release of its runtime by
    the name of the package or of the fact that engines record."""
    row = TARGETS[target]
    version = facts.get(VERSION_FACTS.get(row.package, row.package)) or facts.get(row.package)
    return Platform(row.package, _device(row), _release(version), instruction_sets(facts), precision)


def _release(version: str | None) -> str | None:
    """A version without what a build adds to it: "2025.4.1-19342-..."."""
    return (version or "").split("-")[0] or None


def instruction_sets(facts: Mapping[str, str]) -> frozenset[str]:
    """Those of a CPU, and of a GPU its architecture as "sm_90"."""
    found = set(facts.get("isa", "").split())
    if capability := facts.get("compute_capability", ""):
        found.add(f"sm_{capability.replace('.', '')}")
    return frozenset(found)


def for_target(target: str) -> Sequence[KnownBadEntry]:
    """The entries about the runtime and the kind of device of a target, of whatever release, on whatever machine;
    errors as `entries.table`."""
    row = TARGETS[target]
    return [entry for entry in table() if _is_about(entry, row.package, _device(row))]


def _is_about(entry: KnownBadEntry, runtime: str, device: str | None) -> bool:
    return entry.runtime == runtime and (entry.device == "any" or device in (None, entry.device))


def concerns(entry: KnownBadEntry, platform: Platform) -> bool:
    """Whether an entry is about this platform, whatever the graph."""
    return (
        _is_about(entry, platform.runtime, platform.device)
        and set(entry.isa) <= platform.isa
        and not set(entry.without) & platform.isa
        and (not entry.precisions or platform.precision in (None, *entry.precisions))
        and holds_for(entry.versions, platform.version)
    )


def holds_for(versions: str, version: str | None) -> bool:
    """Whether a release is among `versions`, pre-releases too; one that is unknown, or no version, is."""
    try:
        return version is None or SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def entries_for(platform: Platform) -> Sequence[KnownBadEntry]:
    """The entries about a platform; errors as `entries.table`."""
    return [entry for entry in table() if concerns(entry, platform)]
