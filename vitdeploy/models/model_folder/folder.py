"""A model folder of a library: its config, its labels and the model's task."""

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

# --- A model folder: config.json and weights, as saved by timm and transformers ---------------------------------------


CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
OPEN_CLIP = "open_clip_config.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
# In order of precedence, as in transformers: save_pretrained does not remove the files of an earlier save.
WEIGHTS = (SAFETENSORS, INDEX, PICKLED, "pytorch_model.bin.index.json")
# The same for OpenCLIP's layout; the last is written by other training programs.
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin", SAFETENSORS, PICKLED)


@dataclass(frozen=True)
class ModelFolder:
    """A model folder. `revision` is the hub's commit, None for a local folder. `given`: weights that the user named
    instead of the folder's."""

    path: Path
    repository: str | None = None
    revision: str | None = None
    given: tuple[Path, ...] = ()

    @property
    def has_config(self) -> bool:
        """Whether it has a model's config.json, or OpenCLIP's config; other programs use the first file name, too.

        Raises:
            CheckpointError: it cannot be parsed, so its origin is unknown.
        """
        path = self.path / CONFIG
        if not is_file(path):
            return self.is_open_clip
        try:
            config = any_json(path)
        except CheckpointError as error:
            error.fix += "; or move it elsewhere if it belongs to another program"
            raise
        return isinstance(config, dict) and bool({"model_type", "architecture"} & config.keys())

    @property
    def is_open_clip(self) -> bool:
        """Whether it has OpenCLIP's layout; a folder with config.json is read as transformers' or timm's."""
        return is_file(self.path / OPEN_CLIP) and not is_file(self.path / CONFIG)

    @property
    def weights(self) -> tuple[Path, ...]:
        """Return the weight files, in order.

        Raises:
            MissingFileError: the folder has no weights, or a file that its index names is missing.
            CheckpointError: an index that cannot be read, or names files outside the folder.
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
        """Return all files that determine the model."""
        names = (OPEN_CLIP,) if self.is_open_clip else (CONFIG, PREPROCESSOR, PROCESSOR)
        configs = (self.path / name for name in names)
        return (*(path for path in configs if is_file(path)), *self.weights)


def beside(checkpoint: Path) -> ModelFolder | None:
    """Return the folder of a checkpoint that is sharded, or has a model's config.json next to it; else None."""
    files = files_of(checkpoint)
    folder = ModelFolder(checkpoint.parent, given=files)
    return folder if files != (checkpoint,) or (is_file(checkpoint) and folder.has_config) else None


# --- Check the types and ranges of the values in a config.json, once for all its readers ------------------------------
# Libraries build a model from this file before they read the weights: a width of 10^9 would exhaust the memory first.


# Class names and entries of other programs, whose keys are not config keys.
_OTHERS = frozenset({"id2label", "label2id", "label_names", "label_descriptions", "task_specific_params"})
# Maximum depth of nested objects and lists that are checked.
_DEEPEST = 16


class _Kind(NamedTuple):
    """The allowed `types` of a value, and its largest number, also in lists."""

    types: tuple[type, ...]
    expected: str
    most: int = 0


TEXT, NAMES, OBJECT = _Kind((str,), "text"), _Kind((list,), "a list of names"), _Kind((dict,), "an object")
POOLING, NUMBER = _Kind((str, bool), "text"), _Kind((int, float), "a number from 0 to 1", 1)


def _whole(most: int) -> _Kind:
    return _Kind((int, float, list, dict), f"a number from 0 to {most:,}, or a list of such numbers", most)


# A value that is None or missing has its library's default.
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
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _Kind((int,), "an integer", 1 << 12)),
    **dict.fromkeys(("num_channels", "in_chans"), _Kind((int,), "an integer", 1 << 12)),
    **dict.fromkeys(("num_classes", "num_labels", "vocab_size", "num_queries"), _whole(1 << 24)),
    "max_position_embeddings": _whole(1 << 20),
}


