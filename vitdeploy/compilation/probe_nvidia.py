"""The requirements of targets on NVIDIA GPUs: what is installed, what is missing, and how to install it."""

import ctypes
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import Finding, TargetState
from vitdeploy.errors import VitdeployError
from vitdeploy.extensions import installed_version
from vitdeploy.runtime import nvidia, ort_gpu
from vitdeploy.runtime import tensorrt as tensorrt_api

# The TensorRT versions whose API the back end supports; JetPack 6 has 10.3.
OLDEST, NEWEST = (10, 3), (11,)
SUPPORTED = "10.3 to 11.x"
DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
TENSORRT_FIX = "pip install 'vitdeploy[tensorrt]', or NVIDIA's own package (on Jetson part of JetPack)"
LEAST_MEMORY = 1 << 30
# The first compute capability with matrix products in a type (CUDA C++ Programming Guide, "Compute Capabilities").
CAPABILITIES = {"bf16": (8, 0), "fp8": (8, 9)}
# An ONNX file with one Relu on float32 [2], opset 13: creating a session starts the provider.
PROBE_GRAPH = bytes.fromhex(
    "08083a370a0c0a0178120179220452656c75120570726f6265"
    "5a0f0a0178120a0a08080112040a020802620f0a0179120a0a08080112040a02080242040a00100d"
)


def findings(target: str) -> list[Finding]:
    """All requirements of the target, in the order in which to fix them; each is checked even if another is missing."""
    driver, missing = _driver()
    steps = _tensorrt(driver) if target == "tensorrt" else _onnxruntime(target, driver)
    return [*_gpu(driver, missing), *steps]


def probe(target: str) -> TargetState:
    """The state of the target. Without a driver it has no fix: the machine has no NVIDIA GPU."""
    found = findings(target)
    missing = next((finding for finding in found if not finding.ok), None)
    if missing is None:
        usable = precisions(target)
        shown = "; ".join(each.detail for each in found if each.name in ("GPU", "TensorRT version", "onnxruntime-gpu"))
        return TargetState(True, None, usable, f"{shown}; {', '.join(usable)}", "")
    if missing is found[0]:
        return TargetState(False, None, (), f"not found: {missing.detail}", "")
    return TargetState(False, None, (), f"{missing.name}: {missing.detail}", missing.fix)


def precisions(target: str) -> tuple[str, ...]:
    """The target's precisions that this GPU has kernels for."""
    driver, _ = _driver()
    if driver is None:
        return ()
    capability = driver.gpu.capability
    return tuple(p for p in TARGETS[target].precisions if capability >= CAPABILITIES.get(p, (0, 0)))


def _driver() -> tuple[nvidia.Driver | None, VitdeployError | None]:
    try:
        return nvidia.find_driver(), None
    except VitdeployError as error:
        return None, error


def _gpu(driver: nvidia.Driver | None, missing: VitdeployError | None) -> list[Finding]:
    if driver is None:
        assert missing is not None
        nothing = "unknown without a driver"
        return [
            Finding("NVIDIA driver", False, f"{missing.message} ({missing.found})", missing.fix),
            Finding("GPU", False, nothing),
            Finding("GPU memory", False, nothing),
        ]
    gpu = driver.gpu
    gigabytes = f"{gpu.free / 1e9:.1f} of {gpu.memory / 1e9:.1f} GB free"
    enough = gpu.free >= LEAST_MEMORY
    version = driver.version or "unknown version"
    return [
        Finding("NVIDIA driver", True, "{}, for CUDA up to {}.{}".format(version, *driver.cuda)),
        Finding("GPU", True, "{}, compute capability {}.{}".format(gpu.name, *gpu.capability)),
        Finding("GPU memory", enough, gigabytes, "" if enough else "end other GPU processes; nvidia-smi lists them"),
    ]


def _tensorrt(driver: nvidia.Driver | None) -> Iterator[Finding]:
    yield _cuda_python(driver)
    version = next((found for name in DISTRIBUTIONS if (found := installed_version(name))), None)
    if version is None and importlib.util.find_spec("tensorrt") is None:
        yield Finding("TensorRT for Python", False, "not installed", TENSORRT_FIX)
    else:
        yield Finding("TensorRT for Python", True, version or "unknown version")
    loaded: tuple[int, ...] | None = None
    for name in ("nvinfer", "nvonnxparser"):
        library, detail = _tensorrt_library(name)
        if library is not None and name == "nvinfer":
            loaded = _library_version(library)
        yield Finding(f"lib{name}", library is not None, detail, "" if library else TENSORRT_FIX)
    numbers = loaded or _numbers(version)  # the loaded library counts; the package may report another version or none
    shown = ".".join(map(str, numbers)) if numbers else "unknown"
    supported = bool(numbers) and numbers[:2] >= OLDEST and numbers[:1] <= NEWEST
    yield Finding(
        "TensorRT version",
        supported,
        f"{shown}; supported: {SUPPORTED}",
        "" if supported or not numbers else f"install TensorRT {SUPPORTED}",
    )
    yield _checked("TensorRT starts", _start_tensorrt, TENSORRT_FIX, driver)


