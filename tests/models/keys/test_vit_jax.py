"""Files in the JAX layouts, read by us and by timm's own loader: the same tensors, and the same answers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.models.keys.jax_layout import BIG_VISION, ORIGINAL, as_jax, stacked
from tests.models.keys.proof import answer, loaded, randomise
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.read import read_npz
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.vit_others import recognise_jax as recognise

CLASS = {"class_token": True, "global_pool": "token", "num_classes": 5}
MEAN = {"class_token": False, "global_pool": "avg", "fc_norm": False, "num_classes": 5}
ATTENTION = {"class_token": False, "global_pool": "map", "num_classes": 0}
# timm's arguments, numbering, prefix in the file, blocks on one axis
CASES = {
    "original": (CLASS, ORIGINAL, "", False),
    "original, in an optimizer's state": (CLASS, ORIGINAL, "opt/target/", False),
    "big_vision, class token": ({**CLASS, "no_embed_class": True}, BIG_VISION, "params/", False),
    "big_vision, mean": (MEAN, BIG_VISION, "params/", False),
    "big_vision, SigLIP": (ATTENTION, BIG_VISION, "params/img/", False),
    "big_vision, SigLIP, scanned": (ATTENTION, BIG_VISION, "params/img/", True),
}


def timm_vit(**arguments):
    module = reference("timm").models.vision_transformer.VisionTransformer
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 4, "mlp_ratio": 2.0}
    return module(**sizes, norm_layer=partial(nn.LayerNorm, eps=1e-6), act_layer="gelu_tanh", **arguments)


def arrays_of(case):
    arguments, numbers, prefix, scanned = CASES[case]
    state = randomise(timm_vit(**arguments)).state_dict()
    arrays = as_jax(state, 4, numbers)
    arrays = stacked(arrays, 3) if scanned else arrays
    return {prefix + key: array for key, array in arrays.items()}


@pytest.mark.parametrize("case", CASES)
def test_timm_reads_the_same_file_into_the_same_model(case, tmp_path, parity):
    np.savez(tmp_path / "vit.npz", **arrays_of(case))
    model = timm_vit(**CASES[case][0])
    model.load_pretrained(str(tmp_path / "vit.npz"))
    found = recognise(read_npz(tmp_path / "vit.npz"), Hints())
    theirs = model.state_dict()
    assert found.state.keys() == theirs.keys()
    assert all(torch.equal(found.state[key], tensor) for key, tensor in theirs.items())
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        ours, expected = answer(loaded(found), image)[0], model.double().eval()(image)
    parity("SigLIP image encoder" if "SigLIP" in case else "ViT", "timm", ours, expected, keys=found.style)
    assert (found.family, found.style, found.config.heads) == ("vit", "jax", 4)


def test_notes_name_the_gelu_and_what_is_left_out():
    arrays = arrays_of("big_vision, SigLIP") | {"params/t": np.zeros(1), "params/txt/head/kernel": np.zeros((2, 2))}
    found = recognise(tensors(arrays), Hints())
    assert found.notes == (
        "using the tanh form of GELU, as in the JAX code; PyTorch ports of its weights use the exact form",
        "left out, not part of the image encoder: params/t, params/txt/head/kernel (2 tensors)",
    )


def test_the_representation_layer_of_the_paper_is_a_tanh_before_the_head():
    arrays = arrays_of("original")
    rng = np.random.default_rng(0)
    arrays |= {"pre_logits/kernel": rng.normal(size=(24, 7)), "pre_logits/bias": rng.normal(size=7)}
    arrays["head/kernel"] = rng.normal(size=(7, 5))
    found = recognise(tensors(arrays), Hints())
    module = loaded(found)
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        tokens = module.encode(image)[0, 0].numpy()
        logits = np.tanh(tokens @ arrays["pre_logits/kernel"] + arrays["pre_logits/bias"]) @ arrays["head/kernel"]
        assert np.allclose(module(image)[0].numpy(), logits + arrays["head/bias"], rtol=0, atol=1e-10)


def test_old_files_of_big_vision_have_the_class_token_in_the_table():
    old = {key.replace("Transformer/posembed_input/", ""): array for key, array in arrays_of("original").items()}
    assert recognise(tensors(old), Hints()).config == recognise(tensors(arrays_of("original")), Hints()).config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"conv_root/kernel": np.zeros((7, 7, 3, 64))}, "hybrids of ResNet and ViT"),
        (lambda a: {k: v for k, v in a.items() if "posembed" not in k}, "no pos_embedding"),
        (lambda a: a | {"Transformer/encoderblock_0/gate": np.zeros(1)}, "1 unknown: Transformer/encoderblock_0/gate"),
        (lambda a: {k: v for k, v in a.items() if "query/kernel" not in k}, "3 missing: blocks.0.attn.q.weight"),
        (lambda a: a | {"embedding/kernel": np.zeros((8, 8))}, "patch_embed.proj.weight [8, 8]"),
        (
            lambda a: a | {"Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel": np.zeros(3)},
            "blocks.0.attn.q.weight [3]",
        ),
        (
            lambda a: (
                a
                | {
                    f"Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/query/kernel": np.zeros((24, 24))
                    for i in range(3)
                }
            ),
            "sizes of 0: heads",
        ),
    ],
)
def test_every_fault_is_named(change, message):
    with pytest.raises(CheckpointError) as raised:
        recognise(tensors(change(arrays_of("original"))), Hints())
    assert message in str(raised.value)


def test_other_arrays_are_not_recognised():
    assert recognise({"embedding/kernel": torch.zeros(1)}, Hints()) is None
    assert recognise({"blocks.0.attn.qkv.weight": torch.zeros(1)}, Hints()) is None


def tensors(arrays):
    return {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
