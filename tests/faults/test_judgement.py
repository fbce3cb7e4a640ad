"""What the figures of files call clean, accepted, a crash, a hang and wrong; and that their cases are what they say."""

import random
import time

import pytest

from tests.faults.fuzzing.minimise import minimised
from tests.faults.malformed import bytewise, trees
from tests.faults.malformed.figure import KINDS
from tests.faults.malformed.onnx_wire import field, fields, varint
from tests.faults.sandbox import MARK, Ended, judge, snapshot

REFUSED = "VD2202  not an ONNX file\n        found:  nothing\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "model.onnx").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    ("status", "text", "outcome"),
    [
        (2, REFUSED, "clean"),
        (3, REFUSED, "clean"),
        (0, "done", "accepted"),
        (1, "VD1000  a bug in vitdeploy: KeyError('x')\n", "crash"),
        (2, "Traceback (most recent call last)\n" + REFUSED, "crash"),
        (2, "Usage: vitdeploy ...\n", "crash"),
        (-11, "", "crash"),
        (130, REFUSED, "crash"),
        (2, REFUSED + "\x1b[2J", "wrong"),
        (2, REFUSED + "\u202egnp", "wrong"),
    ],
)
def test_how_a_command_ended(folder, status, text, outcome):
    assert judge(Ended(status, text, 0.1, 0.0), snapshot(folder), folder)[0] == outcome


def test_a_broken_limit_is_a_hang_whatever_else(folder):
    assert judge(Ended(-9, "", 10.0, 0.0, "time"), snapshot(folder), folder)[0] == "hang"


def test_what_must_be_refused_and_is_taken_is_wrong(folder):
    assert judge(Ended(0, "done", 0.1, 0.0), snapshot(folder), folder, must_refuse=True)[0] == "wrong"


@pytest.mark.parametrize(
    "leave",
    [
        lambda folder: (folder / MARK).touch(),
        lambda folder: (folder / "out").mkdir(),
        lambda folder: (folder / "beside").touch(),
        lambda folder: (folder / "given" / "model.onnx").write_bytes(b"other"),
        lambda folder: (folder / "given" / "model.onnx").unlink(),
        lambda folder: (folder / "given" / ".tmp-1-0").mkdir(),
    ],
)
def test_what_a_refused_command_leaves_is_wrong(folder, leave):
    before = snapshot(folder)
    leave(folder)
    assert judge(Ended(2, REFUSED, 0.1, 0.0), before, folder)[0] == "wrong"


def test_caches_and_the_output_are_no_files_outside(folder):
    before = snapshot(folder)
    for name in ("cache", "store", "out"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    assert judge(Ended(0, "done", 0.1, 0.0), before, folder)[0] == "accepted"


def test_the_numbers_of_cases_and_each_class_in_the_short_form():
    assert sum(kind.full for kind in KINDS) == 3200
    for kind in KINDS:
        assert len({damage.name for damage in kind.damages}) == len(kind.damages)
        assert len(kind.numbers(full=True)) == kind.full >= 5 * len(kind.damages)
        short = [kind.damage(number) for number in kind.numbers(full=False)]
        assert {damage.name for damage in kind.damages if damage.must_refuse} <= {damage.name for damage in short}
        assert sum(not damage.must_refuse for damage in short) >= sum(not each.must_refuse for each in kind.damages) / 4


def test_a_case_is_the_same_each_time():
    data = bytes(range(256)) * 8
    for name, mutate in bytewise.MUTATIONS.items():
        first, again = (mutate(random.Random(name), data) for _ in range(2))
        assert first == again != data
    assert trees.changed(random.Random(1), {"a": [1, {"b": 2}]}) != {"a": [1, {"b": 2}]}


def test_the_lengths_of_a_message_are_found():
    data = field(7, field(5, field(9, b"weights")) + field(2, b"g")) + field(1, 8)
    found = {path: data[start:end] for path, _, start, end in fields(data)}
    assert found[(7, 5, 9)] == b"weights" and found[(7, 2)] == b"g" and (1,) not in found
    assert varint(300, least=4) == b"\xac\x82\x80\x00"


def test_an_input_is_made_smaller_while_it_fails():
    data = bytes(random.Random(0).randbytes(3000)) + b"<bad>" + bytes(500)
    assert minimised(data, lambda each: b"<bad" in each, time.monotonic() + 20) == b"<bad"
    assert minimised(b"fine", lambda each: False, time.monotonic() + 1) == b"fine"
