"""`vitdeploy serve BUNDLE`: serve the bundle's engine over HTTP, on this machine."""

# Annotations of options are evaluated: no future import.

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.api.option import Options, advanced, option, required
from vitdeploy.api.options import (
    EXPECT_DIGEST,
    FIRST_ENGINE,
    TRUST,
)
from vitdeploy.cli.options import Console, command_of
from vitdeploy.errors import MissingPackageError
from vitdeploy.runtime.tasks.registry import TASKS

if TYPE_CHECKING:
    from vitdeploy.serve.engines import Engines

MODULES = {"starlette", "uvicorn", "prometheus_client", "python_multipart", "httptools", "anyio"}

PROMPTS = """-F 'prompts=[{"points": [[X, Y]]}]' """

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Serve(Options):
    bundle: Path = field(metadata=required(place="one"))
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all network interfaces.")
    port: int = option(8080, "Port; 0 for any free port.", min=0, max=65535)
    target: str = option("auto", FIRST_ENGINE)
    threads: int | None = option(None, "Engine threads; 0 = runtime default.", min=0)
    max_batch: int = option(8, "Maximum images per run.", min=1, max=1024)
    max_delay_ms: float = advanced(
        0.0, "Milliseconds that an image waits for others while the engine is free.", min=0, max=10_000
    )
    max_queue: int = option(256, "Maximum concurrent requests; further ones get 429.", min=1)
    max_body: float = advanced(16.0, "Maximum size of a request in MiB; larger ones get 413.", min=0.001, max=256)
    max_kept: float = advanced(
        256.0,
        "MiB of image embeddings cached for further prompts (promptable segmentation).",
        min=0,
        max=1 << 20,
    )
    keep_alive: int = advanced(
        75,
        "Seconds that a connection may be idle; set it above the idle timeout of a load balancer.",
        min=1,
        max=86_400,
    )
    monitor: bool = option(False, "Monitor images, answers and golden answers, with metrics and log lines.")
    monitor_window: int = advanced(
        256,
        "Images per comparison with the calibration images.",
        min=8,
        max=1_000_000,
    )
    monitor_every: int = advanced(1000, "Run a golden input every N inferences.", min=1)
    expect_digest: str | None = option(None, EXPECT_DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(Serve, name="serve")
def command(console: Console, options: Serve) -> None:
    """Serve a bundle over HTTP: the Open Inference Protocol v2, and images at /predict.

    Ctrl+C or SIGTERM stops the server after it has answered the accepted requests.

    \b
    Example:
      vitdeploy serve out/digits --port 8080
    """
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
    settings = ServerSettings(
        options.max_batch,
        options.max_delay_ms / 1e3,
        options.max_queue,
        max_body=int(options.max_body * MIB),
        kept=int(options.max_kept * MIB),
        keep_alive=options.keep_alive,
    )
    watch = Monitor(options.monitor_window, every=options.monitor_every, on_event=log_event)
    with bind(options.host, options.port) as taken:
        console.progress("loading and measuring the engine", 0, 1)
        with warnings.catch_warnings(record=True) as heard:
            engines = load_engines(
                options.bundle,
                options.target,
                max_batch=options.max_batch,
                threads=options.threads or 0,
                trust=options.trust,
                expect_digest=options.expect_digest,
                monitor=watch if options.monitor else None,
            )
        warned = sorted({str(each.message) for each in heard})
        if options.host not in LOOPBACK:
            warned.append("anyone who can reach this address can use the server: it has no TLS and no authentication")
        with engines:
            _announce(console, engines, address_of(taken), warned)
            log_to_stderr(console.quiet)
            run(Service(engines, settings), taken)


def _announce(console: Console, engines: "Engines", address: str, warned: list[str]) -> None:
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
        lines.append(f"monitoring: {', '.join(predictor.monitor.watched)}")
    for line in [*lines, *(f"warning: {text}" for text in warned)]:
        click.echo(line, err=console.as_json)
    prompts = PROMPTS if TASKS[predictor.task].takes == "prompts" else ""
    console.note(f"next: curl -F file=@IMAGE {prompts}{address}/predict    (Ctrl+C stops)")
