"""What an export looks like, at every opset; its preprocessing; what cannot be exported."""

import contextlib
import dataclasses
import inspect
import json
import re
import typing
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import vitdeploy
import vitdeploy.stages.export as stage
from tests.conftest import export_of
from vitdeploy.errors import CheckpointError, ExportError
from vitdeploy.exporter import torch_onnx
from vitdeploy.exporter.parity import ask, check_graph
from vitdeploy.exporter.torch_onnx import PixelsIn, export_graph
from vitdeploy.graph.io.files import get_metadata, graph_spec, load_graph, save_graph
from vitdeploy.models.family import LoadedModel, Signature
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.models.torch_runner import TorchRunner
from vitdeploy.progress import silent
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec, TensorSpec
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import Overrides, find_reference_model

MODEL, DEPTH = "vit_w32d2h2_patch8_32", 2
PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
IR_VERSIONS = {18: 8, 19: 9, 20: 9}


@dataclasses.dataclass(frozen=True)
class Exported:
    opset: int
    folder: Path

    @property
    def proto(self) -> onnx.ModelProto:
        return onnx.load(str(self.folder / "model.onnx"))

    @property
    def operators(self) -> Counter[str]:
        return Counter(node.op_type for node in self.proto.graph.node)

    @property
    def facts(self) -> dict:
        return json.loads((self.folder / "export.json").read_text())


def export_small(checkpoint, out, *, opset=20, batch=None, in_graph=True, progress=silent, **overrides):
    reference_model = find_reference_model(
        Source(MODEL, checkpoint), Overrides(**{"preprocess": PREPROCESS, **overrides})
    )
    export(reference_model, ExportConfig("small", opset, batch, in_graph), out, progress)
    return Exported(opset, out)


@pytest.fixture(scope="session", params=sorted(IR_VERSIONS))
def exported(request, tmp_path_factory, small_checkpoint, small_export):
    if request.param == 20:
        return Exported(20, small_export)
    return export_small(small_checkpoint, tmp_path_factory.mktemp(f"opset{request.param}"), opset=request.param)


@pytest.fixture(scope="session")
def tensor_export(tmp_path_factory, small_checkpoint):
    """The same model without preprocessing in the graph."""
    return export_small(small_checkpoint, tmp_path_factory.mktemp("tensor"), in_graph=False)


@pytest.fixture(scope="session")
def fixed_export(tmp_path_factory, small_checkpoint):
    """The same model with the batch fixed to 3, and class names."""
    labels = tmp_path_factory.mktemp("labels") / "names.txt"
    labels.write_text("".join(f"digit {i}\n" for i in range(10)), encoding="utf-8")
    return export_small(small_checkpoint, tmp_path_factory.mktemp("fixed"), batch=3, labels=labels)


def pixels(batch, channels=1):
    return np.random.default_rng(7).integers(0, 256, (batch, 32, 32, channels), dtype=np.uint8)


def shape_of(value):
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]


# --- form -------------------------------------------------------------------------------------------------------------


def test_every_opset_on_offer_is_tested():
    offered = inspect.signature(vitdeploy.export).parameters["opset"].annotation
    assert list(typing.get_args(offered)) == sorted(IR_VERSIONS)


def test_file_has_the_opset_asked_for_and_the_lowest_ir_version_that_holds_it(exported):
    proto = exported.proto
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", exported.opset)]
    assert proto.ir_version == exported.facts["ir_version"] == IR_VERSIONS[exported.opset]


def test_layer_norms_and_softmaxes_are_single_nodes(exported):
    assert exported.operators["LayerNormalization"] == 2 * DEPTH + 1
    assert exported.operators["Softmax"] == DEPTH


def test_gelu_is_one_node_from_opset_20_and_the_error_function_before(exported):
    gelu, erf = exported.operators["Gelu"], exported.operators["Erf"]
    assert (gelu, erf) == ((DEPTH, 0) if exported.opset >= 20 else (0, DEPTH))


def test_graph_holds_no_branch_no_resize_and_no_gemm(exported):
    assert not {"If", "Loop", "Resize", "Gemm", "Constant", "Identity"} & exported.operators.keys()


def test_parity_is_recorded_at_three_batches_and_holds(exported):
    parity = exported.facts["parity"]
    assert [row["batch"] for row in parity] == [1, 2, 5]
    assert all(row["max_relative_difference"] <= 1e-4 for row in parity)


def test_input_is_uint8_pixels_with_a_dynamic_batch(exported):
    [tensor], [output] = exported.proto.graph.input, exported.proto.graph.output
    assert (tensor.name, tensor.type.tensor_type.elem_type) == ("image", onnx.TensorProto.UINT8)
    assert shape_of(tensor) == ["batch", 32, 32, 1]
    assert (output.name, shape_of(output)) == ("logits", ["batch", 10])


