"""The ways to embed a bundle: one module for each kind, which fills an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.embed import cpp, web
from vitdeploy.embed.servers import kserve, ovms, triton


@dataclass(frozen=True)
class Kind:
    """`write(bundle, out)` fills the empty folder `out` and returns the commands that build and test it there."""

    what: str
    write: Callable[[Path, Path], list[str]]


KINDS = {
    "cpp": Kind("a C++ program for OpenVINO, with CMake", cpp.write),
    "web": Kind("a static page for onnxruntime-web", web.write),
    "triton": Kind("a model repository for NVIDIA's Triton", triton.write),
    "ovms": Kind("a model repository for OpenVINO Model Server", ovms.write),
    "kserve": Kind("a model repository and its InferenceService", kserve.write),
}
