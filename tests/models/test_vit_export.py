"""Variants of the ViT through the exporter: the same function on ONNX Runtime at any batch."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tests.models.vit_samples import SMALL, difference, images, randomised
from vitdeploy.export.torch_onnx import export_graph
from vitdeploy.models.deit import DeiTConfig
from vitdeploy.models.vit_family import DEIT_FAMILY, FAMILY
from vitdeploy.spec import PreprocessSpec

ONE_BLOCK = replace(SMALL, depth=1)
VARIANTS = {
    "DINOv2 classifier": replace(
        ONE_BLOCK, registers=4, prefix_positions=False, layer_scale=True, mlp="swiglu_packed", pooling="class_average"
    ),
    "registers with positions": replace(ONE_BLOCK, registers=3),
    "tokens without positions": replace(ONE_BLOCK, registers=2, positions="none"),
    "SigLIP": replace(ONE_BLOCK, class_token=False, pooling="attention", activation="gelu_tanh"),
    "all the rest": replace(
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
    "distilled, with CLIP's stem": DeiTConfig(
        **{field.name: getattr(ONE_BLOCK, field.name) for field in fields(ONE_BLOCK)}
        | {"stem_norm": True, "activation": "quick_gelu"}
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_graph_is_the_model_at_any_batch(variant):
    config = VARIANTS[variant]
    family = DEIT_FAMILY if isinstance(config, DeiTConfig) else FAMILY
    model = randomised(family.build(config), torch.float32)
    graph = export_graph(
        model,
        name="variant",
        preprocess=PreprocessSpec(32, config.image_size),
        image_size=config.image_size,
        opset=20,
        batch=None,
        in_graph=False,
    )
    operators = Counter(node.op_type for node in graph.graph)
    assert not {"If", "Loop", "Resize", "Cast", "ConstantOfShape", "Range"} & operators.keys()
    # No size of the batch: rows for the tokens before the patches are padded, and one constant is added to all.
    assert operators["Pad"] == int(config.prefix > 0)
    assert not {"Shape", "Expand"} & operators.keys()
    assert operators["Concat"] == int(config.pooling == "class_average")
    session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 5):
        image = images(config, batch, torch.float32)
        with torch.no_grad():
            wanted = model(image)
        (found,) = session.run(None, {"image": image.numpy()})
        assert found.dtype == np.float32
        assert difference(torch.from_numpy(found), wanted) <= 1e-4
