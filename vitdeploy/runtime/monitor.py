"""Watches an engine while it answers: are the images like those it was calibrated with, are the answers usual, and does
it still give its golden answers?

What is looked at costs time, which is measured: an image is looked at while all looks together have taken less than
`share` of what the engine's runs took, and one golden input is run every `every` runs. So large models have every image
looked at, and the smallest some of them.
"""

from __future__ import annotations

import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import NormalDist
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np

from vitdeploy.bundle.checked import CheckedFiles
from vitdeploy.errors import ClosedError, InputError, ManifestError, VitdeployError
from vitdeploy.runtime import choice, monitor_reference
from vitdeploy.runtime.golden import GoldenSet, comparable, engine_outputs, read_golden
from vitdeploy.runtime.runner import Array, Runner, forkable_lock
from vitdeploy.spec import EngineSpec, PreprocessSpec, Task

Kind = Literal["inputs", "outputs", "canary", "non-finite"]
# starting: no window is full yet. drift: the last one was out of its limits. fault: the engine gave wrong golden
# answers, or numbers that are not finite.
State = Literal["starting", "steady", "drift", "fault"]
KINDS: tuple[Kind, ...] = typing.get_args(Kind)
STATES: tuple[State, ...] = typing.get_args(State)
# The least standard deviations that a reference is believed to have: of inputs, in 0..1, and of outputs, of their size.
LEAST_INPUT, LEAST_OUTPUT = 0.01, 0.01
UNLIKE = {
    "inputs": "these images are unlike those that the engine was calibrated with",
    "outputs": "the answers are unlike those to the images that the engine was calibrated with",
}


class MonitorWarning(RuntimeWarning):
    """What a monitor has found, where nobody gave it an `on_event`."""


@dataclass(frozen=True)
class MonitorEvent:
    """What a monitor found: "inputs" or "outputs" that drifted, a "canary" with wrong answers, or "non-finite" outputs.

    `runs` of the engine came before it. `statistics`: of each that is out of its limits, the furthest first, its mean
    over the window and its lowest and highest usual value; {} of other kinds.
    """

    kind: Kind
    engine: str
    message: str
    runs: int
    statistics: Mapping[str, tuple[float, float, float]]

    def to_dict(self) -> dict[str, Any]:
        named = {name: dict(zip(("mean", "low", "high"), each, strict=True)) for name, each in self.statistics.items()}
        return {**asdict(self), "statistics": named}


