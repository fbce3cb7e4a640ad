"""The folder of an engine: its metadata, and whether it may be loaded here."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.runtime import backend
from vitdeploy.spec import EngineSpec, decode
from vitdeploy.stages.files import read_json


def read_engine(folder: Path) -> EngineSpec:
    return decode(EngineSpec, read_json(folder / "engine.json"))


def may_load(folder: Path) -> bool:
    """Whether this user may load the engine that the stage left in `folder`, if it is code."""
    return backend.may_load(folder, read_engine(folder))
