"""The two graphs of an encoder-decoder: what they hold, and that decoding with them is the model."""

import copy
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from tests.parity import BATCHES, ENGINES, engine_runner
from vitdeploy.errors import ExportError
from vitdeploy.exporter.sequence import check_sequence_parity, export_sequence
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.models.architectures.transformer import Transformer, TransformerConfig
from vitdeploy.runtime.sequence import SequenceRunner
from vitdeploy.spec import SequenceSpec

ROOT = Path(__file__).parent.parent.parent
CONFIG = TransformerConfig(
    source_vocabulary=11,
    target_vocabulary=9,
    width=16,
    encoder_depth=1,
    decoder_depth=2,
    heads=4,
    hidden=24,
    max_length=24,
    pad=3,
    shared_embeddings=False,
    generator_bias=True,
    pre_norm=True,
    final_norm=True,
)
CACHES = [f"{part}_{i}" for i in range(2) for part in ("key", "value")]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    module = Transformer(CONFIG)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.eval()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """A folder with encoder.onnx and decoder_step.onnx."""
    folder = tmp_path_factory.mktemp("sequence")
    for key, graph in export_sequence(model, name="tiny", opset=18).items():
        save_graph(graph, folder / f"{key}.onnx")
    return folder


@pytest.fixture
def protos(exported):
    return {key: onnx.load(str(exported / f"{key}.onnx")) for key in ("encoder", "decoder_step")}


def shapes(values):
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values
    }


# --- the graphs -------------------------------------------------------------------------------------------------------


def test_the_encoder_gives_all_that_steps_read(protos):
    graph = protos["encoder"].graph
    assert graph.name == "tiny_encoder"
    assert shapes(graph.input) == {"source": ["batch", "source_length"]}
    assert shapes(graph.output) == {
        "memory": ["batch", "source_length", 16],
        "source_mask": ["batch", 1, 1, "source_length"],
        **{f"cross_{cache}": ["batch", 4, "source_length", 4] for cache in CACHES},
    }


def test_the_decoder_step_grows_its_caches_by_one(protos):
    graph = protos["decoder_step"].graph
    assert graph.name == "tiny_decoder_step"
    assert shapes(graph.input) == {
        "token": ["batch", 1],
        "source_mask": ["batch", 1, 1, "source_length"],
        **{f"cross_{cache}": ["batch", 4, "source_length", 4] for cache in CACHES},
        **{f"past_{cache}": ["batch", 4, "past_length", 4] for cache in CACHES},
    }
    assert shapes(graph.output) == {
        "logits": ["batch", 9],
        **{f"present_{cache}": ["batch", 4, "past_length + 1", 4] for cache in CACHES},
    }


def test_tokens_are_integers_and_all_else_is_float(protos):
    for proto in protos.values():
        for value in (*proto.graph.input, *proto.graph.output):
            integer = value.name in ("source", "token")
            assert value.type.tensor_type.elem_type == (onnx.TensorProto.INT64 if integer else onnx.TensorProto.FLOAT)


def test_linears_are_found_by_their_modules_names(exported):
    encoder, step = (
        [linear.name for linear in find_linears(load_graph(exported / f"{key}.onnx"))]
        for key in ("encoder", "decoder_step")
    )
    layers = ["self_attention.qkv", "self_attention.proj", "mlp.fc1", "mlp.fc2"]
    cross = ["cross_attention.query", "cross_attention.proj"]
    assert encoder == [
        *(f"encoder.0.{layer}" for layer in layers),
        *(f"decoder.{i}.cross_attention.key_value" for i in range(2)),
    ]
    per_block = [*layers[:2], *cross, *layers[2:]]
    assert step == [*(f"decoder.{i}.{layer}" for i in range(2) for layer in per_block), "generator"]


def test_sizes_are_read_for_the_positions_alone(protos):
    kinds = {key: [node.op_type for node in proto.graph.node] for key, proto in protos.items()}
    assert {key: kind.count("Shape") for key, kind in kinds.items()} == {"encoder": 1, "decoder_step": 1}
    assert {key: kind.count("Concat") for key, kind in kinds.items()} == {"encoder": 0, "decoder_step": 4}  # the caches
    for kind in kinds.values():
        assert kind.count("LayerNormalization") in (3, 7)
        assert not {"If", "Expand", "Cast", "Range", "Gemm", "ConstantOfShape"} & set(kind)


