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


ONCE = "float layers run once"
MODULES = (
    Module("batch_first", "`nn.MultiheadAttention(batch_first=True)`, dropout"),
    Module("sequence_first", "`nn.MultiheadAttention`, tokens first, post-norm, mean pooling"),
    Module("float_mask", "float `attn_mask` with infinities, no biases"),
    Module("bool_mask", "boolean `attn_mask`"),
    Module("padding_mask", "`key_padding_mask` from a buffer"),
    Module("attention_pooling", "a learned query, other key width (`kdim`, `vdim`)", remark=ONCE),
    Module("encoder_norm_last", "`nn.TransformerEncoder`"),
    Module("encoder_norm_first", "`nn.TransformerEncoder(norm_first=True)`, GELU"),
    Module("encoder_causal", "`nn.TransformerEncoder`, causal mask"),
    Module("query_decoder", "`nn.TransformerDecoder`, one query per class", 2, ONCE),
    Module("detector", "50-line DETR on `nn.Transformer`", 3, ONCE),
    Module("fused", "`F.scaled_dot_product_attention`, one linear for q, k, v"),
    Module("fused_causal", "`F.scaled_dot_product_attention`, `is_causal=True`"),
    Module("fused_with_bias", "`F.scaled_dot_product_attention`, q and k norms, learned bias, own `scale`"),
    Module("grouped_queries", "`F.scaled_dot_product_attention`, `enable_gqa=True`"),
    Module("einops", "lucidrains' ViT on `einops`", library="einops"),
    Module("einsum", "attention by `torch.einsum`"),
    Module("torchvision", "`torchvision.models.VisionTransformer`", library="torchvision"),
    Module("torchvision_style", "torchvision's block copied, tanh GELU"),
    Module("timm_blocks", "timm's blocks in own code, registers", library="timm"),
    Module("timm_modern", "timm's class, RMS norms, SwiGLU", library="timm"),
    Module("conv_stem", "convolutions, then a Transformer"),
    Module("convnext", "ConvNeXt blocks", 0),
    Module("dict_output", "returns a dict with `logits`"),
    Module("tuple_output", "returns a named tuple"),
    Module("windows", "Swin's shifted windows, `torch.roll`", 2),
    Module("rotary", "rotary positions, own RMS norms"),
    Module("unfold", "patches by `F.unfold`, positions by `F.interpolate`"),
    Module("scripted_parts", "a scripted function and submodule"),
    Module("tied", "one block three times, tied head, `checkpoint`", 3),
    Module("half", "float16 weights", remark="computed in float32"),
    Module("bfloat16", "bfloat16 weights", remark="computed in float32"),
    Module("mixer", "parametrizations, token mixer", 0),
    Module("digits", "28x28 grey images, log-softmax", size=None),
    Module("python_length", "`len(x)` in the model"),
    Module("wide", "24x48 images, axial attention, `Conv1d` head", 2, size=None),
)
REFUSED = (
    Module("script", "a fully scripted module", remark="refused: constant batch; use `--batch`"),
    Module("two_heads", "returns a dict of unknown keys", remark="task `tensors`; a key `logits` makes a classifier"),
    Module("early_exit", "an `if` on a tensor's value", remark="refused, with the line; use `torch.where`"),
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
    """# Your own modules

What `vitdeploy export --model FILE:FUNCTION` makes of small modules. Float engines of both runtimes give the module's
answers: max|a-b| / max|b| is at most 1e-4. "7/9" means that 7 of 9 layers with weights are in INT8. ONNX Runtime keeps
convolutions in float. "Float layers run once" if they see no image. `tests/compatibility/test_modules.py` writes this
page; `make modules` also takes each module to a bundle.
""",
    ("module", "INT8 on OpenVINO, ONNX Runtime"),
    tuple(each.what for each in (*MODULES, *REFUSED)),
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
        counts.append(f"{len(placement['int8'])}/{len(placement['int8']) + len(placement['float'])}")
        reasons.update(placement["float"].values())
    told = [module.remark, *(text for reason, text in KNOWN_REASONS.items() if reason in reasons)]
    page(module.what, "; ".join(filter(None, (", ".join(counts), *told))))


# Why a layer may stay float, and what the page says of it beside the remark.
KNOWN_REASONS = {
    "its input is the same for every image, so the runtime computes it once": "",
    "a conv is faster in float on this target": "",
    "a depthwise convolution loses too much in INT8": "depthwise convolutions stay float on OpenVINO",
}


@pytest.mark.parametrize("module", REFUSED[:1], ids=lambda module: module.maker)
def test_a_batch_that_becomes_a_number_is_refused_and_exported_with_a_fixed_one(module, tmp_path, page):
    reference_model = find_reference_model(Source(function=module.function, image_size=module.size))
    with pytest.raises(ExportError, match="contains the batch size 2 as a constant") as refused:
        export(reference_model, ExportConfig("small", 20, None, True), tmp_path)
    assert "take the batch from x.shape[0] or len(x)" in refused.value.fix and "--batch" in refused.value.fix
    facts = export(reference_model, ExportConfig("small", 20, 1, True), tmp_path)
    assert [row["batch"] for row in facts["parity"]] == [1, 1, 1]
    page(module.what, module.remark)


def test_a_dict_of_other_keys_is_compared_as_numbers(page):
    module = REFUSED[1]
    found = find_reference_model(Source(function=module.function, image_size=module.size))
    assert (found.task, [tensor.name for tensor in found.outputs]) == ("tensors", ["age", "gender"])
    page(module.what, module.remark)


def test_a_branch_on_a_value_is_refused_with_its_line(tmp_path, page):
    module = REFUSED[2]
    reference_model = find_reference_model(Source(function=module.function, image_size=module.size))
    with pytest.raises(ExportError, match="cannot be exported") as refused:
        export(reference_model, ExportConfig("small", 20, None, True), tmp_path)
    assert "modules_styles.py" in refused.value.found and "if logits.softmax(-1).max() > 0.9:" in refused.value.found
    page(module.what, module.remark)
