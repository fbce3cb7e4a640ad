"""A folder of a library: its config, its labels, what the model is for."""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.checkpoints.mismatch import listed, refuse_folder
from vitdeploy.models.json_file import INDEX, any_json, files_of, read_json
from vitdeploy.models.model_folder.image_processor import fixed_size, processor_name, short_side
from vitdeploy.paths import is_file
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import BeamSpec, SequenceSpec

# --- A model's folder: config.json and weights, as timm and transformers save them ------------------------------------


CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
OPEN_CLIP = "open_clip_config.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
# Which counts where a folder has several, as in transformers: save_pretrained leaves what an earlier save has written.
WEIGHTS = (SAFETENSORS, INDEX, PICKLED, "pytorch_model.bin.index.json")
# The same of OpenCLIP's layout; the last is what other programs that train such models write.
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", SAFETENSORS, PICKLED)


@dataclass(frozen=True)
class ModelFolder:
    """`revision` is the hub's commit, None for a folder of the user's own. `given`: the weights that the user named
    instead of the folder's."""

    path: Path
    repository: str | None = None
    revision: str | None = None
    given: tuple[Path, ...] = ()

    @property
    def has_config(self) -> bool:
        """Whether it has a model's config.json, or OpenCLIP's; other programs use the first file name, too.

        Raises:
            CheckpointError: it cannot be parsed, so its origin is unknown.
        """
        path = self.path / CONFIG
        if not is_file(path):
            return self.is_open_clip
        try:
            config = any_json(path)
        except CheckpointError as error:
            error.fix += "; or move it elsewhere, if it is another program's"
            raise
        return isinstance(config, dict) and bool({"model_type", "architecture"} & config.keys())

    @property
    def is_open_clip(self) -> bool:
        """Whether it is in OpenCLIP's layout; with a config.json it is read as transformers' or timm's."""
        return is_file(self.path / OPEN_CLIP) and not is_file(self.path / CONFIG)

    @property
    def weights(self) -> tuple[Path, ...]:
        """The files that hold the weights, in order.

        Raises:
            MissingFileError: the folder has none, or not all of those that its index names.
            CheckpointError: an index that cannot be read, or names files outside of the folder.
        """
        if self.given:
            return self.given
        for name in OPEN_CLIP_WEIGHTS if self.is_open_clip else WEIGHTS:
            if is_file(self.path / name):
                return files_of(self.path / name)
        refuse_folder(self.path)
        raise MissingFileError(
            f"no weights in {self.path}",
            found=", ".join(sorted(entry.name for entry in self.path.iterdir())[:8]) or "an empty folder",
            expected=" or ".join(OPEN_CLIP_WEIGHTS[:2] if self.is_open_clip else (SAFETENSORS, PICKLED)),
            fix="copy the whole folder of the model",
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the model is a function of."""
        names = (OPEN_CLIP,) if self.is_open_clip else (CONFIG, PREPROCESSOR, PROCESSOR)
        configs = (self.path / name for name in names)
        return (*(path for path in configs if is_file(path)), *self.weights)


def beside(checkpoint: Path) -> ModelFolder | None:
    """The folder of a checkpoint that is in several files, or lies next to a model's config.json; else None."""
    files = files_of(checkpoint)
    folder = ModelFolder(checkpoint.parent, given=files)
    return folder if files != (checkpoint,) or (is_file(checkpoint) and folder.has_config) else None


# --- The types and ranges of the values in a config.json that its readers rely on, checked once for all of them -------
# Libraries build a model of the numbers in this file before they look at the weights: a width of 10^9 would take all
# memory first.


# Names of classes, and what other programs keep: their keys are not those of a config.
_OTHERS = frozenset({"id2label", "label2id", "label_names", "label_descriptions", "task_specific_params"})
# Objects inside each other that are looked at, and lists of numbers.
_DEEPEST = 16


class _Kind(NamedTuple):
    """`types` of a value, and the largest number in it, in a list too."""

    types: tuple[type, ...]
    expected: str
    most: int = 0


TEXT, NAMES, OBJECT = _Kind((str,), "text"), _Kind((list,), "a list of names"), _Kind((dict,), "an object")
POOLING, NUMBER = _Kind((str, bool), "text"), _Kind((int, float), "a number from 0 to 1", 1)


def _whole(most: int) -> _Kind:
    return _Kind((int, float, list, dict), f"a number from 0 to {most:,}, or a list of such", most)


# What is None, or left out, has its library's default.
KINDS: Mapping[str, _Kind] = {
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
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _Kind((int,), "a whole number", 1 << 12)),
    **dict.fromkeys(("num_channels", "in_chans"), _Kind((int,), "a whole number", 1 << 12)),
    **dict.fromkeys(("num_classes", "num_labels", "vocab_size", "num_queries"), _whole(1 << 24)),
    "max_position_embeddings": _whole(1 << 20),
}


