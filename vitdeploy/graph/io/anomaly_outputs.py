"""Recognises the map and the score of an anomaly model among a graph's outputs, as anomalib names them."""

from __future__ import annotations

from vitdeploy.graph.io.output_row import Found, GraphOutputs, Values, floats
from vitdeploy.spec.anomaly import ANOMALY_MAP, GIVEN, PREDICTED_SCORE


def _map_and_score(outputs: Values, asked: bool) -> Found | None:
    """pred_label and pred_mask, which are computed of these two, are left out."""
    found = floats(outputs)
    names = (ANOMALY_MAP, PREDICTED_SCORE)
    return ({name: found[name] for name in names}, GIVEN) if set(names) <= set(found) else None


ROW = GraphOutputs("anomaly", _map_and_score, "anomaly_map [batch, 1, height, width] and pred_score [batch]")
