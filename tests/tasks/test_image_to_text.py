"""Image to text through the whole line, with the trained TrOCR of the drawn scenes: folder, graphs, bundle, texts."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitdeploy as vd
from tests.models.external.image_texts import TRAINED
from tests.references import reference
from tests.sabotage import require_unproven
from vitdeploy.api.quantize import quantize
from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import DataError, DigestError, InputError, ManifestError
from vitdeploy.models.source import Source
from vitdeploy.runtime import Monitor, load
from vitdeploy.runtime.tasks.image_to_text import to_text
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import find_reference_model
from vitdeploy.tasks.image_to_text import compare_texts
from vitdeploy.workflows.placement import compile_bundle

transformers = reference("transformers")
pytest.importorskip("tokenizers")

COUNT = 12


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Drawn lines, and the file of what is written in them."""
    from calibration.scenes.write import render

    folder = tmp_path_factory.mktemp("lines")
    render("text", folder, {"calibration": 8, "evaluation": COUNT})
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    export(find_reference_model(Source(f"hf:{TRAINED}")), ExportConfig("trocr", 20, None, True), out)
    return out


@pytest.fixture(scope="module", params=["onnxruntime-cpu", "openvino-cpu"])
def bundle(request, exported, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle")
    compile_bundle(exported / "encoder.onnx", request.param, None, None, out)
    return out


@pytest.fixture(scope="module")
def pictures(scenes):
    return sorted((scenes / "images/evaluation").glob("*.png"))


@pytest.fixture(scope="module")
def generated(pictures):
    """The texts that transformers reads, greedily and with four beams, with its own processor and tokenizer."""
    from PIL import Image

    model = transformers.VisionEncoderDecoderModel.from_pretrained(TRAINED).eval()
    processor = transformers.ViTImageProcessor.from_pretrained(TRAINED)
    given = processor([Image.open(path).convert("RGB") for path in pictures], return_tensors="pt").pixel_values
    words, found = transformers.AutoTokenizer.from_pretrained(TRAINED), {}
    for beams in (1, 4):
        with torch.no_grad():
            tokens = model.generate(given, num_beams=beams, do_sample=False)
        found[beams] = words.batch_decode(tokens, skip_special_tokens=True)
    return found


def test_both_graphs_are_the_model_and_the_tokenizer_is_transformers(exported):
    facts = json.loads((exported / "export.json").read_text("utf-8"))
    assert max(row["max_relative_difference"] for row in facts["parity"]) <= 1e-5
    assert [row["batch"] for row in facts["parity"]] == [1, 2, 5]
    assert facts["tokenizer"].startswith("same texts for 1000 token sequences as transformers")


@pytest.mark.parametrize("beams", [1, 4])
def test_a_bundle_reads_what_transformers_reads(bundle, pictures, generated, beams):
    with load(bundle) as predictor:
        found = predictor.predict_batch(pictures, beams=beams)
        assert [each.text for each in found] == generated[beams]
        alone = predictor.predict(pictures[3], beams=beams)
    assert (alone.text, alone.tokens) == (found[3].text, found[3].tokens)
    assert alone.score == pytest.approx(found[3].score, abs=1e-4)
    assert not alone.cut
    assert list(alone.to_dict()) == ["text", "tokens", "score", "cut"]


def test_the_command_line_prints_texts(bundle, pictures, generated):
    from click.testing import CliRunner

    from vitdeploy.cli.predict import predict as command

    found = CliRunner().invoke(command, [str(bundle), str(pictures[0]), "--beams", "4", "--quiet"])
    assert found.exit_code == 0
    assert f"{pictures[0]}: {generated[4][0]}" in found.output


@pytest.mark.parametrize("beams", [0, -1, 65, 1.5, True])
def test_no_sensible_number_of_beams_is_refused(bundle, pictures, beams):
    with load(bundle) as predictor, pytest.raises(InputError, match="invalid number of beams") as caught:
        predictor.predict(pictures[0], beams=beams)
    assert (caught.value.found, caught.value.expected[:24]) == (repr(beams), "an integer from 1 (greed")


def test_a_prompt_begins_the_text_and_is_not_in_it(bundle, pictures):
    with load(bundle) as predictor:
        whole = predictor.predict(pictures[3])
        rest = predictor.predict(pictures[3], prompt=f"<s>{whole.text[:2]}")
        assert rest.text == whole.text[2:]
        with pytest.raises(InputError, match="prompt has unknown tokens") as caught:
            predictor.predict(pictures[3], prompt="A" * 10)
    assert (caught.value.found, caught.value.expected) == ("10 tokens", "tokens 0 to 39, at most 9")


def test_a_decoder_that_gives_no_numbers_is_told_to_who_watches(bundle, pictures, monkeypatch):
    events = []
    with pytest.warns(RuntimeWarning, match="has no monitor reference"):
        predictor = load(bundle, monitor=Monitor(share=float("inf"), on_event=events.append))
    with predictor:
        predictor.predict(pictures[0])
        assert (predictor.monitor.state, events) == ("starting", [])
        tokens, scores = predictor._decoder.write(predictor.prepare(pictures[0])[0])
        monkeypatch.setattr(predictor._decoder, "write", lambda *given: (tokens, scores * np.nan))
        predictor.predict(pictures[0])
        assert predictor.monitor.state == "fault"
    assert [event.kind for event in events] == ["non-finite"]


def test_a_text_that_has_no_end_says_that_it_is_cut(bundle):
    with load(bundle) as predictor:
        tokens = np.full(9, 7)
        found = to_text({"tokens": tokens, "scores": np.full(9, -0.5)}, predictor.sequence, predictor.writer)
    assert (found.cut, found.score, len(found.tokens)) == (True, -4.5, 9)
    assert str(found).endswith("[cut at 9 tokens]")


@pytest.mark.parametrize("beams", [1, 3])
def test_no_run_of_tokens_is_written_twice(bundle, pictures, generated, beams):
    """As by transformers' `no_repeat_ngram_size` of 1: no character twice."""
    with load(bundle) as predictor:
        predictor._decoder.spec = replace(predictor._decoder.spec, no_repeat=1)
        found = predictor.predict_batch(pictures, beams=beams)
    assert any(len(set(text)) < len(text) for text in generated[1])
    assert all(len(set(each.text)) == len(each.text) for each in found)


def test_a_measurement_writes_as_many_tokens_whatever_the_image(bundle, monkeypatch):
    with load(bundle) as predictor:
        step, calls = predictor.runner.decoder_step, []
        infer = step.infer
        monkeypatch.setattr(step, "infer", lambda feeds: calls.append(len(feeds["token"])) or infer(feeds))
        for shade in (0, 255):
            feeds = {"image": np.full((2, 32, 96, 3), shade, np.uint8)}
            predictor.runner.measured(feeds)
        assert calls == [1] * 2 * 2 * 9  # two images one by one, of an engine for one
        assert set(predictor.runner.part_times(feeds)) == {"encoder", "decoder_step"}


def test_beams_of_the_models_own_files_run_side_by_side(bundle, tmp_path, pictures, generated):
    other = shutil.copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((other / "manifest.json").read_text("utf-8"))
    # As `vitdeploy compile` writes it where generation_config.json says num_beams.
    manifest["engines"][0]["sequence"]["search"] = {"beams": 4, "length_penalty": 1.0, "early_stopping": False}
    (other / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with load(other) as predictor:
        assert predictor.runner.decoder_step.inputs[0].shape == (4, 1)
        found = predictor.predict_batch(pictures)
        greedy = predictor.predict_batch(pictures, beams=1)
    assert ([each.text for each in found], [each.text for each in greedy]) == (generated[4], generated[1])


def test_a_manifest_of_no_beams_is_refused(bundle, tmp_path):
    other = shutil.copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((other / "manifest.json").read_text("utf-8"))
    manifest["engines"][0]["sequence"]["search"] = {"beams": 0}
    (other / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ManifestError, match="does not fit format") as caught:
        load(other)
    assert "beams 0: expected at least 1" in caught.value.found


def test_a_bundle_without_its_tokenizer_is_refused(bundle, tmp_path):
    other = shutil.copytree(bundle, tmp_path / "bundle")
    (other / "tokenizer.json").unlink()
    with pytest.raises(DigestError, match=r"tokenizer\.json"):
        load(other)


def test_beams_are_for_bundles_that_write(small_bundle, pictures):
    with pytest.raises(InputError, match="writes no texts") as caught:
        predict_with_beams(small_bundle, pictures[0])
    assert caught.value.fix == "leave --beams out"


def predict_with_beams(bundle, picture):
    from vitdeploy.api.predict import Input, Predict, predict
    from vitdeploy.api.values import Reporter

    chosen = Predict(bundle, (str(picture),), beams=2)
    return predict(chosen, lambda tokens: [Input(str(picture))], Reporter(quiet=True))


def test_verify_says_how_many_characters_are_right(exported, scenes):
    data = vd.images(scenes / "images", labels="texts", annotations=scenes / "texts.json")
    found = vd.verify(exported, f"hf:{TRAINED}", data, progress=False).found
    verified = found.verified
    assert (verified.metric, verified.n, verified.agreement, verified.drop) == ("character accuracy", COUNT, 100, 0)
    assert verified.line_accuracy == verified.reference_line_accuracy
    assert verified.max_difference < 1e-4
    unlabelled = vd.verify(exported, f"hf:{TRAINED}", scenes / "images", progress=False).found.verified
    assert (unlabelled.metric, unlabelled.agreement) == (None, 100)


def test_labels_of_another_kind_are_refused(exported, scenes):
    data = vd.images(scenes / "images", labels="coco", annotations=scenes / "texts.json")
    with pytest.raises(DataError, match="the task image-to-text cannot use labels") as caught:
        vd.verify(exported, f"hf:{TRAINED}", data, progress=False)
    assert caught.value.expected == "texts, none"


def test_both_graphs_are_quantized_on_what_the_original_writes(exported, scenes, generated, pictures, tmp_path):
    made = quantize(exported, scenes / "images", "onnxruntime-cpu", tmp_path / "int8", num_samples=8, progress=False)
    assert {name.partition("/")[0] for name in made.int8} == {"encoder", "decoder_step"}
    (tmp_path / "bundle").mkdir()
    compile_bundle(tmp_path / "int8/encoder.onnx", "onnxruntime-cpu", None, None, tmp_path / "bundle")
    (engine,) = read_bundle(tmp_path / "bundle").engines
    assert (engine.precision, engine.kernels["int8"]) == ("int8", len(made.int8))
    with load(tmp_path / "bundle") as predictor:
        found = [each.text for each in predictor.predict_batch(pictures)]
    # Of a model that is right in a quarter of the lines, and calibrated on eight.
    assert compare_texts(found, generated[1], None, cut=0, max_difference=0).character_agreement > 80


def test_shuffled_weights_never_pass(exported, scenes, tmp_path):
    require_unproven(exported, "encoder.onnx", scenes / "images", tmp_path)
