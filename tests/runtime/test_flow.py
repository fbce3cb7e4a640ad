"""Several graphs as one runner: what passes between them, what is kept, and graphs that do not fit together."""

import dataclasses

import numpy as np
import onnx
import pytest

from vitdeploy.bundle.layout import PartTensors, mismatches
from vitdeploy.errors import ClosedError, TargetError, TensorError
from vitdeploy.runtime.flow import FlowRunner, FlowView
from vitdeploy.runtime.flows import flow_of_graphs
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import FlowPart, FlowSpec, TensorSpec

# An image's embedding and a decoder of points, as promptable segmentation has them; and a part that counts texts.
EMBED = """
<ir_version: 9, opset_import: ["" : 18]> embed (uint8[batch, 2, 2, 1] image) => (float[batch, 4] embedding)
{ x = Cast <to = 1> (image)  shape = Constant <value_ints = [0, 4]> ()  embedding = Reshape (x, shape) }
"""
DECODE = """
<ir_version: 9, opset_import: ["" : 18]>
decode (float[batch, 4] features, float[batch, points, 4] points) => (float[batch, points] scores)
{ axes = Constant <value_ints = [2]> ()  column = Unsqueeze (features, axes)  product = MatMul (points, column)
  scores = Squeeze (product, axes) }
"""
TEXTS = """
<ir_version: 9, opset_import: ["" : 18]> texts (int64[batch, 3] text) => (float[batch, 3] features)
{ features = Cast <to = 1> (text) }
"""
GRAPHS = {"image_encoder": EMBED, "prompt_decoder": DECODE, "text_encoder": TEXTS}
FLOW = FlowSpec(
    (
        FlowPart("image_encoder", {"image": "image"}),
        FlowPart("prompt_decoder", {"features": "image_encoder.embedding", "points": "points"}),
        FlowPart("text_encoder", {"text": "text"}, batch="texts"),
    ),
    {"scores": "prompt_decoder.scores", "text_features": "text_encoder.features"},
)


class Counting(OnnxRuntimeRunner):
    """A real runner that counts its runs."""

    runs = 0

    def _infer(self, feeds):
        self.runs += 1
        return super()._infer(feeds)


def flow_runner(batch=None, keep=False, flow=FLOW, **graphs):
    texts = {**GRAPHS, **graphs}
    parts = {
        name: Counting(onnx.parser.parse_model(text).SerializeToString(), name=name, batch=batch)
        for name, text in texts.items()
    }
    return FlowRunner(flow, parts, name="the model", keep=keep)


def feeds(images=2, texts=3, seed=0):
    generator = np.random.default_rng(seed)
    return {
        "image": generator.integers(0, 256, (images, 2, 2, 1), np.uint8),
        "points": generator.standard_normal((images, 5, 4)).astype(np.float32),
        "text": generator.integers(0, 9, (texts, 3)),
    }


@pytest.mark.parametrize("batch", [None, 1, 2, 4])
def test_tensors_pass_from_graph_to_graph_at_any_batch(batch):
    given = feeds(images=3, texts=5)
    with flow_runner(batch) as runner:
        found = runner.infer(given)
        assert [str(tensor) for tensor in runner.inputs] == [
            "image: uint8[batch, 2, 2, 1]",
            "points: float32[batch, points, 4]",
            "text: int64[texts, 3]",
        ]
        assert [tensor.name for tensor in runner.outputs] == ["scores", "text_features"]
    embedding = given["image"].reshape(3, 4, 1).astype(np.float32)
    np.testing.assert_allclose(found["scores"], (given["points"] @ embedding)[:, :, 0], rtol=1e-5)
    np.testing.assert_array_equal(found["text_features"], given["text"])


def test_a_part_whose_inputs_did_not_change_does_not_run_again():
    given = feeds()
    with flow_runner(keep=True) as runner:
        parts = runner.linked.runners
        first = runner.infer(given)
        first["text_features"][:] = -1  # an array of the caller's own
        again = runner.infer({**given, "points": 2 * given["points"]})
        np.testing.assert_allclose(again["scores"], 2 * first["scores"], rtol=1e-6)
        np.testing.assert_array_equal(again["text_features"], given["text"])
        assert {name: part.runs for name, part in parts.items()} == {
            "image_encoder": 1,
            "prompt_decoder": 2,
            "text_encoder": 1,
        }
        given["image"][0] += 1  # the same array with other numbers
        assert not np.array_equal(runner.infer(given)["scores"][0], first["scores"][0])
        assert parts["image_encoder"].runs == 2


