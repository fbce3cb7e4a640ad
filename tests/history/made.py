"""Histories for tests: documents of the real classes, with latencies as a shared machine gives them."""

import copy
import dataclasses
import datetime
import json

import numpy as np

from tests.documents import as_report, bench_of, row
from tests.report.test_html import REPORT
from vitdeploy.benchmark.summary import Latency, LatencyIntervals
from vitdeploy.document.bench import BenchDocument, Omission
from vitdeploy.errors import AnswersError
from vitdeploy.history.of_documents import (
    MeasuredArtifact,
    MeasuredMachine,
    row_of_canary,
    rows_of_bench,
    rows_of_report,
)
from vitdeploy.history.series import history_document

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
HOST = {"cpu": "a CPU", "isa": "avx2", "cores": "4", "system": "Linux 6.1", "python": "3.11.2", "vitdeploy": "0.1.0"}
ARTIFACT = "openvino-cpu-fp32"
MEASURED = MeasuredArtifact("vit", ARTIFACT, "ab" * 32)


def machine(**facts):
    return MeasuredMachine({**HOST, "openvino": "2026.3.0", **facts})


def bench_document(p50, flags=(), reason=""):
    """A bench of one engine, with an interval of two percent."""
    found = dataclasses.replace(
        row("bundle:" + ARTIFACT, flags=flags),
        latency_ms=Latency(p50, 1.1 * p50, 1.3 * p50, p50),
        latency_ms_ci95=LatencyIntervals((0.98 * p50, 1.02 * p50)),
    )
    undecided = {found.artifact: reason} if reason else {}
    return BenchDocument(**vars(bench_of([found], undecided=undecided)), remarks=())


def bench_rows(p50, number=0, where=None, flags=(), reason=""):
    """The rows of such a bench, measured `number` hours after the start."""
    document = bench_document(p50, flags, reason)
    time = START + datetime.timedelta(hours=number)
    return rows_of_bench(document, {"bundle:" + ARTIFACT: MEASURED}, where or machine(), time)


def report(**changes):
    return as_report({**copy.deepcopy(REPORT), **changes})


def latencies(seed, size, deviation=0.03, decay=0.5, slow=0.5, at=None, factor=1.0):
    """Latencies in ms, log-normal: white noise, and noise whose correlation decays, with the share `slow` of the
    variance; three of a hundred results 10 to 40 % longer. From the index `at` on `factor` times as long."""
    generator = np.random.default_rng(seed)
    drift, steps = np.zeros(size), generator.normal(0, deviation * np.sqrt(slow), size)
    drift[0] = steps[0]
    for index in range(1, size):
        drift[index] = decay * drift[index - 1] + np.sqrt(1 - decay**2) * steps[index]
    logs = drift + generator.normal(0, deviation * np.sqrt(1 - slow), size)
    logs += np.where(generator.random(size) < 0.03, generator.uniform(0.1, 0.34, size), 0)
    return 5 * np.exp(logs) * np.where(np.arange(size) >= (size if at is None else at), factor, 1.0)


def history_of_everything():
    """A history with every kind of point: changes with what changed, flags, undecided results, a canary, failures, and
    files that are left out."""
    values = latencies(0, 60, 0.01, 0.0, 0.0, at=30, factor=1.2)
    rows = []
    for number, p50 in enumerate(values):
        where = machine(openvino="2026.3.0" if number < 30 else "2026.4.0")
        flags = ["unstable", "contended"] if number % 9 == 3 else []
        reason = "other work took 30 % of the processors " * 3 if number % 20 == 5 else ""
        rows += stamped(bench_rows(float(p50), number, where, flags, reason), number + 1)
    wrong = AnswersError(f"{ARTIFACT} gives wrong answers here", found="2 of 8 answers are the original's")
    rows += stamped([row_of_canary(wrong, MEASURED, machine(), START)], 61)
    for number in (62, 63):
        rows += stamped(rows_of_report(report(name="vit-tiny-imagenet-of-a-long-name"), machine()), number)
    left_out = [Omission("0000000007-cut.parquet", "not a whole Parquet file: Parquet magic bytes not found in footer")]
    graph = json.dumps({"graph": {"operators": ["Add", "MatMul", "Softmax"], "opset": 20}})
    return history_document(rows, left_out, "s3://bucket/history/of/a/very/long/name/indeed", lambda row: graph)


def stamped(rows, sequence):
    """Rows as a history has them."""
    stamp = {"sequence": sequence, "run": f"{sequence:012x}", "host": "a-machine"}
    return [dataclasses.replace(row, **stamp) for row in rows]
