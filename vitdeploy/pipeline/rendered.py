"""The attention maps of a run, as its report has them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vitdeploy.report.attention import attention_tile
from vitdeploy.stages.attention import read_attention, shared
from vitdeploy.stages.step import ATTENTION, ORIGINAL
from vitdeploy.store.store import Artifact


def render_attention(
    artifacts: Mapping[str, Artifact], examples: Sequence[Mapping[str, Any]], images: Mapping[str, bytes]
) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """The `attention` part of report.json and its PNG files by name; None where the original has no maps.

    Args:
        examples, images: of the report; what there are maps of is among them.
    """
    if ATTENTION not in artifacts:
        return None, {}
    facts, maps = read_attention(artifacts[ATTENTION].path)
    if ORIGINAL not in maps:
        return None, {}
    pictures: dict[str, bytes] = {}
    rows = []
    places = {each["number"]: place for place, each in enumerate(examples)}
    for index, number in enumerate(facts["images"]):
        name = str(examples[places[number]]["image"])
        pixels = np.asarray(Image.open(io.BytesIO(images[name])).convert("RGB"))
        found = {artifact: each[index].astype(np.float64) for artifact, each in maps.items()}
        # One scale for all maps of an image, so that they can be compared.
        largest = max(float(each.max()) for each in found.values())
        tiles = []
        for artifact, values in found.items():
            file = f"{number}-{artifact}.png"
            pictures[file] = attention_tile(pixels, values, largest)
            tiles.append(
                {
                    "artifact": artifact,
                    "image": file,
                    "on_patches": float(values.sum()),
                    "shared": None if artifact == ORIGINAL else shared(values, found[ORIGINAL]),
                }
            )
        rows.append({"example": places[number], "maps": tiles})
    known = {name: facts[name] for name in ("grid", "reader", "blocks", "left_out")}
    return {**known, "examples": rows}, pictures
