"""Greedy decoding through the engines: the model that reverses digits, on every runtime, pinned to a batch or not."""

import math
import runpy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vitdeploy.data.tokens import read_tokens
from vitdeploy.errors import ClosedError, TensorError
from vitdeploy.models.architectures.transformer import Transformer
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.families.transformer import parse
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.sequence import Sequence, SequenceRunner
from vitdeploy.spec import SequenceSpec, TensorSpec

NAME = "transformer_w32e2d2h4_v13_l20"
PAD, START, END = 0, 1, 2
SPEC = SequenceSpec(START, END, PAD, 20, None)
FP32 = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(scope="module")
def folder(digits):
    return digits.parent / "reverse"


@pytest.fixture(scope="module")
def model(folder):
    module = Transformer(parse(NAME)).eval()
    load_state(module, load_file(folder / "transformer_reverse.safetensors"), NAME)
    return module


@pytest.fixture(scope="module")
def pairs(folder):
    return read_tokens(folder / "tokens.npz")


@pytest.fixture(scope="module")
def graphs(sequence_export):
    return {key: sequence_export / f"{key}.onnx" for key in ("encoder", "decoder_step")}


def runners(runtime, graphs, batch=None):
    pytest.importorskip(runtime, reason=f"pip install 'vitdeploy[{runtime}]'")
    for key in ("encoder", "decoder_step"):
        if runtime == "openvino":
            yield OpenVinoRunner(graphs[key], name=key, batch=batch, options=FP32)
        else:
            yield OnnxRuntimeRunner(graphs[key], name=key, batch=batch)


@pytest.fixture(
    scope="module",
    params=[("onnxruntime", None), ("onnxruntime", 50), ("openvino", None), ("openvino", 50)],
    ids=lambda p: f"{p[0]}-{p[1] or 'dynamic'}",
)
def decoder(request, graphs):
    runtime, batch = request.param
    with SequenceRunner(*runners(runtime, graphs, batch), SPEC) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(model, pairs):
    """Greedy decoding in PyTorch without a cache: tokens, padded after the end, and the logits of each step."""
    source = torch.from_numpy(pairs.source)
    target = torch.full((len(source), 1), START)
    with torch.inference_mode():
        while not (target == END).any(dim=1).all():
            token = model(source, target)[:, -1:].argmax(dim=-1)
            ended = (target == END).any(dim=1, keepdim=True)
            target = torch.cat([target, token.masked_fill(ended, PAD)], dim=1)
        logits = model(source, target[:, :-1])
    return target[:, 1:].numpy(), logits.numpy()


# --- the engines against the model ------------------------------------------------------------------------------------


def test_every_unseen_string_is_reversed(decoder, pairs, reference):
    tokens = decoder.decode(pairs.source)
    assert tokens.dtype == np.int64
    assert np.array_equal(tokens, reference[0])
    used = pairs.target != PAD
    assert (tokens == pairs.target)[used].mean() > 0.99


def test_the_logits_of_every_step_are_the_models(decoder, pairs, reference):
    tokens, logits = decoder.decode_with_logits(pairs.source)
    run = logits.any(axis=-1)
    assert run[tokens != PAD].all()
    assert np.abs(logits - reference[1])[run].max() <= 1e-4 * np.abs(reference[1]).max()


