"""Measures, on the target and the placed model itself, whether its linears are faster with their rows in parts, or with
more rows than tokens."""

from __future__ import annotations

import datetime
import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from vitdeploy.benchmark.candidate import BenchCandidate
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.io.files import load_graph, read_metadata
from vitdeploy.graph.passes.row_alignment import align_rows, token_stream
from vitdeploy.graph.passes.row_split import parts_of, work_by_tokens
from vitdeploy.search.alternatives import Timing, compiled, time_alternatives
from vitdeploy.search.latency import fingerprint
from vitdeploy.search.parts import PartsTable, PartsTiming, in_parts
from vitdeploy.spec import FloatRest, Precision

# Of products at batch 1 in linears over tokens. Below, calling the kernels twice costs more than fuller tiles save: the
# digits, 115 million, took 1.19 of their time with 64 and 1 rows.
LEAST_MACS = 400_000_000
# Of which kernels may take whole tiles.
MULTIPLES = (8, 16)


def measure_row_parts(
    graph: Path,
    target: str,
    batch: int,
    *,
    float_rest: FloatRest = "fp32",
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> PartsTable:
    """Measure a placed model with its rows in each of `parts_of`, and with more of them, against one a token, in
    alternating blocks. `float_rest`: in which precision the engine computes its float operators.

    Raises:
        CapabilityError, EngineError, WorkerError: as `compile_engine` and `run_benchmark`.
    """
    precision = read_metadata(graph).precision or "fp32"
    alternatives, reason = alternatives_of(graph)
    if reason:
        return table_of(target, batch, fingerprint(target), reason=reason)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        candidates = []
        for done, parts in enumerate(alternatives):
            progress(f"prepare rows in parts for {target}", done, len(alternatives))
            compiling = functools.partial(_candidate, target=target, precision=precision, batch=batch, rest=float_rest)
            candidates.append(compiling(graph, parts if done else None, Path(folder)))
        found, disturbed = time_alternatives(
            candidates, lambda done, total: progress("time the rows in parts", done, total)
        )
    return table_of(target, batch, fingerprint(target), zip(alternatives, found, strict=True), disturbed=disturbed)


def alternatives_of(graph: Path) -> tuple[list[tuple[int, ...]], str]:
    """In what parts a placed model may compute its rows, all at once first; and why nothing is worth measuring, "" if
    there is something."""
    model = load_graph(graph)
    work = work_by_tokens(model)
    tokens = next(iter(work), 1)
    alternatives, more = [(tokens,), *parts_of(tokens)], more_rows(tokens)
    if more and _takes_more(model, tokens, more[0]):
        alternatives += [(rows,) for rows in more]
    return alternatives, _without_alternative(work, alternatives)


def table_of(
    target: str,
    batch: int,
    device: Mapping[str, str],
    measured: Iterable[tuple[tuple[int, ...], Timing]] = (),
    *,
    reason: str = "",
    disturbed: str = "",
) -> PartsTable:
    """The table of what was `measured` now; fields as in `PartsTable`."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    timings = tuple(PartsTiming(parts, **vars(each)) for parts, each in measured)
    return PartsTable(target, batch, now, dict(device), timings, reason, disturbed)


def more_rows(tokens: int) -> list[int]:
    """Numbers of rows that may be faster than one a token, of those that `align_rows` takes."""
    rounded = {-(-tokens // multiple) * multiple for multiple in MULTIPLES}
    return sorted(rows for rows in rounded if tokens < rows < 2 * tokens)


def _takes_more(model: ir.Model, tokens: int, rows: int) -> bool:
    """Whether a graph, whose shapes are complete, can have so many rows in place of its tokens. Changes it."""
    try:
        return token_stream(find_attentions(model))[1] == tokens and align_rows(model, rows) > 0
    except GraphError:
        return False


def _without_alternative(work: Mapping[int, int], alternatives: Sequence[tuple[int, ...]]) -> str:
    """Why nothing is measured; "" if there is something to measure."""
    if not work:
        return "no linear over a fixed number of tokens"
    if len(alternatives) == 1:
        return f"{alternatives[0][0]} rows are whole tiles, or less than one"
    least = next(iter(work.values()))
    return f"{least / 1e6:.0f} million products at batch 1, which are too few" if least < LEAST_MACS else ""


def _candidate(
    graph: Path,
    parts: tuple[int, ...] | None,
    folder: Path,
    *,
    target: str,
    precision: Precision,
    batch: int,
    rest: FloatRest,
) -> BenchCandidate:
    name = "+".join(map(str, parts or ("whole",)))
    written, out = folder / f"{name}.onnx", folder / name
    placed = in_parts(graph, parts, written)
    candidate = compiled(written, out, target, precision, batch, placed, name, rest)
    written.unlink()
    return candidate
