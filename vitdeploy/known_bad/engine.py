"""The table asked of a compiled engine, by the facts that it records of where it was compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitdeploy.graph.io.files import load_graph
from vitdeploy.known_bad.find import Match, matches_on, refuse_known_bad
from vitdeploy.known_bad.platform import Platform, platform_of
from vitdeploy.spec import EngineSpec


def engine_matches(engine: EngineSpec, folder: Path) -> list[Match]:
    """The entries about an engine whose files lie in `folder`, each once."""
    found: dict[str, Match] = {}
    for part in engine.parts or (engine,):
        for match in matches_on(load_graph(folder / part.graph), _platform(engine, part)):
            found.setdefault(match.entry.id, match)
    return list(found.values())


def accepted_of(
    engine: EngineSpec, graphs: Mapping[str, Path], name: str, accepted: Sequence[str] = ()
) -> tuple[str, ...]:
    """The `accepted` entries that are about an engine that another machine made of `graphs`, by part.

    Raises:
        KnownBadError: an entry that is not accepted is about it.
    """
    taken: dict[str, None] = {}
    for part in engine.parts or (engine,):
        platform = _platform(engine, part)
        found = matches_on(load_graph(graphs[part.part]), platform)
        taken.update(dict.fromkeys(refuse_known_bad(found, platform, name, accepted)))
    return tuple(taken)


def _platform(engine: EngineSpec, part: EngineSpec) -> Platform:
    return dataclasses.replace(platform_of(engine), precision=part.precision)
