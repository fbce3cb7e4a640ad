"""From the outputs of one image to the answer of its task."""

from collections.abc import Callable, Mapping

import numpy as np

from vitdeploy.errors import ManifestError
from vitdeploy.extensions import RowTable
from vitdeploy.runtime.flows import FlowRow
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs, Result
from vitdeploy.spec import Postprocess, PreprocessSpec, Task
from vitdeploy.spec.tasks import DEVICE_ROWS, TASKS_GROUP

TASKS: RowTable[DeviceTask] = RowTable(TASKS_GROUP, DeviceTask, DEVICE_ROWS)


def flow_of(task: str) -> FlowRow | None:
    """The graphs of a task's models and how they run together; None of a task with one graph."""
    return TASKS[task].flow


def reader_of(task: Task) -> Callable[[Outputs, OutputReading], Result]:
    """What reads the outputs of one image, by name, without the batch axis, as the answer of a task.

    It raises ManifestError for outputs that are not those of the task.
    """
    answer = TASKS[task].answer

    def read(outputs: Outputs, reading: OutputReading) -> Result:
        try:
            return answer(outputs, reading)
        except UNREADABLE as error:
            raise _of_another_task(task, outputs, error) from error

    return read


# Outputs of another task, which a manifest may claim, have other names and axes than what reads them expects.
UNREADABLE = (LookupError, ValueError, TypeError, AssertionError, AttributeError)


def _of_another_task(task: Task, outputs: Outputs, error: Exception) -> ManifestError:
    return ManifestError(
        f"the outputs of the engine are not those of the task {task}",
        found=", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items()),
        expected=f"outputs that can be read as {task}; these cannot: {type(error).__name__}",
    )


def bound(
    task: Task, runner: Runner, inputs: Mapping[str, Array], postprocess: Postprocess | None
) -> tuple[Runner, Array, dict[str, Array]]:
    """A loaded runner, samples for its first input, and what each of these brings for the others. `inputs`: samples
    first, then what all of them share, to which the runner is bound, or what each brings, of a task without `bind`.

    The runner given stays the caller's to close.
    """
    (_, samples), *others = inputs.items()
    bind = TASKS[task].bind
    if not others or bind is None:
        return runner, samples, dict(others)
    return bind(runner, dict(others), postprocess).load(), samples, {}


def count_same(
    task: Task,
    preprocess: PreprocessSpec | None,
    postprocess: Postprocess | None,
    ours: Mapping[str, Array],
    theirs: Mapping[str, Array],
) -> int:
    """On how many of n samples the two agree, as `DeviceTask.same` says; outputs [n, ...] by name, of the same names
    and shapes. Answers with a number that is not finite agree with none."""
    samples = range(len(next(iter(theirs.values()))))
    size = (0, 0) if preprocess is None else (preprocess.crop[1], preprocess.crop[0])
    reading = OutputReading(size, preprocess, postprocess)
    count = 0
    for i in samples:
        a, b = ({name: array[i] for name, array in side.items()} for side in (ours, theirs))
        if not all(np.isfinite(array).all() for array in a.values() if array.dtype.kind == "f"):
            continue
        try:
            count += TASKS[task].same(a, b, reading)
        except UNREADABLE as error:
            raise _of_another_task(task, a, error) from error
    return count
