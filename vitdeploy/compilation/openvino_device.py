"""OpenVINO on Intel's GPUs and NPUs, and AUTO: the placement becomes an IR with its types, compiled at fixed sizes."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from vitdeploy.compilation.backend import CompileBackend, CompileRequest, TargetState
from vitdeploy.compilation.finding import Finding
from vitdeploy.compilation.openvino import IR_FILES, write_ir
from vitdeploy.errors import CapabilityError, EngineError, MissingPackageError
from vitdeploy.runtime import openvino_device as device
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.openvino import KERNEL_PRECISIONS, require, the_core
from vitdeploy.spec import EngineSpec, Precision

# Of PCI: the vendor, and the classes of display controllers and of processing accelerators.
INTEL = "0x8086"
CLASSES = {"GPU": "0x03", "NPU": "0x12"}
PRODUCTS = ("FullyConnected", "Convolution")


def compile_graph(request: CompileRequest) -> EngineSpec:
    """The engine of a placement, converted to `model.xml` and `model.bin` next to it. `kernels` is empty where a plugin
    does not tell its layers, as the NPU's.

    Raises:
        CapabilityError: no such device, a fallback, or a graph that AUTO would run wrongly on a CPU.
        EngineError: OpenVINO cannot read or compile the graph.
    """
    graph, target = request.graph, request.target
    openvino, options = require(), dict(device.OPTIONS[target])
    device.require_device(target)
    model = write_ir(graph)
    with device.OpenVinoDeviceRunner(
        graph.parent / IR_FILES[0], target=target, name="probe", batch=request.batch, options=options
    ) as runner:
        assert isinstance(runner, device.OpenVinoDeviceRunner)
        ran = device.ran_on(runner.compiled)
        return EngineSpec(
            target=target,
            precision=request.precision,
            graph=graph.name,
            files=IR_FILES,
            batch=request.batch,
            dynamic_batch=bool(model.inputs[0].get_partial_shape()[0].is_dynamic),
            provider=runner.provider,
            inputs=runner.inputs,
            outputs=runner.outputs,
            kernels=_kernels(runner.compiled),
            options=options,
            device={**describe_host(), "openvino": openvino.get_version(), device.RAN_ON: ran, **_driver(ran)},
        )


def _kernels(compiled: Any) -> dict[str, int]:
    """How many linears and convolutions run in which precision, as far as the plugin says it."""
    counts: collections.Counter[str] = collections.Counter()
    try:
        operations = compiled.get_runtime_model().get_ops()
    except Exception:  # the NPU's plugin has none
        return {}
    for node in operations:
        info = node.get_rt_info()
        if "layerType" in info and "runtimePrecision" in info and info["layerType"].value in PRODUCTS:
            precision = info["runtimePrecision"].value
            counts[KERNEL_PRECISIONS.get(precision, precision)] += 1
    return dict(sorted(counts.items()))


def _driver(ran: str) -> dict[str, str]:
    """The version of the NPU's driver, and the name of the device."""
    core, facts = the_core(), {}
    for kind in ran.split("+"):
        for name in ("FULL_DEVICE_NAME", "NPU_DRIVER_VERSION"):
            try:
                facts[f"{kind} {name}"] = str(core.get_property(kind, name))
            except Exception:  # noqa: S112  # a property that this plugin does not have
                continue
    return facts


def check_ran(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """Check the precisions of an engine whose plugin tells its layers; the graph's own types are kept by the others."""
    ran = engine.kernels.get(asked, 0)
    if engine.kernels and ran < (max(1, placed) if asked == "int8" else 1):
        raise CapabilityError(
            f"{engine.target} did not run the graph in {asked}",
            found=f"{engine.kernels} on {engine.device.get(device.RAN_ON)}",
            wanted=f"at least {max(1, placed) if asked == 'int8' else 1} layers in {asked}",
            fix="choose another precision, or another device",
        )


def findings(target: str) -> list[Finding]:
    """OpenVINO, and the device that it must see."""
    try:
        version = require().get_version().split("-")[0]
    except (MissingPackageError, EngineError) as error:
        return [Finding("OpenVINO", False, error.message, error.fix)]
    why = device.missing_device(target)
    seen = ", ".join(the_core().available_devices)
    wanted = device.DEVICES[target]
    found = Finding(wanted, not why, why or f"devices are {seen}", device.FIXES[target] if why else "")
    return [Finding("OpenVINO", True, version), found]


def probe(target: str) -> TargetState:
    """Whether OpenVINO sees the device; precisions are those that the plugin says it has."""
    *_, last = findings(target)
    kind = device.DEVICES[target]
    if not last.ok:
        fix = "" if _absent(kind) else last.fix
        return TargetState(False, None, (), f"not here: {last.detail}", fix)
    has = {str(each).lower() for each in the_core().get_property(kind, "OPTIMIZATION_CAPABILITIES")}
    usable = tuple(each for each in ("fp32", "fp16", "int8") if each in has)
    version = require().get_version().split("-")[0]
    return TargetState(True, version, usable, f"{version}, {last.detail}; {', '.join(usable)}", "")


def _absent(kind: str, root: Path = Path("/")) -> bool:
    """Whether Linux lists its PCI devices, and no Intel device of that kind is among them: nothing can be installed."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    listed = [(_read(each / "vendor"), _read(each / "class")) for each in devices]
    return bool(listed) and not any(vendor == INTEL and code.startswith(CLASSES[kind]) for vendor, code in listed)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


BACKEND = CompileBackend(compile_graph, probe, examine=findings, check_ran=check_ran, files=IR_FILES)
