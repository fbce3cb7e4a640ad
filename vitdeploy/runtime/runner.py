"""The life cycle of every back end: load, infer, close.

The base class checks state and inputs, and limits concurrent inferences to what the back end supports. A back end
implements three short methods. Outputs are always new arrays: no back end returns a buffer that it reuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import ClosedError, InputError, TensorError
from vitdeploy.spec import TensorSpec

Array = npt.NDArray[Any]

# Prefix of inputs that are caches of earlier steps; they are empty (except for the batch axis) at the first step.
CACHE = "past_"
AFTER_FORK = "load the bundle after the fork, in the process that uses it"
# Locks and runners to reset after a fork: a lock held by another thread would stay locked in the child.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_runners: weakref.WeakSet[Runner] = weakref.WeakSet()
_paused = contextlib.ExitStack()


class Reloaded:
    """A context manager that calls `close` at the end. Pickling and copying store the call that made it, `again`,
    because an engine cannot leave its process."""

    again: Callable[[], Any] | None = None

    def close(self) -> None:
        """Free all resources."""
        raise NotImplementedError

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        if self.again is None:
            raise InputError(
                "a loaded engine cannot be pickled or copied",
                found=type_name(self),
                expected="a predictor from `vitdeploy.runtime.load`, which pickles its path and arguments",
                fix="pass the bundle's path to the other process, and load it there",
            )
        return self.again, ()


Opened = TypeVar("Opened", bound=Reloaded)


class Runner(Reloaded, ABC):
    """Runs one model on one runtime.

    `inputs` and `outputs` are the tensors as loaded (the batch is a number if the runner has a fixed one); `provider`
    is the provider or device that runs it, set by `load`. `at_once` is the number of concurrent `infer` calls.
    `native`: the runner holds objects of a runtime, with locks and threads; a fork waits for its runs, because a child
    inherits the locks. `engine_threads`: number of threads of one run, set by `load` if the runtime reports it.
    """

    native: ClassVar[bool] = False
    engine_threads: int | None = None
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    provider: str
    at_once: int

    def __init__(self, name: str, at_once: int = 1) -> None:
        self.name = name
        self.at_once = at_once
        self.inputs = ()
        self.outputs = ()
        self.provider = ""
        self._loaded, self._closed, self._inherited, self._process = False, False, False, 0
        self._fixed: dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]] = {}
        self._make_locks()
        _runners.add(self)

    def _make_locks(self) -> None:
        self._turn = threading.Lock() if self.at_once == 1 else threading.Semaphore(self.at_once)
        self._ending = threading.Lock()

    @abstractmethod
    def _load(self) -> None:
        """Prepare for `infer`; set `inputs`, `outputs` and `provider`."""

    def example(self, batch: int) -> dict[str, Array] | None:
        """Return inputs to measure with if random ones are not valid; None if they are."""
        return None

    def stages(self, feeds: Mapping[str, Array]) -> dict[str, float] | None:
        """Return the milliseconds of the phases of one run on `feeds` (checked by `check`): "copy_in", "execute" and
        "copy_out"; None if the back end cannot separate them."""
        return None

    def part_times(self, feeds: Mapping[str, Array]) -> dict[str, float] | None:
        """Return the milliseconds of each graph in one run on `feeds`, by name; None for a single graph."""
        return None

    def measured(self, feeds: Mapping[str, Array]) -> object:
        """Run one query of a measurement, on the feeds of `example` or random ones: `infer`, or a fixed amount of work
        if the computation depends on the input's content."""
        return self.infer(feeds)

    @abstractmethod
    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name, in arrays that later calls do not change. `feeds` are checked and contiguous."""

    @abstractmethod
    def _close(self) -> None:
        """Free the resources that `_load` acquired."""

    def load(self) -> Runner:
        if not self._loaded:
            self._load()
            self._fixed = _fixed_inputs(self.inputs)
            self._loaded, self._closed, self._inherited, self._process = True, False, False, os.getpid()
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for all runs, and block new ones inside the `with` block."""
        with self._ending, contextlib.ExitStack() as turns:
            for _ in range(self.at_once):
                turns.enter_context(self._turn)
            yield

    def forked(self) -> None:
        """Reset the locks in a forked child. The runtime's objects are never freed here: their destructors would wait
        for threads of the parent."""
        self._make_locks()
        if self.native and self._loaded:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dict(vars(self))))
            self._inherited = True

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. Safe to call from several threads; at most `at_once` calls run concurrently, one by default.

        Raises:
            TensorError: a missing or unknown input name, not a numpy array, or a dtype or shape unlike in `inputs`.
            ClosedError: not loaded, or closed.
        """
        with self._turn:
            if self._closed or self._inherited or not self._loaded:
                self._require_loaded("infer()")
            return self._infer(feeds if self._fits_exactly(feeds) else self.check(feeds))

    def _require_loaded(self, call: str) -> None:
        if self._closed:
            raise ClosedError(
                f"{self.name} is closed",
                found=f"{call} after close()",
                expected="an open runner or predictor",
                fix="call load() again; keep it open (`with` block) until all threads are done",
            )
        if not self._loaded:
            raise ClosedError(
                f"{self.name}: load() must be called before {call}",
                found="not loaded yet",
                expected="an open runner or predictor",
            )
        if self._inherited:
            self._inherited = False
            warnings.warn(
                f"{self.name} was loaded before this process was forked: the child lacks the runtime's threads, "
                f"so it is slower, and may hang when the child exits. {AFTER_FORK.capitalize()}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _expected(self, feeds: Mapping[str, object]) -> dict[str, TensorSpec]:
        """The `inputs` by name, after a check of the feeds' names."""
        expected = {tensor.name: tensor for tensor in self.inputs}
        if set(feeds) != set(expected):
            raise TensorError(
                f"{self.name}: wrong input names", found=", ".join(feeds) or "none", expected=", ".join(expected)
            )
        return expected

    def check(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the same feeds, contiguous, after checking them against `inputs`."""
        expected = self._expected(feeds)
        for name, array in feeds.items():
            tensor = expected[name]
            require_array(array, tensor, f"{self.name}: input {name!r}")
            fits = len(array.shape) == len(tensor.shape) and all(
                isinstance(size, str) or size == found for size, found in zip(tensor.shape, array.shape, strict=True)
            )
            native = array.dtype.isnative  # a runtime would misread swapped bytes
            empty = 0 in (array.shape[:1] if name.startswith(CACHE) else array.shape)
            if not fits or not native or array.dtype.name != tensor.dtype or empty:
                raise TensorError(
                    f"{self.name}: wrong dtype or shape of input {name!r}",
                    found=f"{array.dtype.name if native else array.dtype.str} {list(array.shape)}",
                    expected=f"{tensor.dtype} {list(tensor.shape)}",
                )
        return {name: np.ascontiguousarray(array) for name, array in feeds.items()}

    def _fits_exactly(self, feeds: Mapping[str, Array]) -> bool:
        """Whether the feeds are valid by a fast check; False means that `check` must decide."""
        if not self._fixed or len(feeds) != len(self._fixed):
            return False
        for name, array in feeds.items():
            expected = self._fixed.get(name)
            if type(array) is not np.ndarray:
                return False
            if (
                expected is None
                or array.dtype != expected[0]
                or array.shape != expected[1]
                or not array.flags.c_contiguous
            ):
                return False
        return True

    def close(self) -> None:
        """Free all resources after the runs in other threads have ended; new calls are refused. Closing twice is
        allowed."""
        self._closed = self._loaded or self._closed  # set first, so that new calls do not delay closing
        with self.paused():
            if self._loaded:
                self._loaded = False
                if self._process == os.getpid():
                    self._close()

    def __enter__(self: Runs) -> Runs:
        self.load()
        return self


Runs = TypeVar("Runs", bound=Runner)


def forkable_lock() -> threading.Lock:
    """Return a lock that is free in a forked child, whichever thread holds it in the parent."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _before_fork() -> None:
    _forks.acquire()
    for runner in list(_runners):
        if runner.native:
            _paused.enter_context(runner.paused())


def _in_parent() -> None:
    _paused.close()
    _forks.release()


def _in_child() -> None:
    _paused.pop_all()
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own
    for runner in list(_runners):
        runner.forked()


_forks = forkable_lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def require_array(value: object, expected: TensorSpec, what: str) -> None:
    """Raise TensorError if a value is not a numpy array, such as a list, None or a PyTorch tensor."""
    if not isinstance(value, np.ndarray):
        tensor = hasattr(value, "numpy") or hasattr(value, "__dlpack__")
        raise TensorError(
            f"{what} is not a numpy array",
            found=type_name(value),
            expected=f"numpy.ndarray, {expected.dtype} {list(expected.shape)}",
            fix="tensor.numpy(force=True)" if tensor else "convert it with numpy.asarray(..., dtype)",
        )


def type_name(value: object) -> str:
    """Return the name of a value's type, with dtype and shape of an array: "torch.Tensor float32 [3, 224, 224]"."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return name
    return f"{name} {str(dtype).rpartition('.')[2]} {list(shape)}"


def _fixed_inputs(inputs: Sequence[TensorSpec]) -> dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]]:
    """dtype and shape by name if all shapes are fixed; else {}."""
    try:
        fixed = {tensor.name: (np.dtype(tensor.dtype), tensor.shape) for tensor in inputs}
    except TypeError:  # a type that numpy lacks
        return {}
    usual = all(isinstance(size, int) and size > 0 for _, shape in fixed.values() for size in shape)
    return fixed if usual and len(fixed) == len(inputs) else {}
