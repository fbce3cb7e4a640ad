"""What is promised of every family against an independent implementation, and the check that records what was measured.

`ROWS` is the promise: docs/models.md has an entry for each, and a test that takes the fixture `parity` keeps it. With
`pytest --record-parity FILE` every check appends a line to FILE; `tests.models_page` makes the page of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from tests.models.external.detectors import DETECTORS
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Runner

Output: TypeAlias = "torch.Tensor | np.ndarray"

ENGINES = ("ONNX Runtime", "OpenVINO")
BATCHES = (1, 2, 5)


class Form(NamedTuple):
    """What is run, and the largest max|a - b| / max|b| that is allowed between it and the reference."""

    name: str
    tolerance: float


FLOAT64 = Form("PyTorch, float64", 1e-10)
FLOAT32 = Form("PyTorch, float32", 1e-5)
GRAPH = Form("ONNX graph, float32, batch 1, 2, 5", 1e-4)
PHOTOGRAPHS = Form("ONNX graph, float32, 64 photographs", 1e-4)


class Family(NamedTuple):
    """An architecture as users know it.

    names: fnmatch patterns of its built-in names, none where the module is timm's or transformers' own.
    references: the implementations with whose weights ours gives the same outputs, in float64, and these outputs.
    graph: the outputs that the exported graph gives as the module does.
    """

    names: tuple[str, ...]
    references: Mapping[str, str]
    graph: str


STEPS = "its own decoding step by step"
REPOSITORY = "the original repository"
OPEN_CLIP, INDEPENDENT = "open_clip_torch", "the tests' own of torch.nn and timm"
REPOSITORIES = {"RT-DETR": "rtdetr_*", "RT-DETRv2": "rtdetrv2_*", "D-FINE": "dfine_*", "RF-DETR": "rfdetr_*"}
BOTH, BOXES = "logits, features", "class logits, boxes"
TOWERS = "image features, text features"
FAMILIES = {
    "ViT": Family(
        ("vit_*[0-9]_???", "vit_*.dino"), {"timm": "logits", "transformers": BOTH, "torchvision": "logits"}, "logits"
    ),
    "DeiT": Family(("deit_*",), {"timm": BOTH, "transformers": BOTH}, "logits"),
    "DeiT-III": Family(("deit3_*",), {"timm": "logits"}, "logits"),
    "DINOv2": Family(("vit_*_patch14_dinov2",), {"timm": "features", "transformers": BOTH}, "features"),
    "DINOv2 with registers": Family(("vit_*_reg4_dinov2",), {"timm": "features", "transformers": BOTH}, "logits"),
    "MAE": Family(("vit_*.mae",), {"timm": "features", "transformers": "features"}, "features"),
    "CLIP image encoder": Family(
        ("vit_*_clip_*",),
        {"timm": "logits, image embedding", "transformers": f"{BOTH}, image embedding"},
        "image embedding",
    ),
    "SigLIP image encoder": Family(("vit_*_siglip_*",), {"timm": BOTH, "transformers": BOTH}, "features"),
    "CLIP, image and text encoder": Family((), {"transformers": TOWERS}, TOWERS),
    "SigLIP and SigLIP 2, image and text encoder": Family((), {"transformers": TOWERS}, TOWERS),
    "CLIP and SigLIP in OpenCLIP's layout, image and text encoder": Family(
        (), {OPEN_CLIP: TOWERS, INDEPENDENT: TOWERS}, TOWERS
    ),
    "Swin": Family(("swin_*",), {"timm": BOTH, "transformers": BOTH, "torchvision": "logits"}, "logits"),
    "DETR, detection": Family(("detr_*[0-9]",), {"transformers": BOXES}, BOXES),
    "DETR, panoptic": Family(("detr_*_panoptic",), {"transformers": f"{BOXES}, masks"}, f"{BOXES}, masks"),
    **{
        f"{name}, its repository's checkpoints": Family((pattern,), {REPOSITORY: BOXES}, BOXES)
        for name, pattern in REPOSITORIES.items()
    },
    "Transformer": Family(("transformer_*",), {"torch.nn.Transformer": "logits", STEPS: "logits"}, "logits"),
    "SwinV2, timm's module": Family((), {}, "logits"),
    "EVA-02 with rotary positions, timm's module": Family((), {}, "logits"),
    "MobileViT, timm's module": Family((), {}, "logits"),
    "ViT-MSN, transformers' module": Family((), {}, "logits"),
    "ViTPose, transformers' module": Family((), {}, "heatmaps"),
    **{f"{name}, transformers' module": Family((), {}, BOXES) for name in DETECTORS},
    "SegFormer, transformers' module": Family((), {}, "class maps"),
    "Mask2Former, transformers' module": Family((), {}, "class logits, masks"),
    "MaskFormer, transformers' module": Family((), {}, "class logits, masks"),
    "EoMT, transformers' module": Family((), {}, "class logits, masks"),
    "RF-DETR with masks, transformers' module": Family((), {}, "class logits, masks"),
    "Depth Anything, transformers' module": Family((), {}, "depth"),
    "DPT, transformers' module": Family((), {}, "depth"),
    "Swin2SR, transformers' module": Family((), {}, "reconstruction"),
    "SAM, transformers' modules": Family((), {"transformers": "masks, IoU scores"}, "masks, IoU scores"),
    "SAM 2, transformers' modules": Family((), {"transformers": "masks, IoU scores"}, "masks, IoU scores"),
    "EdgeTAM, transformers' modules": Family((), {"transformers": "masks, IoU scores"}, "masks, IoU scores"),
    "SAM 3's tracker, transformers' modules": Family((), {"transformers": "masks, IoU scores"}, "masks, IoU scores"),
    "OWL-ViT and OWLv2, transformers' modules": Family(
        (), {"transformers": "logits of the texts, boxes"}, "logits of the texts, boxes"
    ),
    "TrOCR, transformers' module": Family((), {}, "logits of every step"),
    "Donut, transformers' module": Family((), {}, "logits of every step"),
}


@dataclass(frozen=True)
class Row:
    """One entry of the table of checked parities."""

    family: str
    outputs: str
    against: str
    form: str
    tolerance: float


def _row(family: str, against: str, form: Form) -> Row:
    facts = FAMILIES[family]
    return Row(family, facts.graph if against in ENGINES else facts.references[against], against, *form)


# These are measured only where their data or their package is, which this repository does not bring.
_PHOTOGRAPHS = tuple(_row("ViT", engine, PHOTOGRAPHS) for engine in ENGINES)
OPTIONAL = (*_PHOTOGRAPHS, _row("CLIP and SigLIP in OpenCLIP's layout, image and text encoder", OPEN_CLIP, FLOAT64))
_UNORDERED = (
    *(_row(name, against, FLOAT64) for name, family in FAMILIES.items() for against in family.references),
    _row("Swin", "timm", FLOAT32),
    _row("DETR, detection", "transformers", FLOAT32),
    _row("DETR, panoptic", "transformers", FLOAT32),
    *(_row(name, engine, GRAPH) for name in FAMILIES for engine in ENGINES),
    *_PHOTOGRAPHS,
)
ROWS = tuple(sorted(_UNORDERED, key=lambda row: list(FAMILIES).index(row.family)))


def family_of(name: str) -> str:
    """The family whose patterns a built-in name fits."""
    (found,) = (
        family for family, facts in FAMILIES.items() if any(fnmatchcase(name, pattern) for pattern in facts.names)
    )
    return found


def engine_runner(engine: str, graph: Path, batch: int) -> Runner:
    """A graph file on one of ENGINES in float32; on OpenVINO with the shape of the batch, which its fusions need."""
    if engine == "ONNX Runtime":
        return OnnxRuntimeRunner(graph, name=engine)
    return OpenVinoRunner(graph, name=engine, batch=batch, options={"INFERENCE_PRECISION_HINT": "f32"})


class Recorder:
    """The fixture `parity`: call it with two results of the same inputs."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def __call__(
        self,
        family: str,
        against: str,
        ours: Output | Sequence[Output],
        theirs: Output | Sequence[Output],
        *,
        form: Form | None = None,
        keys: str | None = None,
        top1: bool = False,
    ) -> None:
        """Assert that ours are theirs, within the tolerance of the row of ROWS that this is.

        Args:
            against: of the family's references, or of ENGINES: then `theirs` is the PyTorch module.
            ours, theirs: one output, or several in the same order.
            form: by default GRAPH on an engine, and what the reference's type says in PyTorch.
            keys: whose names the weights had, where they came from a state dict of another.
            top1: the first outputs are logits: wherever the reference's margin exceeds the difference, the largest one
                is the same.
        """
        pairs = list(zip(_arrays(ours), _arrays(theirs), strict=True))
        if form is None:
            form = GRAPH if against in ENGINES else {"float64": FLOAT64, "float32": FLOAT32}[str(pairs[0][1].dtype)]
        row = _row(family, against, form)
        assert row in ROWS, f"not promised: {row}"
        measured = float(np.max([_relative_difference(a, b) for a, b in pairs]))  # a NaN, where there is one
        assert measured <= row.tolerance, f"max|a - b| / max|b| is {measured:.1e}: {row}"
        if top1:
            _assert_same_answers(*pairs[0])
        if self.file is not None:
            record = json.dumps({**asdict(row), "measured": measured, "keys": keys})
            with self.file.open("a", encoding="utf-8") as lines:  # in one write: several processes may append
                lines.write(record + "\n")


def _arrays(outputs: Output | Sequence[Output]) -> Iterable[np.ndarray]:
    return [np.asarray(each) for each in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]


def _relative_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape, f"{ours.shape}, not {theirs.shape}"
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def _assert_same_answers(ours: np.ndarray, theirs: np.ndarray) -> None:
    second, first = np.moveaxis(np.sort(theirs, axis=-1)[..., -2:], -1, 0)
    sure = first - second > np.abs(ours - theirs).max(axis=-1)
    np.testing.assert_array_equal(ours.argmax(axis=-1)[sure], theirs.argmax(axis=-1)[sure])
    assert sure.any()


def read_records(file: Path) -> dict[Row, list[dict[str, Any]]]:
    """What was recorded for each row, in the order of ROWS."""
    found: dict[Row, list[dict[str, Any]]] = {row: [] for row in ROWS}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        extra = {key: record.pop(key) for key in ("measured", "keys")}
        found[Row(**record)].append(extra)
    return found
