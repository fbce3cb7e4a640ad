"""Monitor an engine in use: whether images and answers resemble those of calibration, and whether the engine still
reproduces its golden answers.

The cost is measured and bounded: an image is inspected only while all inspections have taken less than `share` of the
engine's run time, and one golden input runs every `every` runs. So large models have every image inspected, the
smallest only some.
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
# starting: no window is full yet. drift: the last window was out of limits. fault: wrong golden answers, or outputs
# that are not finite.
State = Literal["starting", "steady", "drift", "fault"]
KINDS: tuple[Kind, ...] = typing.get_args(Kind)
STATES: tuple[State, ...] = typing.get_args(State)
# Lower bounds on the reference's standard deviations: of inputs, in 0..1, and of outputs, relative to their size.
LEAST_INPUT, LEAST_OUTPUT = 0.01, 0.01
UNLIKE = {
    "inputs": "the images differ from the calibration images",
    "outputs": "the answers differ from those to the calibration images",
}


class MonitorWarning(RuntimeWarning):
    """A finding of a monitor without `on_event`."""


@dataclass(frozen=True)
class MonitorEvent:
    """A finding of a monitor: drift of "inputs" or "outputs", wrong golden answers ("canary"), or "non-finite" outputs.

    `kind` is one of these, `message` a sentence. `runs` is the engine's number of runs so far. `statistics`: for each
    statistic out of its limits, furthest first, its mean over the window and its usual range; {} for other kinds.
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
    """Settings of a monitor, for `load(..., monitor=Monitor())`.

    Args:
        window: number of inspected images per test.
        false_alarms: the share of windows reported without any change: 0.001 is one in 1,000.
        every: runs of the engine between two golden inputs.
        share: the fraction of the total run time spent on inspection; golden inputs add 1 / `every`.
        on_event: called with each MonitorEvent, in the thread of the answer that caused it; its exceptions propagate
            from `predict`. None issues a MonitorWarning.
    """

    window: int = 256
    false_alarms: float = 0.001
    every: int = 1000
    share: float = 0.005
    on_event: Callable[[MonitorEvent], object] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            InputError: a setting is out of range.
        """
        whole = all(type(value) is int for value in (self.window, self.every))
        if not whole or self.window < 8 or self.every < 1 or not 1e-4 <= self.false_alarms <= 0.5 or not self.share > 0:
            raise InputError(
                "invalid Monitor settings",
                found=f"window {self.window}, every {self.every}, false_alarms {self.false_alarms}, share {self.share}",
                expected="window >= 8, every >= 1, false_alarms from 0.0001 to 0.5, share > 0",
            )


@dataclass(frozen=True)
class MonitorCounts:
    """The counters of a monitor.

    `runs`: runs of the engine. `looked_at`: runs of which one image was inspected. `windows`: full windows of inspected
    images, of which `drifted` were out of limits. `non_finite`: inspected outputs that are not finite. `canaries`:
    golden inputs run, of which `wrong` had wrong answers, and `changed` had correct answers that differ in some bit
    from this process's first ones (not every runtime is deterministic). `events`: reported events by kind.
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
    """The golden answers of one loaded engine, checked one by one; safe to use from several threads."""

    def __init__(self, runner: Runner, preprocess: PreprocessSpec, golden: GoldenSet, names: list[str]) -> None:
        self._runner, self._preprocess, self.tolerance = runner, preprocess, golden.tolerance
        (self._inputs,) = golden.inputs.values()
        self._expected = {name: golden.outputs[name] for name in names}
        self._scales = {
            name: max(float(np.abs(each).max(initial=0.0)), 1e-300) for name, each in self._expected.items()
        }
        self._first: dict[int, dict[str, Array]] = {}
        self._turn = forkable_lock()
        self._next = 0

    def ask(self) -> tuple[float, bool]:
        """Run the next golden input. Return its difference from the recorded output, relative to the largest value (NaN
        if an output has NaN), and whether the output changed since this process first ran it."""
        with self._turn:
            i, self._next = self._next, (self._next + 1) % len(self._inputs)
        found = engine_outputs(self._runner, self._preprocess, self._inputs[i : i + 1])
        first = self._first.setdefault(i, found)
        changed = any(not np.array_equal(found[name], first[name], equal_nan=True) for name in self._expected)
        apart = (np.abs(found[name][0].astype(np.float64) - self._expected[name][i]) for name in self._expected)
        far = [each.max(initial=0.0) / scale for each, scale in zip(apart, self._scales.values(), strict=True)]
        return float(np.max(far)), changed


