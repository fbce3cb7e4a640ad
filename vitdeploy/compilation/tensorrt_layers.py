"""Reads from TensorRT in which precision an engine's linears and convolutions run, and whether attention was fused.

TensorRT fuses and splits the graph's layers. A layer of the engine names the nodes that it was made from in its
"Metadata" ("[ONNX Layer: name]"), so each linear is looked up there; one that no layer names counts as "unknown", never
as what it should be.
"""

from __future__ import annotations

import collections
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorrt as trt

# Words of "Format/Datatype" and of kernels' names, in the order in which they decide: one INT8 operand is INT8.
_WORDS = (
    ("fp8", r"fp8|e4m3"),
    ("int8", r"int8|i8i8|i8f16|i8816|i16832|s8s8|imma"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"fp16|half|f16f16|h884|h1688|h16816"),
    ("fp32", r"fp32|float|f32f32|tf32|sgemm"),
)
# Layers that only move or convert; they name the linear that they were made for, but do not compute it.
_MOVES = {"reformat", "noop", "constant", "shuffle", "reshape", "shape_call", "signal", "wait", "cast", "quantize"}
# TensorRT's maintainers: a fused attention has "_mha" in the name of its kernel (NVIDIA/TensorRT issue 3243).
_ATTENTION = re.compile(r"mha|flash|attention", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"_mha(_|$)", re.IGNORECASE)


def find_linears(network: trt.INetworkDefinition) -> list[str]:
    """The metadata that names each convolution, and each product with a constant weight, of a parsed network."""
    import tensorrt as trt

    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    passing = (trt.LayerType.DEQUANTIZE, trt.LayerType.QUANTIZE, trt.LayerType.SHUFFLE, trt.LayerType.CAST)

    def is_constant(layer: trt.ILayer | None) -> bool:
        while layer is not None and layer.type in passing:
            layer = _maker(layer, 0, makers)
        return layer is not None and layer.type == trt.LayerType.CONSTANT

    def is_linear(layer: trt.ILayer) -> bool:
        if layer.type == trt.LayerType.CONVOLUTION:
            return True
        operands = (_maker(layer, index, makers) for index in range(layer.num_inputs))
        return layer.type == trt.LayerType.MATRIX_MULTIPLY and any(is_constant(maker) for maker in operands)

    return [layer.metadata or layer.name for layer in layers if is_linear(layer)]


def _maker(layer: trt.ILayer, index: int, makers: dict[str, trt.ILayer]) -> trt.ILayer | None:
    tensor = layer.get_input(index)
    return None if tensor is None else makers.get(tensor.name)


def count_layers(text: str, linears: list[str]) -> dict[str, Any]:
    """From the inspector's JSON: `kernels` (linears and convolutions by precision, or "unknown"), `attention` (the
    names of fused attention kernels) and `layers` (each layer of the engine: name, type, kernel, precision).

    Any other text leaves everything unknown.
    """
    layers = _read(text)
    counts: collections.Counter[str] = collections.Counter()
    for linear in linears:
        found = {
            layer["precision"]
            for layer in layers
            if _is_of(linear, layer["made_from"]) and layer["type"].lower() not in _MOVES
        }
        counts[next((name for name, _ in _WORDS if name in found), "unknown")] += 1
    return {
        "kernels": dict(sorted(counts.items())),
        "attention": [layer["kernel"] or layer["name"] for layer in layers if _is_attention(layer)],
        "layers": [{key: layer[key] for key in ("name", "type", "kernel", "precision")} for layer in layers],
    }


def _is_of(linear: str, made_from: str) -> bool:
    """Whether the whole name occurs: "MatMul_1" is not "MatMul_10"."""
    return re.search(rf"(?<![\w./]){re.escape(linear)}(?![\w./])", made_from) is not None


def _read(text: str) -> list[dict[str, str]]:
    try:
        return [_layer(entry) for entry in json.loads(text)["Layers"] if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return []


def _layer(entry: dict[str, Any]) -> dict[str, str]:
    name, kernel = str(entry.get("Name", "")), str(entry.get("TacticName", ""))
    return {
        "name": name,
        "type": str(entry.get("LayerType", "")),
        "kernel": kernel,
        "precision": _precision(entry.get("Inputs") or [], kernel),
        "made_from": f"{entry.get('Metadata', '')}\n{name}",
    }


def _precision(inputs: list[Any], kernel: str) -> str:
    """The precision by the types of the operands, or by the kernel's name if they say nothing."""
    types = " ".join(
        str(tensor.get("Format/Datatype") or tensor.get("Datatype") or "")
        for tensor in inputs
        if isinstance(tensor, dict)
    )
    for words in (types, kernel):
        for precision, pattern in _WORDS:
            if re.search(pattern, words, re.IGNORECASE):
                return precision
    return "unknown"


def _is_attention(layer: dict[str, str]) -> bool:
    # A node's own path may hold any of these words; the name that TensorRT gives a fused kernel has no path.
    named = "/" not in layer["name"] and _ATTENTION_NAME.search(layer["name"])
    return bool(_ATTENTION.search(layer["kernel"]) or _ATTENTION.search(layer["type"]) or named)
