"""Hostile and damaged ONNX files end in a typed error, before anything large is allocated, or are admitted."""

import json
import os
import resource

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.graph.builder import Builder, values
from vitdeploy.errors import GraphError, InputError, MissingFileError, UnsafeGraphError, VitdeployError
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io import admit as gate
from vitdeploy.graph.io import admit as wire
from vitdeploy.graph.io import stored
from vitdeploy.graph.io.admit import admit, admit_graph
from vitdeploy.graph.io.files import METADATA_KEY, get_metadata


def small():
    b = Builder(17)
    x = b.input("x", ["batch", 3, 8, 8])
    y = b.add("Conv", x, values(8, 3, 4, 4), values(8, seed=1), kernel_shape=[4, 4], strides=[4, 4])
    return b.model(b.add("MatMul", b.add("Reshape", y, np.array([-1, 32], np.int64)), values(32, 16, seed=2)), rank=2)


def written(tmp_path, proto):
    path = tmp_path / "model.onnx"
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return path


def refused(path, error, message):
    with pytest.raises(error, match=message) as caught:
        admit(path)
    assert caught.value.exit_code == (3 if error is UnsafeGraphError else 2)
    assert str(caught.value).replace("\n", "").isprintable()
    assert caught.value.message
    return caught.value


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absent.onnx", ".", "nul\0.onnx"])
def test_what_is_not_a_file_is_missing(tmp_path, name):
    refused(tmp_path / name, MissingFileError, "no ONNX file|not a file")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.onnx")
    refused(tmp_path / "model.onnx", MissingFileError, "is not a file")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(gate.MAX_BYTES + 1)  # sparse: no disk is used
    refused(path, UnsafeGraphError, "too large")


@pytest.mark.parametrize(
    "content", [b"", b"this is no model\n", bytes(range(256)) * 16, b"\x80" * 64, b"\x0b"], ids=len
)
def test_what_is_no_model_is_refused(tmp_path, content):
    refused(written(tmp_path, content), GraphError, ".")


