"""List what is installed here, which targets work, and what to install for the others."""

from __future__ import annotations

import importlib.metadata
from typing import Any

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


def diagnose() -> tuple[dict[str, Any], list[str]]:
    """The machine, its packages and every target: the document, and its lines for people."""
    from vitdeploy.backends import TARGETS
    from vitdeploy.compilation.probe import probe_target
    from vitdeploy.runtime.host import VNNI, describe_host, saturates
    from vitdeploy.spec import encode

    host = describe_host()
    packages = {name: _version(name) for names in PACKAGES.values() for name in names}
    targets = {name: probe_target(name) for name in TARGETS}
    missing = [name for name in PACKAGES["export"] if packages[name] is None]
    lines = [f"{host['cpu']}, {host['cores']} cores, {host['isa']}, {host['system']}, Python {host['python']}"]
    if "emulated" in host:
        lines.append(f"emulated: {host['emulated']}; compile and verify work, and nothing is timed")
    if saturates(host["isa"]):
        lines.append("missing  VNNI: INT8 weights are made with 7 bits, as products of 8 would saturate")
    elif VNNI & set(host["isa"].split()):
        lines.append("works    VNNI: INT8 weights are made with 8 bits")
    for name, found in targets.items():
        # A target whose device is not there is no fault of this machine.
        state = "works" if found.works else "missing" if found.fix else "absent"
        lines.append(f"{state:<7}  {name:<20} {found.detail}")
        if found.fix:
            lines.append(f"         fix: {found.fix}")
    if missing:
        lines += [
            f"missing  export, quantize, verify, run: {', '.join(missing)}",
            "         fix: pip install 'vitdeploy[export]'",
        ]
    else:
        lines.append("works    export, quantize, verify, run")
    document: dict[str, Any] = {"host": host, "packages": packages, "targets": encode(targets), "export": not missing}
    return document, lines


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
    document = {"target": target, "works": not missing, "findings": [encode(each) for each in found]}
    return document, [*finding_lines(found), verdict]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
