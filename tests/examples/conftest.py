"""A reader's clone with a bundle at out/digits, and the page that says what to do there."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import ROOT
from tests.examples_page import block
from tests.shell import reader_environment


@dataclass(frozen=True)
class Clone:
    folder: Path
    environment: dict[str, str]

    def start(self, *command: str) -> subprocess.Popen[str]:
        """With Ctrl+C as in a terminal: what a shell starts in the background ignores it, and so would its children."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, preexec_fn=interrupts, **pipes
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, cwd=self.folder, env=self.environment, check=False, **options)

    def shell(self, naming: str, old: str = "", new: str = "") -> list[str]:
        """The lines that a shell block of the page prints; with `old` replaced."""
        done = self.run("sh", "-e", "-c", block("sh", naming).replace(old, new))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def python(self, naming: str) -> None:
        done = self.run(sys.executable, "-c", block("python", naming))
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def clone(small_bundle, digits, tmp_path_factory) -> Clone:
    folder = tmp_path_factory.mktemp("clone")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "out").mkdir()
    (folder / "out" / "digits").symlink_to(small_bundle)
    for label in (digits / "evaluation").iterdir():
        images = folder / "calibration" / "digits" / "evaluation" / label.name
        images.mkdir(parents=True)
        for number, image in enumerate(sorted(label.iterdir())):
            if number % 16 == 0 or image.name == "0017.png":  # which the page names
                shutil.copy(image, images)
    return Clone(folder, reader_environment(folder / "bin"))
