"""Every rule of the bundle format, broken once."""

import copy
import hashlib
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitdeploy.bundle import read
from vitdeploy.bundle.read import MANIFEST_FILE, read_bundle, verify_files
from vitdeploy.errors import DigestError, ManifestError, MissingFileError, VitdeployError

FILES = {
    "model.onnx": b"a graph",
    "labels.txt": b"zero\none\n",
    "engines/onnxruntime-cpu/graph.onnx": b"an engine" * 100,
    "golden/inputs.npz": b"images",
    "golden/outputs.npz": b"logits",
}
INPUT = {"name": "image", "dtype": "uint8", "shape": ["batch", 8, 8, 3]}
OUTPUT = {"name": "logits", "dtype": "float32", "shape": ["batch", 2]}
GOOD = {
    "format": 1,
    "name": "small",
    "task": "classification",
    "graphs": {"model": {"file": "model.onnx", "inputs": [INPUT], "outputs": [OUTPUT]}},
    "preprocess": {"resize": 8, "crop": [8, 8], "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3},
    "labels": "labels.txt",
    "engines": [
        {
            "target": "onnxruntime-cpu",
            "precision": "fp32",
            "graph": "engines/onnxruntime-cpu/graph.onnx",
            "files": ["engines/onnxruntime-cpu/graph.onnx"],
            "batch": 1,
            "dynamic_batch": True,
            "provider": "CPUExecutionProvider",
            "inputs": [INPUT],
            "outputs": [OUTPUT],
            "kernels": {"fp32": 10},
            "options": {},
            "device": {},
        }
    ],
    "golden": {"inputs": "golden/inputs.npz", "outputs": "golden/outputs.npz", "tolerance": {"onnxruntime-cpu": 1e-4}},
    "files": [
        {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in FILES.items()
    ],
    "provenance": {"seed": 1},
}


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / MANIFEST_FILE).write_text(json.dumps(GOOD), encoding="utf-8")
    return folder


def rewrite(bundle, change):
    """Write the good manifest with `change(manifest)` done to it."""
    manifest = copy.deepcopy(GOOD)
    change(manifest)
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")


def refused(bundle, error=ManifestError):
    with pytest.raises(error) as caught:
        read_bundle(bundle)
    return caught.value


def refused_file(bundle, names=None):
    with pytest.raises(DigestError) as caught:
        verify_files(bundle, read_bundle(bundle), names)
    return str(caught.value)


def test_the_good_bundle_is_good(bundle):
    manifest = read_bundle(bundle)
    assert manifest.name == "small"
    assert verify_files(bundle, manifest) is None


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path):
    assert "no manifest.json" in refused(tmp_path, MissingFileError).found


def test_a_folder_that_is_not_there_is_said_to_be_absent(tmp_path):
    assert refused(tmp_path / "absent", MissingFileError).found == "no such folder"


def test_a_manifest_that_is_a_folder_is_no_manifest(tmp_path):
    (tmp_path / MANIFEST_FILE).mkdir()
    assert refused(tmp_path, MissingFileError).exit_code == 2


def test_a_manifest_that_is_too_large_is_not_read(bundle):
    with (bundle / MANIFEST_FILE).open("r+b") as file:
        file.truncate(8 * 1024 * 1024 + 1)
    assert "too large" in refused(bundle).message


GOOD_TEXT = json.dumps(GOOD)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null and void",
        GOOD_TEXT[:-1].encode(),
        GOOD_TEXT.encode("utf-16"),
        b"\xff" + GOOD_TEXT.encode(),
        GOOD_TEXT.encode("utf-8-sig"),
        GOOD_TEXT.replace('"seed": 1', '"seed": NaN').encode(),
        GOOD_TEXT.replace('"seed": 1', '"seed": -Infinity').encode(),
        GOOD_TEXT.replace('"seed": 1', '"seed": ' + "9" * 5000).encode(),
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "text", "cut late", "utf-16", "not utf-8", "bom", "nan", "infinity", "huge integer", "deep"],
)
def test_what_is_not_json_is_refused(bundle, data):
    (bundle / MANIFEST_FILE).write_bytes(data)
    assert "is not JSON" in refused(bundle).message


