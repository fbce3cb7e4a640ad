"""TensorRT: the placement becomes `engine.plan`, built by a process of its own.

The builder is native code that runs for minutes and may crash, hang or be killed for memory; none of that ends the
command, and our files are either complete or absent. The result is registered as this user's own (`runtime/trust.py`),
which no file inside a bundle can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitdeploy.bundle.read import file_sha256
from vitdeploy.compilation.backend import BuildOptions, CompileBackend, CompileRequest, default_batches
from vitdeploy.compilation.child import run_child
from vitdeploy.compilation.probe_nvidia import findings, probe
from vitdeploy.errors import CapabilityError, DigestError, TargetError
from vitdeploy.runtime import cuda
from vitdeploy.runtime import tensorrt as tensorrt_api
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.runtime.profiles import Batches, Profile, plan_profiles
from vitdeploy.runtime.tensorrt import HARDWARE, VERSIONS
from vitdeploy.runtime.trust import private_folder, register
from vitdeploy.spec import EngineSpec, Precision, TensorSpec, decode, encode

PLAN_FILE, LAYERS_FILE = "engine.plan", "layers.json"
# Timings of kernels, which make the next build faster.
TIMINGS = "tensorrt-timings"
BUILDER = module_argv("vitdeploy.compilation.tensorrt_build")


@dataclass(frozen=True)
class BuildRequest:
    """The input of the build process: paths, the batch to check the engine at, and the options."""

    graph: str
    out: str
    cache: str
    batch: int
    options: BuildOptions


@dataclass(frozen=True)
class BuildResult:
    """The answer of the build process. `kernels` counts linears and convolutions by the precision they run in."""

    sha256: str
    device: dict[str, str]
    provider: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dynamic_batch: bool
    kernels: dict[str, int]


def compile_graph(request: CompileRequest) -> EngineSpec:
    """The engine of a placement: `engine.plan` next to it, and `layers.json`, what TensorRT made of its layers.

    Raises:
        MissingPackageError, CapabilityError: no TensorRT, cuda-python, driver or GPU here.
        EngineError: TensorRT rejects the graph (the error names the nodes), or fails to build it.
        DeviceMemoryError: too little memory on the GPU, even with a smaller workspace.
        UnsafeError: others could write the folder of timings, which TensorRT parses.
        WorkerError: the building process died.
        TargetError: a dynamic axis without a range, or no profile that holds `batch`.
    """
    graph, batch, options = request.graph, request.batch, request.build or BuildOptions()
    if not options.batches:
        options = replace(options, batches=default_batches(batch))
    _check_batch(batch, options.batches)
    tensorrt_api.require()
    cuda.describe_device()
    job = BuildRequest(
        str(graph.absolute()),
        str(graph.parent.absolute()),
        str(private_folder(TIMINGS)),
        batch,
        options,
    )
    result = decode(BuildResult, run_child(BUILDER, encode(job), "the TensorRT build", request.progress))
    plan = graph.parent / PLAN_FILE
    if file_sha256(plan) != result.sha256:
        raise DigestError(f"{plan} is not what was built", fix="build it again")
    register(result.sha256, {"built_as": f"{graph.parent.name}/{PLAN_FILE}", **result.device})
    return request.engine(
        {**result.device, HARDWARE: options.hardware, VERSIONS: options.versions},
        files=(PLAN_FILE, LAYERS_FILE),
        dynamic_batch=result.dynamic_batch,
        provider=result.provider,
        inputs=result.inputs,
        outputs=result.outputs,
        kernels=result.kernels,
    )


def _check_batch(batch: int, profiles: Sequence[Batches]) -> None:
    """Refuse, before the build, a batch that the finished engine would fail on."""
    if not any(smallest <= batch <= largest for smallest, _, largest in profiles):
        raise TargetError(
            f"the engine would not run at the batch {batch} that it is compiled at",
            found="profiles of " + ", ".join(f"{smallest} to {largest}" for smallest, _, largest in profiles),
            wanted=f"one that holds {batch}",
            fix="give a --batch within a profile, or another profile",
        )


def profiles(inputs: Sequence[TensorSpec], build: BuildOptions | None, batch: int) -> Sequence[Profile]:
    """The optimisation profiles of an engine; errors as `plan_profiles`."""
    options = build or BuildOptions()
    return plan_profiles(inputs, options.batches or default_batches(batch), options.sizes)


def check_typed(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """Check the precisions of an engine. TensorRT computes in the graph's types, some of which may be wider than
    requested.

    The engine must have as many INT8 and FP8 layers as were placed. A layer that the engine does not name is recorded
    as "unknown" and is no reason to refuse.
    """
    quantized = asked in ("int8", "fp8")
    ran = engine.kernels.get(asked, 0)
    unknown = engine.kernels.get("unknown", 0)
    if ran + unknown < (max(1, placed) if quantized else 1):
        raise CapabilityError(
            f"tensorrt did not run the graph in {asked}",
            found=f"{ran} layers in {asked}, {unknown} that the engine does not name: {engine.kernels}",
            wanted=f"at least {max(1, placed) if quantized else 1} in {asked}",
            fix="layers.json beside the plan lists every layer; `vitdeploy inspect GRAPH --target tensorrt` the rules",
        )


BACKEND = CompileBackend(
    compile_graph, probe, examine=findings, check_ran=check_typed, files=(PLAN_FILE, LAYERS_FILE), profiles=profiles
)
