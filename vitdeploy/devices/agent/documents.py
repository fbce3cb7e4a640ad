"""The jobs and answers that a device and its client exchange, as plain data.

A job contains placements (ONNX), not engines: an engine is code, and each device builds its own. The only exception is
a TensorRT plan, which a device loads only if its own registry shows that it was built there.
"""

import hashlib
import json
import re
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.errors import HostError, MissingPackageError, StorageError, VitdeployError
from vitdeploy.spec import SPARSE, EngineSpec, FileEntry, FloatRest, Precision, SequenceSpec, WeightBits, decode, encode

FORMAT = 1
Kind = Literal["bench", "compile", "stage", "switch"]
State = Literal["absent", "queued", "running", "done", "stopped", "lost"]
# The limits of a job.json, and of a result.json, which consists mostly of raw latencies.
MAX_JOB_BYTES = 8 << 20
MAX_RESULT_BYTES = 256 << 20
# Valid names of deployments and releases, which are folder names. A release is the SHA-256 of its manifest.
DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RELEASE = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PlacedGraph:
    """One ONNX file of a job. `placed`: the number of its linears and convolutions in INT8 or FP8; `precision`: its
    own, if the graphs of the model differ in it."""

    part: str
    file: str
    placed: int
    precision: Precision | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class PlacedArtifact:
    """A placement, as `compilation.engine.compile_engine` takes it. An encoder-decoder has two graphs and a `sequence`.

    `plan`: an engine that a device built from it before, whose files are also in the job. `images`: settings to measure
    from an image to its answer, see `benchmark.stages.ImageStages`. `golden`: the job's folder with the manifest and
    the golden answers of the placement's bundle. `row_parts`: those of the graph. `float_rest`: the precision to use if
    the device's CPU supports it, see `EngineSpec`.
    """

    name: str
    target: str
    precision: Precision
    batch: int
    graphs: tuple[PlacedGraph, ...]
    sequence: SequenceSpec | None = None
    weight_bits: WeightBits | None = None
    plan: EngineSpec | None = None
    images: dict[str, Any] | None = None
    golden: str | None = field(default=None, metadata=SPARSE)
    row_parts: tuple[int, ...] | None = field(default=None, metadata=SPARSE)
    float_rest: FloatRest | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class ReleaseOptions:
    """Options of a job that brings a release ("stage"; `files`: those of the whole bundle, of which the job contains
    the missing ones) or that moves the link to it ("switch"). `expected`: the release of the link ("" for none), moved
    `counter` times, so that each comparison is a distinct job. `release`: the SHA-256 of the manifest. `target`: the
    one that an app requests. `worse`: the share by which p99 may exceed that of the current release."""

    deployment: str
    release: str
    expected: str
    counter: int
    target: str
    worse: float = 0.0
    files: tuple[FileEntry, ...] = ()


@dataclass(frozen=True)
class DeviceJob:
    """A job for a device. `files`: all files that are sent with it. `protocol`: of a benchmark, or of a release to
    measure. `build`: non-default options for TensorRT. `device`: the registered device, since two may be one machine.
    """

    format: int
    kind: Kind
    agent: str
    sender: str
    artifacts: tuple[PlacedArtifact, ...]
    files: tuple[FileEntry, ...]
    protocol: Protocol | None = None
    build: BuildOptions | None = None
    release: ReleaseOptions | None = None
    device: str = ""

    @property
    def digest(self) -> str:
        """The job's identifier: equal jobs of one sender are one job. It is computed from the text with the numbers as
        the device reads them, so that 1 and 1.0 seconds are the same."""
        text = json.dumps(
            encode(decode(DeviceJob, encode(self))), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class GoldenResult:
    """As `runtime.golden.GoldenCheck`, with None for a `difference` of NaN or infinity."""

    inputs: int
    difference: float | None
    tolerance: float
    same: int
    least_same: int

    @property
    def ok(self) -> bool:
        return self.difference is not None and self.difference <= self.tolerance and self.same >= self.least_same


@dataclass(frozen=True)
class Tried:
    """The trial of a release: the golden answers of `engine`, which an app would load. `kept`: whether the link points
    to it now. `alone`: why it was not measured against the previous release; "" if it was, or if the release failed."""

    engine: str
    golden: GoldenResult
    kept: bool = False
    alone: str = ""


@dataclass(frozen=True)
class Deployed:
    """A deployment on a device. `current`, `previous`: the present and previous release of its link, "" for none.
    `counter`: the number of completed moves. `moving`: the release that a running process is moving it to."""

    name: str
    current: str = ""
    previous: str = ""
    counter: int = 0
    moving: str = ""


@dataclass(frozen=True)
class Failure:
    """An error of one artifact ("" for the whole job), as `VitdeployError.to_dict` writes it."""

    artifact: str
    code: str
    message: str
    found: str = ""
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class JobResult:
    """The result of a finished job. `host`: the device's `describe_host`. `engines`: the built engines, by artifact.
    `left_out`: the artifacts that do not work there, with the reasons. `bench_run`: the measurements of a benchmark or
    a release. `tried`: the trial of a release. `failure`: replaces all other fields."""

    format: int
    job: str
    host: dict[str, str]
    engines: dict[str, EngineSpec] = field(default_factory=dict)
    left_out: tuple[Failure, ...] = ()
    bench_run: Any = None
    files: tuple[FileEntry, ...] = ()
    failure: Failure | None = None
    tried: Tried | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class Status:
    """The status of a job. `state`: "absent", "queued", "running", "done" (has a result), "stopped", or "lost" (was
    queued or running, and its process is gone). `detail`: what it waits for, or how it was lost."""

    state: State
    detail: str = ""
    progress: tuple[str, int, int] | None = None


def flat(path: str) -> str:
    """Return the name of an engine's file in a result folder."""
    return path.replace("/", "-")


# --- Failures on a device, as reported to the host --------------------------------------------------------------------


@contextmanager
def explained() -> Iterator[None]:
    """Turn failures on a device into errors with a fix for the device."""
    try:
        yield
    except MissingPackageError as error:
        extra = getattr(error, "extra", "")  # an error of a child process has only its message
        packages = [row.package for row in TARGETS.values() if row.extra == extra != ""]
        if packages:
            error.fix = f"{sys.executable} -m pip install {packages[0]}"
        raise
    except (VitdeployError, BrokenPipeError):
        raise
    except ModuleNotFoundError as error:
        name = {"PIL": "pillow"}.get(str(error.name), str(error.name))
        raise HostError(
            f"the package {name} is not installed for {sys.executable}",
            fix=f"{sys.executable} -m pip install numpy pillow",
        ) from None
    except OSError as error:
        raise StorageError(
            "a file cannot be read or written",
            found=f"{error.strerror or error}, {shutil.disk_usage(Path.home()).free:,} bytes free in {Path.home()}",
            fix="free disk space on the device",
        ) from None
    except Exception as error:
        traceback.print_exc()
        raise VitdeployError(f"{type(error).__name__}: {str(error)[:300]}") from None


def failure(artifact: str, error: VitdeployError) -> Failure:
    return Failure(artifact, error.code, error.message, error.found, error.expected, error.fix)
