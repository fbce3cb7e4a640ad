"""The types and ranges of the values in a config.json that its readers rely on, checked once for all of them.

Libraries build a model of the numbers in this file before they look at the weights: a width of 10^9 would take all
memory first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Names of classes, and what other programs keep: their keys are not those of a config.
_OTHERS = frozenset({"id2label", "label2id", "label_names", "label_descriptions", "task_specific_params"})
# Objects inside each other that are looked at, and lists of numbers.
_DEEPEST = 16


class Kind(NamedTuple):
    """`types` of a value, and the largest number in it, in a list too."""

    types: tuple[type, ...]
    wanted: str
    most: int = 0


TEXT, NAMES, OBJECT = Kind((str,), "text"), Kind((list,), "a list of names"), Kind((dict,), "an object")
POOLING, NUMBER = Kind((str, bool), "text"), Kind((int, float), "a number from 0 to 1", 1)


def _whole(most: int) -> Kind:
    return Kind((int, float, list, dict), f"a number from 0 to {most:,}, or a list of such", most)


# What is None, or left out, has its library's default.
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("model_type", "architecture", "hidden_act", "activation_function", "decoder_method"), TEXT),
    "architectures": NAMES,
    "global_pool": POOLING,
    **dict.fromkeys(("model_args", "pretrained_cfg", "text_config", "vision_config"), OBJECT),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon"), NUMBER),
    **dict.fromkeys(("image_size", "img_size", "input_size", "test_input_size", "patch_size"), _whole(1 << 14)),
    **dict.fromkeys(("hidden_size", "hidden_sizes", "intermediate_size", "embed_dim", "width"), _whole(1 << 17)),
    **dict.fromkeys(("d_model", "projection_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"), _whole(1 << 17)),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "depths", "layers"), _whole(1 << 10)),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _whole(1 << 10)),
    **dict.fromkeys(("num_heads", "num_attention_heads", "heads"), _whole(1 << 12)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), Kind((int,), "a whole number", 1 << 12)),
    **dict.fromkeys(("num_channels", "in_chans"), Kind((int,), "a whole number", 1 << 12)),
    **dict.fromkeys(("num_classes", "num_labels", "vocab_size", "num_queries"), _whole(1 << 24)),
    "max_position_embeddings": _whole(1 << 20),
}


class Wrong(NamedTuple):
    """A value that cannot be, for an error."""

    key: str
    found: str
    wanted: str


def wrong_value(config: Mapping[str, Any]) -> Wrong | None:
    """The first value of a config, or of one inside it, that is not of its kind."""
    return next(_wrong(config, 0), None)


def _wrong(values: Mapping[str, Any], depth: int) -> Iterator[Wrong]:
    for key, value in values.items():
        kind = KINDS.get(key)
        if kind is not None and value is not None and not _fits(value, kind):
            yield Wrong(key, json.dumps(value)[:200], kind.wanted)
        if isinstance(value, dict) and key not in _OTHERS and depth < _DEEPEST:
            yield from _wrong(value, depth + 1)


def _fits(value: Any, kind: Kind) -> bool:
    """Whether a value is of a kind. A flag is no number, and NaN is in no range."""
    if not isinstance(value, kind.types) or (isinstance(value, bool) and bool not in kind.types):
        return False
    if not kind.most:
        return True
    return all(_within(number, kind.most) for number in (value.values() if isinstance(value, dict) else [value]))


def _within(number: Any, most: int, depth: int = 0) -> bool:
    if isinstance(number, list):
        return depth < _DEEPEST and all(_within(each, most, depth + 1) for each in number)
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= most
