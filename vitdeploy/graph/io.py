"""Read and write ONNX: one file, the lowest IR version that holds the opset, the same bytes for the same graph."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from vitdeploy.errors import GraphError, MissingFileError
from vitdeploy.spec import (
    DecodeError,
    GraphSpec,
    PostprocessSpec,
    Precision,
    PreprocessSpec,
    SequenceSpec,
    Task,
    TensorSpec,
    decode,
    encode,
)

MAX_BYTES = 2**31 - 1
METADATA_KEY = "vitdeploy"
BATCH = "batch"


@dataclass(frozen=True)
class GraphMetadata:
    """What travels inside the file, so that a lone `model.onnx` still says how to feed it.

    `target` and `precision` are set in the placement of one target, and None in the float graph.
    """

    name: str
    task: Task
    preprocess: PreprocessSpec | None
    target: str | None = None
    precision: Precision | None = None
    postprocess: PostprocessSpec | None = None
    sequence: SequenceSpec | None = None

    @property
    def images(self) -> PreprocessSpec:
        """How images become the input; raises GraphError where the input is no image."""
        if self.preprocess is None:
            raise GraphError(f"{self.name} takes no images", found=f"a graph for the task {self.task}")
        return self.preprocess


def load_graph(path: Path) -> ir.Model:
    """Parse and check an ONNX file.

    Raises:
        MissingFileError: no such file.
        GraphError: not an ONNX file, or one that the ONNX checker rejects.
    """
    if not path.is_file():
        raise MissingFileError(f"no ONNX file at {path}", wanted="a .onnx file, or a folder that holds model.onnx")
    try:
        proto = onnx.load(str(path))
        onnx.checker.check_model(proto)
    except Exception as error:  # protobuf, checker and external-data errors have no common base
        text = str(error).strip()
        raise GraphError(
            f"{path} is not a valid ONNX file",
            found=text.splitlines()[0][:200] if text else type(error).__name__,
            wanted="an ONNX model",
            fix="export it again",
        ) from None
    return ir.from_proto(proto)


def save_graph(model: ir.Model, path: Path) -> None:
    """Write one deterministic file. The caller owns atomicity (stages write into a folder that is published whole).

    Raises:
        GraphError: the graph is 2 GB or larger, or breaks a rule of the ONNX checker.
    """
    standard = {domain: version for domain, version in model.opset_imports.items() if domain in ("", "ai.onnx.ml")}
    model.ir_version = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid(domain, version) for domain, version in standard.items()]
    )
    proto = ir.to_proto(model)
    if proto.ByteSize() > MAX_BYTES:
        raise GraphError(
            "the graph does not fit into one file",
            found=f"{proto.ByteSize():,} bytes",
            wanted=f"less than {MAX_BYTES:,} bytes",
        )
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise GraphError("the graph breaks a rule of ONNX", found=str(error).splitlines()[0][:200]) from None
    path.write_bytes(proto.SerializeToString(deterministic=True))


def set_metadata(model: ir.Model, metadata: GraphMetadata) -> None:
    model.metadata_props[METADATA_KEY] = json.dumps(encode(metadata), sort_keys=True)


def get_metadata(model: ir.Model, source: str) -> GraphMetadata:
    """The metadata that `vitdeploy export` wrote.

    Raises:
        GraphError: the file carries none, or one that does not decode.
    """
    text = model.metadata_props.get(METADATA_KEY)
    if text is None:
        raise GraphError(
            f"{source} does not say how its input is made",
            found="no vitdeploy metadata in the file",
            wanted="a graph written by `vitdeploy export`",
            fix="vitdeploy export MODEL --checkpoint FILE -o DIR",
        )
    try:
        return decode(GraphMetadata, json.loads(text))
    except (ValueError, DecodeError) as error:
        raise GraphError(f"{source} has metadata that cannot be read", found=str(error)[:200]) from None


def graph_spec(model: ir.Model, file: str) -> GraphSpec:
    """Names, dtypes and shapes of a graph's inputs and outputs."""
    return GraphSpec(
        file, tuple(_tensor_spec(v) for v in model.graph.inputs), tuple(_tensor_spec(v) for v in model.graph.outputs)
    )


def _tensor_spec(value: ir.Value) -> TensorSpec:
    if value.shape is None or value.dtype is None:
        raise GraphError(f"the tensor {value.name} has no declared type and shape")
    shape = tuple(size if isinstance(size, int) else str(size.value or "dynamic") for size in value.shape)
    return TensorSpec(str(value.name), str(value.dtype.numpy()), shape)


def fixed_batch(spec: GraphSpec) -> int | None:
    """The batch that a graph is fixed to, or None where it is dynamic."""
    size = spec.inputs[0].shape[0]
    return size if isinstance(size, int) else None
