"""One stage with everything that its key is made of, and the engine that it may be a stage of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vitdeploy.spec import Precision
from vitdeploy.store.key import artifact_key
from vitdeploy.store.sources import code_version

if TYPE_CHECKING:
    from vitdeploy.store.store import Artifact

Folders: TypeAlias = "Mapping[str, Artifact]"
# Names of steps that a plan has once.
EXPORT, OPTIMIZE, CALIBRATE, REFERENCE, ATTENTION = "export", "optimize", "calibrate", "reference", "attention"
# The rewritten graph of a job whose graph is pruned after that; the pruned one is that of OPTIMIZE. Its first word is
# the kind, so that keys are those of a job that prunes nothing.
UNPRUNED = f"{OPTIMIZE} unpruned"
# The kind of the step that takes layers out of plain INT8.
HIGH_PRECISION = "high_precision"
# The name of the original among those of engines.
ORIGINAL = "original"
# Precisions that need calibration.
QUANTIZED = ("int8", "mixed", "fp8", "int4")


@dataclass(frozen=True)
class Step:
    """One stage with its config. `inputs` are names of earlier steps; `outside` are digests of files from outside;
    `packages` are the versions of what computes it, and the machine if that matters.

    `write` takes the inputs' folders, the empty folder to fill, and a progress; if the step is `resumable` also
    `scratch`: a folder for its key, which keeps what an interrupted run needs to resume. There is no version
    number to raise: the source code of the package is part of the key.
    `measured`: it holds times of this device, whose reuse is reported. `shared_out`: the process that runs `write` has
    workers, and gives them pieces of it. `usable` tells whether this user may use a stored folder; otherwise the folder
    is made again.
    `about`: numbers of how much work it is, such as that of images, by which plans estimate it; no part of the key.
    """

    name: str
    kind: str
    write: Callable[..., None]
    config: dict[str, Any]
    inputs: tuple[str, ...] = ()
    outside: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    resumable: bool = False
    measured: bool = False
    shared_out: bool = False
    usable: Callable[[Path], bool] = lambda folder: True
    about: dict[str, int] = field(default_factory=dict)

    @property
    def modules(self) -> frozenset[str]:
        """The modules where the code of `write` begins: its own, and those of the values in its closure, which may be
        of classes that its module does not import, such as a task adapter."""
        given = inspect.getclosurevars(self.write).nonlocals.values()
        return frozenset({self.write.__module__, *(getattr(value, "__module__", "") for value in given)})

    @property
    def tools(self) -> dict[str, str]:
        """The versions of its packages, that of our own code, and which of it `write` begins with."""
        return {**self.packages, "code": code_version(), "modules": " ".join(sorted(self.modules))}

    def outline(self) -> Outline:
        """The step without its work."""
        how = self.measured, self.about, self.usable, self.shared_out
        return Outline(self.name, self.kind, self.config, self.inputs, self.outside, self.tools, *how)

    def input_digests(self, artifacts: Mapping[str, Artifact]) -> dict[str, str]:
        """Digests by the kind of the input, or by its full name if there are several of a kind."""
        return _input_digests(self.inputs, self.outside, {name: artifacts[name].digest for name in self.inputs})

    def key(self, artifacts: Mapping[str, Artifact]) -> str:
        """The key of its folder; `artifacts` holds those of its inputs."""
        return artifact_key(self.kind, self.config, self.input_digests(artifacts), self.tools)


@dataclass(frozen=True)
class Outline:
    """What plans need to know of a step: many are kept at a time, where those of steps would keep all their images."""

    name: str
    kind: str
    config: Mapping[str, object]
    inputs: tuple[str, ...]
    outside: dict[str, str]
    tools: dict[str, str]
    measured: bool
    about: dict[str, int]
    usable: Callable[[Path], bool]
    shared_out: bool = False

    def key(self, digests: Mapping[str, str]) -> str:
        """The key of its folder; `digests` holds those of its inputs, by step."""
        return artifact_key(self.kind, self.config, _input_digests(self.inputs, self.outside, digests), self.tools)


def _input_digests(inputs: Sequence[str], outside: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, str]:
    kinds = [name.split()[0] for name in inputs]
    names = [name if kinds.count(kind) > 1 else kind for name, kind in zip(inputs, kinds, strict=True)]
    return {**outside, **{key: digests[name] for key, name in zip(names, inputs, strict=True)}}


@dataclass(frozen=True)
class Candidate:
    """A target in one precision; `shipped` where it is what the recipe asks for, else a float baseline."""

    target: str
    precision: Precision
    shipped: bool

    @property
    def artifact(self) -> str:
        return f"{self.target}-{self.precision}"

    def step(self, kind: str) -> str:
        return f"{kind} {self.artifact}"
