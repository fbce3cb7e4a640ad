"""transformers' encoder-decoders of images from a folder: the graphs are the library's module, what they write is what
its `generate` writes, greedily and with beams, and what cannot be done is refused.

Graphs of seeded weights are measured where the page of models is written, or with VITDEPLOY_TEST_DEPTH; those of the
trained model of the drawn scenes always (`tests/tasks/test_image_to_text.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.external.image_texts import FIELDS, PROCESSORS, TRAINED, saved, tokenizer
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.exporter.sequence import check_text_parity, export_image_text
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models.load import load_model
from vitdeploy.models.model_folder.image_processor import transformers_preprocess
from vitdeploy.models.source import Source
from vitdeploy.models.torch_runner import torch_runner
from vitdeploy.runtime.preprocess import normalise, resize_and_crop
from vitdeploy.runtime.text_decoder import TextRunner
from vitdeploy.spec import BeamSpec

transformers = reference("transformers")
pytest.importorskip("tokenizers")

GRID = [(1, 1.0, False), *itertools.product((2, 5), (0.0, 1.0, 2.0), (False, True, "never"))]
IMAGES = 8


@pytest.fixture(scope="module", params=["TrOCR", "Donut"])
def exported(request, tmp_path_factory):
    """The kind, the model, a folder with both graphs, and the library's own model."""
    kind = request.param
    asked = "VITDEPLOY_TEST_DEPTH" in os.environ or request.config.getoption("record_parity")
    if not asked:
        pytest.skip("much like the trained model; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it too")
    out = tmp_path_factory.mktemp("image_text")
    folder = saved(kind, out / "model")
    original = load_model(Source(f"hf:{folder}"))
    module, signature = original.module, original.signature
    graphs = export_image_text(
        module, name="model", preprocess=original.preprocess,
        postprocess=signature.postprocess, sequence=signature.sequence, opset=20, batch=None, in_graph=True,
    )  # fmt: skip
    for name, graph in graphs.items():
        save_graph(graph, out / f"{name}.onnx")
    return kind, original, out, transformers.VisionEncoderDecoderModel.from_pretrained(folder).eval()


def pixels(original, count):
    size = *original.signature.image_size, 3
    return np.random.default_rng(0).integers(0, 256, (count, *size), dtype=np.uint8)


def decoder_of(exported, engine, batch=None):
    _, original, out, _ = exported
    parts = (engine_runner(engine, out / f"{part}.onnx", batch) for part in ("encoder", "decoder_step"))
    return TextRunner(*parts, original.signature.sequence)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_graphs_are_transformers_module_at_any_batch(exported, engine, parity):
    kind, original, _, model = exported
    for batch in BATCHES:
        images = pixels(original, batch)
        with decoder_of(exported, engine, batch) as decoder:
            decoder.spec = replace(decoder.spec, end=-1)  # every run has all its steps
            tokens, logits = decoder.decode_with_logits(images)
        start = np.full((batch, 1), original.signature.sequence.start)
        target = torch.from_numpy(np.concatenate([start, tokens[:, :-1]], axis=1))
        with torch.no_grad():
            expected = model(
                pixel_values=torch.from_numpy(normalise(images, original.preprocess)), decoder_input_ids=target
            ).logits
        parity(f"{kind}, transformers' module", engine, logits, expected)


def test_the_export_measures_the_same(exported):
    _, original, out, _ = exported
    files = out / "encoder.onnx", out / "decoder_step.onnx"
    rows = check_text_parity(*files, original.module, original.preprocess, original.signature.sequence)
    assert [(row.batch, row.unproven) for row in rows] == [(batch, None) for batch in BATCHES]
    assert max(row.max_relative_difference for row in rows) <= 1e-5