def _wrong(values: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, expected) for each invalid value of a config, nested ones included."""
    for key, value in values.items():
        kind = KINDS.get(key)
        if kind is not None and value is not None and not _fits(value, kind):
            yield key, json.dumps(value)[:200], kind.expected
        if isinstance(value, dict) and key not in _OTHERS and depth < _DEEPEST:
            yield from _wrong(value, depth + 1)


def _fits(value: Any, kind: _Kind) -> bool:
    """Whether a value has a kind. A bool is not a number, and NaN is outside every range."""
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
# timm's has "architecture" and "pretrained_cfg" (in old files, that dictionary is the whole file); transformers' has
# "model_type".


def model_config(path: Path) -> dict[str, Any]:
    """Read the config.json of a model: `read_json`, with the types of its values checked.

    Raises:
        MissingFileError, CheckpointError: as `read_json`; or a value has the wrong type.
    """
    config = read_json(path)
    absent = ((key, "null", "text") for key in ("model_type", "architecture") if key in config and config[key] is None)
    for key, value, expected in (*absent, *_wrong(config)):
        raise CheckpointError(
            f"{path} has an invalid value",
            found=f"{key} {value}",
            expected=f"{key}: {expected}",
            fix=f"correct {key}, or download the file again",
        )
    return config


def timm_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `pretrained_cfg` of timm's config.json, in its current or older flat form; None for any other file."""
    own = config.get("pretrained_cfg")
    if isinstance(own, Mapping):
        return own
    return config if "architecture" in config and "input_size" in config else None


def vision_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the image part of a transformers config, which for an image-only model is the whole config."""
    inner = config.get("vision_config")
    return inner if isinstance(inner, Mapping) else config


def stated_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the image size (height, width) in a config.json of timm or transformers; None if it has none."""
    arguments = config.get("model_args")
    of_timm = arguments.get("img_size") if isinstance(arguments, Mapping) else None
    return sides(vision_part(config).get("image_size") or of_timm or (timm_config(config) or {}).get("input_size"))


