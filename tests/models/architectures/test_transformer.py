"""The Transformer against torch.nn.Transformer, its cache against the whole target, its names and checkpoints."""

import math
import warnings

import pytest
import torch
from torch import nn

from tests.parity import STEPS
from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.transformer import MASKED, Transformer, TransformerConfig
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.families.transformer import NAMES, build, parse, recognise
from vitdeploy.models.family import Hints

SMALL = dict(width=16, encoder_depth=2, decoder_depth=3, heads=4, hidden=24, max_length=12)  # noqa: C408
SHARED = TransformerConfig(source_vocabulary=11, target_vocabulary=11, **SMALL)
SEPARATE = TransformerConfig(
    source_vocabulary=11, target_vocabulary=9, shared_embeddings=False, generator_bias=True, pad=3, **SMALL
)
# The variants that torch.nn.Transformer has: it always normalises the output of both stacks.
TORCH = {
    "post-norm": TransformerConfig(
        source_vocabulary=11,
        target_vocabulary=9,
        shared_embeddings=False,
        generator_bias=True,
        final_norm=True,
        layer_norm_eps=1e-3,
        pad=3,
        **SMALL,
    ),
    "pre-norm": TransformerConfig(
        source_vocabulary=11, target_vocabulary=11, pre_norm=True, final_norm=True, pad=1, **SMALL
    ),
}


def seeded(config, dtype=torch.float64):
    """A model none of whose weights is at a neutral value: every term has to be in its place."""
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def batch(config, lengths=(7, 5, 1), target_length=6):
    """Sources of several lengths with padding behind, and targets."""
    torch.manual_seed(1)
    words = torch.tensor([token for token in range(config.source_vocabulary) if token != config.pad])
    source = words[torch.randint(len(words), (len(lengths), max(lengths)))]
    source[torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]] = config.pad
    return source, torch.randint(config.target_vocabulary, (len(lengths), target_length))


