"""Modules of timm and transformers that are not ours: exported, rewritten, and run on both engines."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import numpy as np
import onnx
import pytest
from safetensors.torch import save_file

from tests.models.test_load_folders import SHAPE, SWIN, VIT, randomised
from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.source import Source
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.optimize import optimize
from vitdeploy.stages.reference_model import find_reference_model, reference_runner

TIMM = {
    # One stage of two blocks, with regular and with shifted windows.
    "SwinV2, timm's module": ("swinv2_tiny_window8_256", {**SWIN, "depths": [2], "num_heads": [2]}),
    "EVA-02 with rotary positions, timm's module": ("eva02_tiny_patch14_224", {**VIT, "depth": 1}),
}
TRANSFORMERS = {"ViT-MSN, transformers' module": "ViTMSN"}  # its mask is one of truth values
MOBILE = "MobileViT, timm's module"
# timm's class with one block of each kind, as a user's own module gives it.
MOBILEVIT = """
import torch
from timm.models.byobnet import ByobNet, ByoBlockCfg, ByoModelCfg
from tests.models.detr_reference import randomise

def build():
    inner = {"transformer_dim": 32, "transformer_depth": 1, "patch_size": 2}
    stem = ByoBlockCfg("bottle", d=1, c=16, s=2, gs=1, br=2.0, block_kwargs={"bottle_in": True, "linear_out": True})
    mixed = ByoBlockCfg("mobilevit", d=1, c=16, s=1, block_kwargs=inner)
    model = ByobNet(ByoModelCfg(((stem,), (mixed,)), stem_chs=16, stem_type="3x3", act_layer="silu"), num_classes=5)
    randomise(model)
    return model
"""


def source_of(kind, path, monkeypatch):
    if kind == MOBILE:
        reference("timm")
        (path / "mobile.py").write_text(MOBILEVIT)
        monkeypatch.syspath_prepend(path)
        # As many tokens as heads: OpenVINO 2026.4 computes such attention wrong with its code generator.
        return Source(function="mobile:build", image_size=(32, 32))
    if kind in TIMM:
        name, arguments = TIMM[kind]
        model = randomised(reference("timm").create_model(name, num_classes=5, **arguments))
        config = {"architecture": name, "num_classes": 5, "pretrained_cfg": {}, "model_args": arguments}
        (path / "config.json").write_text(json.dumps(config))
        save_file(model.state_dict(), path / "model.safetensors")
    else:
        library = reference("transformers")
        name = TRANSFORMERS[kind]
        config = getattr(library, f"{name}Config")(**SHAPE | {"num_hidden_layers": 1}, num_labels=5)
        randomised(getattr(library, f"{name}ForImageClassification")(config)).save_pretrained(path)
    return Source(model=f"hf:{path}")


@pytest.mark.parametrize("kind", [*TIMM, *TRANSFORMERS, MOBILE])
def test_a_foreign_module_is_the_same_function_on_both_engines_before_and_after_the_rewrites(
    kind, tmp_path, monkeypatch, parity
):
    (tmp_path / "model").mkdir()
    reference_model = find_reference_model(source_of(kind, tmp_path / "model", monkeypatch))
    assert reference_model.family == ("function" if kind == MOBILE else "timm" if kind in TIMM else "transformers")
    folders = [tmp_path / name for name in ("exported", "rewritten")]
    for folder in folders:
        folder.mkdir()
    exported = export(reference_model, ExportConfig("small", 20, None, True), folders[0])
    assert [row["batch"] for row in exported["parity"]] == [1, 2, 5]
    facts = optimize({"model": folders[0] / "model.onnx"}, OptimizeOptions(), folders[1])
    assert sum(facts["rewrites"]["model"].values()) > 0

    graph = onnx.load(folders[1] / "model.onnx").graph
    operators = Counter(node.op_type for node in graph.node)
    assert not {"If", "Loop", "Resize", "Range", "ConstantOfShape"} & operators.keys()
    # Tokens before the patches are repeated for every image: the one thing that asks for the size of the batch.
    assert operators["Shape"] <= 1
    assert {tensor.type.tensor_type.elem_type for tensor in graph.output} == {onnx.TensorProto.FLOAT}

    generator = np.random.default_rng(0)
    with reference_runner(reference_model.source) as theirs:
        for batch in BATCHES:
            pixels = generator.integers(0, 256, (batch, *reference_model.image_size, 3), dtype=np.uint8)
            expected = theirs.infer({"image": normalise(pixels, reference_model.images)})["logits"]
            assert expected.shape == (batch, 5)
            for engine, folder in product(ENGINES, folders):
                with engine_runner(engine, folder / "model.onnx", batch) as runner:
                    parity(kind, engine, runner.infer({"image": pixels})["logits"], expected, top1=True)