def backbone_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the image size (height, width) in transformers' config of a backbone, if any, rounded up to whole windows:
    RF-DETR's 518 pixels in windows of 56 become the 560 of its repository."""
    size, step = sides(_backbone(config).get("image_size")), window_step(config)
    return None if size is None else (-(-size[0] // step) * step, -(-size[1] // step) * step)


def size_note(config: Mapping[str, Any], size: tuple[int, int]) -> tuple[str, ...]:
    """Return a note if `size` is `backbone_size` and differs from the config's."""
    stated = sides(_backbone(config).get("image_size"))
    if stated is None or stated == size or backbone_size(config) != size:
        return ()
    windows = f"whole windows of {window_step(config)} pixels"
    return (f"image size {size[0]}x{size[1]}: the config's {stated[0]}x{stated[1]}, rounded up to {windows}",)


def window_step(config: Mapping[str, Any]) -> int:
    """Return the number of pixels that both image sides must be a multiple of for windows of patches; else 1."""
    patch, windows = (_backbone(config).get(key) for key in ("patch_size", "num_windows"))
    whole = all(type(value) is int and value > 0 for value in (patch, windows))
    return int(patch) * int(windows) if whole else 1  # type: ignore[arg-type]


def _backbone(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("backbone_config")
    return inner if isinstance(inner, Mapping) else {}


def sides(size: Any) -> tuple[int, int] | None:
    """Return (height, width) from a library's size value, one side or a list that ends with both; else None."""
    if isinstance(size, int) and size > 0:
        return size, size
    if isinstance(size, list | tuple) and len(size) >= 2 and all(isinstance(side, int) and side > 0 for side in size):
        return int(size[-2]), int(size[-1])
    return None


# --- The class names in a model's config file, by class number --------------------------------------------------------
# timm has `label_names`, a list or {class: name}, and `label_descriptions`, {name: description}; transformers has
# `id2label`, whose keys are strings in a file, and `label2id`. They are read by number, never in file order.


Names = dict[int, str]
WORDNET = re.compile(r"n\d{8}")


def labels_for(config: Mapping[str, Any], classes: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return one single-line name per class in output order, and notes on names that were filled in or not used.

    () if the config has no meaningful names, or the model has no classes (None). A class without a name is called
    LABEL_<number>, as in transformers.

    Raises:
        CheckpointError: names for classes that the model does not have, or only for its first classes.
    """
    key, names, notes = _names(config)
    if not names or not classes:
        return (), notes if classes else ()
    last = max(names)
    if last >= classes or (len(names) == last + 1 < classes):
        raise CheckpointError(
            f"{key} in config.json does not match the classes of the weights",
            found=f"{len(names)} names, for classes {min(names)} to {last}",
            expected=f"{classes} names, for classes 0 to {classes - 1}",
            fix=f"write one name per class, or remove {key} from config.json (classes then have no names)",
        )
    absent = [f"LABEL_{number}" for number in range(classes) if number not in names]
    if absent:
        notes = (*notes, f"{key} has no name for {len(absent)} of {classes} classes: using {listed(absent)}")
    return tuple(_one_line(names.get(number, f"LABEL_{number}")) for number in range(classes)), notes


def counted(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the key of the names, and the number of classes that they imply; None if the config has no names."""
    key, names, _ = _names(config)
    return (key, max(names) + 1) if names else None


def _names(config: Mapping[str, Any]) -> tuple[str, Names, tuple[str, ...]]:
    """Return the key that has names, the names by class, and notes. Names such as LABEL_0 are ignored."""
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
        f"{key} of config.json is ignored: its numbers are not class numbers"
        for key, names in (("id2label", of_ids), ("label2id", of_labels))
        if names is None
    ]
    of_ids, of_labels = _meant(of_ids), _meant(of_labels)
    if of_ids and of_labels and any(of_labels.get(number, name) != name for number, name in of_ids.items()):
        unread.append("id2label and label2id of config.json contradict each other: using id2label, as in transformers")
    key = "id2label" if of_ids else "label2id"
    return key, of_ids or of_labels, tuple(unread)


def _listed_or_numbered(value: Any) -> Names:
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return dict(enumerate(value))
    return _meant(_numbered(_items(value)))


def _numbered(pairs: list[tuple[Any, Any]]) -> Names | None:
    """Return names by class number; None if a key is not a class number, or a class has two names."""
    try:
        names = {int(number): str(name) for number, name in pairs}
    except (TypeError, ValueError, OverflowError):  # the last for Infinity
        return None
    return names if len(names) == len(pairs) and min(names, default=0) >= 0 else None


def _meant(names: Names | None) -> Names:
    return names if names and any(name != f"LABEL_{number}" for number, name in names.items()) else {}


def _described(names: Names, descriptions: Any) -> Names:
    """Append descriptions to names that are WordNet ids: "n01440764 tench, Tinca tinca"."""
    texts = dict(_items(descriptions))
    return {
        number: f"{name} {texts[name]}" if WORDNET.fullmatch(name) and isinstance(texts.get(name), str) else name
        for number, name in names.items()
    }


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    return list(mapping.items()) if isinstance(mapping, Mapping) else []


def _one_line(label: str) -> str:
    """Replace runs of white space, line ends and control characters by one space: labels.txt has one label per line."""
    unprintable = ("Cc", "Cs", "Zl", "Zp")
    return " ".join("".join(" " if unicodedata.category(c) in unprintable else c for c in label).split())


# --- How transformers reads the objects of its detectors --------------------------------------------------------------
# The image processor of a model determines it, not the width of the head. A softmax has one more class than a sigmoid,
# and either would accept the other's logits.


SOFTMAX, SIGMOID = PostprocessSpec(scores="softmax"), PostprocessSpec(scores="sigmoid")
BEST_100 = PostprocessSpec(scores="sigmoid", top_k=100)
# `post_process_object_detection` of the classes in transformers 5.23, with their defaults.
RULES: Mapping[str, PostprocessSpec] = {
    "Detr": SOFTMAX,
    "Yolos": SOFTMAX,
    "ConditionalDetr": BEST_100,
    "DeformableDetr": BEST_100,
    "RTDetr": SIGMOID,
    "RfDetr": SIGMOID,
}
# `model_type` -> the processor that transformers' documentation and conversions use.
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
    """Return a preprocessor config for a detector's config.json, with only the class's defaults; None for others."""
    name = PROCESSOR_OF.get(str(config.get("model_type")))
    return None if name is None else {"image_processor_type": f"{name}ImageProcessor"}


def detector_size(config: Mapping[str, Any], processor: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return the image size (height, width) of a detector whose config.json has none; None for other models.

    It comes from the processor's file, the backbone or the processor's class. A processor that keeps the aspect ratio
    has one side, which is used for both unless the backbone's windows do not divide it.
    """
    usual = usual_processor(config)
    if usual is None:
        return None
    square = [short_side(each) if each is not None else None for each in (processor, usual)]
    step = window_step(config)
    own, default = ((side, side) if side is not None and side % step == 0 else None for side in square)
    return own or backbone_size(config) or fixed_size(usual) or default


def reading_rule(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> PostprocessSpec | None:
    """Return how objects are decoded from the outputs of a transformers model; None if unknown.

    Args:
        config: its config.json.
        processor: the content of its image processor's file, if it has one.

    Raises:
        CheckpointError: the file's processor decodes objects differently than the one for the model's type.
    """
    if config.get("use_focal_loss") is False:
        return None  # transformers computes this softmax over the batch: there is no usable rule
    own, named = PROCESSOR_OF.get(str(config.get("model_type"))), processor_name(processor or {})
    usual, stated = RULES.get(own or ""), RULES.get(named)
    if usual is not None and stated is not None and usual.scores != stated.scores:
        raise CheckpointError(
            f"the image processor and the model {config.get('model_type')} score objects differently",
            found=f"{named}ImageProcessor: {stated.scores}; {own}ImageProcessor, the model's: {usual.scores}",
            expected="the processor that was saved with the model",
            fix="correct image_processor_type in preprocessor_config.json",
        )
    return stated or usual


# --- How a transformers model generates, by its generation_config.json or else its config.json ------------------------


FILE = "generation_config.json"
# Settings that are read here, and settings without effect on the tokens.
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
# Settings without effect at these values, whatever the library's default is.
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
    """Return how tokens are decoded, from transformers' GenerationConfig and the number of decoder positions, and
    notes.

    Raises:
        CheckpointError: no start or end token, or an unsupported setting.
    """
    settings = {key: value for key, value in config.to_diff_dict().items() if value is not None and key not in SILENT}
    unknown = [
        f"{key} {value}" for key, value in settings.items() if key not in READ and value not in NEUTRAL.get(key, ())
    ]
    if unknown:
        raise _refused(", ".join(unknown)[:200], f"greedy or beam search: {', '.join(sorted(READ))}")
    for key in (*WHOLE, "length_penalty"):
        value = settings.get(key, 0)
        kinds, expected = ((int,), "an integer") if key in WHOLE else ((int, float), "a number")
        if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) <= MOST:
            raise _refused(f"{key} {value!r}"[:200], f"{key}: {expected}")
    ends = settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    start = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
    if len(ends) != 1 or not isinstance(ends[0], int) or not isinstance(start, int):
        raise _refused(f"decoder_start_token_id {start}, eos_token_id {ends}", "one start token and one end token")
    if settings.get("forced_eos_token_id") not in (None, ends[0]):
        raise _refused(f"forced_eos_token_id {settings['forced_eos_token_id']}", f"eos_token_id {ends[0]}, or none")
    length, notes = _length(settings, positions)
    beams = settings.get("num_beams") or 1
    search = BeamSpec(beams, float(settings.get("length_penalty", 1.0)), settings.get("early_stopping") or False)
    spec = SequenceSpec(
        start=start,
        end=ends[0],
        pad=settings.get("pad_token_id", ends[0]),
        max_length=length,
        source_vocabulary=None,
        search=search if beams > 1 or search != BeamSpec(beams) else None,
        forced_end=True if "forced_eos_token_id" in settings else None,
        no_repeat=settings.get("no_repeat_ngram_size") or None,
    )
    return spec, notes


def _length(settings: dict[str, Any], positions: int) -> tuple[int, tuple[str, ...]]:
    """Return the maximum number of tokens to generate; transformers includes the start token."""
    tokens = settings.get("max_new_tokens") or (settings["max_length"] - 1 if "max_length" in settings else None)
    if tokens is None:
        return positions, (f"{FILE} has no max_length: using the decoder's {positions} positions",)
    if tokens > positions:
        return positions, (f"{FILE} asks for {tokens} tokens, but the decoder has only {positions} positions",)
    return max(tokens, 1), ()


def _refused(found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "vitdeploy does not support the model's generation settings",
        found=found,
        expected=expected,
        fix=f"change {FILE} in a copy of the folder, if the texts may differ",
    )
