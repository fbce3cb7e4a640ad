"""The bill of materials: valid by the library's strict validator, the manifest's digests, the same bytes each time."""

import dataclasses
import json

import pytest

from vitdeploy.bundle.write import BOM_FILE, slim_bundle, write_bundle
from vitdeploy.models.model_folder.model_card import stated_license
from vitdeploy.spec import encode
from vitdeploy.workflows.placement import compile_bundle

pytest.importorskip("cyclonedx", reason="pip install 'vitdeploy[export]'")

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from vitdeploy.pipeline.bom import bom_text

PROVENANCE = {
    "source": {"model": "hf:/home/jane/model", "revision": "abc", "sha256": {"jane.safetensors": "1" * 64}},
    "data": {"calibration": "2" * 64, "evaluation": "3" * 64},
    "tools": {"vitdeploy": "0.1", "onnxruntime": "onnxruntime-gpu 1.31.1", "openvino": "absent", "torch": "2.13.0+cpu"},
    "recipe": {"data": {"path": "/home/jane/images"}},
}
METRICS = {"onnxruntime-cpu-fp32": ("top-1", 97.25)}


@pytest.fixture(scope="module")
def bundle(small_export, tmp_path_factory):
    """(folder, manifest) of a bundle with a bill of materials."""
    home, out = tmp_path_factory.mktemp("compiled"), tmp_path_factory.mktemp("bundle")
    compiled = compile_bundle(small_export / "model.onnx", "onnxruntime-cpu", None, None, home)
    manifest = write_bundle(
        out,
        name="small",
        task=compiled.task,
        graphs={"model": (small_export / "model.onnx", compiled.graphs["model"])},
        preprocess=compiled.preprocess,
        engines=[(compiled.engines[0], home)],
        provenance=PROVENANCE,
        bom=lambda manifest: bom_text(manifest, license="apache-2.0", metrics=METRICS),
    )
    return out, manifest


@pytest.fixture(scope="module")
def text(bundle):
    return (bundle[0] / BOM_FILE).read_text(encoding="utf-8")


def invalid(text):
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def test_the_strict_validator_accepts_it_and_refuses_another_card(text):
    assert invalid(text) is None
    document = json.loads(text)
    document["metadata"]["component"]["modelCard"]["modelParameters"]["kind"] = "classification"
    assert invalid(json.dumps(document)) is not None


def test_it_holds_the_digests_of_the_graph_the_engine_and_the_data(bundle, text):
    document, listed = json.loads(text), {entry.path: entry.sha256 for entry in bundle[1].files}
    model = document["metadata"]["component"]
    files = {each["name"]: each["hashes"][0]["content"] for each in model["components"]}
    assert {"model.onnx", "engines/onnxruntime-cpu/engines/onnxruntime-cpu/graph.onnx"} == set(files)
    assert files.items() <= listed.items()
    assert (model["type"], model["licenses"]) == ("machine-learning-model", [{"license": {"id": "Apache-2.0"}}])
    data = {each["bom-ref"]: each["hashes"][0]["content"] for each in document["components"]}
    assert data == {"data:calibration": "2" * 64, "data:evaluation": "3" * 64}
    card = model["modelCard"]
    assert {each["ref"] for each in card["modelParameters"]["datasets"]} == set(data)
    measured = {"type": "top-1", "value": "97.25", "slice": "onnxruntime-cpu-fp32"}
    assert card["quantitativeAnalysis"]["performanceMetrics"] == [measured]
    assert BOM_FILE in listed  # so a signature and a pack cover it


def test_tools_have_package_urls_and_absent_ones_are_left_out(text):
    tools = {each["name"]: each for each in json.loads(text)["metadata"]["tools"]["components"]}
    assert set(tools) == {"vitdeploy", "onnxruntime-gpu", "torch"}
    assert tools["onnxruntime-gpu"]["purl"] == "pkg:pypi/onnxruntime-gpu@1.31.1"
    assert "licenses" not in tools["onnxruntime-gpu"]  # not installed in that version: nothing is claimed


def test_it_names_no_path_of_the_maker_and_no_time(text):
    assert "jane" not in text and "timestamp" not in text


def test_the_same_manifest_gives_the_same_bytes_and_another_one_another_serial_number(bundle, text):
    manifest = dataclasses.replace(bundle[1])
    again = bom_text(manifest, license="apache-2.0", metrics=METRICS)
    assert again == text
    provenance = {**PROVENANCE, "data": {"calibration": None, "evaluation": "4" * 128}}
    other = bom_text(dataclasses.replace(manifest, provenance=provenance), metrics={})
    assert invalid(other) is None and json.loads(other)["serialNumber"] != json.loads(text)["serialNumber"]
    [data] = json.loads(other)["components"]
    assert "hashes" not in data and data["properties"][0]["value"] == "4" * 128


def test_a_slim_bundle_carries_it(bundle, tmp_path):
    manifest, left_out = slim_bundle(bundle[0], "onnxruntime-cpu", tmp_path)
    assert BOM_FILE in {entry.path for entry in manifest.files} and BOM_FILE not in left_out
    assert (tmp_path / BOM_FILE).read_bytes() == (bundle[0] / BOM_FILE).read_bytes()
    assert encode(manifest)["graphs"] == {}


@pytest.mark.parametrize(
    ("file", "text", "license"),
    [
        ("README.md", "---\nlicense: mit\n---\n# A model\n", "mit"),
        ("README.md", "---\nlicense: other\nlicense_name: own-terms\n---\n", "own-terms"),
        ("README.md", "---\nlicense: [mit]\n---\n", None),
        ("config.json", '{"pretrained_cfg": {"license": "apache-2.0"}}', "apache-2.0"),
        ("config.json", "[]", None),
    ],
)
def test_the_licence_is_what_the_files_of_the_model_state(tmp_path, file, text, license):
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert stated_license(tmp_path) == license
