"""What single operations of work past one machine cost here: the numbers that docs/results/scale-plan.md reckons with.

    PYTHONPATH=. python benchmarks/scale_costs.py [--only FIGURE ... [--sizes N ...]]

Each figure is measured in a process of its own; those of earlier runs stay in the file. Times are what a core worked
(core s, core ms; medians where something is repeated), as other programs do not change that much; only what waits for a
disk or for other processes is by the clock. `other load` says how much of the processors other programs took meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vitdeploy.store.key import Identity

ROOT = Path(__file__).parents[1]
RECORDS = (1_000, 10_000, 100_000)
HISTORY_FILES = (1_000, 10_000, 100_000)
RAY_TASKS = (10, 100, 1_000, 5_000)
RECIPES = (1, 10, 100, 1_000)
LISTED = (1_000, 10_000, 100_000)
CLASSES, SHARD = 1_000, 513
TIMED = 200
Found = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--sizes", type=int, nargs="+", help="instead of those of each figure")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "scale" / "costs.json")
    options = parser.parse_args()
    file: Path = options.output
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in options.only:
        found[name] = [_apart(FIGURES[name], size) for size in options.sizes or SIZES[name]]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{table(name, found[name])}\n", flush=True)


def table(name: str, rows: list[Found]) -> str:
    columns = list(rows[0])
    lines = [f"{name}:", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_text(row[each]) for each in columns)} |" for row in rows)])


def _text(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


def _apart(figure: Callable[[int, Path], Found], size: int) -> Found:
    """A figure in a new process, with an empty folder."""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="vitdeploy-scale-")
    try:
        with context.Pool(1) as pool:
            return pool.apply(_figure, (figure, size, folder))
    finally:
        subprocess.run(["rm", "-rf", folder], check=False)  # noqa: S607 - in a tenth of the time of shutil.rmtree


def _figure(figure: Callable[[int, Path], Found], size: int, folder: str) -> Found:
    load = Load()
    found = figure(size, Path(folder))
    return {**found, "other load, %": 100 * load.share()}


class Load:
    """What other programs took of this machine's processors since this was made."""

    def __init__(self) -> None:
        self._at = self._read()

    def share(self) -> float:
        idle, every, own = (now - then for now, then in zip(self._read(), self._at, strict=True))
        return max(0.0, (every - idle - own) / every) if every > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        ticks = os.sysconf("SC_CLK_TCK")
        own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return (fields[3] + fields[4]) / ticks, sum(fields) / ticks, own


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def seconds(into: list[float], clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    begun = clock()
    yield
    into.append(clock() - begun)


def median_ms(count: int, once: Callable[[int], object], clock: Callable[[], float] = time.process_time) -> float:
    taken: list[float] = []
    for number in range(count):
        with seconds(taken, clock):
            once(number)
    return 1e3 * statistics.median(taken)


# --- the store --------------------------------------------------------------------------------------------------------


def store(size: int, folder: Path) -> Found:
    """One artifact more, found, and looked for in vain, in a store of `size` artifacts of one small file; the same with
    a shared store beside it, in another folder."""
    from vitdeploy.store.shared import SharedStore
    from vitdeploy.store.store import Store

    fill_store(folder / "own", size)
    alone = Store(folder / "own")
    makes = functools.partial(_make, text=b'{"n": 513}')
    found = {"records": float(size), "put, core ms": median_ms(TIMED, lambda number: makes(alone, f"new {number}"))}
    clock = time.perf_counter
    found["put, ms by the clock"] = median_ms(TIMED, lambda number: makes(alone, f"clock {number}"), clock)
    found["find, core ms"] = median_ms(TIMED, lambda number: _find(alone, f"new {number}", True))
    found["absent, core ms"] = median_ms(TIMED, lambda number: _find(alone, f"absent {number}", False))
    shared = f"file://{folder / 'shared'}"
    fill_shared(folder / "shared", size)
    both = Store(folder / "own", SharedStore(shared))
    found["shared: put, core ms"] = median_ms(TIMED, lambda number: makes(both, f"both {number}"))
    found["shared: absent, core ms"] = median_ms(TIMED, lambda number: _find(both, f"absent {number}", False))
    other = Store(folder / "other", SharedStore(shared))
    found["shared: brought, core ms"] = median_ms(TIMED, lambda number: _find(other, f"both {number}", True))
    return found


def _identity(name: object) -> Identity:
    from vitdeploy.store.key import Identity

    return Identity("shard-tally", {"name": str(name)}, {}, {})


def _make(where: object, name: str, text: bytes) -> None:
    from vitdeploy.store.store import Store

    assert isinstance(where, Store)
    where.make(_identity(name), lambda out: (out / "tally.json").write_bytes(text))


def _find(where: object, name: str, there: bool) -> None:
    from vitdeploy.store.store import Store

    assert isinstance(where, Store)
    assert (where.find(_identity(name).key) is not None) == there


def fill_store(root: Path, size: int) -> None:
    """Folders such as those of artifacts, without the record that would let anything be found there."""
    for key in _names(root / "artifacts", size):
        os.mkdir(f"{root}/artifacts/{key[:2]}/{key}")  # noqa: PTH102 - a Path for each of 100,000 takes longer


def fill_shared(root: Path, size: int) -> None:
    """Empty files instead of records and of files."""
    for kind, ending in (("artifacts", ".json"), ("files", "")):
        for key in _names(root / kind, size):
            os.close(os.open(f"{root}/{kind}/{key[:2]}/{key}{ending}", os.O_CREAT | os.O_WRONLY))


def _names(root: Path, size: int) -> Iterator[str]:
    """`size` keys; their folders are created."""
    for first in range(256):
        (root / f"{first:02x}").mkdir(parents=True)
    for number in range(size):
        yield hashlib.sha256(str(number).encode()).hexdigest()


# --- shards -----------------------------------------------------------------------------------------------------------


def shard(size: int, folder: Path) -> Found:
    """What a shard of `SHARD` images and `size` classes leaves: bytes, and the times to keep and to read it again."""
    from vitdeploy.data.folder import Samples
    from vitdeploy.stages.shards import find_answers, find_counts, keep_answers, keep_counts
    from vitdeploy.store.key import Identity
    from vitdeploy.store.store import Store
    from vitdeploy.tasks.adapter import Data, Setting
    from vitdeploy.tasks.classification import ClassificationAdapter
    from vitdeploy.verification.agreement import tally
    from vitdeploy.verification.records import Answers

    generator = np.random.default_rng(0)
    logits = generator.normal(size=(SHARD, size)).astype(np.float32)
    labels = generator.integers(0, size, SHARD)
    where = Store(folder)
    by = [Identity("shard-answers", {"number": number}, {}, {}) for number in range(20)]
    tallies = [Identity("shard-tally", {"number": number}, {}, {}) for number in range(20)]
    kit, answers = ClassificationAdapter(Setting("classification", None)), Answers({"logits": tuple(logits)})
    images = Samples(folder, ((int(label), [f"{i}.png"]) for i, label in enumerate(labels)))
    seen = np.zeros(0, np.int64), kit, Data(folder, (), images, "", "")
    answers_ms = median_ms(len(by), lambda number: keep_answers(where, by[number], answers, *seen))
    counts = tally(logits, logits, labels)
    tally_ms = median_ms(len(by), lambda number: keep_counts(where, tallies[number], counts))
    kinds = {"shard-answers": 0, "shard-tally": 0}
    for record in folder.glob("artifacts/*/*/artifact.json"):
        kind = json.loads(record.read_text(encoding="utf-8"))["kind"]
        kinds[kind] += sum(path.stat().st_size for path in record.parent.iterdir())
    return {
        "classes": float(size),
        "answers, KB": kinds["shard-answers"] / len(by) / 1e3,
        "keep answers, core ms": answers_ms,
        "find answers, core ms": median_ms(len(by), lambda number: find_answers(where, by[number])),
        "count, core ms": median_ms(len(by), lambda number: tally(logits, logits, labels)),
        "counts, KB": kinds["shard-tally"] / len(by) / 1e3,
        "keep counts, core ms": tally_ms,
        "find counts, core ms": median_ms(len(by), lambda number: find_counts(where, tallies[number])),
    }


def listing(size: int, folder: Path) -> Found:
    """The driver of `size` images: their folder listed, cut into shards, and their digests taken from the database."""
    from vitdeploy.data.file_digests import FileDigests
    from vitdeploy.data.folder import cut, scan

    for number in range(size):
        path = folder / "images" / f"{number % 1000:04}" / f"{number:08}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    before, taken = peak_mb(), list[float]()
    with seconds(taken):
        samples, _ = scan(folder / "images", "folders")
    with seconds(taken):
        shards = cut(samples.names)
    time.sleep(2.2)  # files that have just changed are not recorded
    for _ in range(2):
        with seconds(taken), FileDigests(folder / "digests.sqlite") as digests:
            digests.of(sample.path for sample in samples)
    names = ("list, core s", "cut, core s", "first digests, core s", "known digests, core s")
    return {
        "images": float(size),
        **dict(zip(names, taken, strict=True)),
        "shards": float(len(shards)),
        "database, B an image": (folder / "digests.sqlite").stat().st_size / size,
        "memory, B an image": 1e6 * max(0.0, peak_mb() - before) / size,
    }


# --- a history --------------------------------------------------------------------------------------------------------


def history(size: int, folder: Path) -> Found:
    """A history of `size` files, each of a bench of one engine: one more written, and all of them read."""
    from tests.history.made import bench_document, bench_rows
    from vitdeploy.history.files import append, read_rows
    from vitdeploy.history.row import open_place
    from vitdeploy.history.series import history_document
    from vitdeploy.progress import silent

    place, document = open_place(folder / "history"), bench_document(5.0)
    first = folder / "history" / append(place, bench_rows(5.0), document)
    for number in range(2, size):
        copy = first.with_name(f"{number:010d}-{number:012x}.parquet")
        if number % 10_000 == 2:  # the limit of links to one file
            copy.write_bytes(first.read_bytes())
            source = copy
        else:
            os.link(source, copy)
    append_ms = median_ms(5, lambda number: append(place, bench_rows(5.0), document))
    taken: list[float] = []
    with seconds(taken):
        rows, _ = read_rows(place, silent)
    assert len(rows) == 6
    made = [row for number in range(min(size, 10_000)) for row in bench_rows(5.0 + number % 7, number)]
    with seconds(taken):
        history_document(made, [], "here")
    return {
        "files": float(size),
        "one file, KB": first.stat().st_size / 1e3,
        "append, core ms": append_ms,
        "read all, core s": taken[0],
        "series of 10,000 rows at most, core s": taken[1],
        "memory, MB": peak_mb(),
    }


# --- a sweep ----------------------------------------------------------------------------------------------------------


def sweep(size: int, folder: Path) -> Found:
    """sweep.json and sweep.html of `size` recipes, with the report of one of a real run each."""
    from tests.history.made import report
    from vitdeploy.document.sweep import SweepDocument, SweptRecipe
    from vitdeploy.report.html import render_sweep
    from vitdeploy.runtime.host import describe_host
    from vitdeploy.stages.step import json_text

    one = report()
    rows = tuple(SweptRecipe(f"recipe-{number}", "recipe.yaml", one, None) for number in range(size))
    before, taken = peak_mb(), list[float]()
    document = SweepDocument(1, "2026-01-01T00:00:00+00:00", rows, describe_host())
    with seconds(taken):
        text = json_text(document)
    with seconds(taken):
        page = render_sweep(document)
    return {
        "recipes": float(size),
        "sweep.json, KB": len(text) / 1e3,
        "sweep.html, KB": len(page) / 1e3,
        "write, core s": taken[0],
        "page, core s": taken[1],
        "memory, MB": peak_mb() - before,
    }


# --- Ray --------------------------------------------------------------------------------------------------------------


def ray(size: int, folder: Path) -> Found:
    """`size` tasks that do nothing, on a cluster of this machine that is started for them."""
    from tests.workflows.pieces import squared
    from vitdeploy.workflows.executors import RayCluster

    os.environ["RAY_AUTH_TOKEN_PATH"] = str(folder / "token")
    (folder / "token").write_text("0123456789abcdef" * 4)
    before, taken = peak_mb(), list[float]()
    with seconds(taken, time.perf_counter):
        assert len(list(RayCluster().map(squared, [1]))) == 1
    with seconds(taken, time.perf_counter):
        assert len(list(RayCluster().map(squared, range(size)))) == size
    more = taken[1] - taken[0]
    return {
        "tasks": float(size),
        "first task, s": taken[0],
        "all, s": taken[1],
        "ms a task": max(0.0, 1e3 * more / size),
        "driver, KB a task": 1e3 * (peak_mb() - before) / size,
    }


FIGURES: dict[str, Callable[[int, Path], Found]] = {
    "store": store,
    "shard": shard,
    "listing": listing,
    "history": history,
    "sweep": sweep,
    "ray": ray,
}
SIZES = {
    "store": RECORDS,
    "shard": (10, CLASSES),
    "listing": LISTED,
    "history": HISTORY_FILES,
    "sweep": RECIPES,
    "ray": RAY_TASKS,
}

if __name__ == "__main__":
    main()
