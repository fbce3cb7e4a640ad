"""What a back end provides for `compile`: the table of back ends, and what most of them share."""

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

# As of `runtime.profiles`, which needs numpy: the agent says the state of a job without.
Batches = tuple[int, int, int]

# --- The user's options for building an engine with TensorRT ----------------------------------------------------------


# Batches that an engine with a dynamic batch supports in addition to the one that it is built for.
FURTHER_BATCHES = 8


@dataclass(frozen=True)
class BuildOptions:
    """How TensorRT builds.

    `batches`: (smallest, best, largest) of each profile of a graph with a dynamic batch; none: one profile for only
    the compiled batch, with kernels chosen for it alone, and one for every batch up to the larger of it and 8. `sizes`:
    the image sizes (height, width) of a graph in which these are dynamic. `workspace`: bytes of device memory for
    kernels' scratch, None for all free memory. `level`: builder optimisation level, 0 to 5; TensorRT's
    default is 3. `hardware`: the GPUs that the plan may run on. `versions`: "newer" also allows later TensorRTs.
    """

    batches: tuple[Batches, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    workspace: int | None = None
    level: int = 3
    hardware: Literal["this", "same-compute-capability", "ampere+"] = "this"
    versions: Literal["this", "newer"] = "this"


def default_batches(batch: int, further: int = FURTHER_BATCHES) -> tuple[Batches, ...]:
    """One profile for only this batch, and one for all batches up to the larger of it and `further`."""
    largest = max(batch, further)
    return (batch, batch, batch), (1, largest, largest)


# --- A back end: what it is asked, and what it says of this machine ---------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """`detail` says what is here or missing; `fix` how to get what is missing, "" if something else must be fixed
    first."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def finding_lines(found: Sequence[Finding]) -> list[str]:
    """A target's requirements for people: one line per finding, and the fix below the first one that needs it."""
    lines, said = [], set()
    for each in found:
        lines.append(f"{'ok' if each.ok else 'missing':<7}  {each.name:<32} {each.detail}")
        if each.fix and each.fix not in said:
            lines.append(f"         fix: {each.fix}")
        said.add(each.fix)
    return lines


@dataclass(frozen=True)
class CompileRequest:
    """A placement (an ONNX file, alone in its folder except for its weights) and what to build next to it. `batch` is
    the batch to compile at; `progress` is called with the steps of a long build: (what, done, total). `float_rest`:
    what an INT8 engine computes its float operators in, where the CPU has it."""

    graph: Path
    target: str
    precision: Precision
    batch: int
    build: BuildOptions | None
    progress: Progress
    float_rest: FloatRest = "fp32"

    def engine(self, device: Mapping[str, str], **facts: Any) -> EngineSpec:
        """The engine that this asked for, with what is known of `device` besides this machine."""
        from vitdeploy.runtime.host import describe_host  # needs numpy

        facts = {"batch": self.batch, "graph": self.graph.name, **facts}
        return EngineSpec(target=self.target, precision=self.precision, device={**describe_host(), **device}, **facts)


@dataclass(frozen=True)
class TargetState:
    """Whether a target works on this machine. `precisions` are those that it runs; `fix` is "" if the
    machine lacks the device."""

    works: bool
    version: str | None
    precisions: tuple[str, ...]
    detail: str
    fix: str


# What may be wrong where a layer did not run as placed, by its precision.
LACKING = {
    "int8": "run `vitdeploy doctor`; the CPU may lack INT8 instructions",
    "int4": "the runtime has no INT4 kernel for such layers or this CPU: leave layers in float with --ignore LAYER, or "
    "`ignore: [LAYER]` in a recipe, or choose int8",
}


def check_placed(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """Check that there was no silent fallback: every linear and convolution ran in its assigned precision.

    Args:
        engine: its `kernels` say what ran.
        asked: the requested precision.
        placed: how many linears and convolutions the placement has in INT8, or in INT4.

    Raises:
        CapabilityError: one did not.
    """
    integer = asked in ("int8", "mixed", "int4")
    kind = "int4" if asked == "int4" else "int8"
    ran, name = engine.kernels.get(kind, 0), kind.upper()
    if integer and (ran < placed or (asked != "mixed" and not placed)):
        raise CapabilityError(
            f"{engine.target} did not run the graph in {name}",
            found=f"{ran} of {placed} placed layers in {name} kernels: {engine.kernels}",
            expected=f"{placed} in {name}" if placed else f"a layer in {name}",
            fix=LACKING[kind]
            if placed
            else f"choose fp32 for {engine.target}: the placement leaves every layer in float",
        )
    if not integer:
        others = {kind: count for kind, count in engine.kernels.items() if kind != asked}
        if others or not engine.kernels:
            raise CapabilityError(
                f"{engine.target} did not run the graph in {asked}",
                found=str(engine.kernels),
                expected=f"all linears and convolutions in {asked}",
            )


@dataclass(frozen=True)
class CompileBackend:
    """How a back end makes an engine.

    compile_graph: writes the engine's files next to the placement, runs it once and returns what ran; raises
        CapabilityError, EngineError, MissingPackageError.
    probe: loads a target's runtime to check whether the target works here; may raise anything.
    examine: everything that a target needs, in the order in which to fix it; None if `probe` says everything.
    check_ran: raises CapabilityError if an engine did not run as placed.
    require_precision: raises CapabilityError if the runtime does not support a precision on this machine.
    files: what it writes in addition to the graph and its weights, relative to the engine's folder.
    profiles: the shapes that an engine is built for, from its inputs, the options and the batch; None if a back end
        takes no build options.
    splits_rows: whether its INT8 linears may be faster with their rows in parts, and what it loads is not the placement
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
