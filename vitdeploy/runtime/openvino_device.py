"""OpenVINO on Intel GPUs and NPUs, and on the device that OpenVINO chooses (AUTO).

Precision is typed in the graph, as for TensorRT. The GPU plugin would otherwise compute every float in float16, even if
it overflows (docs.openvino.ai, "GPU Device": the default of INFERENCE_PRECISION_HINT); with EXECUTION_MODE_HINT
ACCURACY a plugin keeps the types of the model ("Precision Control"). An NPU computes floats in float16 and takes fixed
shapes only ("NPU Device"). AUTO must not answer on a CPU while another device starts, nor after one failed ("Automatic
Device Selection": ENABLE_STARTUP_FALLBACK, ENABLE_RUNTIME_FALLBACK).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.errors import CapabilityError, EngineError, StorageError, UnsafeError
from vitdeploy.runtime import backend, runner, trust
from vitdeploy.runtime.openvino import OpenVinoRunner, needed_options, put_vectors_first, set_batch, the_core

GPU, NPU, AUTO = "openvino-gpu", "openvino-npu", "openvino-auto"
DEVICES = {GPU: "GPU", NPU: "NPU", AUTO: "AUTO"}
# Key of `EngineSpec.device`: the kind of device that the engine ran on when it was made.
RAN_ON = "openvino-device"
# Compiled blobs are native code: each user has a private folder.
CACHE = "openvino-cache"
OPTIONS: Mapping[str, Mapping[str, str]] = {
    GPU: {"EXECUTION_MODE_HINT": "ACCURACY"},
    NPU: {},
    AUTO: {"EXECUTION_MODE_HINT": "ACCURACY", "ENABLE_STARTUP_FALLBACK": "NO", "ENABLE_RUNTIME_FALLBACK": "NO"},
}
FIXES = {
    GPU: "install Intel's GPU compute runtime (Debian: intel-opencl-icd), and add the user to the group `render`",
    NPU: "install Intel's NPU driver (github.com/intel/linux-npu-driver), and add the user to the group `render`",
    AUTO: "",
}
# Words in error lines about operations that a plugin, or an NPU driver's compiler, does not support
# (intel/linux-npu-driver#44, openvinotoolkit/openvino#27626).
REASONS = ("nsupported", "not supported", "Cannot create", "Not Implemented")
NO_LAYERS = ("Constant", "Parameter", "Result")
# Number of layers listed in an error.
SHOWN_LAYERS = 3
FIX_REFUSED = {NPU: "install a newer NPU driver, whose compiler may support more, or "}


def kind_of(device: str) -> str:
    """Return "GPU" for "GPU.1"; AUTO shows a device that it has not settled on in brackets."""
    return device.strip("()").partition(".")[0]


def missing_device(target: str) -> str:
    """Return why OpenVINO does not see the target's device on this machine; "" if it does."""
    core, device = the_core(), DEVICES[target]
    if device == "AUTO" or device in map(kind_of, core.available_devices):
        return ""
    try:
        core.get_versions(device)  # loads the plugin, whose error names what is missing
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"its plugin does not load: {lines[-1][:400]}"
    return f"its plugin finds no {device}; available devices: {', '.join(core.available_devices)}"


def require_device(target: str) -> None:
    """Raise CapabilityError if OpenVINO does not see the target's device."""
    if why := missing_device(target):
        raise CapabilityError(f"no device for {target} here", found=why, expected=DEVICES[target], fix=FIXES[target])


def compile_on(target: str, model_file: Path, batch: int, options: Mapping[str, str]) -> tuple[Any, tuple[str, ...]]:
    """Return an `openvino.CompiledModel` on the target's device, from an IR or ONNX file with fixed shapes, and its
    output names.

    Raises:
        CapabilityError: no such device; or AUTO chose the CPU although another device exists, or for a graph that the
            CPU plugin computes wrongly without `openvino.needed_options`.
        EngineError: OpenVINO cannot read or compile the model, or the model has a dynamic axis besides the batch.
    """
    require_device(target)
    core, device = the_core(), DEVICES[target]
    config = {"PERFORMANCE_HINT": "LATENCY", **options}
    if device != "AUTO":
        config |= _cache()
    model = None
    try:
        model = core.read_model(str(model_file))
        set_batch(model, batch)
        put_vectors_first(model)  # AUTO may take the CPU
        names = tuple(port.get_any_name() for port in model.outputs)
        free = [port.get_any_name() for port in model.inputs if port.get_partial_shape().is_dynamic]
        if not free:
            compiled = core.compile_model(model, device, config)
    except Exception as error:
        refused = not_taken(core, model, device) if model is not None else []
        raise EngineError(
            f"{target} cannot compile {model_file}",
            found=reason_of(error) + (f"; unsupported: {_listed(refused)}" if refused else ""),
            expected="operations that the device's plugin and driver support" if refused else "",
            fix=f"{FIX_REFUSED.get(target, '')}choose the target openvino-cpu",
        ) from None
    if free:
        raise EngineError(
            f"{target} needs fixed shapes", found=f"dynamic axes in {', '.join(free)}", expected="a dynamic batch only"
        )
    ran = ran_on(compiled)
    _require_no_fallback(target, ran, core.available_devices)
    if target == AUTO and "CPU" in ran.split("+") and needed_options(model):
        raise CapabilityError(
            f"{target} gives wrong answers for this graph on a CPU",
            found=f"AUTO does not pass {', '.join(needed_options(model))} to the CPU plugin, which needs it here",
            expected="the target openvino-cpu, which sets it",
            fix="choose openvino-cpu",
        )
    return compiled, names


