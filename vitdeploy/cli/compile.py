"""`vitdeploy compile DIR_OR_ONNX --target T -o DIR`: an engine for one target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.build_options import build_options, to_build
from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.console import Console, command_line, output_options
from vitdeploy.cli.on import on_option

if TYPE_CHECKING:
    from vitdeploy.compile.tensorrt import BuildOptions
    from vitdeploy.spec import Manifest


@click.command("compile")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option(
    "--target",
    shell_complete=complete_targets,
    required=True,
    help="As `vitdeploy doctor` lists them: openvino-cpu, tensorrt ...",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the engine.")
@click.option("--batch", type=click.IntRange(min=1), help="The batch to compile at. Default: the graph's own, or 1.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="For a float graph. Default: fp32, or what the graph was placed for.",
)
@build_options
@on_option
@output_options
def command(
    console: Console,
    graph: Path,
    target: str,
    output: Path,
    batch: int | None,
    precision: str | None,
    on: str | None,
    **options: Any,
) -> None:
    """Compile a graph to an engine for one target.

    GRAPH is a folder made by `vitdeploy export` or `vitdeploy quantize`, or its model.onnx. `vitdeploy.runtime.load`,
    predict, verify and bench load the output.

    With --on a device compiles the engine, and it is fetched. Only that device can load what TensorRT built.
    """
    from vitdeploy.pipeline.available import require_target
    from vitdeploy.publish import check_replaceable, replacing
    from vitdeploy.stages.capability import check_precision
    from vitdeploy.stages.files import OUTPUT_NAMES, find_graph

    build = to_build(target, options)
    if on is None:
        require_target(target, precision or "fp32")
    else:
        check_precision(target, precision or "fp32")
    file = find_graph(graph)
    check_replaceable(output, OUTPUT_NAMES)

    from vitdeploy.workflows.subjects import compile_bundle

    with console, replacing(output, OUTPUT_NAMES) as work:
        console.progress(f"compile for {target}", 0, 1)
        if on is None:
            manifest = compile_bundle(file, target, batch, precision, work, console.progress, build)
        else:
            manifest = _compile_on(console, on, file, target, batch, precision, work, build)
        console.progress(f"compile for {target}", 1, 1)
    engine = manifest.engines[0]
    kernels = ", ".join(f"{count} in {kind}" for kind, count in engine.kernels.items())
    kernels = kernels or "as the graph is typed (this provider does not show its kernels)"
    lines = [f"{engine.artifact} on {engine.provider}, batch {engine.batch}: linears and convolutions {kernels}"]
    if on is not None and target == "tensorrt":
        lines.append(f"its plan can be loaded on {on} only: bench and verify it with --on {on}")
    document = {
        "artifact": engine.artifact,
        "target": engine.target,
        "precision": engine.precision,
        "provider": engine.provider,
        "batch": engine.batch,
        "kernels": engine.kernels,
        "path": str(output),
    }
    words = ("predict", output, "IMAGE") if on is None else ("bench", output, "--on", on)
    console.finish(document, lines, output, command_line("vitdeploy", *words))


def _compile_on(
    console: Console,
    on: str,
    file: Path,
    target: str,
    batch: int | None,
    precision: str | None,
    out: Path,
    build: BuildOptions | None,
) -> Manifest:
    import tempfile

    from vitdeploy.devices.registry import find_devices
    from vitdeploy.errors import UnknownDeviceError
    from vitdeploy.workflows.on_devices import compile_on
    from vitdeploy.workflows.placement import bundle_of, place_graphs

    devices = find_devices(on)
    if len(devices) != 1:
        raise UnknownDeviceError(
            "one engine is made by one device", found=", ".join(d.name for d in devices), wanted="--on with one name"
        )
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        placed, made = Path(folder) / "placed", Path(folder) / "engine"
        placed.mkdir()
        made.mkdir()
        graphs = place_graphs(file, target, precision, placed)
        engine = compile_on(
            str(file), graphs, batch, devices[0], made, build=build, progress=console.progress, note=console.note
        )
        return bundle_of(graphs, engine, made, out)
