"""What is told while the work goes on: a line a phase, and on a terminal one that lives; tables that fit a terminal."""

import io
import re

import pytest
from rich.console import Console as Terminal

from vitdeploy.api.live import Live, spell
from vitdeploy.api.values import Column, Table, printed, wrapped
from vitdeploy.cli.options import Console, command_line

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_a_phase_is_one_line(quiet, capsys):
    with Console(False, 0, quiet) as console:
        console.progress("load", 0, 1)
        for done in range(9):
            console.progress("bench", done, 8)
        for done in range(8, 17):
            console.progress("bench", done, 16)
    told = capsys.readouterr()
    assert told.err.splitlines() == ([] if quiet else ["load", "bench"])
    assert told.out == ""


def test_names_of_strangers_cannot_steer_the_terminal(capsys):
    console = Console(False, 0, False)
    console.note("labels: a\x1b[2J\u202eb")
    console.finish({}, ["labels: a\x1b[2J\u202eb\ud800"], None)
    told = capsys.readouterr()
    assert told.err == "labels: a\\x1b[2J\\u202eb\n"
    assert told.out.splitlines()[0] == "labels: a\\x1b[2J\\u202eb\\ud800"


class Screen:
    """A terminal of so many columns, and a clock that stands until it is set."""

    def __init__(self, columns=100):
        self.stream, self.now = io.StringIO(), 0.0
        terminal = Terminal(file=self.stream, force_terminal=True, width=columns, color_system=None)
        self.live = Live(terminal, lambda: self.now)
        self.live._bars.live.auto_refresh = False  # drawn when the test says so

    def tell(self, text, done, total, now):
        self.now = now
        self.live.update(text, done, total)

    def drawn(self):
        """What the drawing of now writes."""
        before = len(self.stream.getvalue())
        self.live._bars.refresh()
        return self.stream.getvalue()[before:]

    def left(self):
        """The lines that stay when all is over."""
        self.live.stop()
        lines = CONTROL.sub("", self.stream.getvalue()).split("\n")
        return [line.rpartition("\r")[2].rstrip() for line in lines if line.strip()]


def test_on_a_terminal_the_phase_at_work_is_a_line_with_count_time_and_time_left():
    screen = Screen()
    screen.live.start()
    screen.tell("bench", 0, 40, 0)
    screen.tell("bench", 10, 40, 30)
    line = CONTROL.sub("", screen.drawn()).strip()
    assert line == "bench [#####...............] 10/40  30 s, 1 min 30 s left"
    screen.now = 45
    assert "10/40  45 s, 1 min 15 s left" in screen.drawn()
    screen.live.stop()


def test_a_phase_that_ended_leaves_one_line_and_a_counter_ends_at_its_end():
    screen = Screen()
    screen.live.start()
    screen.tell("read the model", 0, 1, 0)
    screen.tell("bench", 0, 8, 2)
    for done in range(9):
        screen.tell("bench", done, 8, 10 + done)
    for done in range(8, 13):
        screen.tell("bench", done, 16, 20 + done)
    screen.tell("context", 9, 9, 40)
    ended = ["read the model  2 s", "bench  38 s", "context  9/9  0 s"]
    assert [line for line in screen.left() if line in ended] == ended


def test_two_threads_at_work_have_a_line_each():
    import threading

    screen = Screen()
    screen.live.start()
    screen.tell("pi: build", 1, 3, 0)
    other = threading.Thread(target=screen.tell, args=("nano: build", 1, 3, 1))
    other.start()
    other.join()
    screen.tell("pi: build", 2, 3, 2)
    assert [phase.text for phase in screen.live._phases.values()] == ["pi: build", "nano: build"]
    screen.live.stop()


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_drawing_is_under_a_kilobyte_and_at_most_two_are_made_a_second(columns):
    screen = Screen(columns)
    screen.live.start()
    screen.tell("a phase of a name that is much longer than a narrow terminal is wide", 123, 4567, 0)
    screen.now = 100
    written = screen.drawn()
    assert len(written) * screen.live._bars.live.refresh_per_second < 2000
    assert max(len(line) for line in CONTROL.sub("", written).strip().split("\r")) <= columns
    screen.live.stop()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_seconds_are_spelled(seconds, words):
    assert spell(seconds) == words


TABLE = Table(
    (Column("artifact"), *map(Column, ("top-1", "p50 ms", "size"), (90, 100, 30)), Column("ratio", 70, left=True)),
    (("original", "98.28", "4.68", "", ""), ("openvino-cpu-int8", "98.44", "1.34", "2.2 MB", "0.28 [0.24, 0.32]")),
)


def test_a_table_is_as_wide_as_it_is_where_nothing_bounds_it():
    assert TABLE.lines() == [
        "artifact           top-1  p50 ms    size  ratio",
        "original           98.28    4.68",
        "openvino-cpu-int8  98.44    1.34  2.2 MB  0.28 [0.24, 0.32]",
    ]


def test_on_a_narrow_terminal_columns_go_in_their_order_and_are_named():
    assert TABLE.lines(57)[:2] == ["artifact           top-1  p50 ms  ratio", "original           98.28    4.68"]
    assert TABLE.lines(57)[-1] == "(not shown in 57 columns: size; --json has all)"
    # Without the widest one there is room for the size again.
    assert TABLE.lines(42)[0] == "artifact           top-1  p50 ms    size"
    assert TABLE.lines(30)[0] == "artifact           p50 ms"
    assert "top-1, size, ratio;" in " ".join(TABLE.lines(30))
    for width in range(20, 70):
        assert max(map(len, TABLE.lines(width))) <= width


def test_a_row_of_a_remark_and_long_lines_are_wrapped_between_words():
    table = Table(TABLE.columns, (*TABLE.rows, ("mine", "failed: " + "the checkpoint is not there " * 3)))
    assert max(map(len, printed([table, "a word " * 30], 60))) <= 60
    assert wrapped("  operators: " + "/a/very/long/path/that/stays/whole", 20)[-1].strip().startswith("/a/very")


def test_commands_to_type_have_paths_in_quotes():
    assert command_line("vitdeploy", "predict", "my out", "IMAGE") == "vitdeploy predict 'my out' IMAGE"
