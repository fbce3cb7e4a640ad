"""The table of runtime back ends, and the functions that they share."""

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from vitdeploy.backends import TARGETS, BackendTable
from vitdeploy.bundle.read import file_sha256
from vitdeploy.errors import EngineError, MissingPackageError
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.trust import is_trusted
from vitdeploy.spec import EngineSpec


@dataclass(frozen=True)
class RunnerRequest:
    """An engine whose files lie under `folder`, and how to run it. `batch` is never 0; `threads` 0 leaves the number to
    the runtime; `streams` is the number of concurrent runs; `trust` is the key or certificate file of an identity that
    may sign native-code engines; `spinning` as for `make_runner`."""

    folder: Path
    engine: EngineSpec
    batch: int
    threads: int = 0
    streams: int = 1
    trust: Path | None = None
    spinning: bool = True

    @property
    def file(self) -> Path:
        """The file that the runtime loads."""
        return self.folder / self.engine.files[0]


@dataclass(frozen=True)
class RuntimeBackend:
    """How a back end runs an engine.

    make_runner: the runner, not loaded yet.
    require: raises HostError if this build of the runtime cannot serve the named target; runs nothing.
    describe_device: properties of this machine, besides host and package version, that a compiled engine depends on.
    float_precision: the precision that an engine with these options uses for a float32 graph.
    engine_is_code: the engine is native code for one machine: it is loaded only if it is trusted and `fits_here`.
    """

    make_runner: Callable[[RunnerRequest], Runner]
    require: Callable[[str], object] = lambda target: None
    describe_device: Callable[[], dict[str, str]] = dict
    float_precision: Callable[[Mapping[str, str]], str] = lambda options: "fp32"
    engine_is_code: bool = False
    fits_here: Callable[[EngineSpec], bool] = lambda engine: True


RUNTIME = BackendTable(
    "runtime",
    RuntimeBackend,
    {
        "onnxruntime": "vitdeploy.runtime.ort:BACKEND",
        "onnxruntime-gpu": "vitdeploy.runtime.ort_gpu:BACKEND",
        "openvino": "vitdeploy.runtime.openvino:BACKEND",
        "openvino-device": "vitdeploy.runtime.openvino_device:BACKEND",
        "tensorrt": "vitdeploy.runtime.tensorrt:BACKEND",
    },
)


def import_runtime(
    module: str, package: str, extra: str, why: str, target: str = "", *, expected: str = "", fix: str = ""
) -> ModuleType:
    """Import and return the module of a runtime; `package` to `target` as for `MissingPackageError`.

    Raises:
        MissingPackageError: it is not installed.
        EngineError: it is installed but does not load; `expected` and `fix` go into this error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(package, extra, why, target, error=error) from None
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            f"{package} is installed but fails to import",
            found=str(error)[:300],
            expected=expected,
            fix=fix or f"pip install --force-reinstall {package}",
        ) from None


def require_runtime(target: str) -> None:
    """Check that the target's runtime is installed, without running anything.

    Raises:
        MissingPackageError: it is not installed.
        CapabilityError: this build of the runtime lacks the target's provider.
    """
    row = TARGETS[target]
    if importlib.util.find_spec(row.module) is None:
        raise MissingPackageError(row.package, row.extra, f"the target {target}", target if row.device == "GPU" else "")
    RUNTIME[target].require(target)


def engine_is_code(engine: EngineSpec) -> bool:
    """Return whether an engine is native code for one machine."""
    return RUNTIME[engine.target].engine_is_code


def loads_here(folder: Path, engine: EngineSpec, signed: Collection[str] = ()) -> bool:
    """Return whether an engine of a bundle may be loaded on this machine as it is. A native-code engine must be
    trusted, by this user's registry or as one of the `signed` digests, and built for a machine like this one.

    Raises:
        MissingPackageError, EngineError, CapabilityError: the engine needs a runtime or GPU that is not usable here.
    """
    if not engine_is_code(engine):
        return True
    digest = file_sha256(folder / engine.files[0])
    return (digest in signed or is_trusted(digest)) and RUNTIME[engine.target].fits_here(engine)


def may_load(folder: Path, engine: EngineSpec) -> bool:
    """Return whether this user may load the engine in `folder`: a native-code engine must be in the user's registry,
    which may have been deleted since."""
    return not engine_is_code(engine) or is_trusted(file_sha256(folder / engine.files[0]))
