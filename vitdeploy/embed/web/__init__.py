"""A static page that runs a bundle with onnxruntime-web: the unchanged files of `site/`, the graphs, and the facts of
the model in model/model.json."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from vitdeploy import __version__
from vitdeploy.bundle.read import require_graphs
from vitdeploy.embed.source import Embedded, find_embedded, has_form, refuse_fit, render, require_pixels, write_golden
from vitdeploy.embed.web.pad import drawing_form
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.analysis.attention import AttentionViews, token_views
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.admit import admit
from vitdeploy.graph.io.files import save_graph
from vitdeploy.graph.passes.tokens import add_rollout
from vitdeploy.runtime.golden import largest_difference
from vitdeploy.runtime.tasks import forms
from vitdeploy.spec import TensorSpec, encode

TARGETS = ("onnxruntime-cpu",)
COMMANDS = ["npm ci --ignore-scripts", "npm run build", "npm test"]
# WebAssembly addresses 4 GB, and loading a graph takes about twice its size.
MOST_BYTES = 1 << 30
# Sentence beginnings for answers that locate something in the image.
WHERE: Mapping[type[object], str] = {
    forms.BoxesForm: "The answer is boxes",
    forms.ClassMapForm: "The answer is a map",
    forms.DepthForm: "The answer is a map",
    forms.MatteForm: "The answer is a mask",
    forms.PointsForm: "The answer is points",
    forms.PictureForm: "The answer is an image",
}
ENGINE, FLOAT = "engine.onnx", "float.onnx"
# GPUs compute float32 with different approximations.
FLOAT_TOLERANCE = 1e-2
SITE = Path(__file__).parent / "site"


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a page for the bundle in `folder`; return the commands to build and test it.

    Raises:
        CapabilityError: the task or the input is not supported, or a graph is too large for a browser. Other errors as
            `source.find_embedded`.
    """
    embedded = find_embedded(folder, TARGETS, "the web page", has_form)
    refuse_fit(embedded, "the web page")
    require_graphs(folder, embedded.manifest, "the web page")
    source = embedded.manifest.graphs["model"]
    for tensors in (embedded.engine.inputs, source.inputs):
        require_pixels(embedded, tensors, "the web page")
    _check_size(folder, (embedded.engine.graph, source.file))
    name = re.sub(r"[^A-Za-z0-9]+", "-", embedded.manifest.name).strip("-").lower() or "model"
    shutil.copytree(SITE, out, dirs_exist_ok=True)
    for file in ("package.json", "package-lock.json"):
        _rename(out / file, name)
    (out / "model").mkdir()
    shutil.copyfile(folder / embedded.engine.graph, out / "model" / ENGINE)
    attention = _write_float(embedded, out / "model" / FLOAT)
    (out / "model" / "labels.txt").write_text("".join(f"{label}\n" for label in embedded.labels), encoding="utf-8")
    facts = _facts(embedded, attention)
    (out / "model" / "model.json").write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_golden(embedded, out / "golden")
    (out / "README.md").write_text(render(Path(__file__).parent, "README.md.jinja", {**facts, "name": name}), "utf-8")
    return COMMANDS


def _check_size(folder: Path, files: tuple[str, ...]) -> None:
    for file in files:
        size = (folder / file).stat().st_size
        if (folder / f"{file}.data").exists() or size > MOST_BYTES:
            raise CapabilityError(
                f"{file} is too large for a web page",
                found=f"{size:,} bytes" if size > MOST_BYTES else "weights in a separate file, more than 2 GB",
                expected=f"one file of at most {MOST_BYTES:,} bytes",
                fix="use a smaller model",
            )


def _rename(file: Path, name: str) -> None:
    """Set the name of the npm package to that of the model."""
    document = json.loads(file.read_text(encoding="utf-8"))
    document["name"] = name
    if "packages" in document:
        document["packages"][""]["name"] = name
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _write_float(found: Embedded, out: Path) -> dict[str, Any]:
    """Write the float graph, with an attention map as an additional output if it has attention over patches. Return
    {grid, reader} of the map, or the {reason} for its absence."""
    file = found.folder / found.manifest.graphs["model"].file
    if (where := WHERE.get(type(found.form))) is not None:
        shutil.copyfile(file, out)
        return {"reason": f"{where}; attention maps are available for classifiers and features."}
    try:
        model, views = _looking(file)
    except GraphError as error:
        shutil.copyfile(file, out)
        return {"reason": f"No attention map: {error.message}."}
    save_graph(model, out)
    return {"grid": list(views.grid), "reader": f"Rollout over {len(views.blocks)} attentions of the float model"}


def _looking(file: Path) -> tuple[ir.Model, AttentionViews]:
    model = admit(file)
    normalise(model)
    views = token_views(model, "the model")
    add_rollout(model, views)
    return model, views


def _facts(found: Embedded, attention: dict[str, Any]) -> dict[str, Any]:
    """Return the content of model.json."""
    manifest, spec = found.manifest, found.preprocess
    source = manifest.graphs["model"]
    form = (
        drawing_form(found.pixels, spec) if isinstance(found.form, forms.RankingForm) and spec.channels == 1 else None
    )
    return {
        "name": manifest.name,
        "task": manifest.task,
        "version": __version__,
        "digest": found.digest,
        "preprocess": encode(spec),
        "form": encode(found.form),
        "shapes": {tensor.name: list(tensor.shape[1:]) for tensor in source.outputs},
        "graphs": {
            "engine": _graph(ENGINE, found.engine.precision, found.engine.inputs[0]),
            "float": _graph(FLOAT, "fp32", source.inputs[0]),
        },
        "attention": attention,
        "pad": encode(form),
        "golden": {
            "images": len(found.pixels),
            "outputs": list(found.outputs),
            "engine": {"folder": "golden", "tolerance": found.tolerance, "least_same": found.least_same},
            "float": {"folder": "golden/original", **_float_check(found)},
        },
    }


def _float_check(found: Embedded) -> dict[str, Any]:
    """Return the tolerance of the float graph against the original. With merged tokens or pruning the numbers differ;
    then the difference may be as large as measured for the engine, which was made from the same graph."""
    recipe = found.manifest.provenance.get("recipe") or {}
    changed = recipe.get("optimize") or {}
    if all(changed.get(option, "none") == "none" for option in ("token_merging", "prune")):
        return {"tolerance": FLOAT_TOLERANCE, "least_same": len(found.pixels)}
    measured = largest_difference(found.outputs, found.original, found.outputs)
    return {"tolerance": max(FLOAT_TOLERANCE, measured), "least_same": found.least_same}


def _graph(file: str, precision: str, tensor: TensorSpec) -> dict[str, Any]:
    batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else 1
    precision = re.sub(r"\W", "", precision)  # used in README.md
    return {"file": file, "precision": precision, "input": tensor.name, "dtype": tensor.dtype, "batch": batch}
