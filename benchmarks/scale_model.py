"""A discrete-event simulation of work past one machine: a driver, workers on machines, a store, measuring devices.

Everything waits in queues as in the real thing: tasks for a worker, threads for cores, requests for the store, results
for the driver, engines for their device. Workers, devices and the driver fail at random and are started again; a task
that was running begins anew, and counts as failed after `STARTS` deaths, as with Ray. Built with simpy
(simpy.readthedocs.io).

A variant of a model is made first (`Work.make`). That releases its shards to the workers and itself to the devices.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Generator
from dataclasses import dataclass, field

import simpy

STARTS = 3
MAKE, SHARD, MEASURE = "make", "shard", "measure"
Steps = Generator[simpy.Event, object, None]


@dataclass(frozen=True)
class Task:
    """`core_seconds` of computation on at most `threads` cores at a time. Beside it `turn_core_seconds`, which the
    processes of a machine compute one after the other, on at most `turn_threads` cores: the engine, while images of the
    same shard are decoded. Then `requests` of the store, which bring and take `bytes`."""

    core_seconds: float
    threads: float = 1.0
    turn_core_seconds: float = 0.0
    turn_threads: float = 1.0
    requests: int = 0
    bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """The number of `variants`; each is made, evaluated in `shards` shards, and measured for `measure_seconds` on
    `measured_on` devices. `before` and `after`: tasks of the driver alone, at the beginning and at the end."""

    variants: int = 1
    make: Task = Task(0.0)
    shards: int = 0
    shard: Task = Task(0.0)
    measured_on: int = 0
    measure_seconds: float = 0.0
    before: Task = Task(0.0)
    after: Task = Task(0.0)


@dataclass(frozen=True)
class Place:
    """Where it is done. `workers` on `machines` of `cores` each; the driver is on the first one, or has cores of its
    own (`driver_apart`). `boot`: what a worker does before its first task. `collect_seconds`: of the driver, for each
    result.

    The store answers `store_rate` requests a second, each after `store_seconds`, and brings `store_bytes` a second to
    each worker. Worker processes die every `worker_life` seconds on average, the driver every `driver_life`, devices
    every `device_life` for `device_away` seconds.
    """

    workers: int = 1
    machines: int = 1
    cores: float = 1.0
    boot: Task = Task(0.0)
    driver_apart: bool = False
    collect_seconds: float = 0.0
    devices: int = 0
    store_rate: float = math.inf
    store_seconds: float = 0.0
    store_bytes: float = math.inf
    worker_life: float = math.inf
    driver_life: float = math.inf
    driver_start_seconds: float = 0.0
    device_life: float = math.inf
    device_away: float = 0.0


@dataclass
class Result:
    """`seconds` that all took, of which the workers computed a share `busy`. `evaluated` and `measured`: when the last
    of each was done. `deaths` of workers and of the driver, `failed` tasks. `driver_busy`, `store_busy`, `device_busy`:
    shares of the time. `waiting`: the most results that waited for the driver at once."""

    seconds: float = 0.0
    busy: float = 0.0
    evaluated: float = 0.0
    measured: float = 0.0
    deaths: int = 0
    driver_deaths: int = 0
    failed: int = 0
    core_seconds: float = 0.0
    requests: int = 0
    driver_busy: float = 0.0
    store_busy: float = 0.0
    device_busy: float = 0.0
    waiting: int = 0


class Cores:
    """Processors that all which computes shares, each as much as it can use: a fair share, up to its threads."""

    def __init__(self, env: simpy.Environment, count: float) -> None:
        self._env, self._count = env, count
        self._jobs: dict[simpy.Event, list[float]] = {}  # what is left, its threads, its rate now
        self._at, self._change = env.now, 0
        self._turn = simpy.Resource(env)
        self.used = 0.0

    def work(self, task: Task) -> Steps:
        """Compute; what is interrupted leaves its cores and its turn."""
        if not task.turn_core_seconds:
            yield from self._compute(task.core_seconds, task.threads)
            return
        both = [self._env.process(each) for each in (self._beside(task), self._in_turn(task))]
        try:
            yield self._env.all_of(both)
        finally:
            for part in both:
                if part.is_alive:
                    part.interrupt()

    def _beside(self, task: Task) -> Steps:
        with contextlib.suppress(simpy.Interrupt):
            yield from self._compute(task.core_seconds, task.threads)

    def _in_turn(self, task: Task) -> Steps:
        with contextlib.suppress(simpy.Interrupt), self._turn.request() as asked:
            yield asked
            yield from self._compute(task.turn_core_seconds, task.turn_threads)

    def _compute(self, core_seconds: float, threads: float) -> Steps:
        if core_seconds <= 0:
            return
        done = self._env.event()
        self._advance()
        self._jobs[done] = [core_seconds, threads, 0.0]
        self._share()
        try:
            yield done
        finally:
            if done in self._jobs:
                self._advance()
                del self._jobs[done]
                self._share()

    def _advance(self) -> None:
        passed, self._at = self._env.now - self._at, self._env.now
        for job in self._jobs.values():
            job[0] -= passed * job[2]
            self.used += passed * job[2]

    def _share(self) -> None:
        """Rates by filling up those of few threads first, and the next end."""
        left, waiting = self._count, sorted(self._jobs.values(), key=lambda job: job[1])
        for place, job in enumerate(waiting):
            job[2] = min(job[1], left / (len(waiting) - place))
            left -= job[2]
        self._change += 1
        if waiting:
            self._env.process(self._wait(self._change, min(max(0.0, job[0]) / job[2] for job in waiting)))

    def _wait(self, change: int, seconds: float) -> Steps:
        yield self._env.timeout(seconds)
        if change == self._change:
            self._advance()
            ended = [done for done, job in self._jobs.items() if job[0] <= 1e-9 * max(1.0, self._env.now)]
            for done in ended:
                del self._jobs[done]
                done.succeed()
            self._share()


@dataclass
class _Given:
    """A task of a variant, and how often it has been begun."""

    variant: int
    kind: str
    starts: int = 1


@dataclass
class _Simulation:
    work: Work
    place: Place
    seed: int
    env: simpy.Environment = field(default_factory=simpy.Environment)
    found: Result = field(default_factory=Result)

    def __post_init__(self) -> None:
        env, place = self.env, self.place
        self.random = random.Random(self.seed)  # noqa: S311 - not for secrets
        self.costs = {MAKE: self.work.make, SHARD: self.work.shard}
        self.machines = [Cores(env, place.cores) for _ in range(place.machines)]
        self.driver = simpy.Resource(env)
        self.driver_cores = Cores(env, math.inf) if place.driver_apart else self.machines[0]
        self.tasks, self.engines = simpy.Store(env), simpy.Store(env)
        self.store = simpy.Resource(env, capacity=1)
        self.left = self.work.variants * (1 + self.work.shards + self.work.measured_on)
        self.ended, self.back = env.event(), env.event()
        self.lives: list[simpy.Process] = []

    def run(self) -> Result:
        main = self.env.process(self._main())
        self.env.run(until=main)
        found, place = self.found, self.place
        found.seconds = self.env.now
        found.core_seconds = sum(machine.used for machine in self.machines)
        found.busy = found.core_seconds / (found.seconds * place.cores * place.machines)
        for name in ("driver_busy", "store_busy"):
            setattr(found, name, getattr(found, name) / found.seconds)
        if place.devices:
            found.device_busy /= found.seconds * place.devices
        return found

    def _main(self) -> Steps:
        yield from self.driver_cores.work(self.work.before)
        for variant in range(self.work.variants):
            self.tasks.put(_Given(variant, MAKE))
        for number in range(self.place.workers):
            self.env.process(self._worker(self.machines[number % len(self.machines)]))
        for _ in range(self.place.devices):
            self.env.process(self._device())
        if math.isfinite(self.place.driver_life):
            self.env.process(self._driver_dies())
        if self.left:
            yield self.ended
        yield from self.driver_cores.work(self.work.after)

    def _worker(self, cores: Cores) -> Steps:
        while True:
            taken: list[_Given] = []
            life = self.env.process(self._live(cores, taken))
            self.lives.append(life)
            ends = self._drawn(self.place.worker_life)
            yield life | self.env.timeout(ends) if math.isfinite(ends) else life
            if life.is_alive:
                life.interrupt()
                self._died(taken)
            else:  # ended with the driver, whose death is not the task's
                self.tasks.items.extend(taken)
                yield self.back
            self.lives.remove(life)

    def _live(self, cores: Cores, taken: list[_Given]) -> Steps:
        asked = None
        try:
            yield from cores.work(self.place.boot)
            while True:
                asked = self.tasks.get()
                given = yield asked
                asked = None
                taken.append(given)  # type: ignore[arg-type]
                task = self.costs[taken[0].kind]
                yield from cores.work(task)
                yield from self._ask_store(task)
                self.env.process(self._collected(taken.pop()))
        except simpy.Interrupt:
            if asked is not None:
                asked.cancel() if not asked.triggered else self.tasks.put(asked.value)

    def _died(self, taken: list[_Given]) -> None:
        self.found.deaths += 1
        for given in taken:
            if given.starts < STARTS:
                self.tasks.put(_Given(given.variant, given.kind, given.starts + 1))
            else:
                self.found.failed += 1
                # With all that would have come of it.
                self._count(1 + (self.work.shards + self.work.measured_on if given.kind == MAKE else 0))

    def _ask_store(self, task: Task) -> Steps:
        for _ in range(task.requests):
            self.found.requests += 1
            if math.isfinite(self.place.store_rate):
                with self.store.request() as asked:
                    yield asked
                    yield self.env.timeout(1 / self.place.store_rate)
                    self.found.store_busy += 1 / self.place.store_rate
        wait = task.requests * self.place.store_seconds
        wait += task.bytes / self.place.store_bytes if task.bytes else 0.0
        if wait:
            yield self.env.timeout(wait)

    def _collected(self, done: _Given) -> Steps:
        """The driver takes a result, and gives out what that allows."""
        with self.driver.request() as asked:
            self.found.waiting = max(self.found.waiting, len(self.driver.queue))
            yield asked
            yield self.env.timeout(self.place.collect_seconds)
        self.found.driver_busy += self.place.collect_seconds
        if done.kind == MEASURE:
            self.found.measured = self.env.now
        else:
            self.found.evaluated = self.env.now
        if done.kind == MAKE:
            variant = done.variant
            for _ in range(self.work.shards):
                self.tasks.put(_Given(variant, SHARD))
            for _ in range(self.work.measured_on):
                self.engines.put(variant)
        self._count(1)

    def _count(self, done: int) -> None:
        self.left -= done
        if self.left <= 0 and not self.ended.triggered:
            self.ended.succeed()

    def _device(self) -> Steps:
        """Measures one engine after the other, alone; one that goes away measures it again when it is back."""
        while True:
            variant = yield self.engines.get()
            while (lives := self._drawn(self.place.device_life)) < self.work.measure_seconds:
                yield self.env.timeout(lives + self.place.device_away)
            yield self.env.timeout(self.work.measure_seconds)
            self.found.device_busy += self.work.measure_seconds
            self.env.process(self._collected(_Given(int(variant), MEASURE)))  # type: ignore[call-overload]

    def _drawn(self, life: float) -> float:
        return self.random.expovariate(1 / life) if math.isfinite(life) else math.inf

    def _driver_dies(self) -> Steps:
        """Its workers end with it; finished work is in the store, so they continue with the rest when it is back."""
        while True:
            yield self.env.timeout(self._drawn(self.place.driver_life))
            self.back = self.env.event()
            for life in self.lives:
                if life.is_alive:
                    life.interrupt()
            with self.driver.request() as asked:
                yield asked
                yield self.env.timeout(self.place.driver_start_seconds)
            yield from self.driver_cores.work(self.work.before)
            self.found.driver_deaths += 1
            self.back.succeed()


def simulate(work: Work, place: Place, seed: int = 0) -> Result:
    """The end of all work in a place. The same seed gives the same failures."""
    return _Simulation(work, place, seed).run()
