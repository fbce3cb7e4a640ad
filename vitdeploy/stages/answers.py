"""The file of answers that the original and every engine leave."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.verification.collect import Answers

ANSWERS_FILE = "answers.npz"


def read_answers(folder: Path) -> Answers:
    return Answers.load(folder / ANSWERS_FILE)
