"""The `vitdeploy` program: a process that runs the command, and a parent that watches it.

Native libraries can end a process without a message: by a crash, or when the kernel runs out of memory. A malicious
file can keep them busy forever. So the program forks before it loads anything: the child runs the command; the parent
only waits, forwards signals, ends work that takes longer than `limits.bounded` allows, and reports what the command was
doing when it died. On systems without a safe fork, the command runs alone, and says so before it reads such a file.
"""

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from vitdeploy.errors import CapabilityError, VitdeployError, WorkerError
from vitdeploy.limits import Board, Doing, be_watched, run_unlimited

# Commands that finish at once, or have their own supervisor, such as systemd for the server.
ALONE = (("serve",), ("lab", "completion"))
PASSED_ON = (signal.SIGINT, signal.SIGTERM)
# Seconds between two checks of the command, and seconds that it has to end after its time limit.
LOOK, GRACE = 0.5, 3.0
PR_SET_PDEATHSIG = 1
# Signals by which a user, a shell or a service manager ends a command.
ASKED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE")
SHOW_CURSOR = "\x1b[?25h"


def main() -> None:
    """Run the command of the arguments; exit codes are those of `cli.main.main`."""
    if _to_be_watched(sys.argv[1:]):
        if not hasattr(signal, "sigtimedwait"):  # macOS, Windows
            run_unlimited()
        elif command := _fork(board := Board()):
            sys.exit(_watch(command, board))
    from vitdeploy.cli.main import main as run

    run()


def _to_be_watched(arguments: list[str]) -> bool:
    named = [word for word in arguments if not word.startswith("-")]
    alone = any(tuple(named[: len(words)]) == words for words in ALONE)
    return bool(named) and not alone


def _fork(board: Board) -> int:
    """Fork; return the PID of the child, and 0 in the child, which dies with its parent."""
    signals = {*PASSED_ON, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as after &
            signal.signal(signal.SIGINT, _Interrupt())
        be_watched(board)
        if "-vv" in sys.argv:
            faulthandler.enable()
    return child


class _Interrupt:
    """Raise KeyboardInterrupt for SIGINT, as Python does, but only once for a signal that arrives twice: sent to both
    processes, and forwarded by the parent."""

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before > LOOK:
            raise KeyboardInterrupt


def _watch(command: int, board: Board) -> int:
    """Wait for the command, and return the exit code."""
    killed_before, spent, last, seen = _killed_for_memory(), 0.0, time.monotonic(), 0
    while True:
        came = signal.sigtimedwait({*PASSED_ON, signal.SIGHUP, signal.SIGCHLD}, LOOK)
        # A terminal's signal reaches the command too; a process's signal (code 0 or less) must be forwarded.
        if came is not None and came.si_signo != signal.SIGCHLD and came.si_code <= 0:
            os.kill(command, came.si_signo)
        found, status = os.waitpid(command, os.WNOHANG)
        now = board.read()
        if found:
            return _conclude(status, now or Doing(), _killed_for_memory() > killed_before)
        if now is None:
            continue
        # Both processes may have been suspended: only time between checks counts.
        passed, last = min(time.monotonic() - last, 2 * LOOK), time.monotonic()
        spent, seen = (spent + passed if now.number == seen else 0.0), now.number
        if now.number and spent > now.seconds:
            _end(command)
            return _tell(now.exceeded(f"not finished after {spent:,.0f} s"))


def _end(command: int) -> None:
    """Ask the command to end, so that it removes its temporary files, then kill it."""
    os.kill(command, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if os.waitpid(command, os.WNOHANG)[0]:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
    os.kill(command, signal.SIGKILL)
    os.waitpid(command, 0)


def _conclude(status: int, doing: Doing, memory_ran_out: bool) -> int:
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if name in ASKED:
        return 128 + number
    if doing.number and name != "SIGKILL":
        return _tell(doing.crashed(name))
    during = f" while trying to {doing.what}" if doing.number else f' in the phase "{doing.what}"' if doing.what else ""
    if name == "SIGKILL" and memory_ran_out:
        return _tell(
            CapabilityError(
                f"this machine ran out of memory{during}",
                found="the kernel ended the command (SIGKILL)",
                fix="use a smaller model, image size or batch, or a machine with more memory",
            )
        )
    limit = f"; it may take {doing.bound}" if doing.number else ""
    return _tell(
        WorkerError(
            f"the command was ended by {name}{during}",
            found="killed by another process" if name == "SIGKILL" else f"a crash in a native library{limit}",
            fix="run it again: finished stages are stored. For a crash, -vv shows where; please report it",
        )
    )


def _tell(error: VitdeployError) -> int:
    """Print an error as the command would, and return its exit code, which is all that a full disk allows."""
    with contextlib.suppress(OSError):
        if "--json" in sys.argv:
            print(json.dumps({"error": error.to_dict()}), flush=True)
    with contextlib.suppress(OSError):
        cursor = SHOW_CURSOR if sys.stderr.isatty() else ""  # a progress bar may have hidden it
        print(f"{cursor}{error}", file=sys.stderr, flush=True)
    return error.exit_code


def _killed_for_memory() -> int:
    """The number of processes that the kernel has killed for lack of memory; 0 if unknown."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text("ascii"), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


if __name__ == "__main__":
    main()
