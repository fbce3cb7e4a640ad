"""`vitdeploy bench A B ...`: latency and throughput, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.complete import complete_models, complete_targets
from vitdeploy.cli.options import (
    Console,
    Number,
    accept_option,
    expect_option,
    memory_options,
    on_option,
    output_options,
    recorded,
    source_options,
    to_source,
    trust_option,
    wait_option,
)
from vitdeploy.extensions import wing
from vitdeploy.spec import MAX_BATCH


class Scenarios(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """Names of scenarios, with commas between them."""

    name = "scenarios"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from vitdeploy.benchmark.protocol import parse_scenario

        names = tuple(str(value).split(","))
        try:
            for name in names:
                parse_scenario(name)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if len(set(names)) < len(names):
            self.fail("wanted each scenario once", param, ctx)
        return names


class Percents(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """Percentiles, with commas between them; in rising order."""

    name = "percentiles"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = sorted({float(text) for text in str(value).split(",")})
        except ValueError:
            found = []
        # Beyond 99.9999 some seven million queries are needed for the first statement.
        if not found or not all(1 <= each <= 99.9999 for each in found):
            self.fail(f"{value!r}: wanted numbers from 1 to 99.9999, such as 50,90,99,99.9", param, ctx)
        return tuple(found)


@click.command("bench")
@click.argument("artifacts", nargs=-1, required=True, shell_complete=complete_models)
@source_options()
@click.option(
    "--target",
    shell_complete=complete_targets,
    help="Which engine of a bundle, by target or name, or what a graph is compiled for.",
)
@click.option(
    "--scenario",
    "scenarios",
    type=Scenarios(),
    default="single,offline",
    show_default=True,
    help="single, offline, server:QPS (Poisson arrivals), sustain:TIME such as sustain:10m.",
)
@click.option("--batch", default="1,8", show_default=True, help="Batch of all scenarios, batch of offline.")
@click.option(
    "--duration",
    type=Number(min=0, min_open=True, max=3600),
    default=10.0,
    show_default=True,
    help="Seconds an artifact and scenario (at least 12 rounds of half a second); up to three times that while the "
    "interval of a ratio reaches further than 3 %.",
)
@click.option(
    "--warmup",
    type=Number(min=0),
    default=0.5,
    show_default=True,
    help="Least seconds of warm-up in each process; it goes on until latency is steady.",
)
@click.option("--percentiles", type=Percents(), default="50,90,99", show_default=True, help="Percentiles of latency.")
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, show_default=True, help="0: each runtime's own choice."
)
@accept_option
@on_option
@expect_option
@trust_option
@memory_options
@wait_option
@output_options
def command(
    console: Console,
    artifacts: tuple[str, ...],
    target: str | None,
    scenarios: tuple[str, ...],
    batch: str,
    duration: float,
    warmup: float,
    percentiles: tuple[float, ...],
    threads: int,
    accept_known_bad: tuple[str, ...],
    on: str | None,
    expect_digest: str | None,
    trust: Path | None,
    history: str | None,
    trackers: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure latency and throughput: one process per artifact, in alternating blocks.

    ARTIFACTS are bundles (with all their engines), graphs, or built-in PyTorch models. Each is compared with the last
    one: the ratio has a 95 % interval from paired blocks. The options on weights apply to the models.

    With --on each device builds and measures the engines itself, and all devices work at once. If the connection is
    lost, the job continues and the same command fetches the result. Ctrl-C stops the job. Of several devices of one
    kind, the spread is shown; one that throttles, or differs, is named and not counted.
    """
    sizes = batch.split(",")
    if not (1 <= len(sizes) <= 2 and all(size.isdecimal() and 0 < int(size) <= MAX_BATCH for size in sizes)):
        raise click.BadParameter(
            f"wanted one or two numbers from 1 to {MAX_BATCH:,}, such as 1,8", param_hint="--batch"
        )
    from vitdeploy.api.bench import Benchmark, bench
    from vitdeploy.api.bundle import Named
    from vitdeploy.api.values import require_pinned
    from vitdeploy.spec import encode

    require_pinned(expect_digest, artifacts)
    protocol = {
        "scenarios": scenarios,
        "batch": tuple(int(size) for size in sizes),
        "duration": duration,
        "warmup": warmup,
        "threads": threads,
    }
    how: dict[str, Any] = {
        **protocol,
        "target": target,
        "percentiles": percentiles,
        "trust": trust,
        "accept_known_bad": accept_known_bad,
        "progress": console,
    }
    if on is not None:
        if any(value not in (None, ()) for value in options.values()):
            raise click.UsageError("--on takes bundles and graphs: leave the options on weights out.")
        with recorded(history, trackers, progress=console) as record:
            fleet = wing("devices.api")
            outcomes = fleet.bench_on(on, *artifacts, **how)
            try:
                wing("devices.command").finish_devices(
                    console,
                    outcomes,
                    lambda found: encode(found.document),
                    Benchmark.lines,
                    together=fleet.spread_of(outcomes),
                )
            finally:
                for each in outcomes:
                    if each.found is not None:
                        record(each.found)
        return
    source = to_source(None, options)
    with recorded(history, trackers, progress=console) as record:
        found = bench(*(Named(name, source) for name in artifacts), **how)
        console.finish(found.document, found.lines(), None)
        record(found)