def test_nodes_are_named_after_their_modules(exported):
    names = {node.name for node in exported.proto.graph.node}
    layers = [f"blocks.{i}.{part}" for i in range(DEPTH) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    expected = {f"{layer}/{operator}" for layer in [*layers, "head"] for operator in ("MatMul", "Add")}
    expected |= {f"blocks.{i}.norm{j}/LayerNormalization" for i in range(DEPTH) for j in (1, 2)}
    expected |= {"patch_embed.proj/Conv", "norm/LayerNormalization", "blocks.1.attn/Softmax"}
    assert expected <= names
    assert len(names) == len(exported.proto.graph.node)


def test_weights_are_named_after_their_modules(exported):
    names = {tensor.name for tensor in exported.proto.graph.initializer}
    weights = [f"blocks.1.{part}.weight_t" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    assert {*weights, "head.weight_t", "head.bias", "blocks.0.attn.qkv.bias", "patch_embed.proj.weight"} <= names


def test_facts_name_the_model_and_the_size_of_the_file(exported):
    facts = exported.facts
    # 1 channel instead of 3 and 10 classes instead of 1,000.
    seeded = load_model(Source(MODEL)).parameters
    assert facts["model"]["parameters"] == seeded - 2 * 8 * 8 * 32 - 990 * (32 + 1)
    assert (facts["model"]["source"], facts["model"]["family"], facts["model"]["task"]) == (
        MODEL,
        "vit",
        "classification",
    )
    assert (facts["model"]["channels"], facts["model"]["classes"]) == (1, 10)
    assert facts["bytes"] == (exported.folder / "model.onnx").stat().st_size


# --- preprocessing in the graph, fixed batch --------------------------------------------------------------------------


def test_without_preprocessing_the_graph_takes_normalised_float_nchw(tensor_export):
    [tensor] = tensor_export.proto.graph.input
    assert (tensor.name, tensor.type.tensor_type.elem_type) == ("image", onnx.TensorProto.FLOAT)
    assert shape_of(tensor) == ["batch", 1, 32, 32]
    assert all(row["max_relative_difference"] <= 1e-4 for row in tensor_export.facts["parity"])


def test_both_kinds_of_input_give_the_same_logits(small_export, tensor_export):
    images = pixels(6)
    with (
        OnnxRuntimeRunner(small_export / "model.onnx", name="pixels") as inside,
        OnnxRuntimeRunner(tensor_export.folder / "model.onnx", name="tensor") as outside,
    ):
        ours = inside.infer({"image": images})["logits"]
        theirs = outside.infer({"image": normalise(images, PREPROCESS)})["logits"]
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() <= 1e-5


def test_both_kinds_of_input_have_the_same_layer_names(small_export, tensor_export):
    names = [
        {node.name for node in graph.graph.node if node.name.startswith(("blocks.", "patch_embed.", "head", "norm"))}
        for graph in (Exported(20, small_export).proto, tensor_export.proto)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_preprocessing_inside_the_graph_is_the_numpy_reference(order):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    spec = PreprocessSpec(32, (32, 32), "bicubic", mean, std, channel_order=order)
    images = pixels(2, channels=3)
    inside = PixelsIn(nn.Identity(), spec)(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(inside, normalise(images, spec), rtol=0, atol=2e-6)


def test_work_that_is_done_once_gives_the_same_bytes(small_export, small_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_onnx, "_no_work_twice", contextlib.nullcontext)
    export_of(small_checkpoint, tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == (small_export / "model.onnx").read_bytes()


def test_a_long_export_says_so_at_its_start(small_checkpoint, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(stage, "ESTIMATED_SECONDS", 0.0)
    export_small(small_checkpoint, tmp_path, progress=lambda text, *_: lines.append(text))
    [line] = [line for line in lines if "on an idle machine" in line]
    assert re.fullmatch(r"export to ONNX: about \d+ s on an idle machine", line)
    assert lines.index(line) < lines.index("compare with the original")


def test_a_fixed_batch_is_a_static_shape(fixed_export):
    [tensor], [output] = fixed_export.proto.graph.input, fixed_export.proto.graph.output
    assert shape_of(tensor) == [3, 32, 32, 1]
    assert shape_of(output) == [3, 10]
    assert "Shape" not in fixed_export.operators
    assert [row["batch"] for row in fixed_export.facts["parity"]] == [3, 3, 3]


def test_class_names_lie_beside_the_graph_where_there_are_any(fixed_export, small_export):
    assert (fixed_export.folder / "labels.txt").read_text().splitlines() == [f"digit {i}" for i in range(10)]
    assert not (small_export / "labels.txt").exists()


def test_preprocessing_that_does_not_fit_the_model_is_refused(tmp_path, small_checkpoint):
    with pytest.raises(CheckpointError, match="preprocessing does not fit") as caught:
        export_small(small_checkpoint, tmp_path, preprocess=PreprocessSpec(32, (32, 32)))
    assert (caught.value.found, caught.value.expected) == ("crop 32x32, 3 channels", "crop 32x32, 1 channels")
    assert not list(tmp_path.iterdir())


def test_a_crop_of_another_size_resizes_the_model_and_the_notes_say_how(tmp_path, small_checkpoint):
    crop = dataclasses.replace(PREPROCESS, crop=(24, 24))
    made = export_small(small_checkpoint, tmp_path, preprocess=crop)
    assert shape_of(made.proto.graph.input[0]) == ["batch", 24, 24, 1]
    notes = find_reference_model(Source(MODEL, small_checkpoint), Overrides(crop)).notes
    assert any("position" in note and "resized" in note for note in notes), notes


# --- modules that are not what they must be ---------------------------------------------------------------------------


class BakedBatch(nn.Module):
    """Takes its batch at construction."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.head = nn.Linear(32 * 32, 10)

    def forward(self, image):
        return self.head(image.reshape(self.batch, 32 * 32))


class CutBatch(nn.Module):
    """Answers for the first two images only: exports without complaint."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32 * 32, 10)

    def forward(self, image):
        logits = self.head(image.flatten(1))
        return torch.zeros(2, 10) + logits[:1]


class Branching(nn.Module):
    """Takes another path for dark images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32 * 32, 10)

    def forward(self, image):
        logits = self.head(image.flatten(1))
        return logits if image.sum() > 0 else -logits


class Boxes(nn.Module):
    """Two outputs, as detectors have."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.corners = nn.Linear(32, 3), nn.Linear(32, 4)

    def forward(self, image):
        rows = image[:, 0]
        return self.classes(rows), self.corners(rows).sigmoid()


class RightAnswer(nn.Module):
    """What CutBatch should have been."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, image):
        return self.head(image.flatten(1))


LOGITS = (TensorSpec("logits", "float32", ("batch", 10)),)
OBJECTS = (
    TensorSpec("logits", "float32", ("batch", 32, 3)),
    TensorSpec("boxes", "float32", ("batch", 32, 4)),
)


def runner_of(module, outputs=LOGITS, task="classification"):
    """The PyTorch runner of a module for grey images of 32x32 pixels."""
    return TorchRunner(LoadedModel("test", "test", module, Signature(task, (32, 32), 1, outputs), PREPROCESS))


def export_and_check(module, reference, out, outputs=LOGITS, **options):
    graph = export_graph(
        module,
        name="test",
        preprocess=PREPROCESS,
        image_size=(32, 32),
        opset=20,
        batch=None,
        in_graph=True,
        outputs=[tensor.name for tensor in outputs],
        **options,
    )
    save_graph(graph, out / "model.onnx")
    with runner_of(reference, outputs) as runner:
        return check_graph(out / "model.onnx", ask(runner, PREPROCESS, None), PREPROCESS)


def test_a_small_module_of_any_kind_passes_export_and_parity(tmp_path):
    module = RightAnswer(nn.Linear(32 * 32, 10)).eval()
    rows = export_and_check(module, module, tmp_path)
    assert [row.batch for row in rows] == [1, 2, 5]


def test_several_outputs_keep_their_names_order_and_meaning(tmp_path):
    torch.manual_seed(0)
    module = Boxes().eval()
    meaning = PostprocessSpec("softmax", "xyxy", 0.3)
    rows = export_and_check(module, module, tmp_path, OBJECTS, task="detection", postprocess=meaning)
    assert max(row.max_relative_difference for row in rows) <= 1e-6
    model = load_graph(tmp_path / "model.onnx")
    assert graph_spec(model, "model.onnx").outputs == OBJECTS
    metadata = get_metadata(model, "model.onnx")
    assert (metadata.task, metadata.postprocess) == ("detection", meaning)


def test_a_difference_in_the_second_output_is_found(tmp_path):
    torch.manual_seed(0)
    module, other = Boxes().eval(), Boxes().eval()
    other.load_state_dict(module.state_dict())
    with torch.no_grad():
        other.corners.bias[2] += 0.01
    with pytest.raises(ExportError, match="not the same function"):
        export_and_check(module, other, tmp_path, OBJECTS)


def test_a_module_that_bakes_its_batch_is_refused(tmp_path):
    module = BakedBatch(2).eval()
    with pytest.raises(ExportError, match="the original does not run at batch 1") as caught:
        export_and_check(module, module, tmp_path)
    assert "[2, 1024]" in caught.value.found


def test_a_module_that_answers_for_a_fixed_number_of_images_is_refused_by_parity(tmp_path):
    module = CutBatch().eval()
    with pytest.raises(ExportError, match="batch 1: a batch size is baked") as caught:
        export_and_check(module, RightAnswer(module.head).eval(), tmp_path)
    assert caught.value.found == "logits [2, 10], expected [1, 10]"


def test_a_module_with_data_dependent_control_flow_cannot_be_exported(tmp_path):
    with pytest.raises(ExportError, match="test cannot be exported to ONNX") as caught:
        export_and_check(Branching().eval(), Branching().eval(), tmp_path)
    assert caught.value.exit_code == 2
    assert caught.value.found