def _wrong(values: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """The key, the value and what it should be, of each value of a config, or of one inside it, that cannot be."""
    for key, value in values.items():
        kind = KINDS.get(key)
        if kind is not None and value is not None and not _fits(value, kind):
            yield key, json.dumps(value)[:200], kind.expected
        if isinstance(value, dict) and key not in _OTHERS and depth < _DEEPEST:
            yield from _wrong(value, depth + 1)


def _fits(value: Any, kind: _Kind) -> bool:
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


# --- A model's config.json --------------------------------------------------------------------------------------------
# timm's, with "architecture" and "pretrained_cfg" (old ones are that dictionary themselves), or. transformers', with
# "model_type".


def model_config(path: Path) -> dict[str, Any]:
    """The config.json of a model: `read_json`, with values of the types that its readers rely on.

    Raises:
        MissingFileError, CheckpointError: as `read_json`; a value that is of another type.
    """
    config = read_json(path)
    absent = ((key, "null", "text") for key in ("model_type", "architecture") if key in config and config[key] is None)
    for key, value, expected in (*absent, *_wrong(config)):
        raise CheckpointError(
            f"{path} has a value that cannot be",
            found=f"{key} {value}",
            expected=f"{key}: {expected}",
            fix=f"correct {key} in it, or download it again",
        )
    return config


def timm_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `pretrained_cfg` of timm's config.json, in its present or its older flat form; None in any other file."""
    own = config.get("pretrained_cfg")
    if isinstance(own, Mapping):
        return own
    return config if "architecture" in config and "input_size" in config else None


def vision_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of transformers' config that is about images: a whole one, or one of an image and a text model."""
    inner = config.get("vision_config")
    return inner if isinstance(inner, Mapping) else config


def stated_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image size, (height, width), that a config.json of timm or transformers says; None if it says none."""
    arguments = config.get("model_args")
    of_timm = arguments.get("img_size") if isinstance(arguments, Mapping) else None
    return sides(vision_part(config).get("image_size") or of_timm or (timm_config(config) or {}).get("input_size"))


def backbone_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image size, (height, width), that transformers' config of a backbone says, if it says one; up to the next
    whole windows, where it has them: RF-DETR's 518 pixels in windows of 56 are the 560 of its repository."""
    size, step = sides(_backbone(config).get("image_size")), window_step(config)
    return None if size is None else (-(-size[0] // step) * step, -(-size[1] // step) * step)


def size_note(config: Mapping[str, Any], size: tuple[int, int]) -> tuple[str, ...]:
    """A note where `size` is `backbone_size`, and not what the config says."""
    stated = sides(_backbone(config).get("image_size"))
    if stated is None or stated == size or backbone_size(config) != size:
        return ()
    windows = f"whole windows of {window_step(config)} pixels"
    return (f"image size {size[0]}x{size[1]}: the config's {stated[0]}x{stated[1]}, up to {windows}",)


def window_step(config: Mapping[str, Any]) -> int:
    """What a backbone's windows of patches need both sides of an image to be a multiple of; 1 without windows."""
    patch, windows = (_backbone(config).get(key) for key in ("patch_size", "num_windows"))
    whole = all(type(value) is int and value > 0 for value in (patch, windows))
    return int(patch) * int(windows) if whole else 1  # type: ignore[arg-type]


def _backbone(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("backbone_config")
    return inner if isinstance(inner, Mapping) else {}


def sides(size: Any) -> tuple[int, int] | None:
    """(height, width) of a size as libraries write it: one side, or a list that ends with both; None of all else."""
    if isinstance(size, int) and size > 0:
        return size, size
    if isinstance(size, list | tuple) and len(size) >= 2 and all(isinstance(side, int) and side > 0 for side in size):
        return int(size[-2]), int(size[-1])
    return None


# --- The class names in a model's config file, each in the place of its class -----------------------------------------
# timm has `label_names`, a list or {class: name}, and `label_descriptions`, {name: what people call it}; transformers
# has `id2label`, whose keys are text in a file, and `label2id`. They are read by number, never in the order of the
# file.


Names = dict[int, str]
WORDNET = re.compile(r"n\d{8}")


def labels_for(config: Mapping[str, Any], classes: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One name a class in the order of the model's outputs, each on one line; and notes on what was filled or not used.

    () if the config has none that mean anything, and where the model has no classes (None). A class that the
    config leaves out is called LABEL_<number>, as transformers would.

    Raises:
        CheckpointError: names of classes that the model does not have, or of its first ones only.
    """
    key, names, notes = _names(config)
    if not names or not classes:
        return (), notes if classes else ()
    last = max(names)
    if last >= classes or (len(names) == last + 1 < classes):
        raise CheckpointError(
            f"config.json does not name the classes that the weights have: {key}",
            found=f"{len(names)} names, for classes {min(names)} to {last}",
            expected=f"{classes} names, for classes 0 to {classes - 1}",
            fix=f"write one name a class, or take {key} out of config.json: classes are then without names",
        )
    absent = [f"LABEL_{number}" for number in range(classes) if number not in names]
    if absent:
        notes = (*notes, f"{key} has no name for {len(absent)} of {classes} classes: called {listed(absent)}")
    return tuple(_one_line(names.get(number, f"LABEL_{number}")) for number in range(classes)), notes


def counted(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The key of the names, and how many classes they are for; None if nothing is said."""
    key, names, _ = _names(config)
    return (key, max(names) + 1) if names else None


def _names(config: Mapping[str, Any]) -> tuple[str, Names, tuple[str, ...]]:
    """The key that has names, the names by class, and notes. Names such as LABEL_0 mean nothing."""
    own = timm_config(config) or {}
    for key, value in (
        ("label_names", config.get("label_names")),
        ("label_names", own.get("label_names")),
        ("labels", own.get("labels")),
    ):
        if names := _listed_or_numbered(value):
            descriptions = config.get("label_descriptions") or own.get("label_descriptions")
            return key, _described(names, descriptions), ()
    of_ids = _numbered(_items(config.get("id2label")))
    of_labels = _numbered([(number, name) for name, number in _items(config.get("label2id"))])
    unread = [
        f"{key} of config.json is passed by: its numbers are not those of classes"
        for key, names in (("id2label", of_ids), ("label2id", of_labels))
        if names is None
    ]
    of_ids, of_labels = _meant(of_ids), _meant(of_labels)
    if of_ids and of_labels and any(of_labels.get(number, name) != name for number, name in of_ids.items()):
        unread.append("id2label and label2id of config.json contradict each other: id2label counts, as in transformers")
    key = "id2label" if of_ids else "label2id"
    return key, of_ids or of_labels, tuple(unread)


def _listed_or_numbered(value: Any) -> Names:
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return dict(enumerate(value))
    return _meant(_numbered(_items(value)))


def _numbered(pairs: list[tuple[Any, Any]]) -> Names | None:
    """Names by their numbers; None if one is no number of a class, or a class has two names."""
    try:
        names = {int(number): str(name) for number, name in pairs}
    except (TypeError, ValueError, OverflowError):  # the last of Infinity
        return None
    return names if len(names) == len(pairs) and min(names, default=0) >= 0 else None


def _meant(names: Names | None) -> Names:
    return names if names and any(name != f"LABEL_{number}" for number, name in names.items()) else {}


def _described(names: Names, descriptions: Any) -> Names:
    """Names that are WordNet's numbers with what people call them behind: "n01440764 tench, Tinca tinca"."""
    told = dict(_items(descriptions))
    return {
        number: f"{name} {told[name]}" if WORDNET.fullmatch(name) and isinstance(told.get(name), str) else name
        for number, name in names.items()
    }


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    return list(mapping.items()) if isinstance(mapping, Mapping) else []


def _one_line(label: str) -> str:
    """Runs of white space, line ends and control characters become one space: labels.txt has a label a line."""
    unprintable = ("Cc", "Cs", "Zl", "Zp")
    return " ".join("".join(" " if unicodedata.category(c) in unprintable else c for c in label).split())


# --- How transformers reads the objects of its detectors --------------------------------------------------------------
# by the image processor that belongs to a model, not by the width. of its head. A softmax has one class more than a
# sigmoid, and either reads the other's logits without a complaint.


SOFTMAX, SIGMOID = PostprocessSpec(scores="softmax"), PostprocessSpec(scores="sigmoid")
BEST_100 = PostprocessSpec(scores="sigmoid", top_k=100)
# `post_process_object_detection` of the classes of transformers 5.23, with its own defaults.
RULES: Mapping[str, PostprocessSpec] = {
    "Detr": SOFTMAX,
    "Yolos": SOFTMAX,
    "ConditionalDetr": BEST_100,
    "DeformableDetr": BEST_100,
    "RTDetr": SIGMOID,
    "RfDetr": SIGMOID,
}
# `model_type` -> the processor that transformers' documentation and conversions give it.
PROCESSOR_OF: Mapping[str, str] = {
    "detr": "Detr",
    "table-transformer": "Detr",
    "yolos": "Yolos",
    "conditional_detr": "ConditionalDetr",
    "dab-detr": "ConditionalDetr",
    "deformable_detr": "DeformableDetr",
    "lw_detr": "DeformableDetr",
    "rt_detr": "RTDetr",
    "rt_detr_v2": "RTDetr",
    "d_fine": "RTDetr",
    "deimv2": "RTDetr",
    "rf_detr": "RfDetr",
}


def usual_processor(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A file of the processor that belongs to a detector's config.json, with its defaults alone; None for others."""
    name = PROCESSOR_OF.get(str(config.get("model_type")))
    return None if name is None else {"image_processor_type": f"{name}ImageProcessor"}


def detector_size(config: Mapping[str, Any], processor: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """The image size, (height, width), of a detector whose config.json tells none; None for other models.

    It is that of its processor's file, of its backbone, or of its processor's class. A processor that keeps the aspect
    has one side, which both become; not one that the windows of the backbone do not divide.
    """
    usual = usual_processor(config)
    if usual is None:
        return None
    square = [short_side(each) if each is not None else None for each in (processor, usual)]
    step = window_step(config)
    own, default = ((side, side) if side is not None and side % step == 0 else None for side in square)
    return own or backbone_size(config) or fixed_size(usual) or default


def reading_rule(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> PostprocessSpec | None:
    """How objects are read from the outputs of a model of transformers; None if nothing says it.

    Args:
        config: its config.json.
        processor: its image processor's file, if it has one.

    Raises:
        CheckpointError: the file is of a processor that reads objects in another way than that of the model's type.
    """
    if config.get("use_focal_loss") is False:
        return None  # transformers takes this softmax over the batch: there is no rule to follow
    own, told = PROCESSOR_OF.get(str(config.get("model_type"))), processor_name(processor or {})
    usual, given = RULES.get(own or ""), RULES.get(told)
    if usual is not None and given is not None and usual.scores != given.scores:
        raise CheckpointError(
            f"the image processor and the model of {config.get('model_type')} score objects in different ways",
            found=f"{told}ImageProcessor: {given.scores}; {own}ImageProcessor, the model's: {usual.scores}",
            expected="the processor that was saved with the model",
            fix="correct image_processor_type in preprocessor_config.json",
        )
    return given or usual


# --- How a model of transformers generates, as its generation_config.json (or, without one, its config.json) says -----


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
        kinds, expected = ((int,), "a whole number") if key in WHOLE else ((int, float), "a number")
        if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) <= MOST:
            raise _refused(f"{key} {value!r}"[:200], f"{key}: {expected}")
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


def _refused(found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "the model's way of generating is not one that vitdeploy has",
        found=found,
        expected=expected,
        fix=f"change {FILE} in a copy of the folder, if texts without it will do",
    )
