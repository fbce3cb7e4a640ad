"""Variants of the ViT through the exporter: the same function on both engines at any batch.

Those whose parts others have, too, are measured where the page of models is written, or with VITDEPLOY_TEST_DEPTH.
"""

import os
from collections import Counter
from dataclasses import fields, replace
from itertools import product

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.models.vit_samples import SMALL, images, randomised
from tests.parity import BATCHES, ENGINES, engine_runner
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.models.architectures.vit import DeiTConfig
from vitdeploy.models.families.vit import DEIT_FAMILY, FAMILY
from vitdeploy.spec import PreprocessSpec

ONE_BLOCK = replace(SMALL, depth=1)
# The family whose row of the table of parities the variant counts for, and its config.
VARIANTS = {
    "registers with positions": ("ViT", replace(ONE_BLOCK, registers=3)),
    "tokens without positions": ("ViT", replace(ONE_BLOCK, registers=2, positions="none")),
    "all the rest": (
        "ViT",
        replace(
            ONE_BLOCK,
            positions="sincos_2d",
            post_norm=True,
            qk_norm=True,
            mlp="swiglu",
            pooling="average",
            final_norm="after_pooling",
            pre_logits=24,
            head="projection",
        ),
    ),
    "DeiT-III": ("DeiT-III", replace(ONE_BLOCK, layer_scale=True, prefix_positions=False)),
    "DINOv2": ("DINOv2", replace(ONE_BLOCK, layer_scale=True, num_classes=0)),
    "DINOv2 classifier": (
        "DINOv2 with registers",
        replace(
            ONE_BLOCK,
            registers=4,
            prefix_positions=False,
            layer_scale=True,
            mlp="swiglu_packed",
            pooling="class_average",
        ),
    ),
    "MAE": ("MAE", replace(ONE_BLOCK, num_classes=0)),
    "CLIP": ("CLIP image encoder", replace(ONE_BLOCK, stem_norm=True, activation="quick_gelu", head="projection")),
    "SigLIP": (
        "SigLIP image encoder",
        replace(ONE_BLOCK, class_token=False, pooling="attention", activation="gelu_tanh", num_classes=0),
    ),
    "distilled, with CLIP's stem": (
        "DeiT",
        DeiTConfig(
            **{field.name: getattr(ONE_BLOCK, field.name) for field in fields(ONE_BLOCK)}
            | {"stem_norm": True, "activation": "quick_gelu"}
        ),
    ),
}


# Together they have every part of the others.
ALWAYS = ("registers with positions", "all the rest", "DINOv2 classifier", "SigLIP", "distilled, with CLIP's stem")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_graph_is_the_model_at_any_batch(variant, tmp_path, parity, request):
    asked = "VITDEPLOY_TEST_DEPTH" in os.environ or request.config.getoption("record_parity")
    if variant not in ALWAYS and not asked:
        pytest.skip("others have its parts; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it too")
    row, config = VARIANTS[variant]
    family = DEIT_FAMILY if isinstance(config, DeiTConfig) else FAMILY
    model, signature = randomised(family.build(config), torch.float32), family.describe(config)
    graph = export_graph(
        model,
        name="variant",
        preprocess=PreprocessSpec(32, config.image_size),
        image_size=config.image_size,
        opset=20,
        batch=None,
        in_graph=False,
        task=signature.task,
        outputs=[output.name for output in signature.outputs],
    )
    operators = Counter(node.op_type for node in graph.graph)
    assert not {"If", "Loop", "Resize", "Cast", "ConstantOfShape", "Range"} & operators.keys()
    # No size of the batch: rows for the tokens before the patches are padded, and one constant is added to all.
    assert operators["Pad"] == int(config.prefix > 0)
    assert not {"Shape", "Expand"} & operators.keys()
    assert operators["Concat"] == int(config.pooling == "class_average")
    ir.save(graph, tmp_path / "model.onnx")
    for batch, engine in product(BATCHES, ENGINES):
        image = images(config, batch, torch.float32)
        with torch.no_grad(), engine_runner(engine, tmp_path / "model.onnx", batch) as runner:
            found, expected = runner.infer({"image": image.numpy()}), model(image)
        assert {output.dtype for output in found.values()} == {np.dtype(np.float32)}
        ours = [found[output.name] for output in signature.outputs]
        parity(row, engine, ours, expected, top1=signature.task == "classification")