def test_the_same_model_gives_the_same_bytes(model, exported, tmp_path):
    save_graph(export_sequence(model, name="tiny", opset=18)["decoder_step"], tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (exported / "decoder_step.onnx").read_bytes()


@pytest.mark.parametrize("key", ["encoder", "decoder_step"])
def test_the_file_holds_no_path_and_no_trace_of_source(exported, key):
    content = (exported / f"{key}.onnx").read_bytes()
    traces = [str(ROOT), sys.prefix, "stack_trace", "pkg.torch", 'File "', "site-packages"]
    assert [trace for trace in traces if trace.encode() in content] == []


def test_a_model_too_short_to_tell_its_axes_apart_is_refused():
    module = Transformer(TransformerConfig(9, 9, 16, 1, 1, heads=2, hidden=16, max_length=7))
    with pytest.raises(ExportError, match="is too small for an export") as caught:
        export_sequence(module, name="short", opset=20)
    assert (caught.value.found, caught.value.expected) == ("max_length 7", "at least 8")


def test_what_cannot_be_exported_says_why(model, monkeypatch):
    def branch(self, source):
        raise ValueError("no way through")

    monkeypatch.setattr(Transformer, "encode", branch)
    with pytest.raises(ExportError, match="tiny_encoder cannot be exported"):
        export_sequence(model, name="tiny", opset=20)


# --- parity -----------------------------------------------------------------------------------------------------------


def check(protos, model, folder):
    for key, proto in protos.items():
        onnx.save(proto, str(folder / f"{key}.onnx"))
    return check_sequence_parity(folder / "encoder.onnx", folder / "decoder_step.onnx", model)


def change(proto, name, function):
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(function(numpy_helper.to_array(tensor)), name))


def test_the_graphs_are_the_model_at_every_batch_and_length(exported, model):
    rows = check_sequence_parity(exported / "encoder.onnx", exported / "decoder_step.onnx", model)
    assert [(row.batch, row.source_length) for row in rows] == [(b, s) for b in (1, 2, 5) for s in (1, 4, 19)]
    assert {row.steps for row in rows} == {20}
    assert max(row.max_relative_difference for row in rows) <= 1e-5
    assert rows[0].source_length is not None and rows[0].unproven is None


def test_of_a_model_that_always_writes_the_same_the_difference_proves_nothing(protos, model, tmp_path):
    constant = copy.deepcopy(model)
    torch.nn.init.zeros_(constant.generator.weight)
    change(protos["decoder_step"], "generator.weight_t", np.zeros_like)
    rows = check(protos, constant, tmp_path)
    assert {row.unproven for row in rows} == {("logits",)}


@pytest.mark.parametrize("engine", ENGINES)
def test_decoding_through_both_graphs_gives_the_logits_of_the_whole_target(exported, model, engine, parity):
    generator = np.random.default_rng(0)
    words = np.delete(np.arange(CONFIG.source_vocabulary), CONFIG.pad)
    for batch in BATCHES:
        source = generator.choice(words, (batch, 19))
        source[np.arange(19) >= generator.integers(1, 20, (batch, 1))] = CONFIG.pad
        runners = [engine_runner(engine, exported / f"{key}.onnx", batch) for key in ("encoder", "decoder_step")]
        # No token ends a target: every run has all its steps.
        endless = SequenceSpec(CONFIG.start, -1, CONFIG.pad, CONFIG.max_length, None)
        with SequenceRunner(*runners, endless) as decoder:
            tokens, logits = decoder.decode_with_logits(source, CONFIG.max_length)
        target = np.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=CONFIG.start)
        with torch.no_grad():
            expected = model(torch.from_numpy(source), torch.from_numpy(target))
        parity("Transformer", engine, logits, expected, top1=True)


@pytest.mark.parametrize(
    ("key", "name"),
    [("encoder", "decoder.1.cross_attention.key_value.bias"), ("decoder_step", "decoder.0.self_attention.qkv.bias")],
)
def test_one_changed_bias_is_found(protos, model, tmp_path, key, name):
    change(protos[key], name, lambda bias: bias + np.float32(0.05))
    with pytest.raises(ExportError, match="not the same function") as caught:
        check(protos, model, tmp_path)
    assert "at batch 1 and source length" in caught.value.found


def test_positions_that_are_off_by_one_are_found(protos, model, tmp_path):
    change(protos["decoder_step"], "positions", lambda table: np.roll(table, 1, axis=0))
    with pytest.raises(ExportError, match="not the same function"):
        check(protos, model, tmp_path)


def test_a_batch_in_a_constant_is_found(protos, model, tmp_path):
    reshape = next(node for node in protos["decoder_step"].graph.node if node.op_type == "Reshape")
    change(protos["decoder_step"], reshape.input[1], lambda shape: np.where(shape == -1, 2, shape))
    with pytest.raises(ExportError, match="do not run at batch 1 and source length 1") as caught:
        check(protos, model, tmp_path)
    assert caught.value.found


def test_another_token_than_the_likeliest_is_found(exported, model, monkeypatch):
    decode = SequenceRunner.decode_with_logits

    def careless(self, source, steps):
        tokens, logits = decode(self, source, steps)
        tokens[-1, -1] = logits[-1, -1].argmin()
        return tokens, logits

    monkeypatch.setattr(SequenceRunner, "decode_with_logits", careless)
    with pytest.raises(ExportError, match="gives different tokens") as caught:
        check_sequence_parity(exported / "encoder.onnx", exported / "decoder_step.onnx", model)
    assert caught.value.found == "1 of 20 tokens at batch 1 and source length 1"
