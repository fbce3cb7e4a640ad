"""The README and the first guide are executed: every shell block that is no make command, then every Python block."""

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
from vitdeploy import __version__

ACTIVATE = ". .venv/bin/activate\n"
# What the shell runs as `vitdeploy`: it writes its arguments down, one line each, and an empty line after them.
COMMAND = """#!/bin/sh
printf '%s\\n' "$@" '' >> commands
"""


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
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
    assert len(shell) == len(python) == 2
    for block in shell:
        run(["sh", "-e", "-c", block.replace(ACTIVATE, "")], reader)
    commands = typed(reader, shell)
    assert len(commands) == 6
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


def typed(reader: Path, shell: list[str]) -> list[str]:
    """The commands of shell blocks, as their arguments were written down; the next page begins anew."""
    file = reader / "commands"
    commands = file.read_text(encoding="utf-8").split("\n\n")[:-1]
    file.unlink()
    assert len(commands) == sum(block.count("\nvitdeploy ") for block in ("\n" + block for block in shell))
    return commands


def test_the_first_guide_runs_word_for_word(reader: Path, shared_store: Path) -> None:
    page = "docs/get-started.md"
    shell, [python] = blocks("sh", page), blocks("python", page)
    for block in shell:
        run(["sh", "-e", "-c", block.replace(ACTIVATE, "")], reader)
    commands = typed(reader, shell)
    assert len(commands) == 10
    with command_line(reader, shared_store, short_bench=True) as vitdeploy:
        for command in commands:
            done = vitdeploy(*command.split("\n"))
            assert done.returncode == 0, done.stderr[-2000:]
    assert run([sys.executable, "-c", python], reader).startswith("7 ")


def test_the_numbers_of_the_readme_are_of_this_minor_version() -> None:
    """New ones are written by `python -m tests.readme_numbers`."""
    versions = re.findall(r"<!-- numbers: \w+ (\S+) -->", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [version.split(".")[:2] for version in versions] == [__version__.split(".")[:2]] * 2


def test_every_link_of_the_documents_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken
