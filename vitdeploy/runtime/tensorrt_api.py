"""TensorRT 10.3 to 11 in one code path: importing it, its messages, and the places where versions differ.

TensorRT is imported at first use. All differences between the versions are handled here: 10 types a network strongly
only on request, and it can build for all GPUs of one compute capability only from 10.9 on.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, cast

from vitdeploy.errors import (
    CapabilityError,
    DeviceMemoryError,
    EngineError,
    MissingPackageError,
    TensorError,
    VitdeployError,
)
from vitdeploy.spec import TensorSpec

if TYPE_CHECKING:
    import tensorrt as trt

OLDEST = (10, 3)
# numpy's names by TensorRT's names of element types; what numpy lacks cannot be an input or output.
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
}
_NO_MEMORY = re.compile(r"out of memory|outofmemory|insufficient memory|memoryallocation", re.IGNORECASE)


def require() -> str:
    """Import TensorRT and return its version.

    Raises:
        MissingPackageError: it is not installed.
        EngineError: it is installed but does not load.
        CapabilityError: it is older than 10.3.
    """
    try:
        module = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "tensorrt", "tensorrt", "building or running a TensorRT engine", "tensorrt", error=error
        ) from None
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            "tensorrt is installed but does not load",
            found=str(error)[:300],
            wanted="TensorRT's libraries, of the same version and for the CUDA of this driver",
            fix="pip install --force-reinstall tensorrt (for CUDA 12: tensorrt-cu12); on a Jetson use JetPack's own",
        ) from None
    version = str(module.__version__)
    if version_numbers(version)[:2] < OLDEST:
        raise CapabilityError(
            "this TensorRT is too old",
            found=version,
            wanted=".".join(map(str, OLDEST)) + " or newer",
            fix="pip install --upgrade tensorrt",
        )
    return version


def version_numbers(version: str) -> tuple[int, ...]:
    """(11, 4, 0, 106) for "11.4.0.106"; what is no number ends it."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


class Messages:
    """TensorRT's error messages, oldest first. TensorRT reports failures by messages and empty results."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def failure(self, what: str, fix: str = "") -> VitdeployError:
        """The error to raise after a failed call: DeviceMemoryError if memory ran out, otherwise EngineError."""
        found = "\n".join(self.errors[-3:])[:600] or "no message"
        if self.no_memory():
            return DeviceMemoryError(
                f"{what}: the GPU has too little free memory",
                found=found,
                fix="close what else uses the GPU, or take a smaller batch",
            )
        return EngineError(what, found=found, fix=fix)

    def no_memory(self) -> bool:
        return any(_NO_MEMORY.search(text) for text in self.errors)


def make_logger() -> tuple[trt.ILogger, Messages]:
    """A logger for TensorRT, and what it has collected."""
    import tensorrt as trt

    messages = Messages()

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the bindings want their own constructor called

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                messages.errors.append(msg.strip())

    return Logger(), messages


def create_network(builder: trt.Builder) -> trt.INetworkDefinition:
    """An empty network in which every tensor has the type that the graph gives it: on 10 only where asked for by this
    flag, whose number is another one on 11, which ignores it."""
    import tensorrt as trt

    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def hardware_level(name: str) -> trt.HardwareCompatibilityLevel:
    """TensorRT's value for "this", "same-compute-capability" or "ampere+".

    Raises:
        CapabilityError: this version does not have it.
    """
    import tensorrt as trt

    names = {"this": "NONE", "same-compute-capability": "SAME_COMPUTE_CAPABILITY", "ampere+": "AMPERE_PLUS"}
    level: trt.HardwareCompatibilityLevel | None = getattr(trt.HardwareCompatibilityLevel, names[name], None)
    if level is None:
        raise CapabilityError(
            f"this TensorRT cannot build for the hardware {name!r}",
            found=str(trt.__version__),
            wanted="this, or ampere+",
        )
    return level


def sizes_of(dims: trt.Dims) -> tuple[int, ...]:
    """Dims as a tuple; -1 is a dynamic axis."""
    return tuple(int(dims[axis]) for axis in range(len(dims)))


def bytes_of(memory: trt.IHostMemory) -> bytes:
    """A copy of memory that TensorRT owns; it has the buffer protocol, which its type does not tell."""
    return bytes(memoryview(cast(Any, memory)))


def tensor_spec(name: str, dtype: trt.DataType, dims: trt.Dims) -> TensorSpec:
    """A TensorSpec; an axis that is dynamic (-1) is called "batch" where it leads, otherwise "dynamic".

    Raises:
        TensorError: an element type that numpy lacks.
    """
    if dtype.name not in DTYPES:
        raise TensorError(
            f"tensor {name!r} has a type that numpy lacks",
            found=dtype.name,
            wanted=", ".join(DTYPES),
            fix="place the graph with float32 inputs and outputs",
        )
    shape = tuple(size if size >= 0 else "dynamic" if axis else "batch" for axis, size in enumerate(sizes_of(dims)))
    return TensorSpec(name, DTYPES[dtype.name], shape)