def pytorchs(config, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells which of its fast paths it cannot take
        return nn.Transformer(
            config.width,
            config.heads,
            config.encoder_depth,
            config.decoder_depth,
            config.hidden,
            dropout=0.0,
            activation="relu",
            batch_first=True,
            **options,
        )


class Tutorial(nn.Module):
    """torch.nn.Transformer with what is around it, under the names of PyTorch's translation tutorial."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = pytorchs(config, layer_norm_eps=config.layer_norm_eps, norm_first=config.pre_norm)
        self.generator = nn.Linear(config.width, config.target_vocabulary)
        self.src_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(config.source_vocabulary, config.width)})
        self.tgt_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(config.target_vocabulary, config.width)})
        self.positional_encoding = nn.Module()
        self.positional_encoding.register_buffer("pos_embedding", self.table()[:, None, :])

    def table(self):
        """Section 3.5, element by element."""
        config = self.config
        rows = [
            [
                (math.cos if i % 2 else math.sin)(position / 10000 ** ((i - i % 2) / config.width))
                for i in range(config.width)
            ]
            for position in range(config.max_length)
        ]
        return torch.tensor(rows, dtype=torch.float32)

    def embed(self, embedding, tokens):
        table = self.positional_encoding.pos_embedding[: tokens.shape[1], 0]
        return embedding["embedding"](tokens) * math.sqrt(self.config.width) + table

    def forward(self, source, target):
        later = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
        padding = source == self.config.pad
        decoded = self.transformer(
            self.embed(self.src_tok_emb, source),
            self.embed(self.tgt_tok_emb, target),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.generator(decoded)


def tutorial(config, dtype=torch.float64):
    torch.manual_seed(2)
    module = Tutorial(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if config.shared_embeddings:
            for tied in (module.tgt_tok_emb["embedding"], module.generator):
                tied.weight.copy_(module.src_tok_emb["embedding"].weight)
    return module.to(dtype)  # in training mode: its fast path of evaluation drops padded tokens


def hints(config):
    return Hints(
        config={"nhead": config.heads, "norm_first": config.pre_norm, "layer_norm_eps": config.layer_norm_eps}
        | {"pad": config.pad}
    )


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCH)
def test_logits_equal_those_of_pytorchs_transformer(name, parity):
    config = TORCH[name]
    theirs = tutorial(config)
    found = recognise(theirs.state_dict(), hints(config))
    ours = Transformer(found.config).double().eval()
    load_state(ours, found.state, "the tutorial's")
    source, target = batch(config)
    with torch.no_grad():
        parity("Transformer", "torch.nn.Transformer", ours(source, target), theirs(source, target), keys=found.style)


@pytest.mark.parametrize("config", [SHARED, SEPARATE, *TORCH.values()], ids=["shared", "separate", *TORCH])
def test_decoding_step_by_step_gives_the_logits_of_the_whole_target(config, parity):
    model = seeded(config)
    source, target = batch(config)
    with torch.no_grad():
        whole = model(source, target)
        _, mask, cross = model.encode(source)
        empty = torch.zeros(len(source), config.heads, 0, config.width // config.heads, dtype=torch.float64)
        past = [(empty, empty)] * config.decoder_depth
        for position in range(target.shape[1]):
            logits, past = model.step(target[:, position : position + 1], mask, cross, past)
            parity("Transformer", STEPS, whole[:, position], logits)
    assert {tensor.shape for pair in past for tensor in pair} == {(3, 4, 6, 4)}


@pytest.mark.parametrize("config", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_padding_changes_nothing(config):
    model = seeded(config)
    source, target = batch(config, lengths=(4, 4))
    longer = nn.functional.pad(source, (0, 5), value=config.pad)
    with torch.no_grad():
        assert relative(model(longer, target), model(source, target)) <= 1e-12


def test_a_source_of_padding_only_gives_finite_logits():
    model = seeded(SHARED, torch.float32)
    with torch.no_grad():
        logits = model(torch.full((1, 3), SHARED.pad), torch.tensor([[1, 5]]))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_masked_score_has_no_weight_in_any_precision(dtype):
    scores = torch.tensor([[20.0, -20.0 + MASKED]], dtype=dtype)
    assert torch.isfinite(scores).all()
    assert scores.softmax(dim=-1).tolist() == [[1.0, 0.0]]


def test_a_later_target_token_does_not_change_earlier_logits():
    model = seeded(SEPARATE)
    source, target = batch(SEPARATE)
    other = target.clone()
    other[:, 4:] = (other[:, 4:] + 1) % SEPARATE.target_vocabulary
    with torch.no_grad():
        first, second = model(source, target), model(source, other)
    assert relative(first[:, :4], second[:, :4]) <= 1e-12
    assert relative(first[:, 4:], second[:, 4:]) > 1e-3


def test_a_sequence_does_not_change_its_neighbours():
    model = seeded(SHARED)
    source, target = batch(SHARED)
    with torch.no_grad():
        together = model(source, target)
        alone = torch.cat([model(source[i : i + 1], target[i : i + 1]) for i in range(3)])
    assert relative(together, alone) <= 1e-12


def test_shared_embeddings_are_one_parameter():
    state = Transformer(SHARED).state_dict()
    assert [name for name in state if "embedding" in name or "generator" in name] == ["embedding.weight"]


def test_the_base_model_has_the_published_size():
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in Transformer(config).parameters()) for name, config in NAMES.items()}
        reference = sum(p.numel() for p in pytorchs(NAMES["transformer_base"]).parameters())
    # torch.nn.Transformer's, without the norms of both outputs; table 3 says 65 and 213 million.
    assert sizes["transformer_base"] == reference - 4 * 512 + 37_000 * 512
    assert round(sizes["transformer_base"] / 1e6) == 63
    assert round(sizes["transformer_big"] / 1e6) == 214


def test_positions_survive_a_model_that_was_built_without_memory():
    model = seeded(SHARED, torch.float32)
    with torch.device("meta"):
        empty = build(SHARED)
    copy = empty.to_empty(device="cpu").eval()
    load_state(copy, model.state_dict(), "a copy")
    source, target = batch(SHARED)
    with torch.no_grad():
        assert torch.equal(copy(source, target), model(source, target))


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("transformer_base", TransformerConfig()),
        ("transformer_big", TransformerConfig(width=1024, hidden=4096, heads=16)),
        (
            "transformer_w32e2d3h4_v13_l20",
            TransformerConfig(13, 13, 32, encoder_depth=2, decoder_depth=3, heads=4, hidden=128, max_length=20),
        ),
    ],
)
def test_a_name_spells_out_the_whole_configuration(name, config):
    assert parse(name) == config


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "transformer", "transformer_w32e2d3h4", "transformer_base "])
def test_other_names_are_left_to_others(name):
    assert parse(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("transformer_w32e2d2h5_v13_l20", "width 32 is not divisible by 5 heads"),
        ("transformer_w33e2d2h3_v13_l20", "width 33 is odd"),
        ("transformer_w32e0d2h4_v13_l20", "encoder depth"),
        ("transformer_w32e2d2h4_v2_l20", "the token 2 (end) is outside the vocabulary of 2"),
        ("transformer_w32e2d2h4_v13_l0", "max length"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(name, reason):
    with pytest.raises(UnknownModelError) as caught:
        parse(name)
    assert reason in caught.value.found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_vocabulary": 12}, "one shared embedding for two vocabularies, of 11 and 12"),
        ({"pad": 11}, r"the token 11 \(pad\) is outside a vocabulary"),
        ({"start": -1}, r"the token -1 \(start\) is outside"),
    ],
)
def test_tokens_and_vocabularies_have_to_agree(changes, reason):
    with pytest.raises(ValueError, match=reason):
        TransformerConfig(**({"source_vocabulary": 11, "target_vocabulary": 11} | SMALL | changes))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SHARED, SEPARATE, *TORCH.values()], ids=["shared", "separate", *TORCH])
def test_our_own_state_dict_is_recognised(config):
    model = seeded(config)
    told = {"heads": config.heads, "max_length": config.max_length, "pre_norm": config.pre_norm, "pad": config.pad}
    found = recognise(model.state_dict(), Hints(config=told | {"layer_norm_eps": config.layer_norm_eps, "other": "x"}))
    assert (found.style, found.config) == ("original", config)
    assert found.notes == ("not in the checkpoint, using defaults: start 1, end 2",)
    load_state(build(found.config), found.state, "its own")


def test_pytorchs_state_dict_is_recognised():
    config = TORCH["post-norm"]
    found = recognise(tutorial(config).state_dict(), hints(config))
    assert (found.family, found.style, found.config) == ("transformer", "torch", config)
    assert found.notes[0] == "left out, fixed sinusoidal positions: positional_encoding.pos_embedding"


def test_equal_embeddings_are_kept_once():
    config = TORCH["pre-norm"]
    found = recognise(tutorial(config).state_dict(), hints(config))
    assert found.config.shared_embeddings
    assert "embeddings and generator have equal weights: stored once" in found.notes
    assert [name for name in found.state if "embedding" in name or "generator" in name] == [
        "generator.bias",
        "embedding.weight",
    ]


def test_another_state_dict_is_left_to_others():
    assert recognise({"head.weight": torch.zeros(2, 2)}, Hints(heads=2)) is None
    assert recognise({}, Hints()) is None


def test_heads_have_to_be_told():
    with pytest.raises(CheckpointError, match="number of heads") as caught:
        recognise(seeded(SHARED).state_dict(), Hints())
    assert caught.value.fix.startswith("--heads N")
    assert recognise(seeded(SHARED).state_dict(), Hints(heads=2)).config.heads == 2


@pytest.mark.parametrize(
    ("value", "found"), [({"heads": "4"}, "'4'"), ({"heads": True}, "True"), ({"heads": 4, "pad": 1.5}, "1.5")]
)
def test_a_config_value_of_another_type_is_refused(value, found):
    with pytest.raises(CheckpointError, match="has the wrong type") as caught:
        recognise(seeded(SHARED).state_dict(), Hints(config=value))
    assert (caught.value.found, caught.value.expected) == (found, "int")


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(CheckpointError, match="is not a valid Transformer") as caught:
        recognise(seeded(SHARED).state_dict(), Hints(heads=5))
    assert caught.value.found == "width 16 is not divisible by 5 heads"


def test_learned_positions_are_refused():
    state = tutorial(TORCH["post-norm"]).state_dict()
    state["positional_encoding.pos_embedding"] = torch.randn(12, 1, 16)
    with pytest.raises(CheckpointError, match="does not support this Transformer's positions"):
        recognise(state, Hints(heads=4))


def test_tensors_without_a_place_are_named():
    state = tutorial(TORCH["post-norm"]).state_dict() | {"transformer.adapter.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="has unknown tensors") as caught:
        recognise(state, Hints(heads=4))
    assert caught.value.found == "transformer.adapter.weight"


@pytest.mark.parametrize("missing", ["tgt_tok_emb.embedding.weight", "transformer.encoder.layers.0.linear1.weight"])
def test_a_part_that_is_missing_is_named(missing):
    state = tutorial(TORCH["post-norm"]).state_dict()
    del state[missing]
    with pytest.raises(CheckpointError, match="is an incomplete Transformer") as caught:
        recognise(state, Hints(heads=4))
    assert caught.value.found in ("no tensor target_embedding.weight", "no tensor encoder.0.mlp.fc1.weight")
