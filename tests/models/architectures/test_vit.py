"""The ViT against an independent implementation: PyTorch's own encoder, and patches cut by unfold."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures.vit import VisionTransformer, ViTConfig
from vitdeploy.models.catalog import find_or_raise

CONFIGS = [
    ViTConfig((32, 48), 8, 3, width=32, depth=2, heads=2, num_classes=10),
    ViTConfig((24, 24), 4, 1, width=48, depth=1, heads=3, num_classes=7),
    ViTConfig((28, 14), 7, 3, width=40, depth=3, heads=5, num_classes=3, layer_norm_eps=1e-3),
    ViTConfig((16, 64), 16, 4, width=64, depth=2, heads=1, num_classes=2, mlp_ratio=2.0),
]
TIMM_KEYS_OF_DEPTH_1 = [
    "cls_token",
    "pos_embed",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    "blocks.0.norm1.weight",
    "blocks.0.norm1.bias",
    "blocks.0.attn.qkv.weight",
    "blocks.0.attn.qkv.bias",
    "blocks.0.attn.proj.weight",
    "blocks.0.attn.proj.bias",
    "blocks.0.norm2.weight",
    "blocks.0.norm2.bias",
    "blocks.0.mlp.fc1.weight",
    "blocks.0.mlp.fc1.bias",
    "blocks.0.mlp.fc2.weight",
    "blocks.0.mlp.fc2.bias",
    "norm.weight",
    "norm.bias",
    "head.weight",
    "head.bias",
]


def seeded_model(config: ViTConfig, dtype: torch.dtype) -> VisionTransformer:
    """A model none of whose weights is at a neutral value: every term has to be in its place."""
    torch.manual_seed(0)
    model = VisionTransformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def pytorch_encoder(state: dict[str, Tensor], config: ViTConfig, dtype: torch.dtype) -> nn.TransformerEncoder:
    """PyTorch's pre-norm encoder with the weights of the state dict."""
    layer = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        int(config.width * config.mlp_ratio),
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        norm_first=True,
    )
    norm = nn.LayerNorm(config.width, config.layer_norm_eps)
    encoder = nn.TransformerEncoder(layer, config.depth, norm, enable_nested_tensor=False)
    names = {
        "self_attn.in_proj_weight": "attn.qkv.weight",
        "self_attn.in_proj_bias": "attn.qkv.bias",
        "self_attn.out_proj.weight": "attn.proj.weight",
        "self_attn.out_proj.bias": "attn.proj.bias",
        "linear1.weight": "mlp.fc1.weight",
        "linear1.bias": "mlp.fc1.bias",
        "linear2.weight": "mlp.fc2.weight",
        "linear2.bias": "mlp.fc2.bias",
        **{f"norm{i}.{kind}": f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")},
    }
    weights = {
        f"layers.{i}.{theirs}": state[f"blocks.{i}.{ours}"]
        for i in range(config.depth)
        for theirs, ours in names.items()
    }
    encoder.load_state_dict({**weights, "norm.weight": state["norm.weight"], "norm.bias": state["norm.bias"]})
    return encoder.to(dtype).eval()


def independent_logits(state: dict[str, Tensor], config: ViTConfig, image: Tensor) -> Tensor:
    pixels = F.unfold(image, config.patch_size, stride=config.patch_size).transpose(1, 2)
    patches = pixels @ state["patch_embed.proj.weight"].flatten(1).T + state["patch_embed.proj.bias"]
    class_token = state["cls_token"].repeat(len(image), 1, 1)
    tokens = torch.cat([class_token, patches], dim=1) + state["pos_embed"]
    encoded = pytorch_encoder(state, config, image.dtype)(tokens)
    return encoded[:, 0] @ state["head.weight"].T + state["head.bias"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.image_size[0]}x{c.image_size[1]}x{c.in_channels}")
def test_logits_equal_those_of_an_independent_implementation(config, dtype, tolerance):
    model = seeded_model(config, dtype)
    image = torch.randn(3, config.in_channels, *config.image_size, dtype=dtype)
    with torch.no_grad():
        ours = model(image)
        theirs = independent_logits(model.state_dict(), config, image)
    assert ours.shape == (3, config.num_classes)
    assert (ours - theirs).abs().max() / theirs.abs().max() <= tolerance


def test_an_image_does_not_change_the_logits_of_its_neighbour_in_the_batch():
    config = CONFIGS[0]
    model = seeded_model(config, torch.float64)
    images = torch.randn(4, config.in_channels, *config.image_size, dtype=torch.float64)
    with torch.no_grad():
        together, alone = model(images), torch.cat([model(image[None]) for image in images])
    assert (together - alone).abs().max() <= 1e-12


def test_parameter_names_are_those_of_timm():
    config = ViTConfig((16, 16), 8, 3, width=16, depth=1, heads=2)
    assert list(VisionTransformer(config).state_dict()) == TIMM_KEYS_OF_DEPTH_1


@pytest.mark.parametrize(
    ("name", "parameters"), [("vit_tiny_patch16_224", 5_717_416), ("vit_base_patch16_224", 86_567_656)]
)
def test_number_of_parameters_is_the_published_one(name, parameters):
    with torch.device("meta"):
        model = VisionTransformer(find_or_raise(name)[1])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_fresh_model_has_truncated_normal_weights_and_zero_biases():
    torch.manual_seed(0)
    state = VisionTransformer(ViTConfig((32, 32), 4, 3, width=64, depth=1, heads=2)).state_dict()
    weights = [tensor for name, tensor in state.items() if name.endswith("weight") and "norm" not in name]
    assert all(0.018 < float(tensor.std()) < 0.022 for tensor in weights)
    assert all(not tensor.any() for name, tensor in state.items() if name.endswith("bias"))