@pytest.mark.parametrize(
    ("once", "twice"),
    [
        ('"format": 1', '"format": 1, "format": 1'),
        ('"seed": 1', '"seed": 1, "seed": 2'),
        ('"batch": 1', '"batch": 1, "batch": 8'),
    ],
)
def test_a_key_that_stands_twice_is_refused(bundle, once, twice):
    (bundle / MANIFEST_FILE).write_text(GOOD_TEXT.replace(once, twice), encoding="utf-8")
    assert "duplicate key" in refused(bundle).found


def test_nesting_at_the_limit_of_the_interpreter_is_refused_too(bundle):
    messages = set()
    for depth in range(800, 1100, 3):
        text = GOOD_TEXT.replace('"format": 1', '"format": ' + "[" * depth + "]" * depth)
        (bundle / MANIFEST_FILE).write_text(text, encoding="utf-8")
        messages.add(refused(bundle).code)
    assert messages == {"VD3102"}


@pytest.mark.parametrize("value", ["[" * 900 + "]" * 900, '{"a":' * 70 + "1" + "}" * 70, "1e400", "[-1e999]"])
def test_what_cannot_be_written_again_is_refused_where_any_value_may_stand(bundle, value):
    (bundle / MANIFEST_FILE).write_text(GOOD_TEXT.replace('"seed": 1', f'"seed": {value}'), encoding="utf-8")
    error = refused(bundle)
    assert error.code == "VD3102" and "$.provenance" in error.found
    json.dumps(error.to_dict(), allow_nan=False)


# --- the fields -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["[]", "1", "null", '"x"', "{}"])
def test_a_manifest_is_an_object_with_all_fields(bundle, data):
    (bundle / MANIFEST_FILE).write_text(data, encoding="utf-8")
    assert "does not fit format 1" in refused(bundle).message


def test_an_unknown_field_is_refused(bundle):
    rewrite(bundle, lambda m: m.update(on_load="import os"))
    assert refused(bundle).found == "$.on_load: unknown field"


def test_an_unknown_field_deep_inside_is_refused(bundle):
    rewrite(bundle, lambda m: m["engines"][0].update(library="evil.so"))
    assert refused(bundle).found == "$.engines[0].library: unknown field"


def test_a_missing_field_is_refused(bundle):
    rewrite(bundle, lambda m: m.pop("files"))
    assert refused(bundle).found == "$.files: missing"


def test_a_newer_format_is_told_to_upgrade(bundle):
    rewrite(bundle, lambda m: m.update(format=2, something_new={}))
    error = refused(bundle)
    assert "newer format" in error.message
    assert error.fix == "pip install --upgrade vitdeploy"


@pytest.mark.parametrize("value", [0, -1, True, "1", 1.0, None])
def test_another_format_is_refused(bundle, value):
    rewrite(bundle, lambda m: m.update(format=value))
    assert refused(bundle).exit_code == 3


@pytest.mark.parametrize(
    "change",
    [
        {"mean": [0.5, 0.5]},
        {"mean": [], "std": []},
        {"std": [0.5]},
        {"std": [0.5, 0.5, 0.0]},
        {"std": [0.5, 0.5, -1.0]},
        {"resize": 0},
        {"resize": 100_000},
        {"crop": [0, 8]},
        {"crop": [8, 10**30]},
        {"mean": [10**400] * 3},
    ],
)
def test_a_preprocessing_that_cannot_be_done_is_refused(bundle, change):
    rewrite(bundle, lambda m: m["preprocess"].update(change))
    assert refused(bundle).code == "VD3102"


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"batch": -1},
        {"batch": 2**63},
        {"batch": 2**31},
        {"files": []},
        {"inputs": []},
        {"outputs": []},
        {"graph": "other.onnx"},
    ],
)
def test_an_engine_that_cannot_run_is_refused(bundle, change):
    rewrite(bundle, lambda m: m["engines"][0].update(change))
    assert refused(bundle).code == "VD3102"


def test_a_bundle_cannot_set_an_option_that_writes_files(bundle):
    rewrite(bundle, lambda m: m["engines"][0].update(options={"CACHE_DIR": "/tmp/elsewhere"}))  # noqa: S108
    assert "CACHE_DIR" in refused(bundle).found


