"""List what is installed here, which targets work, and what to install for the others."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitdeploy.devices.advice import Advice

PACKAGES = {
    "export": (
        "torch",
        "onnx",
        "onnxscript",
        "onnx_ir",
        "safetensors",
        "pydantic",
        "PyYAML",
        "rich",
        "Jinja2",
        "matplotlib",
        "scipy",
        "platformdirs",
    ),
    "base": ("numpy", "pillow", "click"),
}


NOT_COMPARED = "missing  packaging: releases are not compared with those known to be wrong"


def diagnose() -> tuple[dict[str, Any], list[str]]:
    """The machine, its packages and every target: the document, and its lines for people."""
    from vitdeploy.backends import TARGETS
    from vitdeploy.compilation.probe import probe_target
    from vitdeploy.devices.advice import advice_lines
    from vitdeploy.runtime.host import describe_host
    from vitdeploy.spec import encode

    host, known = describe_host(), known_bad()
    packages = {name: _version(name) for names in PACKAGES.values() for name in names}
    targets = {name: probe_target(name) for name in TARGETS}
    missing = [name for name in PACKAGES["export"] if packages[name] is None]
    advice = _advice(host)
    lines = _host_lines(host)
    for name, found in targets.items():
        # A target whose device is not there is no fault of this machine.
        state = "works" if found.works else "missing" if found.fix else "absent"
        lines.append(f"{state:<7}  {name:<20} {found.detail}")
        if found.fix:
            lines.append(f"         fix: {found.fix}")
        lines += known_lines((known or {}).get(name, {}))
    lines += [NOT_COMPARED] if known is None else []
    if missing:
        lines += [
            f"missing  export, quantize, verify, run: {', '.join(missing)}",
            "         fix: pip install 'vitdeploy[export]'",
        ]
    else:
        lines.append("works    export, quantize, verify, run")
    lines += advice_lines(advice)
    document: dict[str, Any] = {"host": host, "packages": packages, "targets": encode(targets), "export": not missing}
    document["known_bad"] = known
    document["advice"] = encode(advice)
    return document, lines


def _advice(host: Mapping[str, str]) -> list[Advice]:
    """What to say of this machine's power, heat and memory, as `devices doctor` does of others."""
    from vitdeploy.devices.advice import Seen, advise
    from vitdeploy.devices.agent.board import read_board, read_memory
    from vitdeploy.devices.registry import this_machine

    return advise(Seen(this_machine(), host, read_board(), read_memory().get("MemTotal", 0)))


def _host_lines(host: dict[str, str]) -> list[str]:
    """What this machine is, and what its CPU has for INT8."""
    from vitdeploy.runtime.host import name_host
    from vitdeploy.runtime.weight_bits import int8_instructions

    cores = f"{host['cores']} cores" + (f" (a quota of {host['quota']})" if "quota" in host else "")
    words = [*name_host(host), cores, host["isa"], host["system"], f"Python {host['python']}"]
    caches = f"caches: {host['caches']}" if "caches" in host else ""
    emulated = "nothing is timed in an emulator; compile and verify work" if "emulated" in host else ""
    return [", ".join(words), *(line for line in (caches, emulated, int8_instructions(host["isa"])) if line)]


def diagnose_target(target: str) -> tuple[dict[str, Any], list[str]]:
    """Everything that one target needs, one line a thing, with its fix; `works` of the document says whether all is
    here.

    Raises:
        TargetError: an unknown target.
    """
    from vitdeploy.compilation.finding import finding_lines
    from vitdeploy.compilation.probe import examine
    from vitdeploy.spec import encode
    from vitdeploy.stages.capability import check_target

    check_target(target)
    found = examine(target)
    missing = [each.name for each in found if not each.ok]
    verdict = f"{target} does not work here: missing {', '.join(missing)}" if missing else f"{target} works here"
    known = known_bad((target,)) or {}
    document = {"target": target, "works": not missing, "findings": [encode(each) for each in found]}
    document["known_bad"] = known.get(target, {})
    return document, [*finding_lines(found), *known_lines(known.get(target, {})), verdict]


def known_bad(targets: Iterable[str] | None = None) -> dict[str, dict[str, str]] | None:
    """By target that is installed here, the entries on its release in the table of runtimes known to be wrong: by id,
    what vitdeploy does about it. None where no package that reads version ranges is installed.

    Raises:
        KnownBadTableError: the table cannot be read.
    """
    from vitdeploy.backends import TARGETS

    try:
        from vitdeploy.known_bad.entries import DONE
        from vitdeploy.known_bad.platform import entries_for, platform_here
    except ModuleNotFoundError:  # packaging, which a device install need not have
        return None

    found = {}
    for name in targets or TARGETS:
        platform = platform_here(name)
        entries = entries_for(platform) if platform.version is not None else ()
        if entries:
            found[name] = {entry.id: DONE[entry.action] for entry in entries}
    return found


def known_lines(known: Mapping[str, str]) -> list[str]:
    """One line on a target, none without entries."""
    if not known:
        return []
    listed = ", ".join(f"{name} ({done})" for name, done in known.items())
    return [f"         known to be wrong on some graphs, which `vitdeploy inspect` finds: {listed}"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
