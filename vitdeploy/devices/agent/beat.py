"""Signs of life: while the agent works, a line that says nothing goes to the host now and then, so that long work is no
silence.

A process of its own writes them: a runtime may hold the interpreter's lock while it loads a model (ONNX Runtime does,
microsoft/onnxruntime#27063), so that no other thread of the agent runs. A beat is one short write to a pipe, which
nothing divides (pipe(7), PIPE_BUF).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

BEAT = b'{"alive": true}'
BEAT_SECONDS = 5.0
PAUSE, GO_ON = b"-", b"+"


class Beats:
    """Beats on `descriptor`, a pipe to the host, from `with` on; nothing else may be written there but while `paused`.

    Enter it before anything heavy is loaded: it forks. `ends`: this process gets SIGTERM once a beat finds that nobody
    listens any more.
    """

    def __init__(self, descriptor: int, *, ends: bool = False) -> None:
        self._descriptor, self._ends = descriptor, ends
        self._orders, self._child = socket.socketpair()
        self._process = 0

    def __enter__(self) -> Beats:
        agent = os.getpid()
        self._process = os.fork()
        if not self._process:
            self._orders.close()
            _beat(self._child, self._descriptor, agent if self._ends else 0)
        self._child.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.close()
        os.waitpid(self._process, 0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with contextlib.suppress(ConnectionError):  # it has ended, as nobody listens any more
            self._orders.send(PAUSE)
            self._orders.recv(1)
        yield
        with contextlib.suppress(ConnectionError):
            self._orders.send(GO_ON)


def _beat(orders: socket.socket, descriptor: int, ends: int) -> NoReturn:
    """Obey, until the agent's process has ended or nobody listens; `ends`: the process to end then, 0 for none."""
    seconds: float | None = BEAT_SECONDS
    try:
        while True:
            if not select.select([orders], [], [], seconds)[0]:
                os.write(descriptor, BEAT + b"\n")
                continue
            order = orders.recv(1)
            if not order:
                break
            seconds = BEAT_SECONDS if order == GO_ON else None
            if order == PAUSE:
                orders.send(PAUSE)
    except BrokenPipeError:
        if ends == os.getppid():  # else the agent is gone, and another process has its number, or will have
            os.kill(ends, signal.SIGTERM)
    finally:
        os._exit(0)
