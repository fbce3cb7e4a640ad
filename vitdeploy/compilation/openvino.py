"""OpenVINO: the placement becomes an IR; the compiled model's own execution graph says which kernels ran.

On the CPU the IR keeps a dynamic batch, so that one file serves every batch; the runner reshapes it before compiling.
Half precision is the plugin's INFERENCE_PRECISION_HINT, always set; otherwise the plugin would choose. On Intel's GPUs
and NPUs, and AUTO, the graph has its types, and is compiled at fixed sizes.
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
# Of an IR, beside the weights.
REST_BYTES = 4 << 20
CAPABILITIES = {"fp16": "FP16", "bf16": "BF16", "int8": "INT8", "mixed": "INT8", "int4": "INT8"}
PRODUCTS = ("FullyConnected", "Convolution")
# Of PCI: the vendor, and the classes of display controllers and of processing accelerators.
INTEL = "0x8086"
CLASSES = {"GPU": "0x03", "NPU": "0x12"}


def write_ir(graph: Path) -> Any:
    """Convert a graph to `IR_FILES` next to it; gives the model as OpenVINO has read it.

    Raises:
        EngineError: OpenVINO cannot read the graph.
        StorageError: the disk is full or not writable.
    """
    openvino = require()
    size = REST_BYTES + sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))
    with native_writes(graph.parent, size):
        try:
            model = the_core().read_model(str(graph))
            put_vectors_first(model)  # in the file too, which apps in other languages load
            openvino.save_model(model, str(graph.parent / IR_FILES[0]), compress_to_fp16=False)
        except Exception as error:
            found = (str(error).strip() or repr(error)).splitlines()[-1][:300]
            raise EngineError("OpenVINO cannot read the graph", found=found) from None
    return model


def _engine(request: CompileRequest, model: Any, runner: Any, more: dict[str, str], **facts: Any) -> EngineSpec:
    """What a loaded runner of an IR says of its engine. `more`: what is known of the device."""
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
    """How many linears and convolutions run in which precision; {} where a plugin does not tell, as the NPU's."""
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
    # Recorded, as programs and servers that are given the engine compile it themselves.
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
            f"this CPU has no {precision} for OpenVINO",
            found=", ".join(available),
            wanted=CAPABILITIES[precision],
            fix=f"choose {', '.join(['fp32', *here])} or int8, or compile on the device that has it",
        )


def check_ran(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """As `check_placed`. On Arm the plugin has an INT8 convolution only where one step serves all channels and the
    output is INT8 too (OpenVINO 2026.4, acl_conv.cpp; `make arm64`); ours have a step for each and a float output."""
    try:
        check_placed(engine, asked, placed)
    except CapabilityError as error:
        if family(engine.device.get("machine", "")) != "Arm" or not 0 < engine.kernels.get("int8", 0) < placed:
            raise
        raise CapabilityError(
            error.message,
            found=error.found,
            wanted=error.wanted,
            fix="on Arm OpenVINO computes such convolutions in float: vitdeploy quantize GRAPH --target openvino-cpu "
            "--ignore LAYER, or `ignore: [LAYER]` in a recipe, leaves one in float, as patch_embed.proj of a ViT; "
            "onnxruntime-cpu has all in float",
        ) from None


def probe(target: str) -> TargetState:
    """Compile and run a graph of one Relu."""
    openvino = require()
    core = the_core()
    capabilities = {each.lower() for each in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")}
    parameter = openvino.opset13.parameter([2], np.float32)
    model = openvino.Model([openvino.opset13.relu(parameter)], [parameter], "probe")
    result = core.compile_model(model, "CPU")([np.array([-1.0, 2.0], np.float32)])[0]
    if result.tolist() != [0.0, 2.0]:
        raise RuntimeError(f"a probe gave {result.tolist()} instead of [0.0, 2.0]")
    usable = tuple(p for p in TARGETS[target].precisions if CAPABILITIES.get(p, p.upper()).lower() in capabilities)
    version = _version()
    return TargetState(True, version, usable, f"{version}, a probe ran on the CPU; {', '.join(usable)}", "")


# Whose kernels for bf16 are several times as fast as those for f32. With AVX512_BF16 alone, as on AMD's Zen 4 and 5,
# the float operators of INT8 engines gain nothing that can be measured (docs/results/performance.md).
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
    """The version of the NPU's driver, and the name of the device."""
    core, facts = the_core(), {}
    for kind in ran.split("+"):
        for name in ("FULL_DEVICE_NAME", "NPU_DRIVER_VERSION"):
            try:
                facts[f"{kind} {name}"] = str(core.get_property(kind, name))
            except Exception:  # noqa: S112  # a property that this plugin does not have
                continue
    return facts


def check_ran_on_device(engine: EngineSpec, asked: Precision, placed: int) -> None:
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
        version = _version()
    except (MissingPackageError, EngineError) as error:
        return [Finding("OpenVINO", False, error.message, error.fix)]
    why = device.missing_device(target)
    seen = ", ".join(the_core().available_devices)
    found = Finding(device.DEVICES[target], not why, why or f"devices are {seen}", device.FIXES[target] if why else "")
    return [Finding("OpenVINO", True, version), found]


def probe_device(target: str) -> TargetState:
    """Whether OpenVINO sees the device; precisions are those that the plugin says it has."""
    *_, last = findings(target)
    kind = device.DEVICES[target]
    if not last.ok:
        fix = "" if _absent(kind) else last.fix
        return TargetState(False, None, (), f"not here: {last.detail}", fix)
    has = {str(each).lower() for each in the_core().get_property(kind, "OPTIMIZATION_CAPABILITIES")}
    usable = tuple(each for each in ("fp32", "fp16", "int8") if each in has)
    version = _version()
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


DEVICE_BACKEND = CompileBackend(
    compile_on_device, probe_device, examine=findings, check_ran=check_ran_on_device, files=IR_FILES
)
