"""The `vitdeploy` program: a process that runs the command, and one that watches over it.

Native libraries can end a process without a word: a crash, or the kernel's choice when memory runs out. Also can a file
of unknown origin keep them busy for ever. So the program forks before it loads anything; the child is the command, and
the parent does nothing but wait, pass signals on, end what takes longer than `limits.bounded` allows, and say what the
command was doing when it died. Where there is no fork, or none that is safe, the command runs alone.
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
from vitdeploy.limits import Board, Doing, be_watched

# Commands that answer at once, or look after themselves: the server has a supervisor of its own, such as systemd.
ALONE = ("serve", "lab completion")
PASSED_ON = (signal.SIGINT, signal.SIGTERM)
# Seconds between two looks at what the command does, and those that it has to end when its time is over.
LOOK, GRACE = 0.5, 3.0
PR_SET_PDEATHSIG = 1
# What a user, a shell or a service manager ends a command by.
ASKED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE")
SHOW_CURSOR = "\x1b[?25h"


def main() -> None:
    """Run the command of the arguments; exit codes are those of `cli.main.main`."""
    board = Board() if _watchable(sys.argv[1:]) else None
    if board is not None and (command := _fork(board)):
        sys.exit(_watch(command, board))
    from vitdeploy.cli.main import main as run

    run()


def _watchable(arguments: list[str]) -> bool:
    named = [word for word in arguments if not word.startswith("-")]
    alone = any(" ".join(named).startswith(command) for command in ALONE)
    return bool(named) and not alone and hasattr(signal, "sigtimedwait")


def _fork(board: Board) -> int:
    """The number of the child; 0 in the child, which dies with its parent."""
    signals = {*PASSED_ON, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as behind &
            signal.signal(signal.SIGINT, _Interrupt())
        be_watched(board)
        if "-vv" in sys.argv:
            faulthandler.enable()
    return child


class _Interrupt:
    """A KeyboardInterrupt for SIGINT, as Python has it; but one for what came twice, as when both processes were sent
    it and the parent passed its own on."""

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before > LOOK:
            raise KeyboardInterrupt


def _watch(command: int, board: Board) -> int:
    """Wait for the command, and return what to exit with."""
    killed_before, spent, last, seen = _killed_for_memory(), 0.0, time.monotonic(), 0
    while True:
        came = signal.sigtimedwait({*PASSED_ON, signal.SIGHUP, signal.SIGCHLD}, LOOK)
        # What a terminal sends reaches the command too; what a process sends (code 0 or less) is for us to pass on.
        if came is not None and came.si_signo != signal.SIGCHLD and came.si_code <= 0:
            os.kill(command, came.si_signo)
        found, status = os.waitpid(command, os.WNOHANG)
        now = board.read()
        if found:
            return _conclude(status, now or Doing(), _killed_for_memory() > killed_before)
        if now is None:
            continue
        # Both may have been stopped for long: time counts while we look.
        passed, last = min(time.monotonic() - last, 2 * LOOK), time.monotonic()
        spent, seen = (spent + passed if now.number == seen else 0.0), now.number
        if now.number and spent > now.seconds:
            _end(command)
            return _tell(now.exceeded(f"no end after {spent:,.0f} s"))


def _end(command: int) -> None:
    """Ask the command to end, so that it takes its temporary files away, then kill it."""
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
    during = f" while it had to {doing.what}" if doing.number else f' in the phase "{doing.what}"' if doing.what else ""
    if name == "SIGKILL" and memory_ran_out:
        return _tell(
            CapabilityError(
                f"this machine ran out of memory{during}",
                found="the kernel ended the command (SIGKILL)",
                fix="a smaller model, image size or batch, or a machine with more memory",
            )
        )
    limit = f"; it may take {doing.bound}" if doing.number else ""
    return _tell(
        WorkerError(
            f"the command was ended by {name}{during}",
            found="somebody killed it" if name == "SIGKILL" else f"a crash in a native library{limit}",
            fix="call it again: finished stages are stored; -vv shows where a crash is, and please report it",
        )
    )


def _tell(error: VitdeployError) -> int:
    """Print an error as the command would; on a full disk its exit code says it."""
    with contextlib.suppress(OSError):
        if "--json" in sys.argv:
            print(json.dumps({"error": error.to_dict()}), flush=True)
    with contextlib.suppress(OSError):
        cursor = SHOW_CURSOR if sys.stderr.isatty() else ""  # a bar of progress may have hidden it
        print(f"{cursor}{error}", file=sys.stderr, flush=True)
    return error.exit_code


def _killed_for_memory() -> int:
    """How many processes the kernel has ended because memory ran out; 0 where it does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text("ascii"), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


if __name__ == "__main__":
    main()
