"""The INT8 graph of a prepared module: the placement that it was prepared for, with what was learned."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn

from vitdeploy.api.folders import filling, home_of
from vitdeploy.api.quantize import QuantizedGraph
from vitdeploy.errors import NonFiniteWeightsError
from vitdeploy.graph.io.files import save_graph, set_metadata
from vitdeploy.qat.check import check_same
from vitdeploy.qat.float_graph import export_like, float_graph, whole
from vitdeploy.qat.layers import detach
from vitdeploy.qat.plan import ATTRIBUTE, Plan, plan_of, refuse_types
from vitdeploy.qat.trained import place_trained
from vitdeploy.stages.files import LABELS_FILE, MODEL_FILE, OUTPUT_NAMES, write_json

WRAPPERS = ("module", "_orig_mod")


def export(prepared: nn.Module, folder: str | Path | None = None) -> QuantizedGraph:
    """The INT8 graph of a prepared module, as `vitdeploy.quantize` gives one: for `compile`, `verify` and `bench`.

    It has the nodes and the layers of the graph that the module was prepared for; integers, steps, biases and all that
    is float are those of the module. Module and graph are compared before anything is written.

    Args:
        prepared: what `prepare` gave, trained; wrapped by DistributedDataParallel or torch.compile, or a copy such as
            an average of its weights. It stays as it is.
        folder: where the graph is to lie; by default in a temporary folder that lasts as long as this process.

    Raises:
        InputError: the module was not prepared, or is not in float32.
        NonFiniteWeightsError: a step or a weight is no finite number.
        GraphError: the graph would not be the placement any more. ExportError: it would not be the module's.
        OutputError: `folder` holds something that is not ours to replace.
    """
    while getattr(prepared, ATTRIBUTE, None) is None:
        inner = next((getattr(prepared, name, None) for name in WRAPPERS if hasattr(prepared, name)), None)
        if not isinstance(inner, nn.Module):
            break
        prepared = inner
    plan, home = plan_of(prepared), home_of(folder, "quantized", OUTPUT_NAMES)
    refuse_types(prepared)
    refuse_nonfinite(prepared)
    own = copy.deepcopy(prepared).cpu()
    model, placed = _graph(own, plan)
    plain = copy.deepcopy(own)
    detach(plain)
    difference = check_same(own, plain, model, plan.placement, "the trained module")
    placed["difference"] = difference
    with filling(home, OUTPUT_NAMES) as work:
        save_graph(model, work / MODEL_FILE)
        write_json(work / "placement.json", placed)
        if labels := plan.placement.metadata.labels:
            (work / LABELS_FILE).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    dynamic = tuple(placed["dynamic"])
    int8 = (*placed["int8"], *dynamic)
    line = f"{len(int8)} layers in INT8 for {placed['target']}, {len(placed['float'])} in float, trained"
    document = {**placed, "int8": list(int8), "dynamic": list(dynamic), "precision": plan.placement.metadata.precision}
    document["path"] = str(home / MODEL_FILE)
    lines = (line, f"largest difference from the module (|a - b| / |b|) {difference:.1e}")
    return QuantizedGraph(home, document, lines, int8=int8, float=placed["float"], dynamic=dynamic)


def refuse_nonfinite(prepared: nn.Module) -> None:
    """Raise NonFiniteWeightsError if training left a parameter or buffer that is no finite number."""
    tensors = {**dict(prepared.named_parameters()), **dict(prepared.named_buffers())}
    broken = [name for name, each in tensors.items() if each.is_floating_point() and not each.isfinite().all()]
    if broken:
        steps = [name for name in broken if name.endswith(".log_ratio")]
        raise NonFiniteWeightsError(
            f"{len(broken)} tensors of the trained module hold NaN or infinity, {len(steps)} of them steps",
            found=", ".join((steps or broken)[:3]),
            wanted="finite numbers",
            fix="train again with a smaller learning rate, or clip gradients (torch.nn.utils.clip_grad_norm_)",
        )


def _graph(own: nn.Module, plan: Plan) -> tuple[ir.Model, dict[str, Any]]:
    placement = plan.placement
    plain = copy.deepcopy(own)
    detach(plain)
    delattr(plain, ATTRIBUTE)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as scratch:
        file = Path(scratch) / MODEL_FILE
        export_like(whole(plain.float(), placement), placement, file)
        model = float_graph(file, placement, plan.options)
    placed = place_trained(model, plan, whole(own, placement))
    set_metadata(model, placement.metadata)
    return model, placed
