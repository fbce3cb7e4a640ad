"""The `bench` part of a report, from made-up measurements: each artifact twice as fast as the one before it."""

import numpy as np

from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.benchmark.results import BenchRun, Measurements, Round
from vitdeploy.benchmark.summary import Ratio, block_medians, rows, samples
from vitdeploy.document.bench import Bench, ProtocolFacts
from vitdeploy.spec import encode


def bench(names, scenarios=("single", "offline"), drift=0.0, slow=None, rounds=6, processes=3):
    """The first name is what the others are compared with.

    Args:
        drift: by how much of its latency every artifact slows down from the first to the last block. slow: (artifact,
            round) of a block that takes twice as long.
    """
    generator = np.random.default_rng(0)
    protocol = Protocol(scenarios, duration=0.0, min_rounds=rounds, processes=processes)
    entries = [
        Measurements(
            name, "onnxruntime-cpu", "int8", "CPUExecutionProvider", 0.3, 4.0, {scenario: [] for scenario in scenarios}
        )
        for name in names
    ]
    clock, blocks = 0.0, sum(map(protocol.blocks, scenarios))
    for scenario in scenarios:
        for number in range(protocol.blocks(scenario)):
            process = number * processes // rounds if parse_scenario(scenario).spread else 0
            for index, entry in enumerate(entries):
                share = clock / (0.5 * blocks * len(names))
                latency = 4.0 * 2.0**-index * (1 + drift * share) * (2 if (entry.artifact, number) == slow else 1)
                values = latency * np.exp(0.02 * generator.standard_normal(40)).clip(0.9)
                batch = protocol.batch_of(scenario)
                begun = clock + 20 * process
                entry.rounds[scenario].append(Round(batch, values, 0.5, process, 0.4, begun_seconds=begun))
                clock += 0.5
    bench_run = BenchRun(protocol, tuple(entries), 0.1, 2)
    facts = ProtocolFacts(
        dict.fromkeys(scenarios, rounds), protocol.block_seconds, scenarios, protocol.batch, protocol.threads, processes
    )
    ratios = [
        Ratio(name, names[0], metric, 0.5, (0.45, 0.55), "faster")
        for name in names[1:]
        for metric in ("latency", "throughput")
    ]
    medians = block_medians(bench_run)
    return encode(Bench(facts, tuple(rows(bench_run)), tuple(ratios), samples(bench_run), medians))
