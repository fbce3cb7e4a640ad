"""`vitdeploy bench A B ...`: latency and throughput, compared."""

from __future__ import annotations

import dataclasses

import click

from vitdeploy.api.options import Bench, Recorded, SourceOptions, There
from vitdeploy.cli.options import Console, api, call, command_of, recording, to_source
from vitdeploy.extensions import wing
from vitdeploy.spec import encode


@command_of(Bench, (SourceOptions, "target"), (There, "trust"), Recorded, waits=True)
def command(console: Console, options: Bench, source: SourceOptions, there: There, recorded: Recorded) -> None:
    """Measure latency and throughput: one process per artifact, in alternating blocks.

    ARTIFACTS are bundles (with all their engines), graphs, or built-in PyTorch models. Each is compared with the last
    one: the ratio has a 95 % interval from paired blocks. The options on weights apply to the models.

    With --on each device builds and measures the engines itself, and all devices work at once. If the connection is
    lost, the job continues and the same command fetches the result. Ctrl-C stops the job. Of several devices of one
    kind, the spread is shown; one that throttles, or differs, is named and not counted.
    """
    api("values").require_pinned(there.expect_digest, options.artifacts)
    if there.on is not None and source != SourceOptions():
        raise click.UsageError("--on takes bundles and graphs: leave the options on weights out.")
    with recording(console, recorded) as record:
        if there.on is None:
            named, original = api("artifacts").Named, to_source(None, source)
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
            for each in outcomes:
                if each.found is not None:
                    record(each.found)
