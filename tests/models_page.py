"""Writes docs/models.md: `make models-doc`, or `python -m tests.models_page [PYTEST OPTIONS]` in the root folder.

It runs the tests of parity and makes the page of what they recorded and of the product's own list of names.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.parity import FAMILIES, OPTIONAL, ROWS, Row, family_of, read_records
from vitdeploy.models.catalog import CatalogEntry, entries

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
LIBRARIES = ("torch", "timm", "transformers", "torchvision", "onnxruntime", "openvino")
# Styles of keys as `models.family.Recognised` names them, for readers, in the order of the page.
STYLES = {
    "timm": "timm",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "jax": "JAX (.npz)",
    "torch": "torch.nn.Transformer",
    "original": "the paper's own code",
}
HEAD = """\
<!-- Written by `make models-doc`: change tests/parity.py or tests/models_page.py, not this page. -->

# Models

What is built in, whose checkpoints it reads, and how closely it was compared with independent implementations.
`make models-doc` writes this page: it runs the tests of parity and fills the tables with what they measured.

## Families

`vitdeploy export list 'PATTERN'` prints the names that fit a pattern, each with its parameters and input. Other sizes
of a family are spelled out in the name, and a checkpoint tells its own. *Checkpoints* are the styles of keys that a
test loaded and found to compute the same. Any other module of timm or transformers, a function of yours and an `.onnx`
file go through the same export.

transformers' detectors are taken by the library's own module: `vitdeploy export hf:FOLDER`. Their image size is that of
`config.json`, else of the processor's file, of the backbone, of the processor's class (of a short side, both sides); a
size that the model does not run on is answered with the nearest that it does. How objects are read, by softmax or
sigmoid and how many of them, is that of the processor's `post_process_object_detection`; where there is none, a recipe
must say it (`postprocess`). Processors that keep the aspect are run on a stretched image, with a note; letterboxes are
refused.

Checkpoints of the repositories of RT-DETR, RT-DETRv2 (lyuwenyu/RT-DETR), D-FINE (Peterande/D-FINE) and RF-DETR
(roboflow/rf-detr) need no folder: `vitdeploy export rtdetrv2_r18vd --checkpoint FILE.pth`. They become modules of
transformers, which must be installed, with any number of classes. On an image that is not square transformers orders
the encoder's positions of RT-DETR and D-FINE by rows, the repositories do not: their answers differ there. Variants
that transformers has no module for (HGNetv2 in RT-DETRv2, DEIMv2's own files, RF-DETR with masks) are refused with
their keys.

SAM, SAM 2, EdgeTAM and the tracker of SAM 3 (`SamModel`, `Sam2Model`, `EdgeTamModel`, `Sam3TrackerModel`; of
`Sam2VideoModel`, `EdgeTamVideoModel` and `Sam3TrackerVideoModel` the part for single images) become two graphs: an
image encoder, and a decoder of prompts that gives all four masks. EdgeTAM's encoder is a RepViT of timm, which must be
installed. SAM-HQ and the part of SAM 3 that finds what a text says are refused by name; EfficientSAM is no class of
transformers. A prompt has a fixed number of slots; those that are not
used are masked in the decoder's attention, so that the masks are transformers' for any number of points and boxes.
Masks as prompts are left out.

OWL-ViT and OWLv2 become two towers, whose outputs the runtime compares: [what texts say, found in
images](zero-shot.md#what-texts-say-found-in-images). Grounding DINO and OmDet-Turbo are refused by name: their layers
attend to the tokens of the text, which no flow passes with their masks.

Folders in OpenCLIP's layout (`open_clip_config.json`) become two towers: [images against
texts](zero-shot.md#openclips-layout). Vision Transformers of OpenCLIP and SigLIP are ours, others are timm's modules.
They were compared with open_clip_torch 3.3.0, where that is installed.

transformers' encoder-decoders of images (TrOCR, Donut) are cut at their cross-attention: [image to
text](tasks.md#image-to-text). Their graphs are compared with the module that sees all tokens at once, and their texts
with those of `generate`, greedily and with beams.

"""
MIDDLE = """
## Checked parities

*Difference* is max|a - b| / max|b| over an output, and the largest of all outputs, inputs and variants that were
checked; a test fails where it is above the *tolerance*. Weights and inputs are seeded random numbers in small models,
with no weight at a neutral value; the photographs are for a published ViT-Tiny, where its files are
(`tests/test_real_weights.py`). In PyTorch our module has the other implementation's weights. A graph is compared with
the PyTorch module that it was exported from; there the largest logit is the same, too, wherever it leads by more than
the difference.

"""


def page(records: Mapping[Row, Sequence[Mapping[str, Any]]]) -> str:
    """The text of docs/models.md."""
    families = table(FAMILY_COLUMNS, family_lines(records))
    checks = table(CHECK_COLUMNS, (check_cells(row) + measured_cells(records[row]) for row in ROWS))
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in LIBRARIES)
    return f"{HEAD}{families}{MIDDLE}{checks}\nMeasured with {versions}.\n"


NOT_RUN = "not run here"
FAMILY_COLUMNS = ("Family", "Built-in names", "Task", "Parameters", "Input", "Checkpoints")
CHECK_COLUMNS = ("Family", "Outputs", "Compared with", "As", "Tolerance", "Largest difference", "Checks")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def family_lines(records: Mapping[Row, Sequence[Mapping[str, Any]]]) -> Iterable[Sequence[str]]:
    """One line for each family that has built-in names."""
    members: dict[str, list[CatalogEntry]] = {}
    for entry in entries():
        members.setdefault(family_of(entry.name), []).append(entry)
    for family in (name for name in FAMILIES if name in members):
        found = members[family]
        styles = {record["keys"] for row in ROWS if row.family == family for record in records[row]}
        yield [
            *name_cells(family, len(found)),
            ", ".join(dict.fromkeys(entry.task for entry in found)),
            _between([entry.parameters / 1e6 for entry in found]) + " M",
            _inputs(found),
            ", ".join(name for style, name in STYLES.items() if style in styles),
        ]


def name_cells(family: str, count: int) -> list[str]:
    return [family, f"{', '.join(f'`{pattern}`' for pattern in FAMILIES[family].names)} ({count})"]


def check_cells(row: Row) -> list[str]:
    return [row.family, row.outputs, row.against, row.form, f"{row.tolerance:.0e}"]


def measured_cells(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The largest difference, of one digit, and how many checks there were."""
    if not found:
        return [NOT_RUN, "0"]
    largest = max(record["measured"] for record in found)
    return [f"{largest:.0e}" if largest else "0", str(len(found))]


def _between(values: Sequence[float]) -> str:
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def _inputs(found: Sequence[CatalogEntry]) -> str:
    if found[0].task == "sequence":
        return "tokens"
    return ", ".join(f"{height}x{width}" for height, width in sorted({entry.image_size for entry in found}))


def main(options: Sequence[str]) -> int:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "parity.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "parity", "--record-parity", str(file), *options]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            return status
        records = read_records(file)
    missing = [row for row in ROWS if not records[row] and row not in OPTIONAL]
    for row in missing:
        print("promised, and checked by no test that ran:", " | ".join(check_cells(row)), file=sys.stderr)
    if missing:
        return 1
    PAGE.write_text(page(records), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