def test_control_characters_of_a_bundle_are_not_printed(bundle):
    rewrite(bundle, lambda m: m.update({"\x1b[2J" + "x" * 10_000: 1}))
    text = str(refused(bundle))
    assert "\x1b" not in text
    assert "\\x1b[2J" in text
    assert len(text) < 1000


# --- the paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "..",
        ".",
        "./x",
        "/etc/passwd",
        "C:\\x",
        "C:/x",
        "a\\..\\b",
        "a//b",
        "a/",
        "",
        "a b",
        "a\x00b",
        "a\n",
        "naïve",
        "x" * 241,
    ],
)
def test_a_path_that_is_not_plain_is_refused(bundle, path):
    rewrite(bundle, lambda m: m["files"].append({"path": path, "bytes": 0, "sha256": ""}))
    assert "lists an invalid path" in refused(bundle).message


def test_a_file_listed_twice_is_refused(bundle):
    rewrite(bundle, lambda m: m["files"].append(m["files"][0]))
    assert "lists a file twice" in refused(bundle).message


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["engines"][0].update(files=["engines/onnxruntime-cpu/other.onnx"]),
        lambda m: m["engines"][0].update(graph="../../etc/passwd"),
        lambda m: m["graphs"]["model"].update(file="other.onnx"),
        lambda m: m["golden"].update(inputs="/etc/passwd"),
        lambda m: m.update(labels="other.txt"),
        lambda m: m.update(files=[]),
    ],
    ids=["engine file", "placement", "graph", "golden set", "labels", "no files"],
)
def test_a_file_in_use_that_is_not_listed_is_refused(bundle, change):
    rewrite(bundle, change)
    assert "uses files that it does not list" in refused(bundle).message


def test_a_list_that_is_too_long_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(read, "MAX_FILES", len(FILES) - 1)
    assert "too many files" in refused(bundle).message


# --- the files --------------------------------------------------------------------------------------------------------


def test_a_listed_file_that_is_not_there_is_found(bundle):
    (bundle / "model.onnx").unlink()
    assert "model.onnx is missing" in refused_file(bundle)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found(bundle, name):
    data = bytearray((bundle / name).read_bytes())
    data[-1] ^= 0x80
    (bundle / name).write_bytes(data)
    assert "a different SHA-256" in refused_file(bundle)


@pytest.mark.parametrize("data", [b"", b"an engine", b"an engine" * 101], ids=["empty", "cut", "longer"])
def test_a_file_of_another_size_is_found(bundle, data):
    (bundle / "engines/onnxruntime-cpu/graph.onnx").write_bytes(data)
    assert f"{len(data):,} bytes" in refused_file(bundle)


def test_a_link_to_the_right_bytes_is_refused(bundle, tmp_path):
    (bundle / "model.onnx").rename(tmp_path / "elsewhere")
    (bundle / "model.onnx").symlink_to(tmp_path / "elsewhere")
    assert "not a regular file" in refused_file(bundle)


def test_a_folder_that_is_a_link_is_refused(bundle, tmp_path):
    (bundle / "engines").rename(tmp_path / "elsewhere")
    (bundle / "engines").symlink_to(tmp_path / "elsewhere")
    assert "not a regular file" in refused_file(bundle)


def test_a_bundle_reached_through_a_link_is_good(bundle, tmp_path):
    (tmp_path / "latest").symlink_to(bundle)
    assert verify_files(tmp_path / "latest", read_bundle(tmp_path / "latest")) is None


def test_a_pipe_is_refused_without_waiting_for_it(bundle):
    (bundle / "model.onnx").unlink()
    os.mkfifo(bundle / "model.onnx")
    assert "not a regular file" in refused_file(bundle)


def test_a_folder_in_place_of_a_file_is_refused(bundle):
    (bundle / "model.onnx").unlink()
    (bundle / "model.onnx").mkdir()
    assert "not a regular file" in refused_file(bundle)


def test_only_the_files_asked_for_are_checked(bundle):
    (bundle / "model.onnx").write_bytes(b"b graph")
    manifest = read_bundle(bundle)
    assert verify_files(bundle, manifest, ["labels.txt"]) is None
    assert "model.onnx" in refused_file(bundle, ["model.onnx"])


