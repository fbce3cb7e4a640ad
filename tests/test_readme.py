"""The README is executed: every shell block that is not a make command, in order, then every Python block."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

ACTIVATE = ". .venv/bin/activate\n"
# As the installed command, but it measures in shorter and fewer blocks: two runs would take minutes.
COMMAND = """
import functools
from vitdeploy.bench import protocol
from vitdeploy.cli.main import main
protocol.Protocol = functools.partial(protocol.Protocol, min_rounds=3, warmup=0.1, processes=1)
main()
"""


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder as a reader's clone has it, with `vitdeploy` on the path."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "calibration").symlink_to(ROOT / "calibration")
    command = folder / "bin" / "vitdeploy"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n{COMMAND}", encoding="utf-8")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return folder


def run(argv: list[str], folder: Path, store: Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "VITDEPLOY_STORE": str(store),
    }
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=400)


def test_the_readme_runs_word_for_word(reader: Path, shared_store: Path) -> None:
    shell = [block for block in blocks("sh") if not block.startswith("make ")]
    python = blocks("python")
    assert len(shell) == 2
    assert len(python) == 1
    for block in shell:
        done = run(["sh", "-e", "-c", block.replace(ACTIVATE, "")], reader, shared_store)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (reader / "out" / "mine" / "report.html").is_file()
    done = run([sys.executable, "-c", python[0]], reader, shared_store)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("7 ")


def test_every_link_of_the_documents_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "calibration" / "README.md", *ROOT.glob("docs/**/*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken
