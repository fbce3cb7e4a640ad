"""Compile the placement of a target to its engine."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import COMPILE, BuildOptions
from vitdeploy.compilation.engine import compile_engine, joined, within
from vitdeploy.errors import CapabilityError, TargetError
from vitdeploy.graph.analysis.rows import count_int4, count_int8, find_linears, unplaced_weights
from vitdeploy.graph.io.files import fixed_batch, get_metadata, graph_spec, load_graph
from vitdeploy.known_bad import entries, find
from vitdeploy.known_bad.platform import platform_here
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement import QUANTIZE
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.spec import EngineSpec, FloatRest, GraphSpec, Task, encode
from vitdeploy.stages import place, rows, step


def check_task(task: Task, target: str, precision: str) -> None:
    """Raise if a target does not run models of this task in that precision.

    Raises:
        CapabilityError: a model with several graphs, and a target with types in the graph or mixed precision.
    """
    flow = flow_of(task)
    if flow is None:
        return
    if TARGETS[target].typed:
        others = [name for name, row in TARGETS.items() if not row.typed]
        raise CapabilityError(
            f"{target} does not support models with several graphs",
            found=f"the task {task}, with the graphs {' and '.join(flow.parts)}",
            expected=" or ".join(others),
            fix=f"choose the target {others[0]}",
        )
    if precision == "mixed":
        raise CapabilityError(
            "mixed precision does not support models with several graphs",
            found=f"precision mixed, for the task {task}",
            expected="precision fp32 or int8",
            fix="set precision to int8; float_parts keeps whole graphs in float",
        )


@dataclass(frozen=True)
class CompileOptions:
    """Options of a compilation.

    `build`: options of the TensorRT builder. `accepted`: known-bad entries that do not prevent the compilation.
    `row_parts`: the parts in which the engine computes the rows of its tokens; graph.onnx stays the placement.
    `float_rest`: the precision of an INT8 engine's float operators. The last two apply to models with one graph."""

    build: BuildOptions | None = None
    accepted: Sequence[str] = ()
    row_parts: Sequence[int] | None = None
    float_rest: FloatRest = "fp32"


PLAIN = CompileOptions()


def compile_graphs(
    folder: Path,
    target: str,
    batch: int,
    out: Path,
    progress: Progress = silent,
    options: CompileOptions = PLAIN,
) -> EngineSpec:
    """Write the engine of the graph or graphs in `folder`, and engine.json; errors as in `compile_graph`."""
    graphs = step.graphs_in(folder)
    if list(graphs) == ["model"]:
        return compile_graph(graphs["model"], target, batch, out, progress, options)
    parts = []
    for name, file in graphs.items():
        (out / name).mkdir()
        of_part = CompileOptions(options.build, options.accepted)
        parts.append((compile_graph(file, target, batch, out / name, progress, of_part), name))
    first = next(iter(graphs.values()))
    sequence = get_metadata(load_graph(first), str(first)).sequence
    engine = joined([within(part, name) for part, name in parts], sequence)
    engine = replace(engine, accepted=tuple(dict.fromkeys(each for p, _ in parts for each in p.accepted or ())) or None)
    step.write_json(out / "engine.json", encode(engine))
    return engine


def compile_graph(
    graph: Path,
    target: str,
    batch: int,
    out: Path,
    progress: Progress = silent,
    options: CompileOptions = PLAIN,
) -> EngineSpec:
    """Write graph.onnx, the engine's files and engine.json. The precision comes from the graph's metadata.

    If a placement for INT8 or INT4 leaves every layer in float, the engine's kernels must all be float.

    Raises:
        KnownBadError: the installed release of the runtime is known to compute such a graph wrongly.
    """
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.target not in (None, target):
        raise TargetError(
            f"{graph} was quantized for another target",
            found=str(metadata.target),
            expected=target,
            fix=f"vitdeploy quantize FLOAT_GRAPH --data IMAGES --target {target} -o DIR, or --target {metadata.target}",
        )
    spec = graph_spec(model, step.MODEL_FILE)
    check_batch(graph, spec, batch)
    shapes, refuse = COMPILE[target].profiles, QUANTIZE[target].refuse
    if shapes is not None and refuse is not None:
        refuse(model, shapes(spec.inputs, options.build, batch), str(graph))
    precision = metadata.precision or "fp32"
    placed = (count_int4 if precision == "int4" else count_int8)(model)
    platform = platform_here(target, precision)
    taken = find.refuse_known_bad(
        find.matches_on(model, platform), platform, f"{metadata.name} ({graph.name})", options.accepted
    )
    compiling = functools.partial(
        compile_engine,
        target=target,
        precision="fp32" if precision in ("int8", "int4") and not placed else precision,
        batch=batch,
        bare=not (placed or find_linears(model) or unplaced_weights(model)),
        build=options.build,
        progress=progress,
        float_rest=options.float_rest,
    )
    if options.row_parts is None:
        engine = compiling(graph, out, placed=placed)
    else:
        parts = tuple(options.row_parts)
        engine = replace(rows.compile_in_parts(graph, parts, out, compiling), row_parts=parts)
    engine = replace(engine, precision=precision, weight_bits=metadata.weight_bits, accepted=taken or None)
    step.write_json(out / "engine.json", encode(engine))
    return engine


def check_batch(graph: Path, spec: GraphSpec, batch: int) -> None:
    """Raise TargetError if a graph cannot be compiled at `batch`."""
    fixed = fixed_batch(spec)
    if fixed is not None and fixed != batch:
        raise TargetError(
            f"{graph} has a fixed batch size of {fixed}",
            found=f"--batch {batch}",
            expected=f"batch {fixed}",
            fix="export with a dynamic batch",
        )


def compile_step(
    candidate: step.Candidate,
    batch: int,
    build: BuildOptions,
    accepted: Sequence[str] = (),
    row_parts: Sequence[int] | Literal["chosen"] | None = None,
    rest: FloatRest | Literal["chosen"] = "fp32",
) -> step.Step:
    """The step that compiles a candidate's engine at `batch`. `build`: options of the TensorRT builder; other back ends
    ignore it. `row_parts`: parts of rows, or "chosen" for the result of the plan's search; `rest`: the precision of an
    INT8 engine's float operators, likewise.

    The known-bad entries of the back end are part of the key, so that an entry also applies to engines that were
    compiled before it was added.
    """
    shaped = build if COMPILE[candidate.target].profiles is not None else None
    asked = place.rest_of(candidate, rest)

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        progress(candidate.step("compile"), 0, 1)
        parts = (
            rows.PARTS_SEARCH.read(folders[candidate.step("parts")].path).parts if row_parts == "chosen" else row_parts
        )
        placed = folders[candidate.step("place")].path
        options = CompileOptions(shaped, accepted, parts, asked.of(folders))
        compile_graphs(placed, candidate.target, batch, out, progress, options)
        progress(candidate.step("compile"), 1, 1)

    return step.Step(
        candidate.step("compile"),
        "compile",
        write,
        {
            "target": candidate.target,
            "batch": batch,
            "known_bad": entries.digest_of(TARGETS[candidate.target].package),
            **({"build": encode(shaped)} if shaped else {}),
            **({"accepted": sorted(accepted)} if accepted else {}),
            **({"row_parts": list(row_parts)} if row_parts and row_parts != "chosen" else {}),
            **asked.config,
        },
        (candidate.step("place"), *((candidate.step("parts"),) if row_parts == "chosen" else ()), *asked.inputs),
        packages=step.target_tools(candidate.target),
        usable=step.may_load,
    )