def test_a_pickle_under_the_name_of_a_model_is_refused(tmp_path):
    refused(written(tmp_path, b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix"), GraphError, "not a valid")


@pytest.mark.parametrize("tenth", range(10))
def test_a_truncated_file_is_refused(tmp_path, tenth):
    content = small().SerializeToString()
    refused(written(tmp_path, content[: len(content) * tenth // 10]), GraphError, ".")


def field(number, payload):
    """A length-delimited protobuf field."""
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def varint(value):
    digits = []
    while True:
        digits.append(value & 0x7F | (0x80 if value > 0x7F else 0))
        value >>= 7
        if not value:
            return bytes(digits)


def test_too_many_parts_are_counted_before_they_are_built(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "MAX_FIELDS", 10_000)
    path = written(tmp_path, field(7, field(1, b"") * 20_000))  # nodes of two bytes each
    refused(path, UnsafeGraphError, "too many protobuf fields")


def test_deep_nesting_ends_in_an_error(tmp_path):
    content = b""
    for _ in range(40):  # a graph in an attribute of a node of a graph ...
        content = field(1, field(5, field(6, content)))
    refused(written(tmp_path, field(7, content)), UnsafeGraphError, "nested too deeply")


def test_packed_numbers_that_grow_in_memory_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "MAX_PACKED_BYTES", 1000)
    path = written(tmp_path, field(7, field(5, field(1, bytes(1001)))))  # dims
    refused(path, UnsafeGraphError, "too many packed numbers")


# --- the graph --------------------------------------------------------------------------------------------------------


def test_too_many_nodes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "MAX_NODES", 2)
    refused(written(tmp_path, small()), UnsafeGraphError, "too many nodes")


def test_branches_in_branches_are_refused_at_a_depth(tmp_path):
    proto, output = small(), helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph([helper.make_node("Constant", [], ["y"], value_float=1.0)], "leaf", [], [output])
    for _ in range(gate.MAX_SUBGRAPHS + 1):
        graph = helper.make_graph([helper.make_node("If", ["c"], ["y"], then_branch=graph)], "inner", [], [output])
    proto.graph.node.extend(graph.node)
    refused(written(tmp_path, proto), UnsafeGraphError, "too deeply")


def test_functions_are_refused_by_name(tmp_path):
    proto = small()
    node = helper.make_node("Relu", ["a"], ["b"])
    proto.functions.append(helper.make_function("own", "Scaled", ["a"], ["b"], [node], proto.opset_import))
    assert refused(written(tmp_path, proto), GraphError, "functions").found == "Scaled"


@pytest.mark.parametrize(("domain", "operator"), [("com.custom", "Rotate"), ("ai.onnx.ml", "Scaler"), ("", "Rotate")])
def test_foreign_operators_are_named(tmp_path, domain, operator):
    proto = small()
    proto.opset_import.append(helper.make_opsetid(domain or "unused", 1))
    proto.graph.node.append(helper.make_node(operator, ["x"], ["z"], domain=domain))
    error = refused(written(tmp_path, proto), GraphError, "operators that no target supports")
    assert error.found == f"{domain or 'ai.onnx'}.{operator}"


@pytest.mark.parametrize("version", [0, 10, 24, 10**9])
def test_opsets_out_of_range_are_refused(tmp_path, version):
    proto = small()
    proto.opset_import[0].version = version
    refused(written(tmp_path, proto), GraphError, "opset of the file is not supported")


def test_a_file_without_an_opset_is_refused(tmp_path):
    proto = small()
    del proto.opset_import[:]
    refused(written(tmp_path, proto), GraphError, "opset of the file is not supported")


@pytest.mark.parametrize("version", [0, 3, 99])
def test_unknown_versions_of_the_format_are_refused(tmp_path, version):
    proto = small()
    proto.ir_version = version
    refused(written(tmp_path, proto), GraphError, "ONNX IR version")


@pytest.mark.parametrize("name", ["\x1b[2Jgone", "line\nbreak", "right\u202eleft", "long" * 1000])
@pytest.mark.parametrize("place", ["node", "output", "weight", "input", "attribute", "size", "operator"])
def test_names_that_would_garble_a_terminal_are_refused(tmp_path, name, place):
    proto = small()
    graph = proto.graph
    holder, attribute = {
        "node": (graph.node[0], "name"),
        "weight": (graph.initializer[0], "name"),
        "input": (graph.input[0], "name"),
        "attribute": (graph.node[0].attribute[0], "name"),
        "size": (graph.input[0].type.tensor_type.shape.dim[0], "dim_param"),
        "operator": (graph.node[0], "op_type"),
    }.get(place, (None, ""))
    if holder is None:
        graph.node[0].output[0] = name
    else:
        setattr(holder, attribute, name)
    error = refused(written(tmp_path, proto), UnsafeGraphError, "unprintable characters")
    assert error.found.isprintable() and len(error.found) < 100


def test_two_weights_of_one_name_are_refused(tmp_path):
    proto = small()
    proto.graph.initializer.append(proto.graph.initializer[0])
    refused(written(tmp_path, proto), GraphError, "same name")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(["batch", 3, 8], TensorProto.FLOAT), (["batch", 3, 8, 8], TensorProto.INT64), ([], TensorProto.UINT8)],
)
def test_a_graph_without_an_image_is_refused(tmp_path, shape, dtype):
    b = Builder(17)
    proto = b.model(b.add("Identity", b.input("x", shape, dtype)), types=[dtype])
    assert refused(written(tmp_path, proto), GraphError, "no image or token input").found == "x"


def test_an_input_without_a_shape_is_refused(tmp_path):
    proto = small()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    refused(written(tmp_path, proto), GraphError, "no declared type and shape")


@pytest.mark.parametrize("sizes", [[1 << 40, 3, 8, 8], [-1, 3, 8, 8], [0, 3, 1 << 62, 8], [1, 1 << 40, 0, 1]])
def test_an_input_of_absurd_size_is_refused(tmp_path, sizes):
    proto = small()
    for dim, size in zip(proto.graph.input[0].type.tensor_type.shape.dim, sizes, strict=True):
        dim.dim_value = size
    refused(written(tmp_path, proto), UnsafeGraphError, "implausible shape")


@pytest.mark.parametrize("sizes", [[0, 3, 8, 8], [1, 3, 0, 8]])
def test_an_input_without_elements_is_refused(tmp_path, sizes):
    proto = small()
    for dim, size in zip(proto.graph.input[0].type.tensor_type.shape.dim, sizes, strict=True):
        dim.dim_value = size
    refused(written(tmp_path, proto), GraphError, "has no elements")


@pytest.mark.parametrize("read", [admit, admit_graph])
def test_a_graph_without_nodes_is_refused(tmp_path, read):
    proto = small()
    del proto.graph.node[:]
    with pytest.raises(GraphError, match="has no nodes"):
        read(written(tmp_path, proto))


IMAGES = {"resize": 8, "crop": [8, 8], "interpolation": "bilinear", "mean": [0.0], "std": [1.0]}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"task": "classification", "preprocess": None}, "do not fit the task classification"),
        ({"task": "depth", "preprocess": None}, "do not fit the task depth"),
        ({"task": "keypoints", "preprocess": IMAGES}, "do not fit the task keypoints"),
        ({"task": "features", "preprocess": {**IMAGES, "std": [0.0]}}, "invalid preprocessing"),
        ({"task": "features", "preprocess": {**IMAGES, "crop": [0, 8]}}, "invalid preprocessing"),
    ],
)
def test_metadata_that_say_too_little_or_what_cannot_be_are_refused(tmp_path, metadata, message):
    proto = small()
    proto.metadata_props.add(key=METADATA_KEY, value=json.dumps({"name": "x", **metadata}))
    with pytest.raises(GraphError, match=message):
        get_metadata(admit(written(tmp_path, proto)), "model.onnx")


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [[1 << 62, 1 << 62], [-1, 4], [1 << 34], [2] * 64, [1 << 62] * 100_000], ids=len)
def test_absurd_dimensions_are_refused(tmp_path, dims):
    proto = small()
    del proto.graph.initializer[0].dims[:]
    proto.graph.initializer[0].dims.extend(dims)
    refused(written(tmp_path, proto), UnsafeGraphError, "implausible shape")


