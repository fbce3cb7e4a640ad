"""Small ONNX graphs written one operator at a time, and the comparison of two graphs on ONNX Runtime."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


class Builder:
    """`b.add("Mul", x, 0.5)` appends a node and gives its output's name; numbers and arrays become initializers."""

    def __init__(self, opset=20, constants_as_nodes=False):
        self.opset, self.constants_as_nodes = opset, constants_as_nodes
        self.nodes, self.inputs, self.initializers, self.count = [], [], [], 0

    def input(self, name, shape, dtype=TensorProto.FLOAT):
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def constant(self, value):
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = self._name("c")
        tensor = numpy_helper.from_array(array, name)
        if self.constants_as_nodes:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.initializers.append(tensor)
        return name

    def add(self, operator, *inputs, outputs=1, domain="", **attributes):
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        results = [self._name(operator.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, names, results, domain=domain, name=results[0], **attributes))
        return results[0] if outputs == 1 else results

    def model(self, *outputs, types=None, domains=(), rank=3):
        """`rank` is that of outputs whose shape ONNX's own inference cannot find."""
        declared = [
            helper.make_tensor_value_info(name, dtype, None)
            for name, dtype in zip(outputs, types or [TensorProto.FLOAT] * len(outputs), strict=True)
        ]
        graph = helper.make_graph(self.nodes, "test", self.inputs, declared, self.initializers)
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=8 if self.opset < 19 else 9)
        proto = onnx.shape_inference.infer_shapes(proto)
        del proto.graph.value_info[:]
        for output in proto.graph.output:
            if not output.type.tensor_type.HasField("shape"):
                output.type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * rank)
        onnx.checker.check_model(proto)
        return proto

    def _name(self, stem):
        self.count += 1
        return f"{stem}_{self.count}"


def run(proto, **feeds):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)


def checked(model):
    """The proto of an ir.Model, which the ONNX checker accepts."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto


def census(proto):
    return Counter(node.op_type for node in proto.graph.node)


def difference(results, references):
    """max |a - b| / max |b|, the largest over all outputs."""
    return max(
        float(np.abs(a.astype(np.float64) - b).max() / max(np.abs(b).max(), 1e-30))
        for a, b in zip(results, references, strict=True)
    )


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
