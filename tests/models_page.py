"""Writes docs/models.md: `make models-doc`, or `python -m tests.models_page [PYTEST OPTIONS]` in the root folder.

It runs the tests of parity and makes the page of what they recorded and of the product's own list of names.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.parity import (
    ENGINES,
    FAMILIES,
    FLOAT32,
    FLOAT64,
    GRAPH,
    OPTIONAL,
    PHOTOGRAPHS,
    ROWS,
    Row,
    family_of,
    read_records,
)
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

```sh
vitdeploy export list 'deit*'                                  # built-in names, with parameters and input
vitdeploy export hf:FOLDER -o float                            # a transformers folder
vitdeploy export rtdetrv2_r18vd --checkpoint FILE.pth -o float # a built-in model with your weights
```

Modules of timm and transformers that are not built in, [modules of your own](recipes.md#a-module-of-your-own) and
`.onnx` files go through the same export. You can spell out other sizes of a family in the name
(`vit_w192d4h3_patch4_32`). A checkpoint determines its own size.

## Families

The column *Checkpoints* lists the key styles that a test loads and compares with their origin.

**Detectors of transformers.** The image size comes from `config.json`, then from the processor's file, the backbone and
the processor's class. RF-DETR's size is rounded up to whole windows (518 becomes 560). The score function and the
number of objects follow the processor's `post_process_object_detection`; if it has none, set `postprocess`. If the
processor keeps the aspect ratio, vitdeploy stretches the image instead and prints a note; letterboxes are refused.

**Checkpoints of the RT-DETR, RT-DETRv2, D-FINE and RF-DETR repositories** load into modules of transformers, which must
be installed, with any number of classes. On images that are not square, the answers of RT-DETR and D-FINE differ
from those of their repositories, because transformers orders the encoder's positions by rows. Variants without a
transformers module are refused: HGNetv2 in RT-DETRv2, DEIMv2's own files, RF-DETR with masks.

**[Promptable segmentation](tasks.md#promptable-segmentation)**: `SamModel`, `Sam2Model`, `EdgeTamModel` (needs timm)
and `Sam3TrackerModel`, also inside `Sam2VideoModel`, `EdgeTamVideoModel` and `Sam3TrackerVideoModel`. SAM-HQ and
SAM 3's detector for texts are refused. Masks as prompts are not supported.

**Image and text.** [CLIP, SigLIP, OpenCLIP folders](tasks.md#images-against-texts), OWL-ViT and OWLv2 become an
image encoder and a text encoder. Grounding DINO and OmDet-Turbo are refused.
[TrOCR and Donut](tasks.md#image-to-text) are split into an encoder and a decoder step.

"""
MIDDLE = """
## Checked parities

Each entry is the largest max|a - b| / max|b| over all outputs, inputs and variants checked, with the number of checks
in brackets; an empty cell means that the model is the other package's own module. The models are small, with the same
seeded random weights on both sides; the photographs use a published ViT-Tiny. Graphs are compared with the PyTorch
module that they were exported from; the largest logit must match wherever it leads by more than the difference.

"""


def page(records: Mapping[Row, Sequence[Mapping[str, Any]]]) -> str:
    """The text of docs/models.md."""
    families = table(FAMILY_COLUMNS, family_lines(records))
    tolerances = table(TOLERANCE_COLUMNS, ([name, f"{form.tolerance:.0e}"] for name, form in FORMS.items()))

    def shown(row: Row) -> str:
        return measured_text(records[row])

    checks = table(PARITY_COLUMNS, (parity_cells(family, shown) for family in FAMILIES))
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in LIBRARIES)
    return f"{HEAD}{families}{MIDDLE}{tolerances}\n{checks}\nMeasured with {versions}.\n"


NOT_RUN = "not run here"
FAMILY_COLUMNS = ("Family", "Built-in names", "Task", "Parameters", "Input", "Checkpoints")
TOLERANCE_COLUMNS = ("Compared", "Tolerance")
FORMS = {
    f"{FLOAT64.name} (unless float32 is stated)": FLOAT64,
    FLOAT32.name: FLOAT32,
    GRAPH.name: GRAPH,
    PHOTOGRAPHS.name: PHOTOGRAPHS,
}
PARITY_COLUMNS = ("Family", "Other implementations", "Graph on " + ", ".join(ENGINES))


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


def rows_of(family: str) -> list[list[Row]]:
    """The rows of a family as the columns of the page have them: other implementations, then the engines, with one
    comparison on each engine after the other."""
    rows = [row for row in ROWS if row.family == family]
    engines = [row for row in rows if row.against in ENGINES]
    names = list(dict.fromkeys(entry(row) for row in engines))
    engines.sort(key=lambda row: (names.index(entry(row)), ENGINES.index(row.against)))
    return [[row for row in rows if row.against not in ENGINES], engines]


def parity_cells(family: str, shown: Callable[[Row], str] | None = None) -> list[str]:
    """The line of a family; `shown` is what follows the name of each comparison."""
    cells = []
    for rows in rows_of(family):
        names: dict[str, list[Row]] = {}
        for row in rows:
            names.setdefault(entry(row), []).append(row)
        results = {name: f": {', '.join(map(shown, rows))}" if shown else "" for name, rows in names.items()}
        cells.append("; ".join(name + result for name, result in results.items()))
    return [family, *cells]


def entry(row: Row) -> str:
    """The name of a comparison in its column."""
    if row.form == PHOTOGRAPHS.name:
        return "photographs"
    if row.against in ENGINES:
        return row.outputs
    return f"{row.against} ({row.outputs}{', float32' if row.form == FLOAT32.name else ''})"


def measured_text(found: Sequence[Mapping[str, Any]]) -> str:
    """The largest difference, with one digit, and the number of checks."""
    if not found:
        return NOT_RUN
    largest = max(record["measured"] for record in found)
    return f"{largest:.0e} ({len(found)})" if largest else f"0 ({len(found)})"


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
        print("promised, and checked by no test that ran:", f"{row.family}: {entry(row)}", file=sys.stderr)
    if missing:
        return 1
    PAGE.write_text(page(records), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
