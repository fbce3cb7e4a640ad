"""How a model of transformers generates, as its generation_config.json (or, without one, its config.json) says."""

from __future__ import annotations

from typing import Any

from vitdeploy.errors import CheckpointError
from vitdeploy.spec import BeamSpec, SequenceSpec

FILE = "generation_config.json"
# What is read here, and what says nothing of the tokens.
READ = {
    *("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id"),
    *("no_repeat_ngram_size", "max_length", "max_new_tokens", "num_beams", "length_penalty", "early_stopping"),
}
WHOLE = ("pad_token_id", "no_repeat_ngram_size", "max_length", "max_new_tokens", "num_beams")
MOST = 1 << 31
SILENT = {
    *("_from_model_config", "transformers_version", "use_cache", "output_attentions", "output_hidden_states"),
    *("output_scores", "output_logits", "return_dict_in_generate", "num_return_sequences", "cache_implementation"),
}
# Settings that change nothing at these values, whatever the library's default is.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "do_sample": (False,),
    "temperature": (1.0,),
    "top_k": (50,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "is_assistant": (False,),
}


def searched(config: Any, positions: int) -> tuple[SequenceSpec, tuple[str, ...]]:
    """How tokens are decoded, of transformers' GenerationConfig and the number of tokens that the decoder has positions
    for; with notes for people.

    Raises:
        CheckpointError: no start or end token, or a setting that is not done here.
    """
    given = {key: value for key, value in config.to_diff_dict().items() if value is not None and key not in SILENT}
    unknown = [
        f"{key} {value}" for key, value in given.items() if key not in READ and value not in NEUTRAL.get(key, ())
    ]
    if unknown:
        raise _refused(", ".join(unknown)[:200], f"greedy or beam search: {', '.join(sorted(READ))}")
    for key in (*WHOLE, "length_penalty"):
        value = given.get(key, 0)
        kinds, wanted = ((int,), "a whole number") if key in WHOLE else ((int, float), "a number")
        if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) <= MOST:
            raise _refused(f"{key} {value!r}"[:200], f"{key}: {wanted}")
    ends = given.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    start = given.get("decoder_start_token_id", given.get("bos_token_id"))
    if len(ends) != 1 or not isinstance(ends[0], int) or not isinstance(start, int):
        raise _refused(f"decoder_start_token_id {start}, eos_token_id {ends}", "one token that starts, one that ends")
    if given.get("forced_eos_token_id") not in (None, ends[0]):
        raise _refused(f"forced_eos_token_id {given['forced_eos_token_id']}", f"eos_token_id {ends[0]}, or none")
    length, notes = _length(given, positions)
    beams = given.get("num_beams") or 1
    search = BeamSpec(beams, float(given.get("length_penalty", 1.0)), given.get("early_stopping") or False)
    spec = SequenceSpec(
        start=start,
        end=ends[0],
        pad=given.get("pad_token_id", ends[0]),
        max_length=length,
        source_vocabulary=None,
        search=search if beams > 1 or search != BeamSpec(beams) else None,
        forced_end=True if "forced_eos_token_id" in given else None,
        no_repeat=given.get("no_repeat_ngram_size") or None,
    )
    return spec, notes


def _length(given: dict[str, Any], positions: int) -> tuple[int, tuple[str, ...]]:
    """How many tokens are written at most. transformers counts the start token with them."""
    told = given.get("max_new_tokens") or (given["max_length"] - 1 if "max_length" in given else None)
    if told is None:
        return positions, (f"{FILE} says no max_length: texts end where the decoder has no more positions",)
    if told > positions:
        return positions, (f"{FILE} asks for {told} tokens, and the decoder has positions for {positions}",)
    return max(told, 1), ()


def _refused(found: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        "the model's way of generating is not one that vitdeploy has",
        found=found,
        wanted=wanted,
        fix=f"change {FILE} in a copy of the folder, if texts without it will do",
    )
