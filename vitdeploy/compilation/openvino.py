"""OpenVINO CPU: the placement becomes an IR; the compiled model's own execution graph says which kernels ran.

The IR keeps a dynamic batch, so that one file serves every batch; the runner reshapes it before compiling.
Half precision is the plugin's INFERENCE_PRECISION_HINT, always set; otherwise the plugin would choose.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import CompileBackend, CompileRequest, TargetState, check_placed
from vitdeploy.errors import CapabilityError, EngineError
from vitdeploy.publish import native_writes
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


def compile_graph(request: CompileRequest) -> EngineSpec:
    """The engine of a placement, converted to `model.xml` and `model.bin` next to it."""
    graph, precision, batch = request.graph, request.precision, request.batch
    openvino = require()
    require_precision(precision)
    model = write_ir(graph)
    sized = model.clone()
    set_batch(sized, batch)
    # Recorded, as programs and servers that are given the engine compile it themselves.
    hint = hint_of(precision, request.float_rest)
    options = {"INFERENCE_PRECISION_HINT": hint, **needed_options(sized)}
    with OpenVinoRunner(graph.parent / IR_FILES[0], name="probe", batch=batch, options=options) as runner:
        assert isinstance(runner, OpenVinoRunner)
        return EngineSpec(
            target=request.target,
            precision=precision,
            graph=graph.name,
            files=IR_FILES,
            batch=batch,
            dynamic_batch=bool(model.inputs[0].get_partial_shape()[0].is_dynamic),
            provider=runner.provider,
            inputs=runner.inputs,
            outputs=runner.outputs,
            kernels=_kernels(runner.compiled),
            options=options,
            device={**describe_host(), "openvino": openvino.get_version()},
            float_rest="bf16" if hint != PRECISION_HINTS[precision] else None,
        )


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


def _kernels(compiled: Any) -> dict[str, int]:
    """How many linears and convolutions run in which precision, from the execution graph."""
    counts: collections.Counter[str] = collections.Counter()
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if info["layerType"].value in ("FullyConnected", "Convolution"):
            precision = info["runtimePrecision"].value
            counts[KERNEL_PRECISIONS.get(precision, precision)] += 1
    return dict(sorted(counts.items()))


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
    version = openvino.get_version().split("-")[0]
    usable = tuple(p for p in TARGETS[target].precisions if CAPABILITIES.get(p, p.upper()).lower() in capabilities)
    return TargetState(True, version, usable, f"{version}, a probe ran on the CPU; {', '.join(usable)}", "")


# Whose kernels for bf16 are several times as fast as those for f32. With AVX512_BF16 alone, as on AMD's Zen 4 and 5,
# the float operators of INT8 engines gain nothing that can be measured (docs/performance.md).
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