@pytest.mark.parametrize("dims", [[1 << 30], [8, 3, 4, 3], [0]])
@pytest.mark.parametrize("place", ["weight", "constant"])
def test_a_tensor_that_declares_other_than_it_holds_is_refused(tmp_path, dims, place):
    proto = small()
    tensor = proto.graph.initializer[0]
    if place == "constant":
        node = proto.graph.node.add(op_type="Constant", output=["extra"])
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
        tensor = node.attribute[0].t
    del tensor.dims[:]
    tensor.dims.extend(dims)
    refused(written(tmp_path, proto), UnsafeGraphError, "does not match its shape")


def test_typed_data_of_the_wrong_length_is_refused(tmp_path):
    proto = small()
    proto.graph.initializer.append(TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[3], float_data=[1, 2]))
    refused(written(tmp_path, proto), UnsafeGraphError, "does not match its shape")


@pytest.mark.parametrize("number", [0, 99])
def test_unknown_tensor_types_are_refused(tmp_path, number):
    proto = small()
    proto.graph.initializer[0].data_type = number
    refused(written(tmp_path, proto), GraphError, "unknown type")


@pytest.mark.parametrize("equation", ["....", "b.c->b", "bchw->...x...", "->->", "b" * 2000, "b\u00e9", ""])
def test_an_equation_that_cannot_be_read_is_refused_at_once(tmp_path, equation):
    """ONNX's shape inference finds no end in "....", with any input."""
    proto = small()
    node = proto.graph.node.add(op_type="Einsum", input=[proto.graph.input[0].name], output=["odd"])
    node.attribute.append(helper.make_attribute("equation", equation))
    if equation:
        refused(written(tmp_path, proto), GraphError, "the equation of Einsum")
    else:
        assert admit(written(tmp_path, proto))


def test_external_data_that_is_named_in_no_text_is_refused(tmp_path):
    """protobuf gives such bytes as they are; the file is changed after it was written, as it writes none."""
    proto = small()
    proto.graph.initializer[0].data_location = TensorProto.EXTERNAL
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].external_data.add(key="location", value="weights.bin")
    path = written(tmp_path, proto)
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"weights\xff\xc3in"))
    refused(path, UnsafeGraphError, "are not text")


def test_metadata_that_are_nested_without_end_are_refused(tmp_path):
    proto = small()
    proto.metadata_props.add(key=METADATA_KEY, value="[" * 100_000)
    with pytest.raises(GraphError, match=r"the vitdeploy metadata of model\.onnx cannot be read"):
        get_metadata(admit(written(tmp_path, proto)), "model.onnx")


def test_segments_and_sparse_tensors_are_refused(tmp_path):
    proto = small()
    proto.graph.initializer[0].segment.begin = 0
    refused(written(tmp_path, proto), GraphError, "in segments")
    proto = small()
    proto.graph.sparse_initializer.add()
    refused(written(tmp_path, proto), GraphError, "sparse")


# --- external data ----------------------------------------------------------------------------------------------------

SIZE = 8 * 3 * 4 * 4 * 4  # bytes of the convolution's weight