class Monitoring:
    """The monitor of an engine, `Predictor.monitor`; predictors of one engine may share it. Safe to use from several
    threads. `watched`: the kinds of events that it can report."""

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
        """`limits`: for the statistics of inputs, then of `outputs`; None without a reference."""
        self.options, self.engine, self.watched = options, engine, watched
        self._task, self._preprocess, self._limits, self._outputs = task, preprocess, limits, outputs
        self._width = 0 if limits is None else len(limits.names)
        self._inputs = self._width - len(monitor_reference.output_names(task, outputs or []))
        self._lock = forkable_lock()
        self._counts = dict.fromkeys((field.name for field in fields(MonitorCounts)[:-1]), 0)
        self._events: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._ran, self._spent = 0, 0
        self._sums, self._held = np.zeros((2, self._width)), 0  # sums of the raw and of the clipped statistics
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
        """Record a run of the engine on `feed` [n, ...] with `outputs` [n, ...] and its duration. The first image of a
        batch is inspected: the last ones may be padding."""
        with self._lock:
            self._counts["runs"] += 1
            runs = self._counts["runs"]
            self._ran += nanoseconds
            looks = self._spent <= self.options.share * self._ran
        asks = canary is not None and runs % self.options.every == 0
        if not looks and not asks:
            return
        events: list[MonitorEvent] = []
        if looks:
            start = perf_counter_ns()
            events += self._look(feed, outputs, runs)
            with self._lock:
                self._spent += perf_counter_ns() - start
        if asks and canary is not None:
            events += self._ask(canary, runs)
        for event in events:
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
        fits = len(row) == self._width  # non-image tensors have no statistics
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
        parts = [f"{name} {mean:.4g} (usual {low:.4g} to {high:.4g})" for name, (mean, low, high) in statistics.items()]
        shown = "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")
        message = f"{self.engine}: {UNLIKE[kind]}: over {self.options.window} images: {shown}"
        return MonitorEvent(kind, self.engine, message, runs, statistics)

    def _non_finite_outputs(self, runs: int) -> list[MonitorEvent]:
        with self._lock:
            self._counts["looked_at"] += 1
            self._counts["non_finite"] += 1
            began, self._broken = not self._broken, True
            self._sums, self._held = np.zeros_like(self._sums), 0  # the next window starts empty
        message = f"{self.engine}: an output is not finite (NaN or infinity)"
        return [MonitorEvent("non-finite", self.engine, message, runs, {})] if began else []

    def _ask(self, canary: Canary, runs: int) -> list[MonitorEvent]:
        try:
            difference, changed = canary.ask()
        except ClosedError:  # closed by another thread: not a fault of the engine
            return []
        except VitdeployError as error:
            detail = f"it fails: {error.message}" + (f" ({error.found})" if error.found else "")
            right, changed = False, False
        else:
            detail = f"relative difference {difference:.1e}, limit {canary.tolerance:.1e}"
            right = difference <= canary.tolerance  # False for NaN
        with self._lock:
            self._counts["canaries"] += 1
            self._counts["wrong"] += not right
            self._counts["changed"] += right and changed
            began, self._errs = not right and not self._errs, not right
        message = f"{self.engine}: a golden answer was correct at loading and no longer is: {detail}"
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
    """Return the monitor of a loaded engine of an image bundle, and its golden answers.

    A RuntimeWarning is issued if the bundle has no reference: images and answers are then not monitored.

    Raises:
        DigestError, ManifestError: the reference or the golden files differ from the manifest's record, or are invalid.
    """
    manifest = files.manifest
    assert manifest.preprocess is not None, "only image bundles are monitored"
    limits, outputs = _limits(files, engine, runner, options)
    canary = canary_of(files, engine, runner)
    kinds: list[Kind] = [] if limits is None else ["inputs"]
    kinds += ["outputs"] if outputs is not None else []
    kinds += ["canary"] if canary is not None else []
    if limits is None:
        warnings.warn(
            f"the bundle {manifest.name} has no monitor reference: images and answers are not monitored; "
            "`vitdeploy run` with at least 32 calibration images adds one",
            RuntimeWarning,
            stacklevel=choice.CALLER,
        )
    found = (manifest.task, manifest.preprocess, limits, outputs, (*kinds, "non-finite"))
    return Monitoring(options, engine.artifact, *found), canary


def canary_of(files: CheckedFiles, engine: EngineSpec, runner: Runner) -> Canary | None:
    """Return the golden answers of a loaded single-graph engine; None if the bundle has none, or none that can be
    compared or prove anything."""
    manifest = files.manifest
    if engine.parts or manifest.preprocess is None:
        return None
    golden = read_golden(files.folder, manifest, engine, files)
    if golden is None or golden.proves_nothing or len(golden.inputs) != 1:
        return None
    if set(golden.outputs) != {output.name for output in runner.outputs}:
        return None
    names = [name for name in comparable(manifest, golden.outputs) if golden.outputs[name].dtype.kind == "f"]
    return Canary(runner, manifest.preprocess, golden, names) if names else None


def _limits(
    files: CheckedFiles, engine: EngineSpec, runner: Runner, options: Monitor
) -> tuple[Limits | None, list[str] | None]:
    """The control limits, and the monitored outputs; None without a reference."""
    reference = monitor_reference.read_reference(files)
    if reference is None:
        return None, None
    own = None if engine.parts else reference.outputs.get(engine.artifact)
    outputs = None
    if own is not None:
        outputs = [name.removesuffix(".min") for name in own if name.endswith(".min")]
        if list(own) != monitor_reference.output_names(files.manifest.task, outputs) or not set(outputs) <= {
            output.name for output in runner.outputs
        }:
            raise ManifestError(
                f"{files.folder / str(files.manifest.monitor)} does not match the engine {engine.artifact}",
                found=ascii(", ".join(own))[:200],
                expected="the outputs " + ", ".join(output.name for output in runner.outputs),
                fix="make the bundle again with `vitdeploy run`",
            )
    names, values, floors = columns(reference, own)
    return control_limits(names, values, floors, options.window, options.false_alarms), outputs