def test_without_keep_every_part_runs_each_time():
    with flow_runner() as runner:
        runner.infer(feeds())
        runner.infer(feeds())
        assert {part.runs for part in runner.linked.runners.values()} == {2}
        times = runner.part_times(feeds())
        assert list(times) == list(GRAPHS)
        assert min(times.values()) > 0


def test_a_view_runs_only_what_its_outputs_need():
    given = feeds()
    whole = flow_runner()
    with FlowView(whole, ["text_features"]) as view:
        assert [tensor.name for tensor in view.inputs] == ["text"]
        np.testing.assert_array_equal(view.infer({"text": given["text"]})["text_features"], given["text"])
        assert [part.runs for part in whole.linked.runners.values()] == [0, 0, 1]
    with pytest.raises(ClosedError):
        whole.infer(given)


def test_an_example_has_one_row_of_what_is_not_counted():
    with flow_runner() as runner:
        example = runner.example(4)
        assert {name: array.shape[0] for name, array in example.items()} == {"image": 4, "points": 4, "text": 1}
        runner.infer(example)


def test_rows_that_do_not_match_are_refused():
    with flow_runner() as runner, pytest.raises(TensorError, match="differ in their number of rows") as caught:
        runner.infer({**feeds(), "points": feeds(images=3)["points"]})
    assert caught.value.found == "features 2, points 3"


def test_graphs_that_do_not_fit_are_refused_with_every_misfit():
    other = DECODE.replace("float[batch, 4] features", "float[batch, 8] features, float[batch] size").replace(
        "points, 4]", "points, 8]"
    )
    other = other.replace("float[batch, points] scores", "float[batch, points] score").replace("scores =", "score =")
    runner = flow_runner(prompt_decoder=other, text_encoder=TEXTS.replace("text", "tokens"))
    with pytest.raises(TargetError, match="the graphs of the model do not fit together") as caught:
        runner.load()
    assert caught.value.found.split("; ") == [
        "prompt_decoder.size: nothing feeds this input",
        "prompt_decoder.features: takes float32[batch, 8], image_encoder.embedding is float32[batch, 4]",
        "text_encoder.tokens: nothing feeds this input",
        "text_encoder.text: the graph has no such input",
        "output scores: prompt_decoder.scores does not exist",
    ]


def misfits(change, graphs=None):
    vectors = {
        "first": PartTensors((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 4)),)),
        "second": PartTensors((TensorSpec("y", "float32", ("batch", 4)),), (TensorSpec("z", "int64", ("batch",)),)),
    }
    flow = FlowSpec((FlowPart("first", {"x": "x"}), FlowPart("second", {"y": "first.y"})), {"z": "second.z"})
    return mismatches(change(flow), graphs or vectors)


def with_second(**changes):
    return lambda flow: dataclasses.replace(flow, parts=(flow.parts[0], dataclasses.replace(flow.parts[1], **changes)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda flow: flow, []),
        (lambda flow: dataclasses.replace(flow, parts=()), ["the flow has no part"]),
        (lambda flow: dataclasses.replace(flow, parts=flow.parts[::-1]), ["second.y: first.y comes from a later part"]),
        (lambda flow: dataclasses.replace(flow, parts=flow.parts[:1]), ["second: not part of the flow"]),
        (with_second(name="third"), ["third: no such graph", "second: not part of the flow"]),
        (with_second(feeds={"y": "first.x"}), ["second.y: first.x does not exist"]),
        (with_second(feeds={"y": "x"}), []),
        (with_second(batch="texts"), ["second.y: first.y has the leading axis batch, expected texts"]),
        (
            with_second(carries={"y": "z"}),
            ["second.y: fed twice", "second.y: takes float32[batch, 4], second.z is int64"],
        ),
        (
            with_second(**{"token": "t"}),
            ["second.t: the graph has no such input", "second: repeats, but has no logits"],
        ),
    ],
)
def test_each_misfit_is_named(change, told):
    found = misfits(change)
    assert len(found) == len(told), found
    for line, start in zip(found, told, strict=True):
        assert line.startswith(start)


def test_nothing_says_how_unknown_graphs_run_together():
    with pytest.raises(TargetError, match="unknown combination of graphs") as caught:
        flow_of_graphs({"left": PartTensors((), ()), "right": PartTensors((), ())})
    assert "encoder and decoder_step" in caught.value.expected
