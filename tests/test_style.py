"""What keeps the source readable: functions that fit on a screen, and types that say something."""

import ast
import re
from pathlib import Path

import pytest

from tests.texts import Text, texts_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vitdeploy"
LONGEST = 60


def bodies(source):
    """(name, lines of its body without the docstring) of each function: no decorator and no signature is counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            yield node.name, node.end_lineno - body[0].lineno + 1 if body else 0


def test_no_function_is_longer_than_a_screen():
    found = [(path, *each) for path in sorted(PACKAGE.rglob("*.py")) for each in bodies(path.read_text("utf-8"))]
    assert len(found) > 1000
    assert [f"{path.relative_to(ROOT)}: {name}, {lines} lines" for path, name, lines in found if lines > LONGEST] == []


def test_lines_of_a_function_are_those_of_its_body():
    source = '@decorated\ndef f(\n    a,\n):\n    """Text.\n\n    More."""\n    if a:\n        return 1\n    return 2\n'
    assert list(bodies(source)) == [("f", 3)] and list(bodies('def g():\n    "Text."\n')) == [("g", 0)]


@pytest.mark.parametrize(
    ("folders", "most"), [(("pipeline", "workflows", "report"), 6), (("tasks",), 9), (("stages",), 33)]
)
def test_any_is_rare_where_types_are_ours(folders, most):
    """Lines with the word Any, imports included."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in folders
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(r"\bAny\b", line)
    ]
    assert len(found) <= most, "\n".join(found)


def test_messages_are_in_plain_english():
    """By the patterns of `tests.texts`, each with what to write instead. Comments are for reviewers."""
    texts = [text for file in sorted(PACKAGE.rglob("*.py")) for text in texts_of(file)]
    messages = [text for text in texts if text.kind == "message"]
    assert len(messages) > 5000
    wrong = [f"{text.file.relative_to(ROOT)}:{text.line}: {text.problems()}" for text in messages if text.problems()]
    assert wrong == []
    assert Text(PACKAGE, 1, "message", "x.png is no image").problems()


# Names that say nothing of what they hold. Fewer each time; never more.
VAGUE, MOST_VAGUE = ("told", "said", "asked", "given", "found", "each", "wanted"), 5172


def test_vague_names_become_fewer():
    trees = [ast.parse(file.read_text("utf-8")) for file in sorted(PACKAGE.rglob("*.py"))]
    names = [node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assert sum(name in VAGUE for name in names) <= MOST_VAGUE


# A command with the name of a file or folder in it, which is not `quoted`.
COMMAND = r"\b(vitdeploy \w+|python -[cm]|unzip|mv|rm|cp|chmod \d+)\b[^\"'`{]*"
UNQUOTED = re.compile(
    COMMAND + r"(\{[\w.]+\}[^\"'`{]*)*\{(self\.)?(path|file|folder|bundle|graph|home|out|link|plan|final|text)\b"
)


def test_paths_in_printed_commands_are_quoted():
    lines = [(path, line) for path in sorted(PACKAGE.rglob("*.py")) for line in path.read_text("utf-8").splitlines()]
    assert [f"{path.relative_to(ROOT)}: {line.strip()}" for path, line in lines if UNQUOTED.search(line)] == []
    assert UNQUOTED.search('f"vitdeploy export --task {task} {path} -o"') and UNQUOTED.search('f"rm {self.link}"')
