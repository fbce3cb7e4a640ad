"""Every text of the package that a person reads, and the patterns that plain technical English avoids.

`python -m tests.texts [FILE ...]` prints each text with a pattern of `STYLE` in it; `--all` prints every text.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent
Kind = Literal["message", "docstring", "comment", "page"]

_SUBJECT = "start with the subject: 'The layers of a model ...'"
# Pattern -> what to write instead.
STYLE = {
    r"(?:^|[.;:] )Of (?:a|an|the|its|all|those|these|such|which|each|every|two|several|some) ": _SUBJECT,
    r"\b(?:is|are|was|were) of (?!the (?:form|type|wrong)|equal|little|no use|interest|order)": "'applies to'",
    r"\b(?:is|are|was|were) (?:told|said|asked)\b": "name who reports or requests it",
    r"\b(?:is|are|was|were) (?:taken|held) for\b": "'is treated as', 'is assumed to be'",
    r"\bas far as\b": "'if', 'where', or a limit",
    r"\b[Ss]o (?:many|much|few)\b(?!(?: \S+){0,3} (?:that|as)\b)": "the number, or 'this many'",
    r"\bin the place of\b": "'instead of'",
    r"(?<!the )(?<!each )\b(?:an)?other (?!than\b)[\w'-]+(?: [\w'-]+)?,? than\b": "'a different ... from'",
    r"\bany more\b": "state what holds now",
    r"\b(?:for sure|surely)\b": "'provably', 'with 95 % confidence'",
    r"\bfore(?:tell|tells|told)\b": "'predict'",
    r"\bno way\b": "state what is invalid",
    r"\bway out\b": "'fix'",
    r"(?<![Tt]here )\b(?:is|are) no (?!longer|more|less|different|[a-z]+er\b)[a-z]": "'is not a'",
    r"\bwhat (?:is|was|are) (?:told|said|asked|wanted|given|found)\b": "the noun",
    r"\bsuch (?:a|an) one\b": "the noun",
    r"\bbut for\b": "'except'",
    r"\bkeeps? within\b": "'is within'",
    r"\b(?:fix these|told apart)\b": "'correct these', 'distinguished'",
    r"\b[Aa]s it stands\b": "'by default', 'now'",
    r"\b(?:files? of strangers|a stranger's)\b": "'untrusted'",
    r"\bwithout (?:a word|end)\b": "'without a message', 'forever'",
    r"\bin the mean\b": "'on average'",
    r"\bgo(?:es)? on (?:where|until|with)\b": "'continues'",
    r"\bsomebody else\b": "'another process', 'another user'",
}
_STYLE = {re.compile(pattern, re.MULTILINE): fix for pattern, fix in STYLE.items()}


@dataclass(frozen=True)
class Text:
    """`value`: with "{}" for each formatted part of a message."""

    file: Path
    line: int
    kind: Kind
    value: str

    def problems(self) -> list[str]:
        """The words that are wrong, each with what to write instead."""
        matches = ((pattern.search(self.value), fix) for pattern, fix in _STYLE.items())
        return [f"{match[0].strip()!r}: {fix}" for match, fix in matches if match is not None]


def texts_of(file: Path) -> Iterator[Text]:
    """The texts of a Python file, or of a page."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":  # outputs are what a run printed
        source = "\n".join("".join(cell["source"]) for cell in json.loads(source)["cells"])
    if file.suffix != ".py":
        yield from (Text(file, number, "page", line) for number, line in enumerate(source.splitlines(), 1))
        return
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if _is_text_statement(node)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield from _message(file, node.lineno, "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            if id(node) in docstrings:
                yield Text(file, node.lineno, "docstring", re.sub(r"\s+", " ", node.value).strip())
            else:
                yield from _message(file, node.lineno, node.value)
    lines = io.StringIO(source).readline
    comments = [token for token in tokenize.generate_tokens(lines) if token.type == tokenize.COMMENT]
    yield from (Text(file, token.start[0], "comment", token.string.lstrip("#: ")) for token in comments)


def _is_text_statement(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _message(file: Path, line: int, value: str) -> Iterator[Text]:
    """A string of at least two words; keys, formats and names are not read by a person."""
    if re.search(r"[a-z]{2,} +[a-z]{2,}", value):
        yield Text(file, line, "message", value)


def all_texts() -> Iterator[Text]:
    """The texts of the package and of what it writes, of the pages, the examples, the recipes and the scripts."""
    yield from texts_in(ROOT / "vitdeploy", "py", "jinja", "html", "js", "mjs", "css")
    for folder in ("examples", "recipes", "calibration", "benchmarks", "docs"):
        yield from texts_in(ROOT / folder, "py", "md", "yaml", "cpp", "js", "ipynb")
    for file in (*sorted(ROOT.glob("*.md")), ROOT / "Makefile", ROOT / "pyproject.toml"):
        yield from texts_of(file)


def texts_in(folder: Path, *suffixes: str) -> Iterator[Text]:
    """The texts of all files below the folder with one of the suffixes."""
    for file in sorted(file for suffix in suffixes for file in folder.rglob(f"*.{suffix}")):
        yield from texts_of(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="print every text")
    parser.add_argument("--kind", choices=("message", "docstring", "comment", "page"))
    options = parser.parse_args()
    chosen = (text for file in options.files for text in texts_of(file)) if options.files else all_texts()
    count = 0
    for text in chosen:
        problems = text.problems()
        if (options.all or problems) and options.kind in (None, text.kind):
            count += 1
            print(f"{text.file}:{text.line}: {text.kind}: {text.value}")
            print(*(f"    {problem}\n" for problem in problems), sep="", end="")
    print(f"{count} texts")


if __name__ == "__main__":
    main()
