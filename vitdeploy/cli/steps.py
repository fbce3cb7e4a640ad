"""`vitdeploy export|optimize|quantize|compile|verify|bench|compare`: each step alone."""

# Annotations of options are evaluated: no future import.

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vitdeploy.api.option import Options, option
from vitdeploy.api.options import (
    Bench,
    Bisect,
    Build,
    Compare,
    Compile,
    Described,
    ExportOptions,
    Labelled,
    Optimize,
    Pinned,
    Quantize,
    Recorded,
    SourceOptions,
    There,
    Verify,
    VerifyOn,
)
from vitdeploy.api.values import Column, Line, Table, human_bytes
from vitdeploy.cli.options import (
    NOTHING_SHOWN,
    Console,
    api,
    call,
    command_line,
    command_of,
    recording,
    to_build,
    with_images,
)
from vitdeploy.errors import GateError
from vitdeploy.extensions import wing
from vitdeploy.paths import is_dir, is_file
from vitdeploy.spec import MAX_BATCH, encode

NOT_WEIGHTS = ("image_size", "task", "bind")


@command_of(ExportOptions)
def export(console: Console, options: ExportOptions) -> None:
    """Export a model to ONNX and compare it with the original at three batch sizes.

    SOURCE is a built-in architecture such as vit_base_patch16_224 (`vitdeploy export list [WORD]` lists them, or those
    with WORD in their names); timm:NAME or hf:FOLDER_OR_REPOSITORY; an .onnx file, or a folder made by this command; or
    a recipe (.yaml), whose sections source, preprocess and export apply. With only --checkpoint, the architecture is
    recognised from the weights. A built-in name without a checkpoint gets seeded random weights.

    \b
    Example:
      vitdeploy export recipes/digits.yaml -o steps/float
    """
    source, folder, batch = options.source, options.folder, options.batch
    if source[:1] == ("list",):
        _list(console, source[1:])
        return
    if len(source) > 1:
        raise click.UsageError(f"expected one model, found {len(source)}: {', '.join(source)}")
    name = source[0] if source else None
    _check_options(name or "", options)
    if folder is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    if batch is not None and batch != "dynamic" and not (batch.isdecimal() and 0 < int(batch) <= MAX_BATCH):
        raise click.BadParameter(f"expected a number from 1 to {MAX_BATCH:,}, or dynamic", param_hint="--batch")
    api("calls").check_export(name, options)
    made = api("graph").export_of(name, options, console)
    console.finish(dict(made.document), made.text, folder, command_line("vitdeploy", "optimize", folder, "-o", "DIR"))


def _check_options(name: str, options: ExportOptions) -> None:
    """Refuse options without effect: unused weights must not go unnoticed."""
    if options.function and options.heads:
        raise click.UsageError("--heads does not apply to your own module (--model)")
    if name.endswith((".yaml", ".yml")):
        return
    if name and options.function:
        raise click.UsageError(f"expected one model, found two: {name}, and --model {options.function}")
    names = [field.name for field in dataclasses.fields(SourceOptions) if field.name not in NOT_WEIGHTS]
    useless = [f"--{key.replace('_', '-')}" for key in names if getattr(options, key)]
    if (name.endswith(".onnx") or is_file(Path(name) / "model.onnx")) and useless:
        raise click.UsageError(f"an .onnx file has its own weights; leave {', '.join(useless)} out")


def _list(console: Console, patterns: Sequence[str]) -> None:
    from vitdeploy.models.catalog import entries

    if len(patterns) > 1:
        raise click.UsageError("expected one pattern, in quotes: vitdeploy export list 'swin*'")
    pattern = patterns[0] if patterns else "*"
    # A word without wildcards matches any name that contains it: `export list swin`.
    rows = list(entries(pattern if set(pattern) & set("*?[") else f"*{pattern.lower()}*"))
    columns = (
        Column("name"),
        Column("task", 90, left=True, least=14),
        Column("parameters", 60),
        Column("weights", 80, least=8),
        Column("input", 70, left=True),
    )
    cells = [
        (
            row.name,
            row.task,
            f"{row.parameters:,}",
            human_bytes(4 * row.parameters),
            f"{row.image_size[0]}x{row.image_size[1]}" if row.task != "sequence" else "tokens",
        )
        for row in rows
    ]
    lines: list[Line] = [Table(columns, tuple(cells))]
    if not rows:
        lines = [f"no built-in name matches {pattern!r}; `vitdeploy export list` shows all"]
    console.note("other sources: hf:FOLDER and timm:NAME use their libraries; an .onnx file is used unchanged")
    console.finish({"models": [dataclasses.asdict(row) for row in rows]}, lines, None)


@command_of(Optimize)
def optimize(console: Console, options: Optimize) -> None:
    """Apply exact rewrites to a float graph and compare the result with the original graph.

    GRAPH is a folder made by `vitdeploy export`, or an .onnx file from any exporter. The graph is first normalised
    (LayerNorm and GELU as single nodes, linears as MatMul and Add, shapes as constants). --merge-tokens applies after
    the comparison.

    \b
    Example:
      vitdeploy optimize steps/float -o steps/fast
    """
    made = call("optimize", options)
    then = command_line(
        *("vitdeploy", "quantize", options.folder, "--data", "DIR", "--target", "openvino-cpu", "-o", "DIR")
    )
    console.finish(dict(made.document), made.text, options.folder, then)


