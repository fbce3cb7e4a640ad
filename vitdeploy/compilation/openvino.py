"""OpenVINO: the placement is converted to an IR; the execution graph of the compiled model shows which kernels ran.

On the CPU the IR keeps a dynamic batch, so that one file serves every batch; the runner reshapes it before compiling.
Half precision is the plugin's INFERENCE_PRECISION_HINT, which is always set; otherwise the plugin would choose. On
Intel's GPUs and NPUs, and with AUTO, the graph has its types, and is compiled at fixed sizes.
"""

import collections
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import CompileBackend, CompileRequest, Finding, TargetState, check_placed
from vitdeploy.errors import CapabilityError, EngineError, MissingPackageError
from vitdeploy.publish import native_writes
from vitdeploy.runtime import openvino_device as device
from vitdeploy.runtime.host import describe_host, family
from vitdeploy.runtime.openvino import (
    KERNEL_PRECISIONS,
    PRECISION_HINTS,
    OpenVinoRunner,
    hint_of,
    needed_options,
    put_vectors_first,
    require,
    set_batch,
    the_core,
)
from vitdeploy.spec import EngineSpec, Precision

IR_FILES = ("model.xml", "model.bin")
# The size of an IR without its weights.
REST_BYTES = 4 << 20
CAPABILITIES = {"fp16": "FP16", "bf16": "BF16", "int8": "INT8", "mixed": "INT8", "int4": "INT8"}
PRODUCTS = ("FullyConnected", "Convolution")
# PCI codes: the vendor, and the classes of display controllers and of processing accelerators.
INTEL = "0x8086"
CLASSES = {"GPU": "0x03", "NPU": "0x12"}


def write_ir(graph: Path) -> Any:
    """Convert a graph to `IR_FILES` next to it; returns the model as read by OpenVINO.

    Raises:
        EngineError: OpenVINO cannot read the graph.
        StorageError: the disk is full or not writable.
    """
    openvino = require()
    size = REST_BYTES + sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))
    with native_writes(graph.parent, size):
        try:
            model = the_core().read_model(str(graph))
            put_vectors_first(model)  # also in the file, which apps in other languages load
            openvino.save_model(model, str(graph.parent / IR_FILES[0]), compress_to_fp16=False)
        except Exception as error:
            found = (str(error).strip() or repr(error)).splitlines()[-1][:300]
            raise EngineError(f"OpenVINO cannot read {graph.name}", found=found) from None
    return model


def _engine(request: CompileRequest, model: Any, runner: Any, more: dict[str, str], **facts: Any) -> EngineSpec:
    """The engine of an IR, from its loaded runner. `more`: facts about the device."""
    return request.engine(
        {"openvino": require().get_version(), **more},
        files=IR_FILES,
        dynamic_batch=bool(model.inputs[0].get_partial_shape()[0].is_dynamic),
        provider=runner.provider,
        inputs=runner.inputs,
        outputs=runner.outputs,
        kernels=_kernels(runner.compiled),
        **facts,
    )


def _kernels(compiled: Any) -> dict[str, int]:
    """The number of linears and convolutions by precision; {} if a plugin does not report it, such as the NPU's."""
    try:
        operations = compiled.get_runtime_model().get_ops()
    except Exception:
        return {}
    found = (node.get_rt_info() for node in operations)
    named = [each for each in found if "layerType" in each and "runtimePrecision" in each]
    ran = [each["runtimePrecision"].value for each in named if each["layerType"].value in PRODUCTS]
    return dict(sorted(collections.Counter(KERNEL_PRECISIONS.get(each, each) for each in ran).items()))


def _version() -> str:
    return str(require().get_version().split("-")[0])


# --- The CPU ----------------------------------------------------------------------------------------------------------


def compile_graph(request: CompileRequest) -> EngineSpec:
    """The engine of a placement, converted to `model.xml` and `model.bin` next to it."""
    graph, precision, batch = request.graph, request.precision, request.batch
    require()
    require_precision(precision)
    model = write_ir(graph)
    sized = model.clone()
    set_batch(sized, batch)
    # Recorded, because apps and servers compile the engine themselves.
    hint = hint_of(precision, request.float_rest)
    options = {"INFERENCE_PRECISION_HINT": hint, **needed_options(sized)}
    rest = "bf16" if hint != PRECISION_HINTS[precision] else None
    with OpenVinoRunner(graph.parent / IR_FILES[0], name="probe", batch=batch, options=options) as runner:
        return _engine(request, model, runner, {}, options=options, float_rest=rest)


def require_precision(precision: str) -> None:
    """Raise CapabilityError if OpenVINO does not support this precision on this CPU."""
    available = the_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision in CAPABILITIES and CAPABILITIES[precision] not in available:
        here = [name for name in ("bf16", "fp16") if CAPABILITIES[name] in available]
        raise CapabilityError(
            f"OpenVINO does not support {precision} on this CPU",
            found=", ".join(available),
            expected=CAPABILITIES[precision],
            fix=f"choose {', '.join(['fp32', *here])} or int8, or compile on a device that supports {precision}",
        )


