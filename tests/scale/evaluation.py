"""Rows: evaluation in shards."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from tests.scale.cluster import two_nodes
from tests.scale.commands import Commands, Done, Model, kept, kept_kinds, kill, many_images, small_model
from tests.scale.killing import killed_every, pool_workers, ray_workers
from tests.scale.row import Missing, Row
from vitdeploy.data.folder import WINDOW

SHARD_KINDS = ("shard-answers", "shard-tally")
# Fewer images and more of them; and what of memory an image more may take, as its name and digest are kept.
SHORT, ALL = (1_000, 4_000), (10_000, 100_000)
KB_AN_IMAGE, NOISE_MB = 1.5, 25.0
KILLED_AT = 0.6
# Of the rows with executors, and more than one shard may hold; and the driver is killed when so much is stored.
SHARED_OUT, SHARED_OUT_ALL = 2_100, 50_000
CALIBRATED, CALIBRATED_ALL = 256, 1_797
DRIVER_KILLED_AT, DRIVER_KILLED_AT_ALL = (0.4,), (0.25, 0.6)
KILL_SECONDS, KILL_SECONDS_ALL = 2.0, 5.0
# The exit status where chance killed one piece three times: it is named, and the same command goes on.
DIED_THREE_TIMES, TRIES = 4, 4


def constant_memory(full: bool, work: Path, row: Row) -> None:
    """The same evaluation of few images and of many; of many again, killed at 60 %, resumed, and repeated."""
    few, many = ALL if full else SHORT
    model = small_model(work.parent / "made")
    images = work / "images"
    small = _commands(work / "few")(*model.verify(many_images(images, few)))
    whole = _commands(work / "many")(*model.verify(many_images(images, many)))
    row.check(small.document()["n"] == few and whole.document()["n"] == many, "all images are evaluated")
    grown, most = whole.peak_mb - small.peak_mb, KB_AN_IMAGE * (many - few) / 1e3 + NOISE_MB
    row.check(grown <= most, f"{many:,} images take at most {most:.0f} MB more than {few:,}", f"{grown:.0f} MB more")
    row.seen["peak memory"] = f"{small.peak_mb:,.0f} MB for {few:,} images, {whole.peak_mb:,.0f} MB for {many:,}"

    again = _commands(work / "killed")
    expected = 2 * many / (2 * WINDOW + 1)
    killed = again(
        *model.verify(images),
        while_it_runs=lambda process: kill(process) if _shards(again.store) >= KILLED_AT * expected else None,
    )
    left = _shards(again.store)
    row.check(killed.status == -9, f"killed at {100 * KILLED_AT:.0f} %", f"exit status {killed.status}")
    resumed = again(*model.verify(images))
    made = _shards(again.store)
    row.check(left < made == _shards(work / "many" / "store"), "resumed: shards that were there are kept", f"{left}")
    _same(row, resumed, whole, "resumed: the same bytes of metrics")

    second = again(*model.verify(images))
    _same(row, second, whole, "the second run: the same bytes of metrics")
    row.check(_shards(again.store) == made, "the second run evaluates nothing")
    share = 100 * second.seconds / whole.seconds
    row.seen["second run"] = f"{share:.1f} % of {whole.seconds:.0f} s"
    row.check(not full or share < 10, "the second run takes a small part of the first one's time", f"{share:.1f} %")


def calibration(full: bool, work: Path, row: Row) -> None:
    """One quantization, whose images are observed by one process, by several, and by a Ray cluster."""
    model, images = _model_and_images(full, work)
    count = CALIBRATED_ALL if full else CALIBRATED
    words = ("quantize", model.graph, "--target", "onnxruntime-cpu", "--data", images, "--num-samples", count)
    # Where layers leave INT8 is a matter of measured times.
    words = (*words, "--high-precision", 0, "-o", "graph")
    with contextlib.ExitStack() as stack:
        files = {}
        for name, options in {"one process": (), **_ways(full, work, row, stack)}.items():
            command = _commands(work / name.replace(" ", "-"))
            done = command(*words, *options)
            if row.check(done.status == 0, f"{name}: quantized", done.err[-1000:]):
                row.seen[name] = f"{done.seconds:.0f} s"
                files[name] = {
                    file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                    for file in (command.home / "graph").iterdir()
                    if file.name in ("model.onnx", "calibration.json", "monitor.json")
                }
    for name in files.keys() - {"one process"}:
        row.same(files[name], files["one process"], f"{name}: the same bytes of the graph and of its calibration")


def _ways(full: bool, work: Path, row: Row, stack: contextlib.ExitStack) -> dict[str, tuple[object, ...]]:
    """The options of each way to share work out that there is here; in the short form without Ray."""
    if not full:
        return {"two processes": ("--executor", "processes", "--jobs", 2)}
    ways: dict[str, tuple[object, ...]] = {"four processes": ("--executor", "processes", "--jobs", 4)}
    try:
        ways["two Ray nodes"] = ("--executor", f"ray:{stack.enter_context(two_nodes(work))}")
    except Missing as missing:
        row.seen["Ray"] = f"not run, {missing}"
    return ways


def executors(full: bool, work: Path, row: Row) -> None:
    """One evaluation by one process, by several, and by a Ray cluster: the same document and the same store."""
    model, images = _model_and_images(full, work)
    alone = _commands(work / "alone")
    whole = alone(*model.verify(images))
    row.seen["one process"] = f"{whole.seconds:.0f} s"
    with contextlib.ExitStack() as stack:
        for name, options in _ways(full, work, row, stack).items():
            command = _commands(work / name.replace(" ", "-"))
            found = command(*model.verify(images, *options))
            _same(row, found, whole, f"{name}: the same bytes of metrics")
            row.same(_shard_files(command.store), _shard_files(alone.store), f"{name}: the same shards in the store")
            row.seen[name] = f"{found.seconds:.0f} s"


def kills(full: bool, work: Path, row: Row) -> None:
    """A worker is killed every few seconds, and the command itself; then the same command. The short form does it on
    Ray alone."""
    model, images = _model_and_images(full, work)
    whole = _commands(work / "calm")(*model.verify(images))
    expected = _shards(work / "calm" / "store")
    if full:
        words = model.verify(images, "--executor", "processes", "--jobs", 2)
        _killed(row, full, work / "processes", words, whole, expected)
    with two_nodes(work) as address:
        _killed(row, full, work / "ray", model.verify(images, "--executor", f"ray:{address}"), whole, expected)


def _killed(row: Row, full: bool, home: Path, words: tuple[object, ...], whole: Done, expected: int) -> None:
    command, name = _commands(home), home.name
    running: list[int] = []
    workers = ray_workers if name == "ray" else lambda: pool_workers(running[-1]) if running else []
    seconds, deaths, again = 0.0, 0, 0
    every, shares = (KILL_SECONDS_ALL, DRIVER_KILLED_AT_ALL) if full else (KILL_SECONDS, DRIVER_KILLED_AT)
    with killed_every(every, workers, 7, lambda: _shards(command.store)) as killed:
        for share in (*shares, 2.0):

            def look(process: int, share: float = share) -> None:
                running.append(process)
                if _shards(command.store) >= share * expected:
                    kill(process)

            for _ in range(TRIES):
                found = command(*words, while_it_runs=look)
                seconds += found.seconds
                deaths += found.status == -9
                running.clear()
                if found.status != DIED_THREE_TIMES:
                    break
                again += 1
    row.check(deaths == len(shares), f"{name}: the command was killed {len(shares)} times", f"{deaths} times")
    _same(row, found, whole, f"{name}: the same bytes of metrics after all")
    row.check(_shards(command.store) == expected, f"{name}: all shards are stored once")
    row.seen[name] = f"{len(killed)} workers killed, {seconds:.0f} s instead of {whole.seconds:.0f} s of one process"
    if again:
        row.seen[name] += f"; {again} times a piece had died three times, and the same command went on"


def _model_and_images(full: bool, work: Path) -> tuple[Model, Path]:
    count = SHARED_OUT_ALL if full else SHARED_OUT
    return small_model(work.parent / "made"), many_images(work / "images", count)


def _shard_files(store: Path) -> dict[str, object]:
    return {key: record["files"] for key, record in kept(store).items() if record["kind"] in SHARD_KINDS}


def _commands(home: Path) -> Commands:
    home.mkdir(parents=True)
    return Commands(home)


def _shards(store: Path) -> int:
    return kept_kinds(store, *SHARD_KINDS)


def _same(row: Row, found: Done, expected: Done, what: str) -> None:
    """That two commands printed the same document, to the last byte."""
    expected.document()
    row.check(found.out == expected.out, what, f"exit status {found.status}, {found.err[-500:]}")
