"""The table of tasks, and functions that read outputs by task."""

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
    """Return the graphs of a task's models and their flow; None for a task with one graph."""
    return TASKS[task].flow


def reader_of(task: Task) -> Callable[[Outputs, OutputReading], Result]:
    """Return the function that reads the outputs of one image, by name, without the batch axis, as a task's answer.

    It raises ManifestError for outputs that do not fit the task.
    """
    answer = TASKS[task].answer

    def read(outputs: Outputs, reading: OutputReading) -> Result:
        try:
            return answer(outputs, reading)
        except UNREADABLE as error:
            raise _of_another_task(task, outputs, error) from error

    return read


# Errors for outputs that do not fit the task claimed by a manifest: wrong names or axes.
UNREADABLE = (LookupError, ValueError, TypeError, AssertionError, AttributeError)


def _of_another_task(task: Task, outputs: Outputs, error: Exception) -> ManifestError:
    return ManifestError(
        f"the engine's outputs do not fit the task {task}",
        found=", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items()),
        expected=f"outputs that can be read as {task} (reading these raised {type(error).__name__})",
    )


def bound(
    task: Task, runner: Runner, inputs: Mapping[str, Array], postprocess: Postprocess | None
) -> tuple[Runner, Array, dict[str, Array]]:
    """Return a loaded runner, the samples for its first input, and their extra inputs. `inputs`: the samples first,
    then inputs shared by all samples, to which the runner is bound, or, for a task without `bind`, inputs of each
    sample.

    The caller still closes the runner that it passed.
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
    """Return on how many of n samples two sets of outputs agree by `DeviceTask.same`; outputs [n, ...] by name, with
    equal names and shapes. Outputs that are not finite never agree."""
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
