"""The attention maps of a run, as its report has them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from vitdeploy.document.answers import AttentionFacts, ExampleFacts, MapFacts, MappedExample
from vitdeploy.report.attention import attention_tile
from vitdeploy.stages.attention import read_attention, shared
from vitdeploy.stages.step import ATTENTION, ORIGINAL
from vitdeploy.store.store import Artifact


def render_attention(
    artifacts: Mapping[str, Artifact], examples: Sequence[ExampleFacts], images: Mapping[str, bytes]
) -> tuple[AttentionFacts | None, dict[str, bytes]]:
    """The `attention` part of report.json and its PNG files by name; None if the original has no maps.

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
    places = {each.number: place for place, each in enumerate(examples)}
    for index, number in enumerate(facts["images"]):
        name = str(examples[places[number]].image)
        pixels = np.asarray(Image.open(io.BytesIO(images[name])).convert("RGB"))
        found = {artifact: each[index].astype(np.float64) for artifact, each in maps.items()}
        # One scale for all maps of an image, so that they can be compared.
        largest = max(float(each.max()) for each in found.values())
        tiles = []
        for artifact, values in found.items():
            file = f"{number}-{artifact}.png"
            pictures[file] = attention_tile(pixels, values, largest)
            share = None if artifact == ORIGINAL else shared(values, found[ORIGINAL])
            tiles.append(MapFacts(artifact, file, float(values.sum()), share))
        rows.append(MappedExample(places[number], tuple(tiles)))
    grid = tuple(facts["grid"])
    return AttentionFacts(grid, facts["reader"], facts["blocks"], facts["left_out"], tuple(rows)), pictures