@pytest.fixture(scope="module")
def generated(exported):
    """What `generate` writes with each row of GRID, without the start token, and the scores that it ranks by."""
    _, original, _, model = exported
    images = pixels(original, IMAGES)
    given = torch.from_numpy(normalise(images, original.preprocess))
    found = {}
    for beams, penalty, stopping in GRID:
        with torch.no_grad():
            found[beams, penalty, stopping] = model.generate(
                given, num_beams=beams, length_penalty=penalty, early_stopping=stopping, do_sample=False,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
    return images, found


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_is_what_generate_writes(exported, generated, engine):
    sequence = exported[1].signature.sequence
    images, found = generated
    with decoder_of(exported, engine) as decoder:
        for (beams, penalty, stopping), expected in found.items():
            search = BeamSpec(beams, penalty, stopping) if beams > 1 else None
            tokens, scores = decoder.write(images, search)
            theirs = expected.sequences[:, 1:].numpy()
            missing = ((0, 0), (0, tokens.shape[1] - theirs.shape[1]))
            assert np.array_equal(tokens, np.pad(theirs, missing, constant_values=sequence.pad))
            if search is not None:
                ends = tokens == sequence.end
                lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, tokens.shape[1])
                ranked = scores.sum(axis=1) / lengths**penalty
                assert np.abs(ranked - expected.sequences_scores.numpy()).max() < 1e-4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_run_of_tokens_is_written_twice(exported, generated, size):
    _, original, _, model = exported
    images, _ = generated
    given = torch.from_numpy(normalise(images, original.preprocess))
    with decoder_of(exported, "ONNX Runtime") as decoder:
        decoder.spec = replace(decoder.spec, no_repeat=size)
        for beams in (1, 3):
            tokens, _ = decoder.write(images, BeamSpec(beams) if beams > 1 else None)
            theirs = model.generate(given, num_beams=beams, no_repeat_ngram_size=size).numpy()[:, 1:]
            missing = ((0, 0), (0, tokens.shape[1] - theirs.shape[1]))
            assert np.array_equal(tokens, np.pad(theirs, missing, constant_values=decoder.spec.pad))


def test_groups_of_a_pinned_batch_write_the_same(exported, generated):
    images, found = generated
    with decoder_of(exported, "OpenVINO", 3) as decoder:
        tokens, _ = decoder.write(images, BeamSpec(2))
    theirs = found[2, 1.0, False].sequences[:, 1:].numpy()
    assert np.array_equal(tokens[:, : theirs.shape[1]], theirs)


def test_the_original_searches_as_its_own_files_say(exported, generated):
    """PyTorch runs behind the same search."""
    _, original, _, model = exported
    images, _ = generated
    given = torch.from_numpy(normalise(images, original.preprocess))
    with torch_runner(original) as runner:
        tokens = runner.infer({"image": given.numpy()})["tokens"]
    with torch.no_grad():
        theirs = model.generate(given).numpy()[:, 1:]
    assert np.array_equal(tokens[:, : theirs.shape[1]], theirs)


def test_positions_that_transformers_forgets_are_computed(tmp_path):
    """A TrOCR whose positions are computed, as in the large ones, against the library's model as it is built."""
    folder = saved("TrOCR", tmp_path / "model", use_learned_position_embeddings=False)
    original = load_model(Source(f"hf:{folder}"))
    built = transformers.VisionEncoderDecoderModel(original.module.model.config).eval()
    built.load_state_dict(original.module.model.state_dict())
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, *original.signature.image_size, generator=generator)
    target = torch.randint(4, 30, (2, 7), generator=generator)
    with torch.no_grad():
        ours, theirs = original.module(image, target), built(pixel_values=image, decoder_input_ids=target).logits
        past = [(key[:, :, :0], value[:, :, :0]) for key, value in original.module.encode(image)]
        cross, steps = original.module.encode(image), []
        for place in range(7):
            logits, past = original.module.step(target[:, place : place + 1], cross, past)
            steps.append(logits)
    assert torch.equal(ours, theirs)
    assert (torch.stack(steps, 1) - theirs).abs().max() < 1e-5 * theirs.abs().max()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TRAINED, tmp_path / "trocr")


def changed(folder, file, **values):
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **values}), encoding="utf-8")
    return Source(f"hf:{folder}")


def test_a_folder_without_a_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json") as caught:
        load_model(Source(f"hf:{folder}"))
    assert caught.value.found == "tokenizer_config.json"
    assert "AutoTokenizer" in caught.value.fix


