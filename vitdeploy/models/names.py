"""The built-in model names, without PyTorch: for quick errors about wrong names or paths, and for shell completion.

`catalog` has the models themselves, which need PyTorch.

A family of another package is identified by its entry point, which is not loaded: an entry point `toy` stands for the
names `toy` and `toy_...`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.errors import HostError, UnknownModelError, quoted
from vitdeploy.extensions import entry_points_of
from vitdeploy.models.model_folder.folder import CONFIG
from vitdeploy.paths import is_dir, is_file

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXTENSIONS = "vitdeploy.families"
# The values that reports use as the family of an external module.
LIBRARIES = ("timm", "transformers", "function", "module", "onnx")
_NAMES = {
    "vit": """
        vit_tiny_patch16_224 vit_tiny_patch16_384 vit_small_patch8_224.dino vit_small_patch16_224
        vit_small_patch16_224.dino vit_small_patch16_384 vit_small_patch32_224 vit_small_patch32_384
        vit_base_patch8_224 vit_base_patch8_224.dino vit_base_patch16_224 vit_base_patch16_224.dino
        vit_base_patch16_224.mae vit_base_patch16_384 vit_base_patch32_224 vit_base_patch32_384
        vit_large_patch14_224 vit_large_patch16_224 vit_large_patch16_224.mae vit_large_patch16_384
        vit_large_patch32_224 vit_large_patch32_384 vit_huge_patch14_224 vit_huge_patch14_224.mae
        vit_giant_patch14_224 vit_gigantic_patch14_224 vit_base_patch16_clip_224 vit_base_patch16_clip_quickgelu_224
        vit_base_patch32_clip_224 vit_base_patch32_clip_256 vit_base_patch32_clip_quickgelu_224
        vit_large_patch14_clip_224 vit_large_patch14_clip_336 vit_large_patch14_clip_quickgelu_224
        vit_large_patch14_clip_quickgelu_336 vit_huge_patch14_clip_224 vit_huge_patch14_clip_378
        vit_huge_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_378 vit_giant_patch14_clip_224
        vit_gigantic_patch14_clip_224 vit_gigantic_patch14_clip_quickgelu_224 vit_base_patch16_siglip_224
        vit_base_patch16_siglip_256 vit_base_patch16_siglip_384 vit_base_patch16_siglip_512
        vit_base_patch16_siglip_gap_224 vit_base_patch32_siglip_256 vit_large_patch16_siglip_256
        vit_large_patch16_siglip_384 vit_large_patch16_siglip_512 vit_so400m_patch14_siglip_224
        vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384 vit_so400m_patch14_siglip_gap_224
        vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512
        vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384 vit_small_patch14_dinov2
        vit_small_patch14_reg4_dinov2 vit_base_patch14_dinov2 vit_base_patch14_reg4_dinov2 vit_large_patch14_dinov2
        vit_large_patch14_reg4_dinov2 vit_giant_patch14_dinov2 vit_giant_patch14_reg4_dinov2 deit_tiny_patch16_224
        deit_small_patch16_224 deit_base_patch16_224 deit_base_patch16_384 deit3_small_patch16_224
        deit3_small_patch16_384 deit3_medium_patch16_224 deit3_base_patch16_224 deit3_base_patch16_384
        deit3_large_patch16_224 deit3_large_patch16_384 deit3_huge_patch14_224
    """,
    "deit": """
        deit_tiny_distilled_patch16_224 deit_small_distilled_patch16_224 deit_base_distilled_patch16_224
        deit_base_distilled_patch16_384
    """,
    "swin": """
        swin_tiny_patch4_window7_224 swin_small_patch4_window7_224 swin_base_patch4_window7_224
        swin_large_patch4_window7_224 swin_base_patch4_window12_384 swin_large_patch4_window12_384
    """,
    "detr": """
        detr_resnet50 detr_resnet101 detr_resnet50_dc5 detr_resnet101_dc5 detr_resnet50_panoptic
        detr_resnet101_panoptic detr_resnet50_dc5_panoptic detr_resnet101_dc5_panoptic
    """,
    "rtdetr": """
        rtdetr_r18vd rtdetr_r34vd rtdetr_r50vd_m rtdetr_r50vd rtdetr_r101vd rtdetrv2_r18vd rtdetrv2_r34vd
        rtdetrv2_r50vd_m rtdetrv2_r50vd rtdetrv2_r101vd rtdetrv2_r18vd_dsp rtdetrv2_r34vd_dsp rtdetrv2_r50vd_m_dsp
        rtdetrv2_r50vd_dsp rtdetrv2_r18vd_sp1 rtdetrv2_r18vd_sp2 rtdetrv2_r18vd_sp3 dfine_n dfine_s dfine_m dfine_l
        dfine_x
    """,
    "rfdetr": """
        rfdetr_nano rfdetr_small rfdetr_medium rfdetr_base rfdetr_large
    """,
    "transformer": """
        transformer_base transformer_big
    """,
}
# The names of each built-in family, in listing order.
NAMES: Mapping[str, tuple[str, ...]] = {family: tuple(names.split()) for family, names in _NAMES.items()}
BUILT_IN = tuple(name for names in NAMES.values() for name in names)
_SIZE = r"(?:tiny|small|medium|base|large|huge|giant|gigantic|giantopt|so400m|w\d+d\d+h\d+)"
# Names that follow a family's pattern; `catalog` reports sizes that contradict each other.
_SPELLED = re.compile(
    rf"(?:vit|deit3?)_{_SIZE}_(?:distilled_)?patch\d+\S*"
    r"|swin_(?:tiny|small|base|large|w\d\S*)_patch\d\S*|detr_r\d+-\S*|transformer_w\d+e\S*"
)
# package.module:function, as accepted by --model.
FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_OWNED = re.compile(r"[\w-][\w.-]*/[\w.-]+")
ONNX_FILE = "model.onnx"


def is_built_in(name: str) -> bool:
    """Whether `name` is built-in, follows a family's pattern, or belongs to a family of another package."""
    return name in BUILT_IN or _SPELLED.fullmatch(name) is not None or bool(extensions_for(name))


