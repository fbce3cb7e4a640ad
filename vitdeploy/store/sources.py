"""The digest of the source code that a module can run, so that every code change changes the keys of its results.

Imports are read from the text of a module, without importing anything. An import counts wherever it stands, except
under `if TYPE_CHECKING:`, which never runs. So does a string that is the dotted name of a module,
or of something in it ("package.module:NAME"), as processes and tables of back ends name them. A package's own
file counts where something that stands in it is imported; that of `vitdeploy` itself, which is for users, never does.

Whole files are hashed, with their comments: reading 300 files takes a tenth of what parsing them does, and to make a
folder once more is cheap beside reusing one that is out of date.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import vitdeploy
from vitdeploy.store.key import canonical_json

PACKAGE = "vitdeploy"
HOME = Path(vitdeploy.__file__).parents[1]

_NEVER_RUN = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t].*)?\n)+", re.MULTILINE)
_FROM = re.compile(rf"^[ \t]*from ({PACKAGE}[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_IMPORT = re.compile(rf"^[ \t]*import ({PACKAGE}[\w.]*)", re.MULTILINE)
_NAMED = re.compile(rf"""["']({PACKAGE}\.[\w.]+)(:\w+)?["']""")


def source_digest(modules: Iterable[str], home: Path = HOME) -> str:
    """SHA-256 over the sources of some modules, and of all modules of vitdeploy that they import, directly or not.

    The same on every machine for the same sources. Modules of other packages are left out.

    Args:
        home: the folder that the package lies in.

    Raises:
        KeyError: a module has no source there.
    """
    digests: dict[str, str] = {}
    waiting = [module for module in modules if module.startswith(f"{PACKAGE}.")]
    while waiting:
        module = waiting.pop()
        if module not in digests:
            digests[module], imported = _read(home, module)
            waiting += imported
    return hashlib.sha256(canonical_json(digests).encode()).hexdigest()


def imports(text: str, modules: Mapping[str, Path]) -> set[str]:
    """Those of `modules` that the source text of a module imports or names."""
    text = _NEVER_RUN.sub("", text)
    found = set(_IMPORT.findall(text))
    for package, names in _FROM.findall(text):
        members = {f"{package}.{name}" for name in re.findall(r"\w+", re.sub(r"#.*| as \w+", "", names))}
        found |= {member if member in modules else package for member in members}
    for name, attribute in _NAMED.findall(text):
        if attribute or (name in modules and modules[name].name != "__init__.py"):
            found.add(name)  # the name of a package alone is that of a group of entry points
    return found & modules.keys()


@functools.cache
def _files(home: Path) -> dict[str, Path]:
    """The modules of the package by dotted name."""
    paths = ((path, path.relative_to(home).with_suffix("").parts) for path in (home / PACKAGE).rglob("*.py"))
    named = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths}
    return {name: path for name, path in named.items() if name != PACKAGE}


@functools.cache
def _read(home: Path, module: str) -> tuple[str, frozenset[str]]:
    """The digest of a module's source, whatever its line endings, and what it imports."""
    text = _files(home)[module].read_text(encoding="utf-8")  # with universal newlines
    return hashlib.sha256(text.encode()).hexdigest(), frozenset(imports(text, _files(home)))
