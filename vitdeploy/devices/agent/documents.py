"""A device's jobs and answers: the documents that cross the wire, as plain data.

A job carries placements (ONNX), never engines: an engine is code, and each device builds its own. The one exception is
a TensorRT plan, which the device loads only where its own registry says that it was built there.
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
# Of the job.json that a device reads, and of the result.json that it answers with: raw latencies make up most of it.
MAX_JOB_BYTES = 8 << 20
MAX_RESULT_BYTES = 256 << 20
# What a deployment and a release may be called: both name folders. A release is the SHA-256 of its manifest.
DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RELEASE = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PlacedGraph:
    """One ONNX file of a job. `placed`: how many of its linears and convolutions are in INT8 or FP8; `precision`: its
    own, where the graphs of a model differ in it."""

    part: str
    file: str
    placed: int
    precision: Precision | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class PlacedArtifact:
    """A placement, as `compilation.engine.compile_engine` takes it. An encoder-decoder has two graphs and
    its `sequence`.

    `plan` is the engine that a device made of it before, whose files are in the job too. `images`: what a bench needs
    to measure the way from an image to its answer, see `benchmark.stages.ImageStages`. `golden`: the folder of the job
    with the manifest and the golden answers of the bundle that the placement is from. `row_parts`: as the graph has
    them, `float_rest`: as an engine is to have it where the device's CPU does, see `EngineSpec`.
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
    """Of a job that brings a release ("stage": `files` are those of the whole bundle, of which the job has those that
    were missing), or that moves the link to one ("switch"), from `expected` ("" for none), which was moved `counter`
    times: another comparison is another job. `release` is the SHA-256 of its manifest, `target` what an app would ask
    for. Its p99 may be `worse` times that of the current one, less 1."""

    deployment: str
    release: str
    expected: str
    counter: int
    target: str
    worse: float = 0.0
    files: tuple[FileEntry, ...] = ()


@dataclass(frozen=True)
class DeviceJob:
    """`files` are all that goes out with it. `protocol`: of a bench, and of a release that is to be measured; `build`:
    where TensorRT is not to build as by default. `device`: whose it is, as two may be one machine.
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
        """The job's identifier everywhere: equal jobs of one sender are one job. It is over the text with the numbers
        that the device reads: 1 and 1.0 seconds are the same."""
        text = json.dumps(
            encode(decode(DeviceJob, encode(self))), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class GoldenResult:
    """As `runtime.golden.GoldenCheck`; a `difference` that is no number is None."""

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
    """What became of a release: how `engine` answered, the one that an app gets. `kept`: whether the link is at it now.
    `alone`: why it was not measured against the release before it; "" where it was, and of a release that failed."""

    engine: str
    golden: GoldenResult
    kept: bool = False
    alone: str = ""


@dataclass(frozen=True)
class Deployed:
    """A deployment on a device: the releases that its link is at and was at before, "" for none; how often the link was
    moved for good; the release that a living process moves it to right now."""

    name: str
    current: str = ""
    previous: str = ""
    counter: int = 0
    moving: str = ""


@dataclass(frozen=True)
class Failure:
    """An error, as `VitdeployError.to_dict` writes it, of one artifact ("" for the whole job)."""

    artifact: str
    code: str
    message: str
    found: str = ""
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class JobResult:
    """What a finished job answers. `host` is `describe_host` there; `engines` are those that were made, by the names of
    the artifacts; `left_out` those that do not work there, and why. `bench_run` is of a bench, and of a release that
    was measured; `tried` is of a release. A `failure` is instead of everything else."""

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
    """`state`: "absent", "queued", "running", "done" (there is a result), "stopped", or "lost": it was queued or
    running, and its process is gone; `detail` says what it waits for, or how it was lost."""

    state: State
    detail: str = ""
    progress: tuple[str, int, int] | None = None


def flat(path: str) -> str:
    """The name that a file of an engine has in a result's folder."""
    return path.replace("/", "-")


# --- Failures on a device, as reported to the host --------------------------------------------------------------------


@contextmanager
def explained() -> Iterator[None]:
    """Turns failures on a device into errors that say what to do there."""
    try:
        yield
    except MissingPackageError as error:
        extra = getattr(error, "extra", "")  # the error of a child process has its message only
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
            fix="free some space there",
        ) from None
    except Exception as error:
        traceback.print_exc()
        raise VitdeployError(f"{type(error).__name__}: {str(error)[:300]}") from None


def failure(artifact: str, error: VitdeployError) -> Failure:
    return Failure(artifact, error.code, error.message, error.found, error.expected, error.fix)
