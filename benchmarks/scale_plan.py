"""The tables of docs/results/scale-plan.md: a million images, a thousand variants, a hundred devices.

    PYTHONPATH=. python benchmarks/scale_plan.py [--images 1000000] [--variants 1000] [--devices 100] ...

Reads build/scale/costs.json, requests.json and parts.json, which the other programs of this folder wrote; prices are
arguments, and so is what of parts.json or of Ray was not measured. A figure that costs.json lacks has no row. The
simulation has a tenth of the variants, and says how long all would take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale_model import Place, Result, Task, Work, simulate
from vitdeploy.data.folder import WINDOW
from vitdeploy.recipe.grid import MAX_CELLS
from vitdeploy.store.store import AT_ONCE
from vitdeploy.workflows.sharded import MOST_AT_ONCE

ROOT = Path(__file__).parents[1]
SHARD = 2 * WINDOW + 1
WRITES, READS = ("PUT", "POST", "COPY", "LIST"), ("GET", "HEAD")
SIMULATED = 10
MACHINES = (10, 100, 300, 1000)
HOUR = 3600.0
# Answer time of a disk that machines share.
NEAR_SECONDS = 0.001


@dataclass(frozen=True)
class Plan:
    """What is to be done. `originals`: the models that variants are made of. `on`: devices that measure a variant."""

    images: int
    variants: int
    originals: int
    classes: int
    devices: int
    on: int
    measure_seconds: float
    make_core_seconds: float

    @property
    def shards(self) -> int:
        return -(-self.images // SHARD)

    @property
    def pieces(self) -> int:
        """Tasks of one evaluation."""
        return -(-self.shards // MOST_AT_ONCE)


@dataclass(frozen=True)
class Prices:
    """In dollars."""

    core_hour: float
    writes_1000: float
    reads_1000: float
    gb_month: float


@dataclass(frozen=True)
class Measured:
    """The files of the other programs. Core seconds of an image: to decode it, and of the original and an engine."""

    costs: dict[str, list[dict[str, float]]]
    requests: dict[str, dict[str, int]]
    decode: float
    original: float
    engine: float
    boot: float

    def last(self, figure: str, column: str) -> float:
        """The cost at the largest measured size."""
        return self.costs[figure][-1][column]

    def asked(self, operation: str) -> int:
        return sum(self.requests[operation].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=int, default=1_000_000)
    add("--variants", type=int, default=1_000)
    add("--originals", type=int, default=20)
    add("--classes", type=int, default=1_000)
    add("--devices", type=int, default=100)
    add("--on", type=int, default=10, help="devices that each variant is measured on")
    add("--measure", type=float, default=60.0, metavar="SECONDS", help="of one variant on one device")
    add("--make", type=float, default=120.0, metavar="CORE-SECONDS", help="to export, quantize and compile a variant")
    add("--core-hour", type=float, default=0.02, metavar="DOLLARS", help="of a core, at spot prices")
    add("--writes", type=float, default=0.005, metavar="DOLLARS", help="of 1,000 requests that write or list")
    add("--reads", type=float, default=0.0004, metavar="DOLLARS", help="of 1,000 requests that read")
    add("--gb-month", type=float, default=0.023, metavar="DOLLARS")
    add("--answer", type=float, default=0.03, metavar="SECONDS", help="the store's answer time")
    add("--life", type=float, default=10.0, metavar="HOURS", help="mean time until a machine is taken away")
    for name in ("decode", "original", "engine"):
        add(f"--{name}-ms", type=float, metavar="CORE-MS", help="per image, instead of the measured time")
    add("--boot", type=float, metavar="CORE-SECONDS", help="to start a worker, instead of the measured time")
    add("--task-ms", type=float, help="of the driver and its cluster per task, instead of the measured time")
    add("--no-simulation", action="store_true", help="only what is reckoned")
    add("--folder", type=Path, default=ROOT / "build" / "scale", help="of what was measured")
    given = parser.parse_args()
    plan = Plan(
        *(given.images, given.variants, given.originals, given.classes, given.devices, given.on),
        *(given.measure, given.make),
    )
    prices = Prices(given.core_hour, given.writes, given.reads, given.gb_month)
    found = measured(given)
    tables = [amounts(plan, prices, found), bounds(plan, found, given.answer)]
    if not given.no_simulation:
        tables.append(simulated(plan, prices, found, given))
    print("\n\n".join(tables))


def measured(given: argparse.Namespace) -> Measured:
    costs, requests = (json.loads((given.folder / f"{name}.json").read_text("utf-8")) for name in ("costs", "requests"))
    file: Path = given.folder / "parts.json"
    parts = json.loads(file.read_text("utf-8")) if file.is_file() else {}

    def of(name: str, part: str, key: str, scale: float = 1e-3) -> float:
        found = getattr(given, name)
        return float(parts[part][key] if found is None else found * scale)

    if given.task_ms is not None:
        costs["ray"] = [{"ms a task": given.task_ms, "driver, KB a task": 0.0}]
    return Measured(
        costs,
        requests,
        of("decode_ms", "decode", "core_seconds"),
        of("original_ms", "original", "engine"),
        of("engine_ms", "engine", "engine"),
        of("boot", "original", "boot", 1.0),
    )


# --- tasks, bytes, requests, money ------------------------------------------------------------------------------------


def amounts(plan: Plan, prices: Prices, found: Measured) -> str:
    evaluations = plan.originals + plan.variants
    answers, counts = plan.originals * plan.shards, plan.variants * plan.shards
    cores = plan.images * (evaluations * found.decode + plan.originals * found.original + plan.variants * found.engine)
    making = plan.variants * plan.make_core_seconds
    kilobytes = answers * found.last("shard", "answers, KB") + counts * found.last("shard", "counts, KB")
    writes, reads = _requests(plan, found)
    measuring = plan.variants * plan.on * plan.measure_seconds
    rows = [
        ("shards of an evaluation", f"{plan.shards:,}, in {plan.pieces:,} tasks"),
        ("tasks", f"{evaluations * plan.pieces + plan.variants:,}, and {plan.variants * plan.on:,} measurements"),
        ("artifacts of shards", f"{answers + counts:,}"),
        ("bytes of answers", f"{answers * found.last('shard', 'answers, KB') / 1e6:,.0f} GB"),
        ("bytes of counts", f"{counts * found.last('shard', 'counts, KB') / 1e6:,.1f} GB"),
        ("images decoded and answered", f"{evaluations * plan.images:,}"),
        ("cores", f"{(cores + making) / HOUR:,.0f} core hours: {prices.core_hour * (cores + making) / HOUR:,.0f} $"),
        (
            "requests of the store",
            f"{writes / 1e6:,.0f} M that write, {reads / 1e6:,.0f} M that read: "
            f"{(prices.writes_1000 * writes + prices.reads_1000 * reads) / 1e3:,.0f} $",
        ),
        ("storage", f"{kilobytes / 1e6 * prices.gb_month:,.2f} $ a month"),
        (
            "devices",
            f"{measuring / HOUR:,.0f} hours of measuring, {measuring / HOUR / plan.devices:,.1f} hours with all",
        ),
    ]
    return _table(("amount", ""), rows)


def _requests(plan: Plan, found: Measured) -> tuple[float, float]:
    """Requests to the shared store: a worker fetches the answers that it compares with, and stores what it makes; the
    driver looks for each artifact before, and fetches it after."""
    answers, counts = plan.originals * plan.shards, plan.variants * plan.shards
    operations = {
        "make, the bytes are new": answers + counts,
        "look in vain": 2 * (answers + counts),
        "find there, and bring": answers + 2 * counts,
    }
    return tuple(
        sum(count * found.requests[name].get(kind, 0) for name, count in operations.items() for kind in kinds)
        for kinds in (WRITES, READS)
    )  # type: ignore[return-value]


# --- what breaks first ------------------------------------------------------------------------------------------------


def bounds(plan: Plan, found: Measured, answer: float) -> str:
    """Each of them with what was measured, what it comes to, and when it breaks."""
    tasks = (plan.originals + plan.variants) * plan.pieces
    driver = found.last("listing", "memory, B an image") * plan.images / 1e6
    listing = (found.last("listing", "list, core s") + found.last("listing", "known digests, core s")) / found.last(
        "listing", "images"
    )
    finds = _driver_seconds(found, answer)
    each = plan.images / plan.pieces * (found.decode + found.engine) / 2
    history = (
        found.last("history", "read all, core s") / found.last("history", "files") if "history" in found.costs else 0
    )
    page = found.last("sweep", "sweep.html, KB") / found.last("sweep", "recipes")
    document = found.last("sweep", "sweep.json, KB") / found.last("sweep", "recipes")
    rows = [
        (
            "the driver reads results from an object store",
            f"{_driver_requests(found) // MOST_AT_ONCE} requests of {answer * 1e3:.0f} ms a shard, {AT_ONCE} at a time",
            f"{finds:.3f} s a task, of which a machine of two cores makes one in {each:.0f} s",
            f"with {each / finds:,.0f} machines",
        ),
        ("the grid's length", "", f"{plan.variants:,} recipes", f"{MAX_CELLS} recipes a grid: refused before any work"),
        (
            "the report of a sweep",
            f"{document:.0f} KB of JSON and {page:.0f} KB of page a recipe",
            f"{document * plan.variants / 1e3:,.0f} MB and {page * plan.variants / 1e3:,.0f} MB",
            "slow in a browser from some 50 MB on",
        ),
        *([_history(plan, history)] if history else []),
        (
            "the driver's memory",
            f"{found.last('listing', 'memory, B an image'):.0f} B an image",
            f"{driver:,.0f} MB",
            f"16 GB at {16e9 / found.last('listing', 'memory, B an image') / 1e6:,.0f} M images",
        ),
        (
            "the list of images, and their digests",
            f"{1e6 * listing:.0f} us an image",
            f"{listing * plan.images:,.0f} s a command",
            f"an hour at {3600 / listing / 1e6:,.0f} M images",
        ),
        (
            "the database of digests",
            f"{found.last('listing', 'database, B an image'):.0f} B an image",
            f"{found.last('listing', 'database, B an image') * plan.images / 1e6:,.0f} MB",
            "one machine's: never shared",
        ),
        (
            "answers of the originals",
            f"{found.last('shard', 'answers, KB') / SHARD:.2f} KB an image",
            f"{plan.originals * plan.shards * found.last('shard', 'answers, KB') / 1e6:,.0f} GB",
            "the disk of a worker that compares with all of them",
        ),
        (
            "folders of one store on a disk",
            f"{found.last('store', 'put, core ms'):.1f} ms with {found.last('store', 'records'):,.0f} records, "
            f"{found.costs['store'][0]['put, core ms']:.1f} with {found.costs['store'][0]['records']:,.0f}",
            f"{(plan.originals + plan.variants) * plan.shards / 256:,.0f} names a folder",
            "no listing of all is ever made",
        ),
        (
            "Ray's overhead",
            f"{found.last('ray', 'ms a task'):.1f} ms a task; as many tasks wait as there are cores",
            f"{found.last('ray', 'ms a task') * tasks / 1e3:,.0f} s for {tasks:,} tasks",
            f"with {1e3 * each / found.last('ray', 'ms a task'):,.0f} machines",
        ),
    ]
    return _table(("what", "measured", "comes to", "breaks"), rows)


def _history(plan: Plan, seconds: float) -> tuple[str, ...]:
    files = plan.variants * plan.on
    return (
        "the history's files",
        f"{1e3 * seconds:.1f} ms to read one",
        f"{files:,} files a round: {seconds * files:,.0f} s to read",
        f"{3600 / seconds:,.0f} files take an hour",
    )


# --- simulated --------------------------------------------------------------------------------------------------------


def simulated(plan: Plan, prices: Prices, found: Measured, given: argparse.Namespace) -> str:
    """Machines of two cores with a worker each, one driver, an object store."""
    rows = [
        _row(plan, prices, f"{machines:,} machines", _simulated(plan, found, machines, given, given.answer))
        for machines in MACHINES
    ]
    near = _simulated(plan, found, MACHINES[-1], given, NEAR_SECONDS)
    rows.append(_row(plan, prices, f"{MACHINES[-1]:,} machines, a store that answers in 1 ms", near))
    return _table(("simulated", "all, hours", "cores busy", "driver busy", "taken away", "cores, $"), rows)


def _row(plan: Plan, prices: Prices, name: str, found: tuple[Result, int]) -> tuple[str, ...]:
    result, machines = found
    hours = result.seconds * plan.variants / _some(plan) / HOUR
    dollars = hours * machines * 2 * prices.core_hour
    return (
        name,
        f"{hours:,.1f}",
        f"{100 * result.busy:.0f} %",
        f"{100 * result.driver_busy:.0f} %",
        f"{result.deaths:,}",
        f"{dollars:,.0f}",
    )


def _driver_requests(found: Measured) -> int:
    """Requests of the driver for one task: it looks for each artifact before, and fetches it after."""
    return MOST_AT_ONCE * (found.asked("look in vain") + found.asked("find there, and bring"))


def _driver_seconds(found: Measured, answer: float) -> float:
    """The seconds of these requests, `AT_ONCE` of them in flight."""
    return _driver_requests(found) * answer / AT_ONCE


def _some(plan: Plan) -> int:
    return max(1, plan.variants // SIMULATED)


def _simulated(
    plan: Plan, found: Measured, machines: int, given: argparse.Namespace, answer: float
) -> tuple[Result, int]:
    images = plan.images / plan.pieces
    own = MOST_AT_ONCE * (
        found.asked("make, the bytes are new") + found.asked("look in vain") + found.asked("find there, and bring")
    )
    task = Task(images * found.decode, turn_core_seconds=images * found.engine, turn_threads=2, requests=own)
    work = Work(
        variants=_some(plan),
        make=Task(plan.make_core_seconds, threads=2),
        shards=plan.pieces,
        shard=task,
        measured_on=plan.on,
        measure_seconds=plan.measure_seconds,
    )
    place = Place(
        workers=machines,
        machines=machines,
        cores=2,
        boot=Task(found.boot),
        driver_apart=True,
        collect_seconds=found.last("ray", "ms a task") / 1e3 + _driver_seconds(found, answer),
        devices=plan.devices,
        store_seconds=answer,
        worker_life=given.life * HOUR,
    )
    return simulate(work, place), machines


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    main()