@dataclass(frozen=True)
class Monitor:
    """How an engine is watched, for `load(..., monitor=Monitor())`.

    Args:
        window: images that are looked at before it is judged whether they are usual.
        false_alarms: the share of windows that are judged wrongly while all is as it was: 0.001 is one of 1,000.
        every: runs of the engine from one golden input to the next.
        share: of the time of all runs that looking may take; golden inputs take another 1 / `every`.
        on_event: called with each MonitorEvent, in the thread whose answer it came with, and what it raises, `predict`
            raises; None: a MonitorWarning is given.
    """

    window: int = 256
    false_alarms: float = 0.001
    every: int = 1000
    share: float = 0.005
    on_event: Callable[[MonitorEvent], object] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            InputError: numbers that make no sense.
        """
        whole = all(type(value) is int for value in (self.window, self.every))
        if not whole or self.window < 8 or self.every < 1 or not 1e-4 <= self.false_alarms <= 0.5 or not self.share > 0:
            raise InputError(
                "that is no way to watch an engine",
                found=f"window {self.window}, every {self.every}, false_alarms {self.false_alarms}, share {self.share}",
                expected="a window of 8 images or more, every 1 run or more, false_alarms 0.0001 to 0.5, a share above 0",
            )


@dataclass(frozen=True)
class MonitorCounts:
    """What a monitor has done so far, since it was made.

    Of each of `looked_at` of the `runs` of the engine one image was looked at; of `windows` of these `drifted` were out
    of their limits, and `non_finite` had outputs that are not finite. Of `canaries` golden inputs `wrong` had wrong
    answers, and `changed` had right ones, but not bit for bit those that this process got at first, which not every
    runtime promises. `events` by kind were told.
    """

    runs: int
    looked_at: int
    windows: int
    drifted: int
    canaries: int
    wrong: int
    changed: int
    non_finite: int
    events: Mapping[Kind, int]


class Canary:
    """The golden answers of one loaded engine, asked for one at a time; in turns, by any thread."""

    def __init__(self, runner: Runner, preprocess: PreprocessSpec, golden: GoldenSet, names: list[str]) -> None:
        self._runner, self._preprocess, self.tolerance = runner, preprocess, golden.tolerance
        (self._inputs,) = golden.inputs.values()
        self._expected = {name: golden.outputs[name] for name in names}
        self._scales = {name: max(float(np.abs(each).max(initial=0.0)), 1e-300) for name, each in self._expected.items()}
        self._first: dict[int, dict[str, Array]] = {}
        self._turn = forkable_lock()
        self._next = 0

    def ask(self) -> tuple[float, bool]:
        """How far the answer to the next golden input is from the recorded one, of the largest output; not a number
        where it holds one. And whether it is another one than this process got for it at first."""
        with self._turn:
            i, self._next = self._next, (self._next + 1) % len(self._inputs)
        found = engine_outputs(self._runner, self._preprocess, self._inputs[i : i + 1])
        first = self._first.setdefault(i, found)
        changed = any(not np.array_equal(found[name], first[name], equal_nan=True) for name in self._expected)
        apart = (np.abs(found[name][0].astype(np.float64) - self._expected[name][i]) for name in self._expected)
        far = [each.max(initial=0.0) / scale for each, scale in zip(apart, self._scales.values(), strict=True)]
        return float(np.max(far)), changed


class Monitoring:
    """What watches an engine, `Predictor.monitor`; predictors of one engine may share it. Safe to use from several
    threads. `watched`: what it can find."""

    def __init__(
        self,
        options: Monitor,
        engine: str,
        task: Task,
        preprocess: PreprocessSpec,
        limits: Limits | None = None,
        outputs: list[str] | None = None,
        watched: tuple[Kind, ...] = (),
    ) -> None:
        """`limits` are of the statistics of inputs, then of those of `outputs`; None without a reference of them."""
        self.options, self.engine, self.watched = options, engine, watched
        self._task, self._preprocess, self._limits, self._outputs = task, preprocess, limits, outputs
        self._width = 0 if limits is None else len(limits.names)
        self._inputs = self._width - len(monitor_reference.output_names(task, outputs or []))
        self._lock = forkable_lock()
        self._counts = dict.fromkeys((each.name for each in fields(MonitorCounts)[:-1]), 0)
        self._events: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._ran, self._spent = 0, 0
        self._sums, self._held = np.zeros((2, self._width)), 0  # of what was seen, and of what of it is believed
        self._drifts, self._errs, self._broken = False, False, False

    @property
    def state(self) -> State:
        with self._lock:
            if self._errs or self._broken:
                return "fault"
            if self._drifts:
                return "drift"
            return "steady" if self._counts["windows"] else "starting"

    @property
    def counts(self) -> MonitorCounts:
        with self._lock:
            return MonitorCounts(**self._counts, events=dict(self._events))

    def saw(self, feed: Array, outputs: Mapping[str, Array], nanoseconds: int, canary: Canary | None = None) -> None:
        """A run of the engine on `feed` [n, ...] gave `outputs` [n, ...] in so many nanoseconds. Of a batch the first
        image is looked at: the last ones may be padding."""
        with self._lock:
            self._counts["runs"] += 1
            runs = self._counts["runs"]
            self._ran += nanoseconds
            looks = self._spent <= self.options.share * self._ran
        asks = canary is not None and runs % self.options.every == 0
        if not looks and not asks:
            return
        found: list[MonitorEvent] = []
        if looks:
            start = perf_counter_ns()
            found += self._look(feed, outputs, runs)
            with self._lock:
                self._spent += perf_counter_ns() - start
        if asks and canary is not None:
            found += self._ask(canary, runs)
        for event in found:
            self._tell(event)

    def _look(self, feed: Array, outputs: Mapping[str, Array], runs: int) -> list[MonitorEvent]:
        limits = self._limits
        names = self._outputs if self._outputs is not None else monitor_reference.watched_outputs(outputs)
        some = {name: outputs[name][0] for name in names if name in outputs}
        numbers = monitor_reference.output_statistics(self._task, some, list(some))
        if not np.isfinite(numbers).all():
            return self._non_finite_outputs(runs)
        seen = monitor_reference.input_statistics(feed[0], self._preprocess) if limits is not None else None
        row = np.array([] if seen is None else seen if self._outputs is None else [*seen, *numbers], np.float64)
        fits = len(row) == self._width  # tensors that are no images have none
        believed = limits.clipped(row) if limits is not None and fits else row
        with self._lock:
            self._counts["looked_at"] += 1
            if not fits:
                return []
            self._sums += np.stack([row, believed])
            self._held += 1
            if self._held < self.options.window:
                return []
            (means, clipped), self._sums, self._held = self._sums / self._held, np.zeros_like(self._sums), 0
            self._counts["windows"] += 1
            outside = [] if limits is None else limits.outside(clipped)
            began, self._drifts, self._broken = bool(outside) and not self._drifts, bool(outside), False
            self._counts["drifted"] += bool(outside)
        return [self._drift(limits, means, outside, runs)] if began and limits is not None else []

    def _drift(self, limits: Limits, means: monitor_reference.Numbers, outside: list[int], runs: int) -> MonitorEvent:
        statistics = {limits.names[i]: (float(means[i]), *limits.bounds(i)) for i in outside}
        kind: Kind = "inputs" if min(outside) < self._inputs else "outputs"
        told = [f"{name} {mean:.4g} (usual {low:.4g} to {high:.4g})" for name, (mean, low, high) in statistics.items()]
        shown = "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")
        message = f"{self.engine}: {UNLIKE[kind]}: over {self.options.window} of them {shown}"
        return MonitorEvent(kind, self.engine, message, runs, statistics)

    def _non_finite_outputs(self, runs: int) -> list[MonitorEvent]:
        with self._lock:
            self._counts["looked_at"] += 1
            self._counts["non_finite"] += 1
            began, self._broken = not self._broken, True
            self._sums, self._held = np.zeros_like(self._sums), 0  # the next window is of finite ones alone
        message = f"{self.engine}: an answer is not finite, which no answer was when the bundle was made"
        return [MonitorEvent("non-finite", self.engine, message, runs, {})] if began else []

    def _ask(self, canary: Canary, runs: int) -> list[MonitorEvent]:
        try:
            difference, changed = canary.ask()
        except ClosedError:  # by another thread, which is no fault of the engine
            return []
        except VitdeployError as error:
            said = f"it fails: {error.message}" + (f" ({error.found})" if error.found else "")
            right, changed = False, False
        else:
            said = f"{difference:.1e} of the largest output away, allowed {canary.tolerance:.1e}"
            right = difference <= canary.tolerance  # not of a number that is none
        with self._lock:
            self._counts["canaries"] += 1
            self._counts["wrong"] += not right
            self._counts["changed"] += right and changed
            began, self._errs = not right and not self._errs, not right
        message = f"{self.engine}: it gave a golden answer when it was loaded, and no longer does: {said}"
        return [MonitorEvent("canary", self.engine, message, runs, {})] if began else []

    def _tell(self, event: MonitorEvent) -> None:
        with self._lock:
            self._events[event.kind] += 1
        if self.options.on_event is not None:
            self.options.on_event(event)
        else:
            warnings.warn(event.message, MonitorWarning, stacklevel=2)


def watch(
    files: CheckedFiles, engine: EngineSpec, runner: Runner, options: Monitor
) -> tuple[Monitoring, Canary | None]:
    """What watches a loaded engine of a bundle of images, and the golden answers that it is asked for.

    A RuntimeWarning says so where the bundle keeps no reference: then images and answers are not watched.

    Raises:
        DigestError, ManifestError: the reference or the golden files are not the recorded ones, or no such files.
    """
    manifest = files.manifest
    assert manifest.preprocess is not None, "of bundles of images"
    limits, outputs = _limits(files, engine, runner, options)
    canary = canary_of(files, engine, runner)
    kinds: list[Kind] = [] if limits is None else ["inputs"]
    kinds += ["outputs"] if outputs is not None else []
    kinds += ["canary"] if canary is not None else []
    if limits is None:
        warnings.warn(
            f"the bundle {manifest.name} does not say what its images are like, so these are not watched; "
            "`vitdeploy run` with 32 calibration images or more makes one that does",
            RuntimeWarning,
            stacklevel=choice.CALLER,
        )
    found = (manifest.task, manifest.preprocess, limits, outputs, (*kinds, "non-finite"))
    return Monitoring(options, engine.artifact, *found), canary


def canary_of(files: CheckedFiles, engine: EngineSpec, runner: Runner) -> Canary | None:
    """The golden answers of a loaded engine of one graph; None if the bundle has none, none that are comparable, or
    such as prove nothing."""
    manifest = files.manifest
    if engine.parts or manifest.preprocess is None:
        return None
    golden = read_golden(files.folder, manifest, engine, files)
    if golden is None or golden.proves_nothing or len(golden.inputs) != 1:
        return None
    if set(golden.outputs) != {each.name for each in runner.outputs}:
        return None
    names = [name for name in comparable(manifest, golden.outputs) if golden.outputs[name].dtype.kind == "f"]
    return Canary(runner, manifest.preprocess, golden, names) if names else None


def _limits(
    files: CheckedFiles, engine: EngineSpec, runner: Runner, options: Monitor
) -> tuple[Limits | None, list[str] | None]:
    """The limits of what is watched, and the outputs that are; None without a reference of them."""
    reference = monitor_reference.read_reference(files)
    if reference is None:
        return None, None
    own = None if engine.parts else reference.outputs.get(engine.artifact)
    outputs = None
    if own is not None:
        outputs = [name.removesuffix(".min") for name in own if name.endswith(".min")]
        if list(own) != monitor_reference.output_names(files.manifest.task, outputs) or not set(outputs) <= {
            each.name for each in runner.outputs
        }:
            raise ManifestError(
                f"{files.folder / str(files.manifest.monitor)} is not of the engine {engine.artifact}",
                found=ascii(", ".join(own))[:200],
                expected="the outputs " + ", ".join(each.name for each in runner.outputs),
                fix="make the bundle again with `vitdeploy run`",
            )
    names, values, floors = columns(reference, own)
    return control_limits(names, values, floors, options.window, options.false_alarms), outputs


def columns(
    reference: monitor_reference.MonitorReference, own: Mapping[str, monitor_reference.Numbers] | None
) -> tuple[list[str], monitor_reference.Numbers, monitor_reference.Numbers]:
    """The statistics of a reference, and of an engine's `own` outputs: their names, the numbers [images, statistics],
    and the least standard deviation that is believed of each."""
    own = own or {}
    floors = [LEAST_INPUT] * len(reference.inputs)
    floors += [LEAST_OUTPUT * max(float(np.abs(numbers).mean()), 1e-6) for numbers in own.values()]
    values = np.stack([*reference.inputs.values(), *own.values()], axis=1)
    return [*reference.inputs, *own], values, np.array(floors)


# --- Control limits for means over windows of images, from a sample of images that are in order -----------------------
# A Shewhart chart of several means at once, its limits found by resampling: a window is out of control if any of its
# means lies further from the reference's than chance takes the worst of them in all but a share `rate` of windows.
#
# - Means are of numbers that are clipped to within 3 robust standard deviations of the median: a single image, such as
#   the one in a hundred that a classifier is unsure of, says little about a window, and a reference that happens to
#   have none of these would call others unusual. Source: Huber, "Robust Statistics" (1981), chapter 1: winsorizing.
# - Windows of the reference's own images are drawn with replacement, and, as the reference is a sample too, so is the
#   reference: both errors count. Sources: Liu and Tang, "Control Charts for Dependent and Independent Measurements
#   Based on Bootstrap Methods", JASA 91 (1996), 1694-1700; Efron and Tibshirani, "An Introduction to the Bootstrap"
#   (1993), chapter 16.
# - Of each drawing the largest deviation in standard errors counts, over all statistics: its quantile is one threshold
#   that holds for all of them together, however they depend on each other. Source: Westfall and Young,
#   "Resampling-Based Multiple Testing" (1993), the maxT method.


DRAWINGS, AT_A_TIME, MANY = 20_000, 500, 4096
SEED = 0
CLIP = 3.0


@dataclass(frozen=True)
class Limits:
    """Of each statistic what it is clipped to, its mean in the reference, the standard error of a window's mean about
    it, and how many of these a mean may be away, `threshold`. Means are of clipped numbers."""

    names: tuple[str, ...]
    least: monitor_reference.Numbers
    most: monitor_reference.Numbers
    mean: monitor_reference.Numbers
    error: monitor_reference.Numbers
    threshold: float

    def clipped(self, values: monitor_reference.Numbers) -> monitor_reference.Numbers:
        """Numbers [..., statistics] within what is believed of a single image."""
        return np.asarray(np.clip(values, self.least, self.most), np.float64)

    def outside(self, means: monitor_reference.Numbers) -> list[int]:
        """The statistics that are out of their limits, the furthest first."""
        away = np.abs(means - self.mean) / self.error
        return [int(i) for i in np.argsort(-away) if not away[i] <= self.threshold]

    def bounds(self, index: int) -> tuple[float, float]:
        room = self.threshold * self.error[index]
        return float(self.mean[index] - room), float(self.mean[index] + room)


def control_limits(
    names: Sequence[str], values: monitor_reference.Numbers, floors: monitor_reference.Numbers, window: int, rate: float
) -> Limits:
    """The limits for means over `window` images.

    Args:
        values: float64 [images, statistics] of the reference.
        floors: [statistics], the least standard deviation that is believed: a statistic that is the same in all
            images of a small reference need not be so in all others.
        rate: of windows of images like the reference's, the share that is out of some limit.
    """
    images, median = len(values), np.median(values, axis=0)
    below, above = np.quantile(values, (0.16, 0.84), axis=0)  # one standard deviation each, of a normal distribution
    room = CLIP * np.maximum((above - below) / 2, floors)
    values = np.clip(values, median - room, median + room)
    mean = values.mean(axis=0)
    deviation = np.maximum(values.std(axis=0, ddof=1), floors)
    error = deviation * np.sqrt(1 / window + 1 / images)
    generator, worst = np.random.default_rng(SEED), []
    centred = (values - mean) / error
    for _ in range(DRAWINGS // AT_A_TIME):
        drawn = _shares(generator, images, window) - _shares(generator, images, images)
        worst.append(np.abs(drawn @ centred).max(axis=1))
    # What a single normal mean would need, where the reference varies less than is believed.
    least = NormalDist().inv_cdf(1 - rate / 2)
    found = max(least, float(np.quantile(np.concatenate(worst), 1 - rate)))
    return Limits(tuple(names), median - room, median + room, mean, error, _student(found, images - 1))


def _student(quantile: float, freedom: int) -> float:
    """A normal quantile as it is where the deviation is estimated, with so many degrees of freedom. Source: Abramowitz
    and Stegun (1964), 26.7.5, the first two terms."""
    return quantile + (quantile**3 + quantile) / (4 * freedom)


def _shares(generator: np.random.Generator, images: int, count: int) -> monitor_reference.Numbers:
    """[AT_A_TIME, images]: the share of each image among `count` drawn with replacement."""
    if count > MANY:  # takes as long for any count, which for few is longer
        return np.asarray(generator.multinomial(count, np.full(images, 1 / images), AT_A_TIME) / count, np.float64)
    drawn = generator.integers(0, images, (AT_A_TIME, count)) + images * np.arange(AT_A_TIME)[:, None]
    found = np.bincount(drawn.ravel(), minlength=AT_A_TIME * images).reshape(AT_A_TIME, images)
    return np.asarray(found / count, np.float64)
