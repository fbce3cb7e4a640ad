"""The README is executed: every shell block that is not a make command, in order, then every Python block."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT, command_line

ACTIVATE = ". .venv/bin/activate\n"
# What the shell runs as `vitdeploy`: it writes its arguments down, one line each, and an empty line after them.
COMMAND = """#!/bin/sh
printf '%s\\n' "$@" '' >> commands
"""


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder as a reader's clone has it, but with fewer images to judge by; `vitdeploy` is on the path."""
    folder = tmp_path_factory.mktemp("reader")
    theirs, ours = ROOT / "calibration" / "digits", folder / "calibration" / "digits"
    for label in (theirs / "evaluation").iterdir():
        (ours / "evaluation" / label.name).mkdir(parents=True)
        for image in sorted(label.iterdir())[::4]:
            shutil.copy(image, ours / "evaluation" / label.name)
    shutil.copytree(theirs / "calibration", ours / "calibration")
    shutil.copy(theirs / "vit_digits.safetensors", ours)
    command = folder / "bin" / "vitdeploy"
    command.parent.mkdir()
    command.write_text(COMMAND, encoding="utf-8")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return folder


def run(argv: list[str], folder: Path) -> str:
    """What a process in this folder prints on standard output."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_readme_runs_word_for_word(reader: Path, shared_store: Path) -> None:
    """The shell reads the blocks; what it calls is called in this process, which spares loading PyTorch ten times,
    as is the Python that needs it."""
    shell = [block for block in blocks("sh") if not block.startswith("make ")]
    python = blocks("python")
    assert len(shell) == 3
    assert len(python) == 2
    for block in shell:
        run(["sh", "-e", "-c", block.replace(ACTIVATE, "")], reader)
    commands = (reader / "commands").read_text(encoding="utf-8").split("\n\n")[:-1]
    assert len(commands) == sum(block.count("\nvitdeploy ") for block in ("\n" + block for block in shell)) > 9
    printed = io.StringIO()
    with command_line(reader, shared_store, short_bench=True) as vitdeploy:
        for command in commands:
            done = vitdeploy(*command.split("\n"))
            assert done.returncode == 0, done.stderr[-2000:]
        with contextlib.redirect_stdout(printed):
            exec(python[0], {})  # noqa: S102 - of our own page
    assert (reader / "out" / "mine" / "report.html").is_file()
    assert "\ngate        pass" in printed.getvalue()
    assert run([sys.executable, "-c", python[1]], reader).startswith("7 ")


def test_every_link_of_the_documents_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken
