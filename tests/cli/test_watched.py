"""The process that watches over a command: exit codes, signals, deaths, bounds of time and memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from tests.graph.builder import Builder
from vitdeploy import limits
from vitdeploy.errors import InputError
from vitdeploy.limits import Board, Doing

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="the command is watched on Linux")

# The program, with something else in the place of the command.
PROGRAM = """
import os, signal, sys, time
import vitdeploy.cli.main as command
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from vitdeploy.cli import watched
from vitdeploy.limits import bounded, phase
def run():
    {body}
command.main = run
sys.argv = ["vitdeploy", "inspect", "x", {options}]
watched.main()
"""
HANG = "time.sleep(60)"


def program(body, options="", **environment):
    code = PROGRAM.format(body=body.replace("\n", "\n    "), options=options)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process, limit=20):
    out, error = process.communicate(timeout=limit)
    return process.returncode, out, error


@pytest.mark.parametrize("code", [0, 3, 130])
def test_its_exit_code_is_that_of_the_command(code):
    assert ended(program(f"print('said'); sys.exit({code})")) == (code, "said\n", "")


def test_a_crash_of_a_native_library_is_told_with_the_phase():
    body = "phase('compile openvino-cpu-int8')\nos.kill(os.getpid(), signal.SIGSEGV)"
    code, out, error = ended(program(body, "'--json'"))
    assert code == 4 and "VD4202" in error and 'SIGSEGV in the phase "compile openvino-cpu-int8"' in error
    assert json.loads(out)["error"]["found"] == "a crash in a native library"


def test_a_crash_over_a_file_is_its_refusal_and_a_kill_names_it():
    crash = program("with bounded('read m.onnx'):\n    os.abort()", "'--json'")
    killed = program(
        "with bounded('read m.onnx'):\n    os.kill(os.getpid(), signal.SIGKILL)", VITDEPLOY_MAX_SECONDS="7"
    )
    code, out, error = ended(crash)
    assert code == 3 and "VD3108  the command crashed (SIGABRT) while trying to read m.onnx" in error
    assert json.loads(out)["error"]["found"] == "a crash in a native library"
    code, _, error = ended(killed)
    assert code == 4 and "SIGKILL while trying to read m.onnx" in error
    assert "killed by another process" in ended(program("os.kill(os.getpid(), signal.SIGKILL)"))[2]


def test_a_quotient_that_the_processor_traps_is_a_refusal_of_its_file(tmp_path):
    """A classifier that adds -2^63 / -1 to its logits, where nothing but a run says what the divisor is."""
    b = Builder(20)
    logits = b.add("Flatten", b.add("GlobalAveragePool", b.input("x", ["batch", 3, 8, 8])))
    nothing = b.add("Cast", b.add("Mul", logits, np.float32(0)), to=TensorProto.INT64)
    divided = b.add("Div", np.full(3, -(2**63), np.int64), b.add("Sub", nothing, np.int64(1)))
    model = b.model(b.add("Add", logits, b.add("Cast", divided, to=TensorProto.FLOAT)), rank=2)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    words = [sys.executable, "-m", "vitdeploy.cli.watched", "export", "m.onnx", "-o", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "VD3108  the command crashed (SIGFPE) while trying to run m.onnx" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_has_no_end_is_ended():
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwith bounded('read m.onnx'):\n    " + HANG
    start = time.monotonic()
    code, _, error = ended(program(body, VITDEPLOY_MAX_SECONDS="0.5"))
    assert (
        code == 3
        and "VD3108  a resource limit was exceeded while trying to read m.onnx" in error
        and "VITDEPLOY_MAX_SECONDS" in error
    )
    assert "at most 0.5 s and" in error and time.monotonic() - start < 15


def test_only_what_is_bounded_is_ended():
    body = "for number in range(4):\n    with bounded('read'):\n        time.sleep(0.4)\ntime.sleep(1)\nprint('done')"
    assert ended(program(body, VITDEPLOY_MAX_SECONDS="1"))[:2] == (0, "done\n")


def test_memory_is_bounded_and_what_the_command_had_before_does_not_count():
    body = "held = bytearray(1 << 29)\nwith bounded('read m.onnx'):\n    {}\nmore = bytearray(1 << 30)\nprint('done')"
    taken = body.format("try:\n        bytearray(1 << 30)\n    except MemoryError:\n        print('none left')")
    assert ended(program(taken, VITDEPLOY_MAX_GIB="0.25"))[:2] == (0, "none left\ndone\n")


@pytest.mark.parametrize(
    "read", ["{}", "try:\n            {}\n        except Exception:\n            raise ValueError from None"]
)
def test_memory_ran_out_even_where_a_reader_takes_that_for_a_damaged_file(read):
    body = "from vitdeploy.errors import LimitError\ntry:\n    with bounded('read m.onnx'):\n        "
    body += read.format("bytearray(1 << 30)")
    body += "\nexcept LimitError as error:\n    print(error.expected)"
    assert ended(program(body, VITDEPLOY_MAX_GIB="0.25"))[1].endswith("s and 0.25 GiB\n")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_of_other_processes_reach_the_command_once(sent):
    body = "count = []\nfor each in (signal.SIGTERM, signal.SIGINT):\n"
    body += "    signal.signal(each, lambda n, f: count.append(n))\n"
    body += "print('ready', flush=True)\ntime.sleep(1)\nprint(count)"
    process = program(body)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    assert ended(process)[1] == f"[{int(sent)}]\n"


def test_what_a_whole_group_is_sent_interrupts_once():
    body = "try:\n    print('ready', flush=True)\n    time.sleep(20)\nexcept KeyboardInterrupt:\n"
    body += "    time.sleep(0.3)\n    print('once')"
    process = program(body)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process)[1] == "once\n"


def test_an_interrupt_of_the_terminal_reaches_the_command_once():
    body = "count = []\nsignal.signal(signal.SIGINT, lambda n, f: count.append(n))\nprint('ready', flush=True)\n"
    body += "time.sleep(1)\nprint(len(count))"
    controller, terminal = os.openpty()
    code = PROGRAM.format(body=body.replace("\n", "\n    "), options="")
    owns = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    owns += "os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", owns, sys.executable, "-c", code]
    process = subprocess.Popen(words, stdin=terminal, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    os.write(controller, b"\x03")
    out = process.communicate(timeout=20)[0]
    os.close(controller), os.close(terminal)
    assert out == "1\n"


def test_a_killed_program_leaves_no_command_behind():
    process = program("print(os.getpid(), flush=True)\n" + HANG)
    command = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{command}").exists() and "Z" not in Path(f"/proc/{command}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_setting_that_is_no_number_is_refused(monkeypatch):
    board = Board()
    monkeypatch.setattr(limits, "_watched", limits._Watched(board, os.getpid(), Doing()))
    monkeypatch.setenv("VITDEPLOY_MAX_GIB", "much")
    with pytest.raises(InputError, match="VITDEPLOY_MAX_GIB must be a number above zero"), limits.bounded("read"):
        pass


@given(st.text(max_size=9000), st.integers(0, 2**40), st.floats(0, 1e12), st.integers(0, 2**60))
def test_a_board_says_what_was_written_last(what, number, seconds, memory):
    board = Board()
    board.write(Doing("before", 1))
    board.write(Doing(what, number, seconds, memory))
    found = board.read()
    assert what.startswith(found.what) and (len(what) > 200 or found.what == what)
    assert (found.number, found.seconds, found.memory) == (number, seconds, memory)


def test_a_library_is_not_bounded():
    with limits.bounded("read"):
        held = bytearray(1 << 20)
    assert len(held) == 1 << 20 and limits._watched is None
