"""200 folders of models as hubs have them, whose config.json or processor file is damaged.

The weights are whole, so that a config is read to its end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

from tests.faults.malformed import places, trees
from tests.faults.malformed.kinds import Attempt, Kind, Table, in_turns

MODEL = ("vitdeploy.model", "hf:given/vit")
EXPORT = ("export", "hf:given/vit", "-o", "out")
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
CONFIGS = Table()
# Types of models whose configs other readers take, with what they need beside the ViT's own keys.
MODEL_TYPES = (
    *("vit", "deit", "swin", "swinv2", "dinov2", "dinov2_with_registers", "dinov3_vit", "clip", "siglip", "siglip2"),
    *(
        "clip_vision_model",
        "siglip_vision_model",
        "detr",
        "rt_detr",
        "rt_detr_v2",
        "d_fine",
        "rf_detr",
        "owlvit",
        "owlv2",
    ),
    *("sam", "sam2", "segformer", "mask2former", "dpt", "depth_anything", "vitpose", "swin2sr", "trocr", "donut-swin"),
    *("vision-encoder-decoder", "marian", "bert", "llama", "", "\x1b[2J", "x" * 5000, "../../x", "auto"),
)
TIMM = {
    "architecture": "vit_w32d2h2_patch8_32",
    "num_classes": 4,
    "pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"},
    "model_args": {"img_size": 32},
}
OPEN_CLIP = {
    "model_cfg": {"embed_dim": 32, "vision_cfg": {"layers": 2, "width": 32, "patch_size": 8, "image_size": 32}},
    "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3},
}


def copied(attempt: Attempt) -> dict[str, Any]:
    """The whole folder; its two documents by name."""
    folder = attempt.given / "vit"
    shutil.copytree(attempt.seeds.model_folder, folder)
    return {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in (CONFIG, PROCESSOR)}


def written(attempt: Attempt, name: str, content: Any) -> None:
    attempt.write(f"vit/{name}", content if isinstance(content, bytes | str) else json.dumps(content))


def case(title: str, *, names: tuple[str, ...] = (CONFIG, PROCESSOR)) -> Callable[[trees.Change], trees.Change]:
    """A class of damage to one of two documents: (chance, document) -> another, or bytes."""

    def added(change: trees.Change) -> trees.Change:
        for name in names:

            @CONFIGS.add(f"{name}: {title}")
            def make(attempt: Attempt, name: str = name) -> None:
                documents = copied(attempt)
                written(attempt, name, change(attempt.random, documents[name]))

        return change

    return added


trees.add_each(case)


@case("every value of another type")
def _all(chance, document):
    return {key: chance.choice(trees.VALUES) for key in document}


@case("sizes that no model has", names=(CONFIG,))
def _sizes(chance, document):
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    wrong = (0, -1, 3, 10**6, 1 << 40, 10**30, 0.5, "32", [32], [32, 32, 32], None, True, float("nan"), 1e300)
    return {**document, chance.choice((*keys, "num_channels", "layer_norm_eps", "num_labels")): chance.choice(wrong)}


@case("names of classes", names=(CONFIG,))
def _classes(chance, document):
    odd = (
        {str(i): f"c{i}" for i in range(100_000)},
        {"0": "\x1b[2J", "1": "\u202e", "2": "", "3": "a\nb"},
        {"-1": "a", "0": "b"},
        {"0": "a", "00": "b"},
        {"9" * 5000: "a"},
        {"0": None, "1": [], "2": {}, "3": 3},
        {str(1 << 40): "far"},
        {"0": "a" * 1_000_000},
        {"\u0661": "a"},
        ["a", "b"],
        "labels",
        {},
    )
    return {**document, chance.choice(("id2label", "label2id", "label_names")): chance.choice(odd)}


@case("activations and other names", names=(CONFIG,))
def _activation(chance, document):
    key = chance.choice(("hidden_act", "architectures", "torch_dtype", "dtype", "model_type", "_name_or_path"))
    return {
        **document,
        key: chance.choice(([[[]]], {}, [{}], 7, "", "gelu" * 10_000, None, ["A", 1], "__import__", "\0")),
    }


@case("the config of another model", names=(CONFIG,))
def _other(chance, document):
    inner = chance.choice((None, [], document, {"vision_config": document}))
    found = {**document, "model_type": chance.choice(MODEL_TYPES)}
    key = chance.choice(("vision_config", "text_config", "backbone_config", "encoder", "decoder", "none"))
    return {**found, key: inner}


@case("the config of timm", names=(CONFIG,))
def _timm(chance, document):
    return chance.choice((trees.changed, trees.wrapped, trees.grown, trees.without))(chance, TIMM)


@CONFIGS.add(f"{CONFIG}: code of its own")
def _code(attempt: Attempt) -> None:
    """`auto_map` names classes in a file beside it, which nothing here may import."""
    document = copied(attempt)[CONFIG]
    attempt.write("vit/modeling_x.py", f"open({str(attempt.mark)!r}, 'w')\n")
    names = {
        "AutoConfig": "modeling_x.C",
        "AutoModelForImageClassification": "modeling_x.M",
        "AutoModel": "modeling_x.M",
    }
    kind = attempt.random.choice(("vit", "own", "qwen2_vl", None))
    written(attempt, CONFIG, {**document, "auto_map": names, "model_type": kind, "trust_remote_code": True})


@case("sizes that no image has", names=(PROCESSOR,))
def _processor(chance, document):
    sides = (0, -1, 1, 10**6, 1 << 40, 10**30, 0.5, "32", None, True, [32, 32], {}, float("inf"))
    size = chance.choice(
        (
            {"height": chance.choice(sides), "width": chance.choice(sides)},
            {"shortest_edge": chance.choice(sides), "longest_edge": chance.choice(sides)},
            chance.choice(sides),
        )
    )
    return {**document, chance.choice(("size", "crop_size", "pad_size", "size_divisor")): size}


@case("means and deviations", names=(PROCESSOR,))
def _mean(chance, document):
    odd = (
        [],
        [0.5],
        [0.5] * 4,
        [0.5] * 100_000,
        [None] * 3,
        ["0.5"] * 3,
        [float("nan")] * 3,
        [1e308] * 3,
        0.5,
        [0, 0, 0],
    )
    key = chance.choice(("image_mean", "image_std", "rescale_factor"))
    return {**document, key: chance.choice((*odd, float("inf"), -1, "1/255", [[0.5] * 3]))}


@case("another processor", names=(PROCESSOR,))
def _processors(chance, document):
    names = ("CLIP", "Detr", "Sam", "Donut", "VitPose", "Owlv2", "Mask2Former", "Swin2SR", "\x1b", "", "X" * 5000)
    key = chance.choice(("image_processor_type", "feature_extractor_type", "processor_class"))
    other = trees.changed(chance, document)
    return {**other, key: chance.choice((*[f"{name}ImageProcessor" for name in names], 7, [], None)), "resample": 99}


for _name in (CONFIG, PROCESSOR):

    @CONFIGS.add(f"{_name}: something else in its place")
    def _place(attempt: Attempt, name: str = _name) -> None:
        copied(attempt)
        places.another(attempt.random, attempt.given / "vit" / name)


@CONFIGS.add("OpenCLIP's config")
def _open_clip(attempt: Attempt) -> None:
    copied(attempt)
    (attempt.given / "vit" / CONFIG).unlink()
    change = attempt.random.choice((trees.changed, trees.without, trees.wrapped))
    written(attempt, "open_clip_config.json", change(attempt.random, OPEN_CLIP))


@CONFIGS.add("a processor in two files")
def _two(attempt: Attempt) -> None:
    documents = copied(attempt)
    odd = attempt.random.choice(
        ({"image_processor": []}, {"image_processor": None}, [], {"image_processor": {"size": []}})
    )
    written(attempt, "processor_config.json", odd)
    if attempt.random.random() < 0.5:
        (attempt.given / "vit" / PROCESSOR).unlink()
    else:
        written(attempt, PROCESSOR, trees.without(attempt.random, documents[PROCESSOR]))


@CONFIGS.add("no config, or no weights")
def _without(attempt: Attempt) -> None:
    copied(attempt)
    name = attempt.random.choice((CONFIG, PROCESSOR, "model.safetensors"))
    (attempt.given / "vit" / name).unlink()


@CONFIGS.add("an odd name of a folder")
def _folder(attempt: Attempt) -> None:
    copied(attempt)
    name = attempt.random.choice([each for each in places.ODD_NAMES if "\0" not in each])
    attempt.words = (attempt.words[0], f"hf:{name}", *attempt.words[2:])


KIND = Kind(
    "config.json and processor",
    full=200,
    damages=tuple(CONFIGS),
    words=in_turns(*[MODEL] * 9, EXPORT),
    whole=lambda attempt: copied(attempt) and None,
    commands=(MODEL, EXPORT),
)
