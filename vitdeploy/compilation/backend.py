"""The interface of a back end for `compile`, the table of back ends, and shared checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitdeploy.backends import BackendTable
from vitdeploy.errors import CapabilityError
from vitdeploy.progress import Progress
from vitdeploy.spec import EngineSpec, FloatRest, Precision, TensorSpec

if TYPE_CHECKING:
    from vitdeploy.runtime.profiles import Profile

# As in `runtime.profiles`, which needs numpy; the agent must work without it.
Batches = tuple[int, int, int]

# --- The user's options for building an engine with TensorRT ----------------------------------------------------------


# The batch sizes 1 to this that an engine with a dynamic batch supports in addition to the compiled one.
FURTHER_BATCHES = 8


@dataclass(frozen=True)
class BuildOptions:
    """Options of the TensorRT builder.

    `batches`: (smallest, best, largest) of each profile of a graph with a dynamic batch; without any, one profile for
    the compiled batch only, with kernels chosen for it, and one for every batch up to the larger of it and 8. `sizes`:
    the image sizes (height, width) of a graph in which these are dynamic. `workspace`: bytes of device memory for the
    kernels' scratch space, None for all free memory. `level`: builder optimisation level, 0 to 5; TensorRT's default
    is 3. `hardware`: the GPUs that the plan may run on. `versions`: "newer" also allows later TensorRT versions.
    """

    batches: tuple[Batches, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    workspace: int | None = None
    level: int = 3
    hardware: Literal["this", "same-compute-capability", "ampere+"] = "this"
    versions: Literal["this", "newer"] = "this"


def default_batches(batch: int, further: int = FURTHER_BATCHES) -> tuple[Batches, ...]:
    """One profile for this batch only, and one for all batches up to the larger of it and `further`."""
    largest = max(batch, further)
    return (batch, batch, batch), (1, largest, largest)


# --- The interface of a back end: requests, findings and states -------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One requirement of a target. `detail`: its version, or what is missing; `fix`: how to install it, "" if another
    requirement must be fixed first."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """A target's requirements as text: one line per finding, and each fix below the first finding that needs it."""
    lines, shown = [], set()
    for finding in findings:
        lines.append(f"{'ok' if finding.ok else 'missing':<7}  {finding.name:<32} {finding.detail}")
        if finding.fix and finding.fix not in shown:
            lines.append(f"         fix: {finding.fix}")
        shown.add(finding.fix)
    return lines


@dataclass(frozen=True)
class CompileRequest:
    """A placement (an ONNX file, alone in its folder except for its weights) and the engine to build next to it.
    `batch`: the batch to compile at; `progress`: called with the steps of a long build (text, done, total).
    `float_rest`: the precision of an INT8 engine's float operators, if the CPU supports it."""

    graph: Path
    target: str
    precision: Precision
    batch: int
    build: BuildOptions | None
    progress: Progress
    float_rest: FloatRest = "fp32"

    def engine(self, device: Mapping[str, str], **facts: Any) -> EngineSpec:
        """The engine of this request. `device`: facts about the device besides those about this machine."""
        from vitdeploy.runtime.host import describe_host  # needs numpy

        facts = {"batch": self.batch, "graph": self.graph.name, **facts}
        return EngineSpec(target=self.target, precision=self.precision, device={**describe_host(), **device}, **facts)


@dataclass(frozen=True)
class TargetState:
    """Whether a target works on this machine. `precisions`: those that it supports; `fix`: "" if the machine lacks the
    device."""

    works: bool
    version: str | None
    precisions: tuple[str, ...]
    detail: str
    fix: str


# Fixes for layers that did not run as placed, by their precision.
LACKING = {
    "int8": "run `vitdeploy doctor`: the CPU may lack INT8 instructions",
    "int4": "keep layers in float with --ignore LAYER (in a recipe `ignore: [LAYER]`), or choose int8: the runtime has "
    "no INT4 kernel for such layers or for this CPU",
}


def check_placed(engine: EngineSpec, precision: Precision, placed: int) -> None:
    """Check that every linear and convolution ran in its assigned precision, without a silent fallback.

    Args:
        engine: an engine whose `kernels` are known.
        precision: the requested precision.
        placed: the number of linears and convolutions in INT8, or in INT4, in the placement.

    Raises:
        CapabilityError: one of them ran in another precision.
    """
    integer = precision in ("int8", "mixed", "int4")
    kind = "int4" if precision == "int4" else "int8"
    ran, name = engine.kernels.get(kind, 0), kind.upper()
    if integer and (ran < placed or (precision != "mixed" and not placed)):
        raise CapabilityError(
            f"{engine.target} did not run the graph in {name}",
            found=f"{ran} of {placed} placed layers in {name} kernels: {engine.kernels}",
            expected=f"{placed} layers in {name}" if placed else f"at least one layer in {name}",
            fix=LACKING[kind] if placed else f"choose fp32 for {engine.target}: the placement has no {name} layers",
        )
    if not integer:
        others = {kind: count for kind, count in engine.kernels.items() if kind != precision}
        if others or not engine.kernels:
            raise CapabilityError(
                f"{engine.target} did not run the graph in {precision}",
                found=str(engine.kernels),
                expected=f"all linears and convolutions in {precision}",
            )


@dataclass(frozen=True)
class CompileBackend:
    """The compile functions of a back end.

    compile_graph: writes the engine's files next to the placement, runs the engine once and returns it; raises
        CapabilityError, EngineError, MissingPackageError.
    probe: loads a target's runtime to check whether the target works here; may raise any exception.
    examine: returns all requirements of a target, in the order in which to fix them; None if `probe` covers them.
    check_ran: raises CapabilityError if an engine did not run as placed.
    require_precision: raises CapabilityError if the runtime does not support a precision on this machine.
    files: the files that it writes in addition to the graph and its weights, relative to the engine's folder.
    profiles: returns the shapes that an engine is built for, from its inputs, the options and the batch; None if the
        back end takes no build options.
    splits_rows: whether its INT8 linears may be faster with their rows in parts, and it does not load the placement
        itself.
    half_rest: whether its INT8 engines may be faster on this CPU with their float operators in bf16.
    """

    compile_graph: Callable[[CompileRequest], EngineSpec]
    probe: Callable[[str], TargetState]
    examine: Callable[[str], list[Finding]] | None = None
    check_ran: Callable[[EngineSpec, Precision, int], None] = check_placed
    require_precision: Callable[[str], None] = lambda precision: None
    files: tuple[str, ...] = ()
    profiles: Callable[[Sequence[TensorSpec], BuildOptions | None, int], Sequence[Profile]] | None = None
    splits_rows: bool = False
    half_rest: Callable[[], bool] = lambda: False


COMPILE = BackendTable(
    "compilation",
    CompileBackend,
    {
        "onnxruntime": "vitdeploy.compilation.onnxruntime:BACKEND",
        "onnxruntime-gpu": "vitdeploy.compilation.onnxruntime_gpu:BACKEND",
        "openvino": "vitdeploy.compilation.openvino:BACKEND",
        "openvino-device": "vitdeploy.compilation.openvino:DEVICE_BACKEND",
        "tensorrt": "vitdeploy.compilation.tensorrt:BACKEND",
    },
)
