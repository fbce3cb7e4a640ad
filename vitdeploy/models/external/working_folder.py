"""The working folder as a place for the modules of a user's own model, and for nobody else's imports.

Python looks for every import in the folder that a program was started in. There a folder called `triton` is then taken
for the package of that name, by PyTorch too, which asks for it while it exports. So that folder is on no path of ours
(`runtime.interpreter`), and this finder shows it to the code that lies in it alone.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

# Frames between an import and who asks for it.
MACHINERY = ("<frozen importlib", str(Path(importlib.__file__).parent))
PROBES = ("<frozen importlib.util>", str(Path(importlib.__file__).parent / "util.py"))
INSTALLED = {"site-packages", "dist-packages"}
STANDARD = Path(sysconfig.get_path("stdlib"))


class WorkingFolder(MetaPathFinder):
    """Finds the modules of one folder.

    For code of this folder they come first, as for a script that is started there; folders without `__init__.py` come
    last. Libraries that this code calls find its modules by name while the model is built (a pickle, a registry).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named = ""
        self.building = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:  # of a package, which has a path of its own
            return None
        spec = PathFinder.find_spec(fullname, [str(self.folder)])
        if spec is None:
            return None
        asked_by_own = fullname == self.named or is_own(_asking(), self.folder)
        if spec.origin is None:  # a folder without __init__.py: whatever else has the name is meant
            return spec if asked_by_own and not self._elsewhere(fullname) else None
        if asked_by_own:
            return spec
        return spec if self.building and not _probed() and not self._elsewhere(fullname) else None

    def _elsewhere(self, name: str) -> bool:
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        return any(finder.find_spec(name, None) is not None for finder in others)

    @contextlib.contextmanager
    def build(self) -> Iterator[None]:
        """While the user's own code makes a model."""
        self.building = True
        try:
            yield
        finally:
            self.building = False

    def import_module(self, name: str) -> ModuleType:
        """Import the module that the user named; its errors propagate."""
        importlib.invalidate_caches()
        self.named = name.partition(".")[0]
        try:
            return importlib.import_module(name)
        finally:
            self.named = ""

    def hidden(self, name: str) -> str | None:
        """The file of a module that is loaded already, where it hides one of this folder; None otherwise."""
        top = name.partition(".")[0]
        loaded = sys.modules.get(top)
        spec = PathFinder.find_spec(top, [str(self.folder)]) if loaded is not None else None
        if spec is None or spec.origin is None:
            return None
        file = getattr(loaded, "__file__", None)
        same = file is not None and Path(file).resolve() == Path(spec.origin).resolve()
        return None if same else file or "Python itself"


def shown_folder() -> WorkingFolder:
    """The finder of the working folder, which stays: a model may import when it first runs."""
    folder = Path.cwd()
    for finder in sys.meta_path:
        if isinstance(finder, WorkingFolder) and finder.folder == folder:
            return finder
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, WorkingFolder)]
    added = WorkingFolder(folder)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), added)
    return added


def is_own(file: str | None, folder: Path) -> bool:
    """Whether a code file in this folder is the user's own, not part of an environment in the folder."""
    if not file or file.startswith("<"):
        return False
    path = Path(file)
    return path.is_relative_to(folder) and not INSTALLED & set(path.parts) and not path.is_relative_to(STANDARD)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def _asking() -> str | None:
    """The file of the code that asks for an import."""
    files = (frame.f_code.co_filename for frame in _frames())
    return next((file for file in files if not file.startswith(MACHINERY)), None)


def _probed() -> bool:
    """Whether the caller only checks that such a module exists, as libraries do for optional ones."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith(MACHINERY):
            return False
        if frame.f_code.co_filename in PROBES:
            return True
    return False