def reason_of(error: Exception) -> str:
    """Return the reason in a plugin's error, at most 300 characters: the line about an unsupported operation, else the
    last line (a driver's compiler ends with a line that says only that it failed)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return next((line for line in lines if any(word in line for word in REASONS)), lines[-1])[:300]


def not_taken(core: Any, model: Any, device: str) -> list[str]:
    """Return the layers of an `openvino.Model` that a device's plugin does not support, as "name (operation)"; [] if it
    supports all or cannot tell."""
    if device == "AUTO":
        return []
    try:
        taken = core.query_model(model, device)
    except Exception:  # the plugin does not support this query
        return []
    nodes = ((node.get_friendly_name(), node.get_type_name()) for node in model.get_ordered_ops())
    return [f"{name} ({kind})" for name, kind in nodes if name not in taken and kind not in NO_LAYERS]


def _listed(layers: list[str]) -> str:
    rest = len(layers) - SHOWN_LAYERS
    return ", ".join(layers[:SHOWN_LAYERS]) + (f" and {rest} more" if rest > 0 else "")


def ran_on(compiled: Any) -> str:
    """Return the kinds of devices that a compiled model runs on, as "GPU" or "NPU+CPU"."""
    return "+".join(dict.fromkeys(map(kind_of, compiled.get_property("EXECUTION_DEVICES"))))


def _require_no_fallback(target: str, ran: str, available: list[str]) -> None:
    expected = {DEVICES[target]} if target != AUTO else {kind_of(each) for each in available} - {"CPU"} or {"CPU"}
    if not set(ran.split("+")) <= expected:
        raise CapabilityError(
            f"{target} fell back to another device",
            found=f"it runs on {ran}",
            expected=" or ".join(sorted(expected)),
            fix="use the target openvino-cpu to run it on the CPU",
        )


def _cache() -> dict[str, str]:
    """The property for OpenVINO's cache of compiled blobs, by model, device and driver; {} without a private folder."""
    try:
        return {"CACHE_DIR": str(trust.private_folder(CACHE))}
    except (StorageError, UnsafeError):
        return {}


class OpenVinoDeviceRunner(OpenVinoRunner):
    """Runs a model on the device of `target`; `expected` is the kind of device that it must be, None for any."""

    def __init__(
        self,
        model_file: Path,
        *,
        target: str,
        name: str,
        batch: int,
        options: Mapping[str, str],
        expected: str | None = None,
    ) -> None:
        super().__init__(model_file, name=name, batch=batch, options=options)
        self.target, self.size, self.expected = target, batch, expected

    def _compile(self) -> tuple[Any, tuple[str, ...]]:
        compiled, names = compile_on(self.target, self.model_file, self.size, self.options)
        if self.expected is not None and ran_on(compiled) != self.expected:
            raise EngineError(
                f"{self.name} was built for {self.expected}",
                found=f"OpenVINO would run it on {ran_on(compiled)} here",
                expected=self.expected,
                fix=f"build an engine for this machine: vitdeploy compile GRAPH --target {self.target} -o DIR",
            )
        return compiled, names


def _make_runner(request: backend.RunnerRequest) -> runner.Runner:
    engine = request.engine
    return OpenVinoDeviceRunner(
        request.file,
        target=engine.target,
        name=engine.artifact,
        batch=request.batch,
        options=engine.options,
        expected=engine.device.get(RAN_ON),
    )


BACKEND = backend.RuntimeBackend(_make_runner, require=require_device)
