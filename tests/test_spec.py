"""encode and decode: nothing is lost on the way, and nothing that does not fit gets in."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import (
    SPARSE,
    Budget,
    DecodeError,
    EngineSpec,
    FileEntry,
    GoldenSpec,
    GraphSpec,
    Manifest,
    PreprocessSpec,
    SequenceSpec,
    TensorSpec,
    decode,
    encode,
)

names = st.text(max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
sizes = st.integers(0, 10**12)
tables = st.dictionaries(names, names, max_size=3)
tensors = st.builds(TensorSpec, names, names, st.lists(st.one_of(sizes, names), max_size=4).map(tuple))
tensor_lists = st.lists(tensors, max_size=2).map(tuple)
preprocessings = st.builds(
    PreprocessSpec,
    sizes,
    st.tuples(sizes, sizes),
    st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"]),
    st.lists(numbers, max_size=3).map(tuple),
    st.lists(numbers, max_size=3).map(tuple),
)
postprocessings = st.builds(
    PostprocessSpec,
    st.sampled_from(["softmax", "sigmoid", "given"]),
    st.sampled_from(["cxcywh", "xyxy"]),
    numbers,
    st.lists(sizes, max_size=3).map(tuple),
    numbers,
    numbers,
)
sequences = st.builds(SequenceSpec, sizes, sizes, sizes, sizes, sizes)
parts = st.builds(
    EngineSpec,
    target=names,
    precision=names,
    graph=names,
    files=st.lists(names, max_size=3).map(tuple),
    batch=sizes,
    dynamic_batch=st.booleans(),
    provider=names,
    inputs=tensor_lists,
    outputs=tensor_lists,
    kernels=st.dictionaries(names, sizes, max_size=3),
    options=tables,
    device=tables,
    part=names,
)
engines = st.builds(
    dataclasses.replace, parts, parts=st.lists(parts, max_size=2).map(tuple), sequence=st.none() | sequences
)
json_values = st.recursive(
    st.none() | st.booleans() | sizes | numbers | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
manifests = st.builds(
    Manifest,
    format=sizes,
    name=names,
    task=st.sampled_from(["classification", "features", "detection", "panoptic", "sequence"]),
    graphs=st.dictionaries(names, st.builds(GraphSpec, names, tensor_lists, tensor_lists), max_size=2),
    preprocess=st.none() | preprocessings,
    postprocess=st.none() | postprocessings,
    labels=st.none() | names,
    engines=st.lists(engines, max_size=2).map(tuple),
    golden=st.none() | st.builds(GoldenSpec, names, names, st.dictionaries(names, numbers, max_size=2)),
    files=st.lists(st.builds(FileEntry, names, sizes, names), max_size=3).map(tuple),
    provenance=st.dictionaries(names, json_values, max_size=3),
)
PREPROCESS = {"resize": 32, "crop": [32, 32], "interpolation": "bicubic", "mean": [0.5], "std": [0.5]}
TENSOR = {"name": "x", "dtype": "uint8", "shape": ["batch", 32, 32, 1]}
ENGINE = {
    "target": "openvino-cpu",
    "precision": "fp32",
    "graph": "graph.onnx",
    "files": ["model.xml"],
    "batch": 1,
    "dynamic_batch": True,
    "provider": "CPU",
    "inputs": [TENSOR],
    "outputs": [TENSOR],
}


def problems_of(cls, data):
    with pytest.raises(DecodeError) as caught:
        decode(cls, data)
    return caught.value.problems


@pytest.mark.parametrize(
    ("cls", "strategy"), [(Manifest, manifests), (EngineSpec, engines), (PreprocessSpec, preprocessings)]
)
def test_decode_gives_back_what_was_encoded(cls, strategy):
    @settings(deadline=None, max_examples=60)
    @given(strategy)
    def check(value):
        text = json.dumps(encode(value), allow_nan=False)
        assert decode(cls, json.loads(text)) == value

    check()


def test_fields_with_a_default_may_be_absent():
    assert decode(Budget, {}) == Budget()
    assert decode(PreprocessSpec, {"resize": 8, "crop": [8, 8]}) == PreprocessSpec(8, (8, 8))


def test_a_whole_number_is_a_number():
    decoded = decode(Budget, {"max_drop": 1})
    assert decoded.max_drop == 1.0
    assert isinstance(decoded.max_drop, float)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"extra": 1}, "$.extra: unknown field"),
        ({"resize": "32"}, "$.resize: found '32', expected an integer or a list"),
        ({"resize": 32.0}, "$.resize: found '32.0', expected an integer or a list"),
        ({"resize": True}, "$.resize: found 'True', expected an integer or a list"),
        ({"resize": None}, "$.resize: found 'None', expected an integer or a list"),
        ({"crop": [32]}, "$.crop: found '[32]', expected a list of 2 values"),
        ({"crop": [1, 2, 3]}, "$.crop: found '[1, 2, 3]', expected a list of 2 values"),
        ({"crop": 32}, "$.crop: found '32', expected a list"),
        ({"crop": [32, "x"]}, "$.crop[1]: found 'x', expected an integer"),
        (
            {"interpolation": "cubic"},
            "$.interpolation: found 'cubic', expected one of nearest, bilinear, bicubic, lanczos",
        ),
        ({"interpolation": []}, "$.interpolation: found '[]', expected one of nearest, bilinear, bicubic, lanczos"),
        ({"mean": [math.nan]}, "$.mean[0]: found 'nan', expected a finite number"),
        ({"mean": [0.1, -math.inf]}, "$.mean[1]: found '-inf', expected a finite number"),
        ({"mean": [False]}, "$.mean[0]: found 'False', expected a finite number"),
        ({"std": ["0.5"]}, "$.std[0]: found '0.5', expected a finite number"),
        ({"std": {}}, "$.std: found '{}', expected a list"),
    ],
)
def test_a_misfit_is_named_with_its_path(change, problem):
    assert problems_of(PreprocessSpec, {**PREPROCESS, **change}) == [problem]


def test_a_number_beyond_the_range_of_float_is_a_misfit():
    (problem,) = problems_of(PreprocessSpec, {**PREPROCESS, "mean": [10**400]})
    assert problem.startswith("$.mean[0]: found '1000")


@pytest.mark.parametrize("missing", ["resize", "crop"])
def test_a_missing_field_is_named(missing):
    data = {key: value for key, value in PREPROCESS.items() if key != missing}
    assert problems_of(PreprocessSpec, data) == [f"$.{missing}: missing"]


@pytest.mark.parametrize("data", [None, [], "x", 1, True])
def test_an_object_is_wanted_where_there_is_none(data):
    assert problems_of(PreprocessSpec, data) == [f"$: found {str(data)!r}, expected an object"]


@pytest.mark.parametrize("size", [1.5, True, None, [1]])
def test_an_axis_is_a_whole_number_or_a_name(size):
    found = problems_of(TensorSpec, {**TENSOR, "shape": [size]})
    assert found == [f"$.shape[0]: found {str(size)!r}, expected an integer or a string"]


def test_all_misfits_are_reported_at_once():
    golden = {"inputs": 1, "outputs": "o.npy", "tolerance": {"openvino-cpu": math.nan}}
    data = {
        "format": True,
        "task": "poetry",
        "graphs": {"model": {"file": "m.onnx", "inputs": [{**TENSOR, "shape": 3}], "outputs": []}},
        "preprocess": {**PREPROCESS, "crop": [1]},
        "postprocess": {"scores": "sigmoid", "things": [1, "two"]},
        "labels": 5,
        "engines": [ENGINE | {"parts": [{**ENGINE, "batch": "1"}], "sequence": {"start": 0}}],
        "golden": golden,
        "files": [{"path": "a", "bytes": "1", "sha256": "x", "mode": 7}],
        "surprise": None,
    }
    paths = {problem.split(":")[0] for problem in problems_of(Manifest, data)}
    assert paths == {
        "$.format",
        "$.name",
        "$.task",
        "$.graphs.model.inputs[0].shape",
        "$.preprocess.crop",
        "$.postprocess.things[1]",
        "$.labels",
        "$.engines[0].parts[0].batch",
        *(f"$.engines[0].sequence.{field}" for field in ("end", "pad", "max_length", "source_vocabulary")),
        "$.golden.inputs",
        "$.golden.tolerance.openvino-cpu",
        "$.files[0].bytes",
        "$.files[0].mode",
        "$.surprise",
    }


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("labels", 5, "$.labels: found '5', expected a string or null"),
        ("preprocess", [], "$.preprocess: found '[]', expected an object or null"),
        ("postprocess", {"boxes": "yolo"}, "$.postprocess.boxes: found 'yolo', expected one of cxcywh, xyxy"),
        ("postprocess", {"colour": 1}, "$.postprocess.colour: unknown field"),
    ],
)
def test_what_may_be_absent_must_fit_where_it_is_there(field, value, problem):
    good = {"format": 1, "name": "n", "task": "sequence", "graphs": {}, "preprocess": None, "labels": None}
    good |= {"engines": [ENGINE], "golden": None, "files": []}
    assert decode(Manifest, good).engines[0].sequence is None
    assert problems_of(Manifest, {**good, field: value}) == [problem]


def test_a_long_value_is_cut_in_the_message():
    (problem,) = problems_of(PreprocessSpec, {**PREPROCESS, "resize": "x" * 1000})
    assert len(problem) < 120


def test_a_dynamic_batch_is_pinned_and_a_fixed_one_stays():
    assert TensorSpec("x", "uint8", ("batch", 3)).with_batch(4).shape == (4, 3)
    assert TensorSpec("x", "uint8", (2, 3)).with_batch(4).shape == (2, 3)
    assert TensorSpec("x", "uint8", ()).with_batch(4).shape == ()


def test_a_budget_says_its_bounds_and_no_others():
    assert str(Budget(max_drop=0.5, max_latency=12)) == "max_drop 0.5, max_latency 12"
    assert str(Budget()) == "no bound"


@dataclasses.dataclass(frozen=True)
class Named:
    """A field whose name in JSON is a keyword of Python, and one that is written only where it is known."""

    kind: str = dataclasses.field(metadata={"alias": "class"})
    more: int | None = dataclasses.field(default=None, metadata=SPARSE)


@dataclasses.dataclass(frozen=True)
class Other:
    size: int
    weight: int


@dataclasses.dataclass(frozen=True)
class Either:
    found: Named | Other | None


def test_a_field_may_have_another_name_in_json_and_may_be_left_out():
    assert encode([Named("a"), Named("b", 2)]) == [{"class": "a"}, {"class": "b", "more": 2}]
    assert decode(Named, {"class": "b", "more": 2}) == Named("b", 2)
    assert problems_of(Named, {"kind": "a"}) == ["$.class: missing", "$.kind: unknown field"]


def test_of_several_objects_the_misfits_are_those_of_the_one_that_fits_best():
    assert decode(Either, {"found": {"size": 1, "weight": 2}}).found == Other(1, 2)
    assert problems_of(Either, {"found": {"size": 1, "weight": "x"}}) == [
        "$.found.weight: found 'x', expected an integer"
    ]
    assert problems_of(Either, {"found": 3}) == ["$.found: found '3', expected an object or an object or null"]
