"""The folder of an engine: what it says of itself, and whether it may be loaded here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vitdeploy.bundle.read import file_sha256
from vitdeploy.runtime import tensorrt_identity
from vitdeploy.runtime.trust import is_trusted
from vitdeploy.spec import TARGETS, EngineSpec, decode
from vitdeploy.stages.files import read_json


def read_engine(folder: Path) -> EngineSpec:
    return decode(EngineSpec, read_json(folder / "engine.json"))


def loads_here(folder: Path, engine: EngineSpec, signed: Collection[str]) -> bool:
    """Whether an engine of a bundle may be loaded on this machine as it is. A plan of TensorRT must be trusted, by this
    user's registry or as one of the `signed` digests, and be of a machine like this one.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT or GPU, where the engine needs them.
    """
    if TARGETS[engine.target].backend != "tensorrt":
        return True
    return tensorrt_identity.loads_here(file_sha256(folder / engine.files[0]), engine.device, signed)


def may_load(folder: Path) -> bool:
    """Whether this user may load the engine that the stage left in `folder`. A plan of TensorRT must stand in the
    registry of this user, which may be gone while the folder is there."""
    engine = read_engine(folder)
    return TARGETS[engine.target].backend != "tensorrt" or is_trusted(file_sha256(folder / engine.files[0]))