def external(tmp_path, location="weights.bin", **entries):
    """A model whose first weight lies in a file, in a folder of its own below `tmp_path`."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(bytes(SIZE))
    (tmp_path / "secret.bin").write_bytes(bytes(SIZE))
    proto = small()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": location} | entries).items():
        tensor.external_data.add(key=key, value=value)
    return written(folder, proto), folder


def test_external_data_is_admitted(tmp_path):
    path, _ = external(tmp_path, offset="0", length=str(SIZE))
    admit(path)


@pytest.mark.parametrize(
    "location",
    [
        "../secret.bin",
        "sub/../../secret.bin",
        "/etc/passwd",
        "C:\\x.bin",
        "C:x.bin",
        "..\\secret.bin",
        "",
        "a\0b",
        "\\x",
        "weights.bin/",
        "weights.bin/.",
    ],
)
def test_external_data_outside_the_folder_is_refused(tmp_path, location):
    path, _ = external(tmp_path, location)
    refused(path, UnsafeGraphError, "outside the folder")


def test_external_data_that_is_absent_is_missing(tmp_path):
    path, _ = external(tmp_path, "absent.bin")
    refused(path, MissingFileError, "does not exist")


@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "hard link", "pipe", "folder"])
def test_external_data_that_is_no_file_of_its_own_is_refused(tmp_path, kind):
    location = "data/secret.bin" if kind == "link to a folder" else "data"
    path, folder = external(tmp_path, location)
    if kind == "link to a file":
        (folder / "data").symlink_to(tmp_path / "secret.bin")
    elif kind == "link to a folder":
        (folder / "data").symlink_to(tmp_path)
    elif kind == "hard link":
        (folder / "data").hardlink_to(tmp_path / "secret.bin")
    elif kind == "pipe":
        os.mkfifo(folder / "data")
    else:
        (folder / "data").mkdir()
    refused(path, UnsafeGraphError, "is a symbolic link|not a regular file without hard links")


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": "4"},
        {"offset": str(1 << 40)},
        {"length": str(SIZE + 4)},
        {"length": str(SIZE - 4)},
        {"length": str(1 << 50)},
    ],
    ids=str,
)
def test_external_data_beyond_its_file_is_refused(tmp_path, entries):
    path, _ = external(tmp_path, **entries)
    refused(path, UnsafeGraphError, "does not fit its external file")


@pytest.mark.parametrize("value", ["-1", "1e3", "0x10", "", "9" * 30, "١"])
@pytest.mark.parametrize("key", ["offset", "length"])
def test_sizes_that_are_no_numbers_are_refused(tmp_path, key, value):
    path, _ = external(tmp_path, **{key: value})
    refused(path, UnsafeGraphError, "not a size")


@pytest.mark.parametrize("key", ["__class__", "basepath", "location"])
def test_keys_that_onnx_does_not_define_are_refused(tmp_path, key):
    path, _ = external(tmp_path)
    proto = onnx.load(str(path), load_external_data=False)
    proto.graph.initializer[0].external_data.add(key=key, value="weights.bin")
    path.write_bytes(proto.SerializeToString())
    refused(path, UnsafeGraphError, "has invalid keys")


def test_external_data_inside_a_node_is_refused(tmp_path):
    path, _ = external(tmp_path)
    proto = onnx.load(str(path), load_external_data=False)
    node = proto.graph.node.add(op_type="Constant", output=["extra"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(proto.graph.initializer[0])
    path.write_bytes(proto.SerializeToString())
    refused(path, GraphError, "has external data")


def test_a_file_beside_data_in_the_model_is_refused(tmp_path):
    proto = small()
    proto.graph.initializer[0].external_data.add(key="location", value="weights.bin")
    refused(written(tmp_path, proto), UnsafeGraphError, "names an external file")


# --- damage -----------------------------------------------------------------------------------------------------------

CONTENT = small().SerializeToString()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("damage")


@given(
    st.lists(st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.booleans(),
)
@settings(max_examples=120, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_give_a_typed_error_or_a_model(scratch, flips, headers):
    """Half of the flips hit the structure: what is not the raw data of a weight."""
    damaged = bytearray(CONTENT)
    for position, byte in flips:
        damaged[STRUCTURE[position % len(STRUCTURE)] if headers else position] = byte
    path = written(scratch, bytes(damaged))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        normalise(admit(path))
    except (InputError, UnsafeGraphError) as error:
        assert isinstance(error, VitdeployError) and str(error).replace("\n", "").isprintable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def _structure():
    """The bytes of CONTENT outside all weights."""
    weights = [tensor.raw_data for tensor in small().graph.initializer if len(tensor.raw_data) > 64]
    inside = set()
    for raw in weights:
        start = CONTENT.index(raw)
        inside.update(range(start, start + len(raw)))
    return [position for position in range(len(CONTENT)) if position not in inside]


STRUCTURE = _structure()


def test_names_are_shown_escaped_and_cut():
    assert stored.shown("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert stored.shown("x" * 500) == "x" * 80 + "..."
    assert stored.shown(b"\xff\xfe") == "��"
