"""`vitdeploy serve BUNDLE`: the bundle's engine behind HTTP, on this machine."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.cli.options import Console, Number, engine_option, expect_option, output_options, trust_option

if TYPE_CHECKING:
    from vitdeploy.serve.engines import Engines

MODULES = {"starlette", "uvicorn", "prometheus_client", "python_multipart", "httptools", "anyio"}

# What a request has besides an image, by task.
ASKED = {"promptable-segmentation": """-F 'prompts=[{"points": [[X, Y]]}]' """}

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command("serve")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 is the network.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@engine_option
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Of the engine; 0 leaves it to the runtime.")
@click.option("--max-batch", type=click.IntRange(1, 1024), default=8, show_default=True, help="Images run together.")
@click.option(
    "--max-delay-ms",
    type=Number(0, 10_000),
    default=0.0,
    show_default=True,
    help="How long an image waits for others while the engine is free.",
)
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=256, show_default=True, help="Requests at once; more get 429."
)
@click.option(
    "--max-body", type=Number(0.001, 256), default=16.0, show_default=True, help="MiB of a request; more get 413."
)
@click.option(
    "--max-kept",
    type=Number(0, 1 << 20),
    default=256.0,
    show_default=True,
    help="MiB of embedded images that are kept for further prompts, of promptable segmentation.",
)
@click.option(
    "--keep-alive",
    type=click.IntRange(1, 86_400),
    default=75,
    show_default=True,
    help="Seconds that a connection may be idle: more than the load balancer in front keeps its own.",
)
@click.option(
    "--monitor", is_flag=True, help="Watch images, answers and golden answers: metrics, and a line in the log."
)
@click.option(
    "--monitor-window",
    type=click.IntRange(8, 1_000_000),
    default=256,
    show_default=True,
    help="Images that are looked at before it is judged whether they are like those of the calibration.",
)
@click.option(
    "--monitor-every",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Runs from one golden input on.",
)
@expect_option
@trust_option
@output_options
def command(
    console: Console,
    bundle: Path,
    host: str,
    port: int,
    target: str,
    threads: int,
    max_batch: int,
    max_delay_ms: float,
    max_queue: int,
    max_body: float,
    max_kept: float,
    keep_alive: int,
    monitor: bool,
    monitor_window: int,
    monitor_every: int,
    expect_digest: str | None,
    trust: Path | None,
) -> None:
    """Answer HTTP requests with a bundle: the Open Inference Protocol v2, and images at /predict.

    Ctrl+C or SIGTERM stops the server; it answers the requests that it has accepted first.
    """
    from vitdeploy.errors import MissingPackageError
    from vitdeploy.runtime.monitor import Monitor

    try:
        from vitdeploy.serve.app import Service
        from vitdeploy.serve.engines import load_engines
        from vitdeploy.serve.server import address_of, bind, run
        from vitdeploy.serve.settings import MIB, ServerSettings, log_event, log_to_stderr
    except ModuleNotFoundError as error:
        if (name := (error.name or "").partition(".")[0]) in MODULES:
            raise MissingPackageError(name, "serve", "the server") from None
        raise
    sizes = {"max_body": int(max_body * MIB), "kept": int(max_kept * MIB)}
    settings = ServerSettings(max_batch, max_delay_ms / 1e3, max_queue, **sizes, keep_alive=keep_alive)
    with bind(host, port) as taken:
        console.progress("loading and measuring the engine", 0, 1)
        with warnings.catch_warnings(record=True) as heard:
            engines = load_engines(
                bundle,
                target,
                max_batch=max_batch,
                threads=threads,
                trust=trust,
                expect_digest=expect_digest,
                monitor=Monitor(monitor_window, every=monitor_every, on_event=log_event) if monitor else None,
            )
        warned = sorted({str(each.message) for each in heard})
        if host not in LOOPBACK:
            warned.append("everybody who reaches this address may use it: neither TLS nor passwords here")
        with engines:
            _announce(console, engines, address_of(taken), warned)
            log_to_stderr(console.quiet)
            run(Service(engines, settings), taken)


def _announce(console: Console, engines: Engines, address: str, warned: list[str]) -> None:
    predictor = engines.predictor
    if console.as_json:
        document = {
            "address": address,
            "model": engines.model.name,
            "engine": predictor.target,
            "why": predictor.why,
            "batches": engines.describe(),
            "max_batch": engines.model.max_batch,
            "watched": list(predictor.monitor.watched) if predictor.monitor is not None else [],
            "warnings": warned,
        }
        click.echo(json.dumps(document, indent=1))
    lines = [f"{engines.model.name} at {address}", predictor.why, engines.describe()]
    if predictor.monitor is not None:
        lines.append(f"watched: {', '.join(predictor.monitor.watched)}")
    for line in [*lines, *(f"warning: {text}" for text in warned)]:
        click.echo(line, err=console.as_json)
    asked = ASKED.get(predictor.task, "")
    console.note(f"next: curl -F file=@IMAGE {asked}{address}/predict    (Ctrl+C stops)")
