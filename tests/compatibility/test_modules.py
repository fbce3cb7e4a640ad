"""Modules as people write them, each from its function to engines in INT8 on both runtimes; the page of them.

`make modules` runs the same on modules of three blocks (VITDEPLOY_TEST_DEPTH), and those too that are much like others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.compatibility import modules_attention, modules_styles
from tests.compatibility_page import Page
from tests.quantization.test_families import error, pictures
from tests.references import reference
from vitdeploy.errors import ExportError
from vitdeploy.exporter.parity import TOLERANCE, relative_difference
from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.io.files import load_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.source import Source
from vitdeploy.quantization import place_openvino
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.ranges import save_statistics, separate_scores
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.stages.compile import compile_graph
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.optimize import optimize
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.stages.reference_model import find_reference_model, reference_runner

TARGETS = ("openvino-cpu", "onnxruntime-cpu")
PART = 8
# The deviation of INT8 over that between pictures, of modules that have learnt nothing; one wrong layer gives more.
BOUND = 0.5


@dataclass(frozen=True)
class Module:
    """A maker, and what it makes. `attentions`: in each block of the graph; `size`: (height, width) that is asked for.

    `remark` is for the page.
    """

    maker: str
    what: str
    attentions: int = 1
    remark: str = ""
    size: tuple[int, int] | None = (32, 32)
    library: str | None = None

    @property
    def function(self) -> str:
        module = modules_attention if hasattr(modules_attention, f"make_{self.maker}") else modules_styles
        return f"{module.__name__}:make_{self.maker}"


ONCE = "layers that see no image are computed once, in float"
MODULES = (
    Module("batch_first", "`nn.MultiheadAttention(batch_first=True)`, dropout"),
    Module("sequence_first", "`nn.MultiheadAttention` with tokens first, weights returned, norms behind, mean pooling"),
    Module("float_mask", "`attn_mask` of numbers with infinities, no biases"),
    Module("bool_mask", "`attn_mask` of truth values"),
    Module("padding_mask", "`key_padding_mask` from a buffer, expanded to the batch"),
    Module("attention_pooling", "a learned query, keys of another width (`kdim`, `vdim`)", remark=ONCE),
    Module("encoder_norm_last", "`nn.TransformerEncoder`, as it is by default"),
    Module("encoder_norm_first", "`nn.TransformerEncoder(norm_first=True)`, GELU, a last norm"),
    Module("encoder_causal", "`nn.TransformerEncoder` under a square causal mask"),
    Module("query_decoder", "`nn.TransformerDecoder`, a query for each class", 2, ONCE),
    Module("detector", "DETR of fifty lines: `nn.Transformer`, a dict of `pred_logits` and `pred_boxes`", 3, ONCE),
    Module("fused", "`F.scaled_dot_product_attention` behind one linear for query, key and value"),
    Module("fused_causal", "the same with `is_causal=True`"),
    Module("fused_with_bias", "the same with normed queries and keys, a learned bias, a `scale` of its own"),
    Module("grouped_queries", "the same with `enable_gqa=True`"),
    Module("einops", "lucidrains' ViT: `einops` layers and functions, patches by `Rearrange`", library="einops"),
    Module("einsum", "projections and attention by `torch.einsum`, weights as parameters"),
    Module("torchvision", "`torchvision.models.VisionTransformer`", library="torchvision"),
    Module("torchvision_style", "its block in own code: `OrderedDict`, `torch._assert`, GELU by tanh"),
    Module("timm_blocks", "timm's blocks and patch embedding in own code, registers, two heads", library="timm"),
    Module("timm_modern", "timm's class with RMS norms, SwiGLU, average pooling", library="timm"),
    Module("conv_stem", "convolutions with batch norms, then a Transformer"),
    Module("convnext", "ConvNeXt's blocks: depthwise, norms over channels, GRN", 0),
    Module("dict_output", "returns a dict with `logits` among others"),
    Module("tuple_output", "returns a named tuple of features"),
    Module("windows", "Swin's shifted windows: `torch.roll`, a table read through a buffer, a mask", 2),
    Module("rotary", "rotary positions, RMS norms by hand, SwiGLU"),
    Module("unfold", "patches by `F.unfold`, positions by `F.interpolate`"),
    Module("scripted_parts", "a `torch.jit.script` function and a scripted submodule"),
    Module("tied", "one block three times, a head tied to an embedding, `checkpoint`", 3),
    Module("half", "float16 weights, with batch norms", remark="computed in float32, as the original"),
    Module("bfloat16", "bfloat16 weights", remark="computed in float32, as the original"),
    Module("mixer", "weight and spectral norm as parametrizations, a mixer of tokens", 0),
    Module("digits", "28x28 grey images, tokens first, log-softmax", size=None),
    Module("python_length", "`len(x)` in the model"),
    Module("wide", "24x48 images, attention along rows and columns, a `Conv1d` as the head", 2, size=None),
)
REFUSED = (
    Module("script", "a `torch.jit.script` of all of it", remark="refused: a batch in a constant; `--batch` fixes it"),
    Module("two_heads", "returns a dict of keys of its own", remark="`tensors`; `logits` make it a classifier"),
    Module("early_exit", "an `if` on a tensor's value", remark="refused, with the line; `torch.where` in its place"),
)
# Each is one of the others but for a line, or made of parts that these have; with these `make test` would take 55 CPU
# seconds more.
ALIKE = (
    *("bool_mask", "padding_mask", "encoder_norm_first", "encoder_causal", "fused", "fused_causal", "timm_modern"),
    *("query_decoder", "torchvision_style", "bfloat16", "torchvision", "conv_stem", "digits", "python_length"),
    "timm_blocks",
)
PAGE = Page(
    "modules",
    "# Modules of one's own\n\nWhat `vitdeploy export --model FILE:FUNCTION` and all that follows make of modules as "
    'people write them. Each is seeded and small (`tests/compatibility/modules_*.py`). "Same": the float engines of '
    "OpenVINO and ONNX Runtime give the module's own answers, max|a-b| / max|b| at most 1e-4. The columns behind count "
    "the layers with weights (linears, convolutions) that each runtime computes in INT8, of all that the graph has. "
    "The tests write this table; `make modules` also takes each module to a bundle in INT8 for both runtimes by the "
    "commands, once with `run --model` and once through the folder that `export --model` leaves.\n",
    ("module", "what it is", "same", "INT8 on OpenVINO", "INT8 on ONNX Runtime", "remarks"),
    tuple(each.maker for each in (*MODULES, *REFUSED)),
)


@pytest.fixture
def page(request):
    depth = modules_attention.DEPTH == 1

    def check(*cells):
        if depth:  # the page is of modules of one block
            PAGE.check(cells, write=request.config.getoption("--write-compatibility"))

    return check


def images_of(reference_model, count, seed):
    height, width = reference_model.image_size
    return pictures(64, count, seed)[:, :height, :width, : reference_model.channels]


def answers(runner, pixels):
    with runner:
        parts = [runner.infer({"image": part}) for part in np.split(pixels, len(pixels) // PART)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def rewritten(module: Module, folder: Path):
    """(origin, the rewritten float graph) of a module; `export` compares the one, `optimize` the other."""
    reference_model = find_reference_model(Source(function=module.function, image_size=module.size))
    for name in ("exported", "rewritten"):
        (folder / name).mkdir()
    export(reference_model, ExportConfig(module.maker, 20, None, True), folder / "exported")
    optimize({"model": folder / "exported" / "model.onnx"}, OptimizeOptions(), folder / "rewritten")
    return reference_model, folder / "rewritten" / "model.onnx"


def engine(graph, target, precision, statistics, out):
    """(placement, engine, its folder)."""
    placed, made = out / f"{target}-{precision}", out / f"{target}-{precision}-engine"
    placed.mkdir()
    made.mkdir()
    placement = place_graph(PlaceConfig(target, precision), graph, statistics, placed)
    return placement, compile_graph(placed / "model.onnx", target, PART, made), placed / "model.onnx", made


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of ways that are slow in training
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.maker)
def test_a_module_becomes_int8_on_both_runtimes(module, tmp_path, monkeypatch, page):
    if module.maker in ALIKE and "VITDEPLOY_TEST_DEPTH" not in os.environ:
        pytest.skip("much like another module; VITDEPLOY_TEST_DEPTH=1 runs it too, as `make modules` does")
    if module.library is not None:
        reference(module.library)
    # All layers of these are so small that they would stay float.
    monkeypatch.setattr(place_openvino, "FEW_WEIGHTS", 0)
    reference_model, graph = rewritten(module, tmp_path)
    model = load_graph(graph)
    assert len(find_attentions(model)) % module.attentions == 0 if module.attentions else not find_attentions(model)
    assert module.attentions == 0 or find_attentions(model)
    assert not {"If", "Loop", "Resize", "Einsum", "Gemm"} & {node.op_type for node in model.graph}

    separate_scores(model)
    statistics = tmp_path / "statistics.npz"
    save_statistics(observe(model, np.split(images_of(reference_model, 16, 1), 2), reference_model.images), statistics)
    pixels = images_of(reference_model, 2 * PART, 2)
    with reference_runner(reference_model.source) as theirs:
        expected = theirs.infer({"image": normalise(pixels, reference_model.images)})
    _, plain, _, made = engine(graph, "openvino-cpu", "fp32", None, tmp_path)
    ours = answers(make_runner(made, plain), pixels)
    assert max(relative_difference(ours[name], each) for name, each in expected.items()) <= TOLERANCE

    counts, reasons = [], set[str]()
    for target in TARGETS:
        placement, found, placed, made = engine(graph, target, "int8", statistics, tmp_path)
        assert found.kernels["int8"] == count_int8(load_graph(placed)) == len(placement["int8"])
        assert set(placement["float"].values()) <= KNOWN_REASONS.keys(), placement["float"]
        assert error(answers(make_runner(made, found), pixels), expected) <= BOUND
        counts.append(f"{len(placement['int8'])} of {len(placement['int8']) + len(placement['float'])}")
        reasons.update(placement["float"].values())
    told = [module.remark, *(text for reason, text in KNOWN_REASONS.items() if reason in reasons)]
    page(module.maker, module.what, "yes", *counts, "; ".join(filter(None, told)) or "-")


# Why a layer may stay float, and what the page says of it beside the remark.
KNOWN_REASONS = {
    "its input is the same for every image, so the runtime computes it once": "",
    "a conv is faster in float on this target": "convolutions stay float on ONNX Runtime",
    "a depthwise convolution loses too much in INT8": "depthwise ones on OpenVINO",
}


@pytest.mark.parametrize("module", REFUSED[:1], ids=lambda module: module.maker)
def test_a_batch_that_becomes_a_number_is_refused_and_exported_with_a_fixed_one(module, tmp_path, page):
    reference_model = find_reference_model(Source(function=module.function, image_size=module.size))
    with pytest.raises(ExportError, match="contains the batch size 2 as a constant") as refused:
        export(reference_model, ExportConfig("small", 20, None, True), tmp_path)
    assert "take the batch from x.shape[0] or len(x)" in refused.value.fix and "--batch" in refused.value.fix
    facts = export(reference_model, ExportConfig("small", 20, 1, True), tmp_path)
    assert [row["batch"] for row in facts["parity"]] == [1, 1, 1]
    page(module.maker, module.what, "-", "-", "-", module.remark)


def test_a_dict_of_other_keys_is_compared_as_numbers(page):
    module = REFUSED[1]
    found = find_reference_model(Source(function=module.function, image_size=module.size))
    assert (found.task, [tensor.name for tensor in found.outputs]) == ("tensors", ["age", "gender"])
    page(module.maker, module.what, "-", "-", "-", module.remark)


def test_a_branch_on_a_value_is_refused_with_its_line(tmp_path, page):
    module = REFUSED[2]
    reference_model = find_reference_model(Source(function=module.function, image_size=module.size))
    with pytest.raises(ExportError, match="cannot be exported") as refused:
        export(reference_model, ExportConfig("small", 20, None, True), tmp_path)
    assert "modules_styles.py" in refused.value.found and "if logits.softmax(-1).max() > 0.9:" in refused.value.found
    page(module.maker, module.what, "-", "-", "-", module.remark)
