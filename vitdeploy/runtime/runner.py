"""One life-cycle for every back end: load, infer, close.

The base class does what every back end needs: state checks, input checks, as many inferences at a time as the back end
is made for. A back end writes three short methods. Outputs are always arrays of the caller's own: no back end hands out
a buffer that it reuses.
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

# Inputs of such names are caches of earlier steps, which hold nothing at the first one: only their batch is not empty.
CACHE = "past_"
AFTER_FORK = "load the bundle after the fork, in the process that uses it"
# A lock that another thread holds at a fork would stay locked in the child.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_runners: weakref.WeakSet[Runner] = weakref.WeakSet()
_paused = contextlib.ExitStack()


class Reloaded:
    """A context manager that closes what it is at the end. It is pickled and copied as the call that made it, `again`:
    an engine stays in its process."""

    again: Callable[[], Any] | None = None

    def close(self) -> None:
        """Free everything."""
        raise NotImplementedError

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        if self.again is None:
            raise InputError(
                "an engine cannot be pickled or copied: it is memory and threads of this process",
                found=type_name(self),
                expected="a predictor that `vitdeploy.runtime.load` gave; its path and arguments are what is pickled",
                fix="give the other process the bundle's path, and load it there",
            )
        return self.again, ()


Opened = TypeVar("Opened", bound=Reloaded)


class Runner(Reloaded, ABC):
    """Runs one model on one runtime.

    `inputs` and `outputs` are the tensors as loaded (the batch is a number once the runner is pinned to one);
    `provider` is what really runs, set by `load`. `at_once` is how many calls of `infer` run at a time. `native`: it
    holds objects of a runtime, with locks and threads. A fork waits for its runs, as a child inherits these locks.
    `engine_threads`: that compute one run, set by `load` where the runtime tells.
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
        """Make ready to infer; set `inputs`, `outputs` and `provider`."""

    def example(self, batch: int) -> dict[str, Array] | None:
        """Inputs to measure with, where random ones of the right shape would not do; None if they would."""
        return None

    def stages(self, feeds: Mapping[str, Array]) -> dict[str, float] | None:
        """Milliseconds of the parts of one run on `feeds`, which `check` has passed: "copy_in", "execute" and
        "copy_out"; None if the back end cannot tell them apart."""
        return None

    def part_times(self, feeds: Mapping[str, Array]) -> dict[str, float] | None:
        """Milliseconds of each graph of one run on `feeds`, by name; None where there is one graph."""
        return None

    def measured(self, feeds: Mapping[str, Array]) -> object:
        """One query of a measurement, on the feeds of `example` or random ones: `infer`, or, where how much is computed
        depends on what is seen in the input, a fixed amount of the same work."""
        return self.infer(feeds)

    @abstractmethod
    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, in arrays that a later call does not touch. `feeds` are checked and contiguous."""

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
        """No run is going on."""
        with self._ending, contextlib.ExitStack() as turns:
            for _ in range(self.at_once):
                turns.enter_context(self._turn)
            yield

    def forked(self) -> None:
        """This process is a child that was forked. What the runtime made is never freed here: its destructors would
        wait for threads of the parent."""
        self._make_locks()
        if self.native and self._loaded:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dict(vars(self))))
            self._inherited = True

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. Safe to call from several threads; `at_once` calls run at a time, one by default.

        Raises:
            TensorError: a missing or unknown input name, no numpy array, or another dtype or shape than `inputs` say.
            ClosedError: not loaded, or closed.
        """
        with self._turn:
            if self._closed or self._inherited or not self._loaded:
                self._require_loaded("infer()")
            return self._infer(feeds if self._fits_exactly(feeds) else self.check(feeds))

    def _require_loaded(self, call: str) -> None:
        if self._closed:
            raise ClosedError(
                f"{self.name} is closed: nothing can be asked of it any more",
                found=f"{call} after close()",
                expected="a runner or predictor that is open",
                fix="use it within its `with` block, or call close() when no thread has anything to ask any more",
            )
        if not self._loaded:
            raise ClosedError(
                f"{self.name}: load() must be called before {call}",
                found="not loaded yet",
                expected="a runner or predictor that is open",
            )
        if self._inherited:
            self._inherited = False
            warnings.warn(
                f"{self.name} was loaded before this process was forked: the runtime's threads are not in this child, "
                f"so it is slower, and may hang when the child exits. {AFTER_FORK.capitalize()}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _expected(self, feeds: Mapping[str, object]) -> dict[str, TensorSpec]:
        """The `inputs` to feed, by name."""
        expected = {tensor.name: tensor for tensor in self.inputs}
        if set(feeds) != set(expected):
            raise TensorError(
                f"{self.name}: wrong input names", found=", ".join(feeds) or "none", expected=", ".join(expected)
            )
        return expected

    def check(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The same feeds, contiguous, after checking them against `inputs`."""
        expected = self._expected(feeds)
        for name, array in feeds.items():
            tensor = expected[name]
            require_array(array, tensor, f"{self.name}: input {name!r}")
            fits = len(array.shape) == len(tensor.shape) and all(
                isinstance(size, str) or size == found for size, found in zip(tensor.shape, array.shape, strict=True)
            )
            native = array.dtype.isnative  # a runtime would read swapped bytes as other numbers
            empty = 0 in (array.shape[:1] if name.startswith(CACHE) else array.shape)
            if not fits or not native or array.dtype.name != tensor.dtype or empty:
                raise TensorError(
                    f"{self.name}: input {name!r} does not fit",
                    found=f"{array.dtype.name if native else array.dtype.str} {list(array.shape)}",
                    expected=f"{tensor.dtype} {list(tensor.shape)}",
                )
        return {name: np.ascontiguousarray(array) for name, array in feeds.items()}

    def _fits_exactly(self, feeds: Mapping[str, Array]) -> bool:
        """Whether the feeds are in the usual form that needs no further check. False proves nothing."""
        if not self._fixed or len(feeds) != len(self._fixed):
            return False
        for name, array in feeds.items():
            expected = self._fixed.get(name)
            if type(array) is not np.ndarray:
                return False
            if expected is None or array.dtype != expected[0] or array.shape != expected[1] or not array.flags.c_contiguous:
                return False
        return True

    def close(self) -> None:
        """Free everything, once the runs that have begun in other threads have ended; all others are refused. Closing
        twice is as good as once."""
        self._closed = self._loaded or self._closed  # already: calls must not keep this waiting for its turn
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
    """A lock that is free in a forked child, whoever holds it in the parent."""
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
    """Raise TensorError if a value is no numpy array: a list, None, a tensor of PyTorch."""
    if not isinstance(value, np.ndarray):
        tensor = hasattr(value, "numpy") or hasattr(value, "__dlpack__")
        raise TensorError(
            f"{what} is no numpy array",
            found=type_name(value),
            expected=f"numpy.ndarray, {expected.dtype} {list(expected.shape)}",
            fix="tensor.numpy(force=True)" if tensor else "numpy.asarray(..., dtype) makes one",
        )


def type_name(value: object) -> str:
    """The type of a value that somebody gave, with what is known of an array: "torch.Tensor float32 [3, 224, 224]"."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return name
    return f"{name} {str(dtype).rpartition('.')[2]} {list(shape)}"


def _fixed_inputs(inputs: Sequence[TensorSpec]) -> dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]]:
    """dtype and shape by name, where all of them are arrays of one shape each; else nothing."""
    try:
        fixed = {tensor.name: (np.dtype(tensor.dtype), tensor.shape) for tensor in inputs}
    except TypeError:  # a type that numpy lacks
        return {}
    usual = all(isinstance(size, int) and size > 0 for _, shape in fixed.values() for size in shape)
    return fixed if usual and len(fixed) == len(inputs) else {}