def check_ran(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """As `check_placed`. On Arm, the plugin has INT8 convolutions only with one scale for all channels and an INT8
    output (OpenVINO 2026.4, acl_conv.cpp; `make arm64`); placements have a scale per channel and a float output."""
    try:
        check_placed(engine, asked, placed)
    except CapabilityError as error:
        if family(engine.device.get("machine", "")) != "Arm" or not 0 < engine.kernels.get("int8", 0) < placed:
            raise
        raise CapabilityError(
            error.message,
            found=error.found,
            expected=error.expected,
            fix="keep such convolutions in float, which is how OpenVINO computes them on Arm (patch_embed.proj in a "
            "ViT): vitdeploy quantize GRAPH --target openvino-cpu --ignore LAYER, or `ignore: [LAYER]` in a recipe; "
            "onnxruntime-cpu keeps all of them in float",
        ) from None


def probe(target: str) -> TargetState:
    """The state of the target, after a run of a graph with one Relu."""
    openvino = require()
    core = the_core()
    capabilities = {each.lower() for each in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")}
    parameter = openvino.opset13.parameter([2], np.float32)
    model = openvino.Model([openvino.opset13.relu(parameter)], [parameter], "probe")
    result = core.compile_model(model, "CPU")([np.array([-1.0, 2.0], np.float32)])[0]
    if result.tolist() != [0.0, 2.0]:
        raise RuntimeError(f"a test graph returned {result.tolist()} instead of [0.0, 2.0]")
    usable = tuple(p for p in TARGETS[target].precisions if CAPABILITIES.get(p, p.upper()).lower() in capabilities)
    version = _version()
    return TargetState(True, version, usable, f"{version}, a test graph ran on the CPU; {', '.join(usable)}", "")


# With this instruction set, bf16 kernels are several times as fast as f32 kernels. With AVX512_BF16 only, as on AMD's
# Zen 4 and 5, the float operators of INT8 engines gain nothing measurable (docs/results/performance.md).
HALF_REST = "amx_bf16"

BACKEND = CompileBackend(
    compile_graph,
    probe,
    check_ran=check_ran,
    require_precision=require_precision,
    files=IR_FILES,
    splits_rows=True,
    half_rest=lambda: HALF_REST in describe_host()["isa"].split(),
)


# --- Intel's GPUs and NPUs, and AUTO ----------------------------------------------------------------------------------


def compile_on_device(request: CompileRequest) -> EngineSpec:
    """The engine of a placement, converted to `model.xml` and `model.bin` next to it.

    Raises:
        CapabilityError: no such device, a fallback, or a graph that AUTO would run wrongly on a CPU.
        EngineError: OpenVINO cannot read or compile the graph.
    """
    target, options = request.target, dict(device.OPTIONS[request.target])
    require()
    device.require_device(target)
    model, file = write_ir(request.graph), request.graph.parent / IR_FILES[0]
    with device.OpenVinoDeviceRunner(file, target=target, name="probe", batch=request.batch, options=options) as runner:
        assert isinstance(runner, device.OpenVinoDeviceRunner)
        ran = device.ran_on(runner.compiled)
        return _engine(request, model, runner, {device.RAN_ON: ran, **_driver(ran)}, options=options)


def _driver(ran: str) -> dict[str, str]:
    """The names of the devices, and the version of the NPU's driver."""
    core, facts = the_core(), {}
    for kind in ran.split("+"):
        for name in ("FULL_DEVICE_NAME", "NPU_DRIVER_VERSION"):
            try:
                facts[f"{kind} {name}"] = str(core.get_property(kind, name))
            except Exception:  # noqa: S112  # the plugin lacks this property
                continue
    return facts


def check_ran_on_device(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """Check the precisions of an engine if its plugin reports its layers; other plugins keep the graph's types."""
    ran = engine.kernels.get(asked, 0)
    if engine.kernels and ran < (max(1, placed) if asked == "int8" else 1):
        raise CapabilityError(
            f"{engine.target} did not run the graph in {asked}",
            found=f"{engine.kernels} on {engine.device.get(device.RAN_ON)}",
            expected=f"at least {max(1, placed) if asked == 'int8' else 1} layers in {asked}",
            fix="choose another precision or another device",
        )


def findings(target: str) -> list[Finding]:
    """The requirements of a target: OpenVINO, and a device that it finds."""
    try:
        version = _version()
    except (MissingPackageError, EngineError) as error:
        return [Finding("OpenVINO", False, error.message, error.fix)]
    why = device.missing_device(target)
    seen = ", ".join(the_core().available_devices)
    finding = Finding(device.DEVICES[target], not why, why or f"devices: {seen}", device.FIXES[target] if why else "")
    return [Finding("OpenVINO", True, version), finding]


def probe_device(target: str) -> TargetState:
    """The state of a device target; its precisions are those that the plugin reports."""
    *_, last = findings(target)
    kind = device.DEVICES[target]
    if not last.ok:
        fix = "" if _absent(kind) else last.fix
        return TargetState(False, None, (), f"not found: {last.detail}", fix)
    has = {str(each).lower() for each in the_core().get_property(kind, "OPTIMIZATION_CAPABILITIES")}
    usable = tuple(each for each in ("fp32", "fp16", "int8") if each in has)
    version = _version()
    return TargetState(True, version, usable, f"{version}, {last.detail}; {', '.join(usable)}", "")


def _absent(kind: str, root: Path = Path("/")) -> bool:
    """Whether Linux lists PCI devices, but no Intel device of that kind, so that installing a driver cannot help."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    listed = [(_read(each / "vendor"), _read(each / "class")) for each in devices]
    return bool(listed) and not any(vendor == INTEL and code.startswith(CLASSES[kind]) for vendor, code in listed)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


DEVICE_BACKEND = CompileBackend(
    compile_on_device, probe_device, examine=findings, check_ran=check_ran_on_device, files=IR_FILES
)