def columns(
    reference: monitor_reference.MonitorReference, own: Mapping[str, monitor_reference.Numbers] | None
) -> tuple[list[str], monitor_reference.Numbers, monitor_reference.Numbers]:
    """Return the statistics of a reference and of an engine's `own` outputs: names, values [images, statistics], and
    the lower bound on each standard deviation."""
    own = own or {}
    floors = [LEAST_INPUT] * len(reference.inputs)
    floors += [LEAST_OUTPUT * max(float(np.abs(numbers).mean()), 1e-6) for numbers in own.values()]
    values = np.stack([*reference.inputs.values(), *own.values()], axis=1)
    return [*reference.inputs, *own], values, np.array(floors)


# --- Control limits for means over windows of images, from a reference sample -----------------------------------------
# A Shewhart chart of several means at once, its limits found by resampling: a window is out of control if one of its
# means deviates further from the reference's than the largest deviation that chance causes in all but a share `rate` of
# windows.
#
# - Numbers are clipped to within 3 robust standard deviations of the median before averaging: a single image, such as
#   the one in a hundred that a classifier is unsure of, says little about a window, and a reference that happens to
#   lack such images would flag them. Source: Huber, "Robust Statistics" (1981), chapter 1: winsorizing.
# - Windows of the reference's own images are drawn with replacement, and the reference, a sample itself, is resampled
#   too, so both errors count. Sources: Liu and Tang, "Control Charts for Dependent and Independent Measurements
#   Based on Bootstrap Methods", JASA 91 (1996), 1694-1700; Efron and Tibshirani, "An Introduction to the Bootstrap"
#   (1993), chapter 16.
# - Each drawing contributes its largest deviation in standard errors over all statistics: the quantile is one threshold
#   for all of them together, however they are correlated. Source: Westfall and Young,
#   "Resampling-Based Multiple Testing" (1993), the maxT method.


DRAWINGS, AT_A_TIME, MANY = 20_000, 500, 4096
SEED = 0
CLIP = 3.0


@dataclass(frozen=True)
class Limits:
    """Control limits by statistic: clipping range (`least`, `most`), mean of the clipped reference, and standard error
    of a window's mean. `threshold` is the allowed deviation in standard errors."""

    names: tuple[str, ...]
    least: monitor_reference.Numbers
    most: monitor_reference.Numbers
    mean: monitor_reference.Numbers
    error: monitor_reference.Numbers
    threshold: float

    def clipped(self, values: monitor_reference.Numbers) -> monitor_reference.Numbers:
        """Return the values [..., statistics], clipped."""
        return np.asarray(np.clip(values, self.least, self.most), np.float64)

    def outside(self, means: monitor_reference.Numbers) -> list[int]:
        """Return the indices of statistics that are out of their limits, furthest first."""
        away = np.abs(means - self.mean) / self.error
        return [int(i) for i in np.argsort(-away) if not away[i] <= self.threshold]

    def bounds(self, index: int) -> tuple[float, float]:
        room = self.threshold * self.error[index]
        return float(self.mean[index] - room), float(self.mean[index] + room)


def control_limits(
    names: Sequence[str], values: monitor_reference.Numbers, floors: monitor_reference.Numbers, window: int, rate: float
) -> Limits:
    """Return the limits for means over `window` images.

    Args:
        values: float64 [images, statistics] of the reference.
        floors: [statistics], the lower bound on the standard deviation: a statistic that is constant in a small
            reference may vary in other images.
        rate: the share of in-control windows that exceed a limit (false alarms).
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
    # The quantile of one normal mean, if the reference varies less than the lower bounds.
    least = NormalDist().inv_cdf(1 - rate / 2)
    found = max(least, float(np.quantile(np.concatenate(worst), 1 - rate)))
    return Limits(tuple(names), median - room, median + room, mean, error, _student(found, images - 1))


def _student(quantile: float, freedom: int) -> float:
    """Correct a normal quantile for an estimated deviation with `freedom` degrees of freedom (Student's t). Source:
    Abramowitz and Stegun (1964), 26.7.5, the first two terms."""
    return quantile + (quantile**3 + quantile) / (4 * freedom)


def _shares(generator: np.random.Generator, images: int, count: int) -> monitor_reference.Numbers:
    """[AT_A_TIME, images]: the share of each image among `count` drawn with replacement."""
    if count > MANY:  # constant time, but slower for small counts
        return np.asarray(generator.multinomial(count, np.full(images, 1 / images), AT_A_TIME) / count, np.float64)
    drawn = generator.integers(0, images, (AT_A_TIME, count)) + images * np.arange(AT_A_TIME)[:, None]
    value = np.bincount(drawn.ravel(), minlength=AT_A_TIME * images).reshape(AT_A_TIME, images)
    return np.asarray(value / count, np.float64)