def test_tokens_without_a_text_are_told(folder):
    assert len(load_model(Source(f"hf:{folder}")).signature.notes) == 1
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"] = {word: k for word, k in tokenizer["model"]["vocab"].items() if k < 30}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    told = load_model(Source(f"hf:{folder}")).signature.notes[-1]
    assert told == "tokenizer.json has no text for the last 10 of the model's 40 tokens"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"repetition_penalty": 1.2, "do_sample": True}, "do_sample True, repetition_penalty 1.2"),
        ({"eos_token_id": [2, 5]}, "eos_token_id [2, 5]"),
        ({"forced_eos_token_id": 7}, "forced_eos_token_id 7"),
    ],
)
def test_another_way_of_generating_is_refused(folder, values, found):
    with pytest.raises(CheckpointError, match="does not support the model's generation settings") as caught:
        load_model(changed(folder, "generation_config.json", **values))
    assert all(part in caught.value.found for part in found.split(", "))
    assert "generation_config.json" in caught.value.fix


def test_the_length_is_what_the_files_say_and_the_decoder_can(folder):
    told = load_model(changed(folder, "generation_config.json", max_length=40)).signature
    assert (told.sequence.max_length, told.notes[1:]) == (
        12, ("generation_config.json asks for 39 tokens, but the decoder has only 12 positions",),
    )  # fmt: skip
    (folder / "generation_config.json").unlink()
    assert load_model(Source(f"hf:{folder}")).signature.sequence.max_length == 12


def test_beams_of_the_models_own_files_are_its_search(folder):
    sequence = load_model(
        changed(folder, "generation_config.json", num_beams=4, length_penalty=2.0, early_stopping=True)
    ).signature.sequence
    assert sequence.search == BeamSpec(4, 2.0, True)
    assert replace(sequence, search=None, forced_end=True).forced_end


def test_an_operation_of_a_processor_that_is_not_done_is_named(folder):
    source = changed(
        folder, "preprocessor_config.json", image_processor_type="DonutImageProcessor", do_align_long_axis=True
    )
    with pytest.raises(CheckpointError, match="does not support the checkpoint's preprocessing") as caught:
        load_model(source)
    assert "do_align_long_axis" in caught.value.found


def test_fields_are_part_of_what_a_donut_writes(tmp_path):
    from vitdeploy.models.model_folder.tokenizer import text_spec
    from vitdeploy.runtime.tokenizer import TextWriter

    words = tokenizer()
    words.save_pretrained(tmp_path)
    given = words(FIELDS[1] + "A7" + FIELDS[2]).input_ids
    given = [words.bos_token_id, *given, words.eos_token_id, words.pad_token_id]
    texts = [
        TextWriter(tmp_path / "tokenizer.json", text_spec(tmp_path, keeps_special=keeps)).text(given)
        for keeps in (True, False)
    ]
    assert texts == ["<s_name>A7</s_name>", words.decode(given, skip_special_tokens=True)]


@pytest.mark.parametrize("size", [(24, 32), (32, 24), (30, 40), (40, 30), (50, 90), (23, 31), (9, 60)])
def test_pictures_are_fitted_and_padded_as_donuts_are(size):
    from PIL import Image

    given = {**PROCESSORS["Donut"], "size": {"height": 32, "width": 24}}
    spec, notes = transformers_preprocess(given, 3, (32, 24))
    assert (spec.fit, notes) == ("contain", ("the processor resizes some images twice; vitdeploy resizes them once",))
    grey = np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    image = Image.fromarray(grey).resize(size, Image.Resampling.BICUBIC)
    processor = transformers.DonutImageProcessorPil(
        size=given["size"], do_align_long_axis=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    theirs = processor(image, return_tensors="np").pixel_values[0]
    ours = normalise(resize_and_crop(image, spec)[None], spec)[0]
    once = size[1] / size[0] >= 1 and size[1] / size[0] <= 32 / 24 + 0.02
    levels = 127.5 * np.abs(ours - theirs)
    assert levels.max() < (1 if once else 20)
    assert np.array_equal(ours == -1, theirs == -1) or not once


@pytest.mark.parametrize("step", ["do_pad", "do_thumbnail", "do_resize"])
def test_a_donut_without_a_step_is_refused(step):
    with pytest.raises(CheckpointError, match="does not support the checkpoint's preprocessing") as caught:
        transformers_preprocess({**PROCESSORS["Donut"], step: False}, 3, (32, 32))
    assert caught.value.found == f"{step} false"