def test_training_strings_are_not_evaluated(folder, pairs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    train = runpy.run_path(str(folder / "train.py"), run_name="train")
    generator = np.random.RandomState(0)
    evaluated = train["draw_distinct"](generator, train["EVALUATED"])
    source, target = train["to_tokens"](evaluated)
    assert np.array_equal(source, pairs.source)
    assert np.array_equal(target, pairs.target)
    drawn = [train["draw"](generator, train["BATCH"], set(evaluated)) for _ in range(100)]
    assert not {string for strings in drawn for string in strings} & set(evaluated)
    assert all(len(string) in range(2, 17) for strings in drawn for string in strings)


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_one_source_alone_gives_the_same_tokens(decoder, pairs, reference):
    for i in (0, 7):
        length = int((pairs.source[i] != PAD).sum())
        tokens = decoder.decode(pairs.source[i : i + 1, :length])
        assert tokens.shape == (1, length)
        assert np.array_equal(tokens[0], reference[0][i, :length])


def test_decoding_stops_after_the_steps_that_are_asked_for(decoder, pairs, reference):
    tokens, logits = decoder.decode_with_logits(pairs.source[:5], steps=3)
    assert np.array_equal(tokens, reference[0][:5, :3])
    assert logits.shape == (5, 3, 13)


@pytest.fixture(scope="module")
def ort(graphs):
    with SequenceRunner(*runners("onnxruntime", graphs), replace(SPEC, source_vocabulary=13)) as opened:
        yield opened


def test_decoding_stops_at_the_largest_length(graphs, pairs):
    with SequenceRunner(*runners("onnxruntime", graphs), replace(SPEC, end=-1)) as never_ending:
        assert never_ending.decode(pairs.source[:2]).shape == (2, 20)


def test_results_have_words_and_their_probability(ort, model):
    sources = [[5, 6, 7, END], [9, 3, END]]
    first, second = ort.predict(sources)
    assert (first.tokens, second.tokens) == ((7, 6, 5), (3, 9))
    with torch.inference_mode():
        logits = model(torch.tensor([sources[1]]), torch.tensor([[START, 3, 9]])).double()
    expected = logits.log_softmax(dim=-1)[0, [0, 1, 2], [3, 9, END]].sum()
    assert second.score == pytest.approx(float(expected), abs=1e-6)
    assert second.to_dict() == {"tokens": [3, 9], "score": second.score}


def test_a_result_without_an_end_has_all_its_tokens(ort):
    (answer,) = ort.sequences(np.array([[5, 4]]), np.zeros((1, 2, 13), np.float32))
    assert answer == Sequence((5, 4), pytest.approx(2 * math.log(1 / 13)))


def test_no_sources_give_no_results(ort):
    assert ort.predict([]) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (np.zeros((1, 3), np.int32), "int32 [1, 3]"),
        (np.zeros(3, np.int64), "int64 [3]"),
        (np.zeros((0, 3), np.int64), "int64 [0, 3]"),
        (np.zeros((3, 0), np.int64), "int64 [3, 0]"),
    ],
)
def test_what_is_no_array_of_tokens_is_refused(ort, source, found):
    with pytest.raises(TensorError, match="not an array of tokens") as caught:
        ort.decode(source)
    assert caught.value.found == found


def test_a_source_that_is_too_long_is_refused(ort):
    with pytest.raises(TensorError, match="too long") as caught:
        ort.decode(np.ones((1, 21), np.int64))
    assert (caught.value.found, caught.value.expected) == ("21 tokens", "at most 20")


@pytest.mark.parametrize("token", [13, -1, 2**40])
def test_tokens_outside_the_vocabulary_are_refused(ort, token):
    with pytest.raises(TensorError, match="outside the vocabulary") as caught:
        ort.decode(np.array([[3, token]]))
    assert (caught.value.found, caught.value.expected) == (str(token), "0 to 12")


def test_a_closed_decoder_closes_its_engines(graphs):
    decoder = SequenceRunner(*runners("onnxruntime", graphs), SPEC).load()
    decoder.close()
    with pytest.raises(RuntimeError, match="is closed"):
        decoder.decode(np.ones((1, 2), np.int64))


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_close_in_the_middle_of_decoding_is_told_to_every_thread(graphs, runtime):
    decoder, going = SequenceRunner(*runners(runtime, graphs), SPEC).load(), threading.Barrier(4)

    def ask():
        going.wait(20)
        while True:
            decoder.decode(np.full((2, 9), 5, np.int64))

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask) for _ in range(3)]
        going.wait(20)
        time.sleep(0.05)
        decoder.close()
        assert {type(each.exception(20)) for each in asked} == {ClosedError}


# --- the runners ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 3])
def test_openvino_pins_the_batch_and_no_other_axis(graphs, batch):
    encoder, step = (runner.load() for runner in runners("openvino", graphs, batch))
    size = batch or "batch"
    assert encoder.inputs == (TensorSpec("source", "int64", (size, "dynamic")),)
    shapes = {tensor.name: tensor.shape for tensor in (*step.inputs, *step.outputs)}
    assert shapes["token"] == (size, 1)
    assert shapes["source_mask"] == (size, 1, 1, "dynamic")
    assert shapes["past_key_0"] == shapes["present_value_1"] == (size, 4, "dynamic", 8)
    assert shapes["logits"] == (size, 13)


class Caches(Runner):
    def _load(self):
        self.inputs = (TensorSpec("past_key_0", "float32", ("batch", 4, "past_length", 8)),)

    def _infer(self, feeds):
        return dict(feeds)

    def _close(self):
        pass


def test_a_cache_may_be_empty_and_a_batch_may_not():
    with Caches("caches") as runner:
        assert runner.infer({"past_key_0": np.zeros((2, 4, 0, 8), np.float32)})["past_key_0"].shape == (2, 4, 0, 8)
        with pytest.raises(TensorError, match="wrong dtype or shape"):
            runner.infer({"past_key_0": np.zeros((0, 4, 3, 8), np.float32)})