@command_of(Quantize, (Described, "image_size"), waits=True)
def quantize(console: Console, options: Quantize, described: Described) -> None:
    """Convert a float graph to INT8, INT4 weights, FP8 or half precision for one target, with calibration images.

    GRAPH is a folder made by `vitdeploy export`, its model.onnx, or any .onnx file of a float image model. Values that
    such a file does not contain, such as mean and std, are assumed and printed; `vitdeploy export` takes them from a
    recipe.

    --precision mixed overrides the precision of single layers, the cheapest first by a table of costs, until
    --min-agreement is expected to be met; without that option, as long as an override pays off. --sensitivity lists the
    layers that cost most accuracy.

    In plain INT8 for a CPU, layers that cost much accuracy and little time stay in float, or have their activations
    quantized by the runtime. --high-precision limits the added latency.

    --precision int4 stores the weights of linears in 4 bits: half the size of INT8. It is faster than INT8 for products
    with few rows, as in a text decoder, and slower for many rows.

    Promptable segmentation is calibrated on the prompts of --annotations, key points on the boxes of its objects, and
    all other models on the images only.

    For NVIDIA GPUs the types int8, fp8 and fp16 are written into the graph. A pass over the images finds the operations
    that must stay in float32, and the result is evaluated on the images with these types.

    \b
    Example:
      vitdeploy quantize steps/fast --data calibration/digits --target openvino-cpu -o steps/int8
    """
    made = call("quantize", with_images(options, described))
    then = command_line("vitdeploy", "compile", options.folder, "--target", options.target, "-o", "DIR")
    console.finish(dict(made.document), made.text, options.folder, then)


@command_of(Compile, (Build, "accept_known_bad"), Pinned)
def compile(console: Console, options: Compile, build: Build, pinned: Pinned) -> None:
    """Compile a graph to an engine for one target.

    GRAPH is a folder made by `vitdeploy export` or `vitdeploy quantize`, its model.onnx, or a bundle, whose float graph
    is compiled. `vitdeploy.runtime.load`, predict, verify and bench load the output.

    A graph that this release of the runtime is known to compute wrongly is refused with a fix, exit code 4.

    An INT8 engine for openvino-cpu may be faster with its token rows split. This is measured (about 40 seconds for a
    large model) unless --split-rows is given.

    With --on, a device measures its rows and compiles the engine, which is then fetched. Only that device can load a
    TensorRT engine.

    \b
    Example:
      vitdeploy compile steps/int8 --target openvino-cpu -o steps/engine
    """
    options = dataclasses.replace(options, build=to_build(options.target, build))
    graph = Path(str(options.graph))
    api("values").require_pinned(pinned.expect_digest, [graph if is_dir(graph) else graph.parent])
    from vitdeploy.runtime.backend import engine_is_code

    made, on = call("compile", options), options.on
    lines = list(made.text)
    if on is not None and engine_is_code(made.engines[0]):
        lines.append(f"only {on} can load this engine: bench and verify it with --on {on}")
    words = ("predict", options.folder, "IMAGE") if on is None else ("bench", options.folder, "--on", on)
    console.finish(dict(made.document), lines, options.folder, command_line("vitdeploy", *words))


@dataclass(frozen=True)
class Instead(Options):
    bisect: bool = option(False, "Instead, find where the error enters, and its fix.")


@command_of(
    Verify,
    *((SourceOptions, "data"), (Described, "target"), (Instead, "skip_bad"), (There, "trust")),
    *(("emulate", "skip_bad"), ("executor", "accept_known_bad"), ("jobs", "accept_known_bad")),
)
def verify(
    console: Console, options: Verify, source: SourceOptions, described: Described, instead: Instead, there: There
) -> None:
    """Compare an artifact with the original on the same images.

    The same tensor goes through both first: a difference comes from the graph. Then the same image goes through both: a
    difference comes from the preprocessing. With labels, the accuracy of both is printed, and the paired drop with its
    95 % interval. Exit code 5 if a gate is not met, or not provably met. The options on weights apply to the original.

    --bisect instead finds the part and the layer (its input or its weight) that makes the engine's answers differ from
    those of its float graph. It uses 32 calibration images (--num-samples), never evaluation images.

    --emulate evaluates a graph that `quantize` typed for a GPU, or such a graph of a bundle, on this CPU: every tensor
    is rounded to its type, sums are in float32. It finds overflow and lost answers without the GPU, but measures no
    speed.

    Many images are evaluated in shards, which are stored: the same command resumes where it stopped. With --executor,
    shards run in local processes or on the nodes of a Ray cluster, with the same results. Shards are used for
    classification, detection, instance segmentation, segmentation and depth; other tasks are evaluated in one piece.

    With --on, each device builds and runs the artifact's engine, and the original runs here.

    \b
    Example:
      vitdeploy verify steps/engine --against steps/float --data calibration/digits
    """
    if (options.executor is not None or options.jobs) and (instead.bisect or there.on is not None):
        raise click.UsageError("--executor and --jobs cannot be combined with --bisect or --on.")
    if there.on is not None and (instead.bisect or options.emulate):
        raise click.UsageError("--on runs a whole engine and cannot be combined with --bisect or --emulate.")
    api("values").require_pinned(there.expect_digest, [options.artifact])
    original = api("artifacts").Named(options.against, source.to_source())
    options = dataclasses.replace(with_images(options, described), against=original)
    if instead.bisect:
        bounds = options.max_drop, options.min_agreement, described.labels, described.annotations
        if any(bound is not None for bound in bounds):
            raise click.UsageError("--bisect has no gate: leave --max-drop, --min-agreement and labels out.")
        for flag, value in (("--trust", options.trust), ("--accept-known-bad", options.accept_known_bad)):
            if value:
                raise click.UsageError(f"--bisect compiles its own engines: leave {flag} out.")
        cause = call("bisect", options.passed_on(Bisect))
        console.finish(cause.document, cause.text, None, cause.fix)
    elif there.on is not None:
        outcomes = call("verify_on", options.passed_on(VerifyOn), there.on)
        kind = api("verify").Verification
        wing("devices.command").finish_devices(console, outcomes, kind.document, kind.lines, _unmet)
    else:
        found = call("verify", options)
        console.finish(found.document(), found.lines(), None)
        error = _unmet(found)
        if error is not None:
            raise error


