"""Messages of the Open Inference Protocol: what goes in comes out, and what is wrong is told."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vitdeploy.serve.protocol import (
    DATATYPES,
    InferRequest,
    Refusal,
    ServedModel,
    encode_infer,
    from_binary,
    from_json,
    load_json,
    model_metadata,
    parse_infer,
    to_binary,
    to_json,
)
from vitdeploy.spec import TensorSpec

MODEL = ServedModel(
    "quarters",
    "vitdeploy_test",
    (TensorSpec("image", "uint8", (1, 2, 2)),),
    (TensorSpec("logits", "float32", (1, 3)), TensorSpec("features", "float16", (1, 5))),
    4,
)
FLOATS = {"allow_nan": False, "allow_infinity": False}


@st.composite
def tensors(draw):
    dtype = np.dtype(draw(st.sampled_from(sorted(DATATYPES))))
    elements = arrays.from_dtype(dtype, **(FLOATS if dtype.kind == "f" else {}))
    return draw(arrays.arrays(dtype, arrays.array_shapes(max_dims=3, max_side=4), elements=elements))


@settings(max_examples=40, deadline=None)
@given(tensors())
def test_arrays_survive_both_forms(array):
    dtype, shape = array.dtype.name, array.shape
    data = to_binary(array)
    assert len(data) == array.nbytes
    flat = json.loads(json.dumps(to_json(array, "x")))
    nested = json.loads(json.dumps(array.tolist()))
    for found in (from_binary(data, dtype, shape, "x"), *(from_json(d, dtype, shape, "x") for d in (flat, nested))):
        assert found.dtype == array.dtype
        assert found.dtype.isnative
        assert found.flags.aligned
        assert np.array_equal(found, array)


def infer(data=None, *, body=b"", **changes):
    """The body of a request with one change, and the length of its JSON part."""
    tensor = {"name": "image", "shape": [1, 2, 2], "datatype": "UINT8", "data": data or [1, 2, 3, 4]}
    given = {**tensor, **{key: value for key, value in changes.items() if key in ("name", "shape", "datatype")}}
    if body:
        del given["data"]
        given["parameters"] = {"binary_data_size": changes.get("size", len(body))}
    message = {"inputs": [given], **{key: changes[key] for key in ("id", "outputs", "parameters") if key in changes}}
    head = json.dumps(message).encode()
    return head + body, len(head) if body else None


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.booleans(), st.booleans(), st.text(max_size=8))
def test_a_request_and_its_answer_survive(count, binary_in, binary_out, request_id):
    image = np.arange(4 * count, dtype=np.uint8).reshape(count, 2, 2)
    body, length = infer(
        image.tolist(),
        body=image.tobytes() if binary_in else b"",
        shape=[count, 2, 2],
        id=request_id,
        parameters={"binary_data_output": binary_out},
    )
    request = parse_infer(body, length, MODEL)
    assert request.id == request_id
    assert np.array_equal(request.inputs["image"], image)
    assert request.outputs == {"logits": binary_out, "features": binary_out}
    outputs = {"logits": np.random.rand(count, 3).astype("f4"), "features": np.random.rand(count, 5).astype("f2")}
    content, head = encode_infer(MODEL, request, outputs)
    message = json.loads(content[:head])
    assert message.get("id", "") == request_id
    assert (message["model_name"], message["model_version"]) == ("quarters", "1")
    rest = content[head:] if head else b""
    for entry in message["outputs"]:
        array = outputs[entry["name"]]
        if binary_out:
            size = entry["parameters"]["binary_data_size"]
            found, rest = from_binary(rest[:size], array.dtype.name, entry["shape"], entry["name"]), rest[size:]
        else:
            found = from_json(entry["data"], array.dtype.name, entry["shape"], entry["name"])
        assert entry["datatype"] == DATATYPES[array.dtype.name]
        assert np.array_equal(found, array)
    assert not rest


def test_outputs_are_chosen_one_by_one():
    outputs = [{"name": "features", "parameters": {"binary_data": True}}, {"name": "logits"}]
    request = parse_infer(*infer(outputs=outputs), MODEL)
    assert list(request.outputs.items()) == [("features", True), ("logits", False)]
    request = parse_infer(*infer(outputs=[{"name": "logits"}], parameters={"binary_data_output": True}), MODEL)
    assert request.outputs == {"logits": True}


def test_metadata_names_every_tensor_with_a_free_batch():
    metadata = model_metadata(MODEL)
    assert metadata["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, 2, 2]}]
    assert [entry["datatype"] for entry in metadata["outputs"]] == ["FP32", "FP16"]
    assert metadata["versions"] == ["1"]


WRONG = {
    "not valid JSON": (b"{", None),
    "not valid JSON: unexpected character": (b'{"inputs": [NaN]}', None),
    "is not a JSON object": (b"[]", None),
    "maximum recursion|not valid JSON|inputs must": (b'{"inputs": ' + b"[" * 100_000, None),
    "inputs must be a list": (b'{"inputs": 3}', None),
    "inputs must be a list of": (b"{}", None),
    "but the body has 3 bytes": (b"abc", 4),
    "length 0, but": (b"abc", 0),
    r"inputs \['picture'\], but the model takes \['image'\]": infer(name="picture"),
    "datatype 'FP32', but the model takes UINT8": infer(datatype="FP32"),
    "datatype None": infer(datatype=None),
    "shape must be a list of positive": infer(shape=[0, 2, 2]),
    "shape must be a list of positive integers": infer(shape=[True, 2, 2]),
    r"shape \[1, 4\], but the model takes \['n', 2, 2\]": infer(shape=[1, 4]),
    r"shape \[1, 2, 3\]": infer(shape=[1, 2, 3]),
    "5 images, but a request may have at most 4": infer(shape=[5, 2, 2]),
    r"data of shape \[3\]": infer([1, 2, 3]),
    r"data of shape \[2, 1, 2\]": infer([[[1, 2]], [[3, 4]]]),
    "data must be a list": infer("abcd"),
    "only UINT8": infer([1, 2, 3, 4.5]),
    "only UINT8 ": infer([1, 2, 3, "4"]),
    "only UINT8 n": infer([1, 2, 3, None]),
    "only UINT8 nu": infer([1, [2], 3, 4]),
    "only UINT8 num": infer([1, 2, 3, 10**30]),
    "only UINT8 numb": infer([True, False, True, True]),
    "out of range for UINT8, 0 to 255": infer([1, 2, 3, 256]),
    "out of range for UINT8": infer([1, 2, 3, -1]),
    "3 bytes, but uint8 .* needs 4": infer(body=b"abc"),
    "1 extra bytes after the inputs": infer(body=b"abcde", size=4),
    "binary_data_size 5, but 4 bytes are left": infer(body=b"abcd", size=5),
    "binary_data_size -1": infer(body=b"abcd", size=-1),
    "binary_data_size True": infer(body=b"abcd", size=True),
    "id must be a string": infer(id=3),
    "parameters must be an object": infer(parameters=3),
    "outputs must be": infer(outputs=3),
    r"outputs \['scores'\], but the model has \['logits', 'features'\]": infer(outputs=[{"name": "scores"}]),
    "outputs .*, but the model has": infer(outputs=[{"name": "logits"}, {"name": "logits"}]),
    "outputs .*, but": infer(outputs=[{"name": ["logits"]}]),
    "binary_data must be true or false": infer(outputs=[{"name": "logits", "parameters": {"binary_data": 1}}]),
    "binary_data_output must be": infer(parameters={"binary_data_output": "yes"}),
    "classification belongs to an unsupported extension": infer(
        outputs=[{"name": "logits", "parameters": {"classification": 2}}]
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_every_mistake_is_told(message):
    with pytest.raises(Refusal, match=message) as refusal:
        parse_infer(*WRONG[message], MODEL)
    assert refusal.value.status == 400


def test_an_input_has_data_once():
    tensor = {"name": "image", "shape": [1, 2, 2], "datatype": "UINT8"}
    for extra, message in ((b"abcd", "both data and"), (b"", "neither data nor")):
        both = {"data": [1, 2, 3, 4], "parameters": {"binary_data_size": 4}} if extra else {}
        head = json.dumps({"inputs": [{**tensor, **both}]}).encode()
        with pytest.raises(Refusal, match=message):
            parse_infer(head + extra, len(head), MODEL)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_that_are_none_are_refused(dtype):
    for value in (np.nan, np.inf):
        with pytest.raises(Refusal, match="NaN, infinity, or a number out of range"):
            from_binary(np.array([1, value], dtype).tobytes(), dtype, [2], "x")
    with pytest.raises(Refusal, match="out of range for FP16"):
        from_json([1e6], "float16", [1], "x")
    with pytest.raises(Refusal) as refusal:
        to_json(np.array([1, np.nan], dtype), "logits")
    assert refusal.value.status == 500


def test_a_byte_of_bool_is_0_or_1():
    with pytest.raises(Refusal, match="0 or 1"):
        from_binary(b"\x02", "bool", [1], "x")


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=80), st.none() | st.integers(-3, 90))
def test_any_bytes_are_refused(body, length):
    with pytest.raises(Refusal):
        parse_infer(body, length, MODEL)


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=4)))
def test_any_json_as_data_is_taken_or_refused(data):
    try:
        found = parse_infer(*infer_raw(data), MODEL).inputs["image"]
    except Refusal as refusal:
        assert refusal.status == 400
    else:
        assert found.ravel().tolist() == np.ravel(data).tolist()


def infer_raw(data):
    tensor = {"name": "image", "shape": [1, 2, 2], "datatype": "UINT8", "data": data}
    return json.dumps({"inputs": [tensor]}).encode(), None


def test_json_is_an_object():
    assert load_json(b'{"a": [1, 2]}') == {"a": [1, 2]}
    assert InferRequest("", {}, {}).outputs == {}
