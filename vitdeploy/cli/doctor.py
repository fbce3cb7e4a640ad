"""`vitdeploy doctor`: what is installed here, which targets work, and what to install for the others."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import click

from vitdeploy.cli.console import Console, output_options

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


@click.command("doctor")
@output_options
def command(console: Console) -> None:
    """What is installed here and which targets work."""
    from vitdeploy.compile.probe import probe_target
    from vitdeploy.runtime.host import VNNI, describe_host, saturates
    from vitdeploy.spec import TARGETS

    host = describe_host()
    packages = {name: _version(name) for names in PACKAGES.values() for name in names}
    targets = {name: probe_target(name) for name in TARGETS}
    missing = [name for name in PACKAGES["export"] if packages[name] is None]
    lines = [f"{host['cpu']}, {host['cores']} cores, {host['isa']}, {host['system']}, Python {host['python']}"]
    if saturates(host["isa"]):
        lines.append("missing  VNNI: INT8 weights are made with 7 bits, as products of 8 would saturate")
    elif VNNI & set(host["isa"].split()):
        lines.append("works    VNNI: INT8 weights are made with 8 bits")
    for name, found in targets.items():
        lines.append(f"{'works  ' if found['works'] else 'missing'}  {name:<18} {found['detail']}")
        if found["fix"]:
            lines.append(f"         fix: {found['fix']}")
    if missing:
        lines += [
            f"missing  export, quantize, verify, run: {', '.join(missing)}",
            "         fix: pip install 'vitdeploy[export]'",
        ]
    else:
        lines.append("works    export, quantize, verify, run")
    document: dict[str, Any] = {"host": host, "packages": packages, "targets": targets, "export": not missing}
    console.finish(document, lines, None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