def _unmet(found: Any) -> GateError | None:
    from vitdeploy.verification.gate import proves_nothing

    if found.status not in ("fail", "undecided"):
        return None
    return GateError(
        "the gate is not met" if found.status == "fail" else "the gate is not provably met",
        found="; ".join(found.reasons),
        fix=f"{NOTHING_SHOWN if proves_nothing(found.found.gate) else 'evaluate on more images'}, or raise the budget",
    )


@command_of(Bench, (SourceOptions, "target"), (There, "trust"), Recorded, waits=True)
def bench(console: Console, options: Bench, source: SourceOptions, there: There, recorded: Recorded) -> None:
    """Measure latency and throughput: one process per artifact, in alternating blocks.

    ARTIFACTS are bundles (with all their engines), graphs, or built-in PyTorch models. Each is compared with the last
    one: the ratio has a 95 % interval from paired blocks. The options on weights apply to the models.

    With --on, each device builds and measures the engines, all devices in parallel. If the connection is lost, the job
    continues and the same command fetches the result. Ctrl-C stops the job. For several devices of one kind, the spread
    is shown; a device that throttles or differs is named and excluded.

    \b
    Example:
      vitdeploy bench steps/engine steps/float --duration 2
    """
    api("values").require_pinned(there.expect_digest, options.artifacts)
    if there.on is not None and source != SourceOptions():
        raise click.UsageError("--on takes only bundles and graphs: leave the options on weights out.")
    with recording(console, recorded) as record:
        if there.on is None:
            named, original = api("artifacts").Named, source.to_source()
            artifacts = [named(artifact, original) for artifact in options.artifacts]
            found = call("bench", dataclasses.replace(options, artifacts=artifacts))
            console.finish(found.document, found.lines(), None)
            record(found)
            return
        outcomes = call("bench_on", options, there.on)
        try:
            apart = wing("devices.api").spread_of(outcomes)
            lines = api("bench").Benchmark.lines
            finish = wing("devices.command").finish_devices
            finish(console, outcomes, lambda each: encode(each.document), lines, together=apart)
        finally:
            for outcome in outcomes:
                if outcome.found is not None:
                    record(outcome.found)


@command_of(Compare, ("data", "target"), (Labelled, "target"), ("folder", "trust"), Recorded, waits=True)
def compare(console: Console, options: Compare, labelled: Labelled, recorded: Recorded) -> None:
    """Compare two bundles, or two reports: a gate against lost answers and slower engines.

    Bundles run here: engines of the same target and precision answer the images of --data and are measured in
    alternating runs. Reports (report.json) are compared by their numbers, which is weaker: they were not measured in
    alternating runs. Exit code 5 if a limit is exceeded, or not provably kept.

    \b
    Example:
      vitdeploy compare out/digits steps/engine --data calibration/digits --max-drop 1 --no-bench
    """
    if options.junit is not None and not is_dir(Path(options.junit).parent):
        raise click.BadParameter(f"the folder {Path(options.junit).parent} does not exist", param_hint="--junit")
    if options.data is not None:
        options = with_images(options, labelled)
    elif labelled != Labelled():
        raise click.UsageError("--labels and --annotations need --data.")
    with recording(console, recorded) as record:
        found = call("compare", options)
        console.finish(found.document, found.lines(), options.folder)
        record(found)
    if found.status in ("fail", "undecided"):
        raise GateError(
            "the gate is not met" if found.status == "fail" else "the gate is not provably met",
            found="; ".join(found.reasons),
            fix=f"evaluate on more images{'' if options.data else ' (--data)'}, "
            f"{'measure for longer (--duration), ' if options.bench else ''}or raise the limit",
        )
