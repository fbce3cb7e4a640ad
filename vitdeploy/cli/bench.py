"""`vitdeploy bench A B ...`: latency and throughput, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.console import Console, Number, interval, output_options
from vitdeploy.cli.sources import source_options, to_source
from vitdeploy.cli.trust import trust_option


@click.command("bench")
@click.argument("artifacts", nargs=-1, required=True)
@source_options()
@click.option("--target", help="Which engine of a bundle, or what a graph is compiled for.")
@click.option("--batch", default="1,8", show_default=True, help="Batch of the single stream, batch of offline.")
@click.option(
    "--duration",
    type=Number(min=0, min_open=True, max=3600),
    default=10.0,
    show_default=True,
    help="Seconds an artifact and scenario (at least 12 rounds of half a second).",
)
@click.option(
    "--warmup",
    type=Number(min=0),
    default=1.0,
    show_default=True,
    help="Least seconds of warm-up; it goes on until latency is steady.",
)
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, show_default=True, help="0: each runtime's own choice."
)
@trust_option
@output_options
def command(
    console: Console,
    artifacts: tuple[str, ...],
    target: str | None,
    batch: str,
    duration: float,
    warmup: float,
    threads: int,
    trust: Path | None,
    **options: Any,
) -> None:
    """Latency and throughput, one process an artifact, in alternating blocks.

    ARTIFACTS are bundles (all their engines), graphs, or built-in PyTorch models. Each is compared with the last one
    named: the ratio has a 95 % interval from the paired blocks. The options on weights are for the models among them.
    """
    from vitdeploy.bench.contest import Protocol
    from vitdeploy.pipeline.comparison import bench_subjects
    from vitdeploy.pipeline.subjects import opened

    sizes = batch.split(",")
    if not (1 <= len(sizes) <= 2 and all(size.isdecimal() and int(size) > 0 for size in sizes)):
        raise click.BadParameter("wanted one or two numbers above 0, such as 1,8", param_hint="--batch")
    protocol = Protocol(batch=tuple(int(size) for size in sizes), duration=duration, warmup=warmup, threads=threads)
    with console, opened(target=target, source=to_source(None, options), trust=trust) as find:
        found = bench_subjects([subject for name in artifacts for subject in find(name)], protocol, console.progress)
    width = max(len(row["artifact"]) for row in found["results"]) + 2
    lines = [f"{'artifact':<{width}}{'p50 ms':>9}{'p90 ms':>9}{'p99 ms':>9}{'mean ms':>9}{'images/s':>10}  flags"]
    for row in found["results"]:
        latency = "".join(f"{row['latency_ms'][key]:>9.3f}" for key in ("p50", "p90", "p99", "mean"))
        lines.append(
            f"{row['artifact']:<{width}}{latency}{row['throughput']:>10.1f}  {' '.join(row['flags'])}".rstrip()
        )
    lines += [
        f"{ratio['metric']} {ratio['a']} / {ratio['b']}: {interval(ratio['ratio'], ratio['ci95'], 3)}"
        for ratio in found["ratios"]
    ]
    lines += found["remarks"]
    console.finish(found, lines, None)
