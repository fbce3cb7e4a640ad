"""INT8 of a model of several graphs: calibrated on what flows between them, each graph in a precision of its own."""

import json

import pytest

from vitdeploy.api.quantize import quantize
from vitdeploy.data.tokens import read_tokens
from vitdeploy.errors import CapabilityError, DataError, GraphError, InputError
from vitdeploy.graph.io.files import admitted_metadata, load_graph
from vitdeploy.quantization.placement_reader import reject_quantized
from vitdeploy.quantization.ranges import load_statistics
from vitdeploy.runtime.engine import make_runner
from vitdeploy.stages.calibrate import calibrate_parts
from vitdeploy.stages.step import graphs_in
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.sequence import Decoding, SequenceAdapter
from vitdeploy.workflows.placement import compile_bundle

TOKENS = "tokens.npz"


@pytest.fixture(scope="module")
def tokens(digits):
    return digits.parent / "reverse" / TOKENS


@pytest.fixture(scope="module")
def drive(tokens, sequence_export):
    metadata = admitted_metadata(sequence_export / "encoder.onnx")
    adapter = SequenceAdapter(Setting("sequence", None, sequence=metadata.sequence))
    choice = DataChoice(tokens, "none", None, 12, "all", 0)
    return adapter.drive(adapter.calibration(choice, skip_bad=False, progress=lambda *told: None))


@pytest.fixture(scope="module")
def quantized(tokens, sequence_export, tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8") / "both"
    return quantize(sequence_export, tokens, "onnxruntime-cpu", folder, num_samples=64, progress=False)


def test_every_graph_is_observed_while_the_float_model_decodes(drive, sequence_export, tmp_path):
    facts = calibrate_parts(graphs_in(sequence_export), drive, tmp_path)
    assert (facts["images"], facts["distinct"], facts["warnings"]) == (12, 12, [])
    encoder, step = (load_statistics(tmp_path / f"{part}.statistics.npz") for part in ("encoder", "decoder_step"))
    # One row a token: of a source with its padding, and of the digits with the end, of which no step is padded.
    assert {each.rows for each in encoder.values()} == {sum(len(pair.source) for pair in drive.samples)}
    assert max(each.rows for each in step.values()) == sum(int((pair.target != 0).sum()) for pair in drive.samples)
    bounds = json.loads((tmp_path / "ranges.json").read_text())
    assert {name.partition("/")[0] for name in bounds} == {"encoder", "decoder_step"}


def test_few_samples_are_told(drive, sequence_export, tmp_path):
    few = Decoding(drive.samples[:2], drive.sequence)
    [told] = calibrate_parts(graphs_in(sequence_export), few, tmp_path)["warnings"]
    assert told.startswith("Only 2 calibration sequences")


def test_a_graph_that_nothing_reaches_is_refused(drive, sequence_export, tmp_path):
    class EncoderAlone(Decoding):
        def __call__(self, runners, progress):
            runners["encoder"].infer({"source": self.samples[0].source[None]})

    half = EncoderAlone(drive.samples, drive.sequence)
    with pytest.raises(GraphError, match="no calibration sequences reach the decoder_step graph"):
        calibrate_parts(graphs_in(sequence_export), half, tmp_path)


def test_both_graphs_are_int8_and_still_reverse_strings(quantized, tokens, tmp_path):
    assert {name.partition("/")[0] for name in quantized.int8} == {"encoder", "decoder_step"}
    assert quantized.calibration_images == 64
    engine = compile_bundle(quantized.folder / "encoder.onnx", "onnxruntime-cpu", None, None, tmp_path).engines[0]
    assert (engine.precision, [part.precision for part in engine.parts]) == ("int8", ["int8", "int8"])
    assert engine.kernels["int8"] == len(quantized.int8)
    pairs = read_tokens(tokens)
    with make_runner(tmp_path, engine, batch=50) as runner:
        found = runner.infer({"source": pairs.source[-100:]})["tokens"]
        assert list(runner.part_times({"source": pairs.source[:50]})) == ["encoder", "decoder_step"]
    written = pairs.target[-100:, : found.shape[1]]
    used = written != 0
    assert (found[:, : written.shape[1]] == written)[used].mean() > 0.99


def test_one_graph_can_stay_in_float(tokens, sequence_export, tmp_path):
    made = quantize(
        sequence_export,
        tokens,
        "onnxruntime-cpu",
        tmp_path / "half",
        num_samples=16,
        float_parts=["encoder"],
        ignore=["decoder_step/*fc*"],
        progress=False,
    )
    assert {name.partition("/")[0] for name in made.int8} == {"decoder_step"}
    assert set(made.float.values()) == {"ignored on request"}
    reject_quantized(load_graph(made.folder / "encoder.onnx"), "the encoder")
    out = tmp_path / "bundle"
    out.mkdir()
    [engine] = compile_bundle(made.folder / "encoder.onnx", "onnxruntime-cpu", None, None, out).engines
    assert (engine.precision, [part.precision for part in engine.parts]) == ("int8", ["fp32", "int8"])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"float_parts": ["decoder"]}, InputError, "float_parts names unknown graphs: decoder"),
        ({"float_parts": ["encoder", "decoder_step"]}, GraphError, "float_parts leaves no graph to quantize"),
        ({"ignore": ["*"]}, GraphError, "no layer matches *"),
        ({"sensitivity": True}, CapabilityError, "sensitivity is not available for a model of several"),
        ({"precision": "mixed"}, CapabilityError, "mixed precision does not support models with several graphs"),
        ({"num_samples": 1000}, DataError, "has too few sequences"),
    ],
)
def test_what_cannot_be_is_refused(tokens, sequence_export, tmp_path, options, error, says):
    with pytest.raises(error) as caught:
        quantize(sequence_export, tokens, "onnxruntime-cpu", tmp_path / "out", progress=False, **options)
    assert caught.value.message.startswith(says) or says in caught.value.message


def test_a_model_of_one_graph_has_no_float_parts(small_export, digits, tmp_path):
    with pytest.raises(InputError, match="unknown graphs: encoder") as caught:
        quantize(small_export, digits, "onnxruntime-cpu", tmp_path / "o", float_parts=["encoder"], progress=False)
    assert caught.value.expected == "no float_parts: the model has a single graph"
