"""Lines of long work where there is no terminal."""

from __future__ import annotations

import time

from vitdeploy.api import values as reporter
from vitdeploy.api.values import Reporter


def test_a_long_phase_says_that_it_goes_on_and_a_short_one_does_not(capsys, monkeypatch):
    with Reporter() as short:
        short.progress("read the model", 0, 1)
    monkeypatch.setattr(reporter, "SILENCE", 0.15)
    with Reporter() as long:
        long.progress("export to ONNX", 1, 3)
        time.sleep(0.5)
    time.sleep(0.3)  # nothing comes after the work
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["read the model", "export to ONNX"]
    assert lines[2] == "export to ONNX: 0 s elapsed, 1 of 3"
    assert 3 <= len(lines) <= 6


def test_quiet_work_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(reporter, "SILENCE", 0.1)
    with Reporter(quiet=True) as quiet:
        quiet.progress("export to ONNX", 1, 3)
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