def extensions() -> Mapping[str, EntryPoint]:
    """Return the entry points of other packages' families, by family name, without loading them.

    Raises:
        HostError: two packages provide the same family, or a package uses the name of a built-in family.
    """
    points = entry_points_of(EXTENSIONS)
    for name in points.keys() & {*NAMES, *LIBRARIES}:
        raise HostError(
            f"another package registers a model family under the built-in name {name!r}",
            found=f"{points[name].value}, and vitdeploy's own {name}",
            expected="a unique name",
            fix=f"uninstall the package that provides {points[name].value}, or rename its entry point and its models",
        )
    return points


def extensions_for(name: str) -> list[EntryPoint]:
    """Return the entry points of other packages' families that a model name may belong to."""
    points = extensions()
    return [points[family] for family in _in_family(name, points)]


def _in_family(name: str, families: Iterable[str]) -> list[str]:
    return [family for family in families if name == family or name.startswith(f"{family}_")]


def is_graph(model: str | None) -> bool:
    """Whether a model name is an ONNX file, or a folder with one."""
    return model is not None and (model.endswith(".onnx") or graph_folder(model) is not None)


def graph_folder(model: str | None) -> Path | None:
    """Return the folder of an exported model if `model` names one, else None; built-in names take precedence."""
    folder = Path(model) if model is not None else None
    if folder is None or not is_file(folder / ONNX_FILE) or is_built_in(str(model)):
        return None
    return folder


def check_name(name: str) -> None:
    """Raise if `name` is neither a built-in model nor the folder of an exported one; for another path or a repository,
    the error says how to name it.

    Raises:
        UnknownModelError: not a built-in name; lists the closest ones.
    """
    path = Path(name)
    if is_dir(path):
        if graph_folder(name) is not None:
            return
        holds_config = is_file(path / CONFIG)
        fix = quoted(f"hf:{name}") if holds_config else "hf:FOLDER, with config.json and weights"
        raise _of_another_kind(name, "is a folder", fix)
    if is_file(path):
        raise _of_another_kind(name, "is a file", f"--checkpoint {quoted(name)}, with or without a model name")
    if _OWNED.fullmatch(name):
        raise _of_another_kind(name, "is not a path here", f"for a Hugging Face repository: hf:{name}")
    if not is_built_in(name):
        raise unknown_model(name)


def unknown_model(name: str, others: Iterable[str] = ()) -> UnknownModelError:
    """Return the error for an unknown name, with the closest names of the family that it begins with, or timm:NAME.
    `others`: names of other packages' families."""
    family = re.split(r"[_\d]", name.lower())[0]
    names = (*BUILT_IN, *others)
    same = [known for known in names if re.split(r"[_\d]", known)[0] == family]
    # A name of another family is suggested only for a typo: resnet50 is not a misspelled detr_resnet50.
    near = difflib.get_close_matches(name.lower(), same or names, n=3, cutoff=0.5 if same else 0.85)
    ask = f"if timm has it: timm:{name}" if re.fullmatch(r"[\w.-]+", name) else "`vitdeploy export list` shows all"
    if re.fullmatch(r"[\w.]+:[\w.]+", name):
        ask = f"for a function of your own: --model {name}, and no other model"
    return UnknownModelError(
        f"no built-in model is called {name!r}",
        found=name,
        expected="a name of `vitdeploy export list`, timm:NAME, hf:FOLDER, or an .onnx file",
        fix=f"did you mean {' or '.join(near)}?" if near else ask,
    )


def _of_another_kind(name: str, what: str, fix: str) -> UnknownModelError:
    return UnknownModelError(
        f"no built-in model is called {name!r}, which {what}",
        found=name,
        expected="a name of `vitdeploy export list`, timm:NAME, hf:FOLDER, hf:OWNER/NAME, or an .onnx file",
        fix=fix,
    )
