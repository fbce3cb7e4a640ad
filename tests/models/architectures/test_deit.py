"""DeiT with its distillation token against timm's."""

from dataclasses import fields, replace

import pytest
import torch

from tests.models.vit_samples import SMALL, difference, images, randomised, timm_vit
from vitdeploy.models.architectures.vit import DeiTConfig, DistilledVisionTransformer, VisionTransformer
from vitdeploy.models.keys.vit import parse_deit, parse_vit

CONFIG = DeiTConfig(**{field.name: getattr(SMALL, field.name) for field in fields(SMALL)})
VARIANTS = {
    "distilled": CONFIG,
    "features": replace(CONFIG, num_classes=0),
    "LayerScale, positions of patches only": replace(CONFIG, layer_scale=True, prefix_positions=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_keys_are_those_of_timm(variant, parity):
    config = VARIANTS[variant]
    arguments = {} if config.prefix_positions else {"weight_init": "skip"}
    theirs = timm_vit(config, "VisionTransformerDistilled", **arguments)
    if not config.prefix_positions:  # timm makes the table with rows for both tokens, and then adds it to the patches
        theirs.pos_embed = torch.nn.Parameter(torch.zeros(1, config.num_patches, config.width))
    theirs = randomised(theirs)
    ours = DistilledVisionTransformer(config).double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    image = images(config)
    with torch.no_grad():
        result, expected = ours(image), theirs(image)
        if not config.num_classes:
            expected = expected, theirs.forward_features(image)[:, 2:]
    parity("DeiT", "timm", result, expected, keys="timm")


def test_both_heads_count():
    model = randomised(DistilledVisionTransformer(CONFIG))
    image = images(CONFIG)
    with torch.no_grad():
        both = model(image)
        model.head_dist.weight.zero_()
        model.head_dist.bias.zero_()
        without_teacher = model(image)
        model.head.weight.zero_()
        model.head.bias.zero_()
        assert not model(image).any()
    assert difference(without_teacher, both) > 0.1


def test_a_fresh_model_has_no_neutral_distillation_token_or_head():
    model = DistilledVisionTransformer(CONFIG)
    assert 0.01 < float(model.dist_token.detach().std()) < 0.03
    assert 0.01 < float(model.head_dist.weight.detach().std()) < 0.03
    assert not model.head_dist.bias.any()


@pytest.mark.parametrize(
    "change", [{"registers": 1}, {"pooling": "average"}, {"final_norm": "after_pooling"}, {"pre_logits": 8}]
)
def test_a_distilled_model_pools_its_two_tokens_only(change):
    with pytest.raises(ValueError, match="class and distillation tokens"):
        replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("deit_tiny_distilled_patch16_224", 5.91), ("deit_base_distilled_patch16_384", 87.63)],
)
def test_number_of_parameters_in_millions_is_that_of_timms_results(name, parameters):
    with torch.device("meta"):
        model = DistilledVisionTransformer(parse_deit(name))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == parameters


def test_deit_without_its_token_and_deit_3_are_plain_vits():
    assert parse_deit("deit_tiny_patch16_224") is None
    assert parse_vit("deit_tiny_distilled_patch16_224") is None
    assert type(VisionTransformer(replace(parse_vit("deit_tiny_patch16_224"), depth=1))) is VisionTransformer
    third = parse_vit("deit3_small_patch16_224")
    assert (third.layer_scale, third.prefix_positions) == (True, False)