# --- anything ---------------------------------------------------------------------------------------------------------


def read_and_verify(bundle, data):
    """True if the bundle with these bytes as manifest is taken; False if it is refused as it should be."""
    (bundle / MANIFEST_FILE).write_bytes(data)
    try:
        verify_files(bundle, read_bundle(bundle))
    except VitdeployError as error:
        assert error.exit_code in (2, 3)
        assert "\x1b" not in str(error)
        return False
    return True


SETTINGS = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, len(GOOD_TEXT) - 1), st.integers(0, 3), st.binary(max_size=6)), max_size=4))
def test_no_change_of_bytes_raises_anything_but_our_errors(bundle, changes):
    data = bytearray(GOOD_TEXT.encode())
    for position, removed, inserted in changes:
        data[position : position + removed] = inserted
    assert read_and_verify(bundle, bytes(data)) in (True, False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


@SETTINGS
@given(st.sampled_from(places(GOOD)[1:]), json_values)
def test_no_change_of_a_value_raises_anything_but_our_errors(bundle, place, value):
    manifest = copy.deepcopy(GOOD)
    holder = manifest
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    assert read_and_verify(bundle, json.dumps(manifest).encode()) in (True, False)


# --- tasks other than classification ----------------------------------------------------------------------------------


def test_only_a_model_of_tokens_may_do_without_preprocessing(bundle):
    rewrite(bundle, lambda m: m.update(preprocess=None))
    assert "has no preprocess" in refused(bundle).message
    rewrite(bundle, lambda m: m.update(preprocess=None, task="sequence"))
    assert read_bundle(bundle).preprocess is None
    rewrite(bundle, lambda m: m.update(task="sequence"))
    assert "has preprocess, but its inputs are tokens" in refused(bundle).message


@pytest.mark.parametrize("task", ["detection", "panoptic"])
def test_objects_need_to_be_read_from_the_outputs_somehow(bundle, task):
    rewrite(bundle, lambda m: m.update(task=task))
    assert "has no postprocess for its task" in refused(bundle).message
    rewrite(bundle, lambda m: m.update(task=task, postprocess={"scores": "sigmoid", "things": [0, 3]}))
    spec = read_bundle(bundle).postprocess
    assert (spec.scores, spec.boxes, spec.things) == ("sigmoid", "cxcywh", (0, 3))


def in_two_parts(manifest, **changes):
    """The engine as one of two parts, the second of which gets the changes."""
    engine = manifest["engines"][0]
    encoder, step = {**engine, "part": "encoder"}, {**engine, "part": "decoder_step", **changes}
    manifest["engines"][0] = {
        **engine,
        "parts": [encoder, step],
        "sequence": {"start": 1, "end": 2, "pad": 0, "max_length": 20, "source_vocabulary": 13},
    }


def test_an_engine_may_have_parts(bundle):
    rewrite(bundle, in_two_parts)
    engine = read_bundle(bundle).engines[0]
    assert [part.part for part in engine.parts] == ["encoder", "decoder_step"]
    assert engine.sequence.max_length == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"CACHE_DIR": "elsewhere"}}, "an invalid engine"),
        ({"files": []}, "an invalid engine"),
        ({"batch": 0}, "an invalid engine"),
        ({"files": ["labels.txt"]}, "files that its engine does not list"),
        ({"files": ["../secret"]}, "files that its engine does not list"),
        ({"graph": "/etc/passwd"}, "uses files that it does not list"),
    ],
    ids=str,
)
def test_the_rules_of_engines_hold_for_their_parts(bundle, change, message):
    rewrite(bundle, lambda m: in_two_parts(m, **change))
    assert message in refused(bundle).message


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("../x", "has an invalid image size"),
        ("0x32", "has an invalid image size"),
        ("32x40", "uses files that it does not list"),
    ],
)
def test_a_further_image_size_is_a_size_and_a_bundle_that_is_listed(bundle, size, message):
    rewrite(bundle, lambda m: m.update(sizes=[size]))
    assert message in refused(bundle).message