def _onnxruntime(target: str, driver: nvidia.Driver | None) -> Iterator[Finding]:
    try:
        runtime = ort_gpu.require_provider(target)
    except VitdeployError as error:
        found = f"{error.message} (found {error.found})" if error.found else error.message
        yield Finding("onnxruntime-gpu", False, found, error.fix)
        yield Finding("its libraries", False, "unknown without onnxruntime-gpu")
        return
    built = getattr(runtime, "cuda_version", "")
    yield Finding("onnxruntime-gpu", True, runtime.__version__ + (f", built for CUDA {built}" if built else ""))
    ort_gpu.preload(runtime, target)
    missing = ort_gpu.missing_library(runtime, target)
    yield Finding("its libraries", not missing, missing or "all load", ort_gpu.library_fix(target) if missing else "")
    name, fix = f"{ort_gpu.PROVIDERS[target]} starts", ort_gpu.library_fix(target)
    yield _checked(name, lambda: _start_provider(target), fix, driver)


def _checked(name: str, start: Callable[[], str], fix: str, driver: nvidia.Driver | None) -> Finding:
    try:
        return Finding(name, True, start())
    except Exception as error:  # a native library may raise any exception
        text = f"{error.message} ({error.found})" if isinstance(error, VitdeployError) else str(error)
        shown = (text.strip().splitlines() or [type(error).__name__])[0][:200]
        return Finding(name, False, shown, fix if driver is not None else "")


def _cuda_python(driver: nvidia.Driver | None) -> Finding:
    fix = "pip install 'vitdeploy[tensorrt]'"
    version = installed_version("cuda-bindings") or installed_version("cuda-python")
    try:
        importlib.import_module("cuda.bindings.runtime")
    except ModuleNotFoundError:
        return Finding("cuda-python", False, "not installed", fix)
    except Exception as error:
        return Finding("cuda-python", False, f"cannot be loaded: {str(error)[:200]}", fix)
    numbers = _numbers(version)
    if driver is not None and numbers and numbers[0] > driver.cuda[0]:
        detail = "{}, for a newer CUDA than the driver's {}.{}".format(version, *driver.cuda)
        fix = f"pip install 'cuda-python=={driver.cuda[0]}.*', or a newer driver"
        return Finding("cuda-python", False, detail, fix)
    return Finding("cuda-python", True, version or "unknown version")


def _tensorrt_library(name: str) -> tuple[ctypes.CDLL | None, str]:
    """The library (from NVIDIA's Python packages, or from the system), and its path or the loader's error."""
    spec = importlib.util.find_spec("tensorrt_libs")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    packaged = [str(path) for folder in folders for path in sorted(folder.glob(f"*{name}*")) if _is_library(path, name)]
    detail = "not found"
    for candidate in (*packaged, *(f"lib{name}.so.{major}" for major in range(NEWEST[0], OLDEST[0] - 1, -1))):
        try:
            return ctypes.CDLL(candidate), candidate
        except OSError as error:
            detail = str(error)
    return None, detail


def _is_library(path: Path, name: str) -> bool:
    return re.fullmatch(rf"lib{name}\.so\.\d+|{name}_\d+\.dll", path.name) is not None


def _library_version(library: ctypes.CDLL) -> tuple[int, ...] | None:
    """Major, minor, patch of libnvinfer: 10,000, 100 and 1 (NvInferRuntimeBase.h, NV_TENSORRT_VERSION_INT)."""
    number = int(library.getInferLibVersion())
    return (number // 10_000, number // 100 % 100, number % 100) if number else None


def _start_tensorrt() -> str:
    tensorrt = importlib.import_module("tensorrt")
    logger, messages = tensorrt_api.make_logger()
    try:
        tensorrt.Builder(logger)
    except TypeError:  # the bindings' error for a builder that could not be created
        raise messages.failure("TensorRT cannot create a builder") from None
    return "a builder was created"


def _start_provider(target: str) -> str:
    """Run the test graph on the provider only."""
    runtime, provider = ort_gpu.require_provider(target), ort_gpu.PROVIDERS[target]
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(ort_gpu.NO_FALLBACK, "1")
    session = runtime.InferenceSession(PROBE_GRAPH, options, providers=[provider], enable_fallback=0)
    [answer] = session.run(None, {"x": np.array([-1.0, 2.0], np.float32)})
    if answer.tolist() != [0.0, 2.0]:
        raise RuntimeError(f"a test graph returned {answer.tolist()} instead of [0.0, 2.0]")
    return "a test graph ran on the GPU"


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])
