"""Virtual environments with one release of a runtime each, in the user's cache folder.

All packages are installed by pip with the user's configuration.
"""

import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vitdeploy.devices.client import agent_package
from vitdeploy.errors import HostError, HubError
from vitdeploy.known_bad.platform import holds_for
from vitdeploy.publish import publish, storage_errors, temporary_folder
from vitdeploy.runtime.trust import write_atomic
from vitdeploy.store.store import store_folder

FOLDER = "runtimes"
ASK_SECONDS, INSTALL_SECONDS = 120.0, 1800.0
# Run a module of the device zone in an environment with numpy, Pillow and one runtime.
LAUNCH = (
    "import runpy,sys;sys.path.insert(0,sys.argv[1]);module=sys.argv[2];del sys.argv[1:3];"
    "runpy.run_module(module,None,'__main__',True)"
)
# Releases whose wheels need numpy 1 without declaring it.
NUMPY_1 = {"onnxruntime": "<1.19"}
# Other interpreters and systems whose releases are reported.
PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
GLIBCS = ("manylinux2014", "manylinux_2_27", "manylinux_2_28", "manylinux_2_31", "manylinux_2_35", "manylinux_2_39")


class NotInstalled(Exception):
    """A release that pip cannot install here; the text is the reason."""


@dataclass(frozen=True)
class Environment:
    """An environment with one release of the runtime. `python`: its interpreter. `zone`: the packed device zone."""

    python: Path
    zone: Path

    def argv(self, module: str) -> tuple[str, ...]:
        """Return the command that runs a module of vitdeploy's device zone there."""
        return str(self.python), "-I", "-c", LAUNCH, str(self.zone), module


class Environments:
    """Creates environments in `root`, sequentially, and reuses existing ones."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or store_folder()) / FOLDER

    def released(self, package: str) -> list[Version]:
        """Return the releases that pip finds for this Python and system.

        Raises:
            HubError: pip cannot reach its index, or has no such package.
        """
        return self._index(package)

    def elsewhere(self, package: str) -> list[Version]:
        """Return the releases that pip finds for other Pythons, and for systems with other versions of glibc."""
        versions: set[Version] = set()
        systems = [word for name in GLIBCS for word in ("--platform", f"{name}_{platform.machine()}")]
        for python in PYTHONS:
            try:
                versions.update(self._index(package, "--only-binary", ":all:", "--python-version", python, *systems))
            except HubError:  # none for that one
                continue
        return sorted(versions)

    def of(self, package: str, version: Version) -> Environment:
        """Return the environment of a release, created if missing.

        Raises:
            NotInstalled: pip cannot install it here.
        """
        home = self.root / f"{package}-{version}-cp{sys.version_info[0]}{sys.version_info[1]}"
        with storage_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            if not home.is_dir():
                with temporary_folder(self.root) as work:
                    made = work / "environment"
                    self._make(made, package, version)
                    publish(made, home)
            zone = self.root / f"zone-{agent_package().digest[:16]}.pyz"
            if not zone.is_file():
                write_atomic(zone, agent_package().data)
        return Environment(home / "bin" / "python", zone)

    def _make(self, home: Path, package: str, version: Version) -> None:
        self._venv(home, "--without-pip")
        numpy = "numpy<2" if holds_for(NUMPY_1.get(package, "<0"), str(version)) else "numpy"
        words = ("install", "--quiet", "--only-binary", ":all:", f"{package}=={version}", numpy, "pillow")
        done = self._run(INSTALL_SECONDS, self._pip(), "-m", "pip", "--python", str(home / "bin" / "python"), *words)
        if done.returncode:
            raise NotInstalled(_last_line(done.stderr))
        loaded = self._run(ASK_SECONDS, home / "bin" / "python", "-I", "-c", f"import {package}")
        if loaded.returncode:
            raise NotInstalled(f"import fails: {_last_line(loaded.stderr)}")

    def _index(self, package: str, *words: str) -> list[Version]:
        done = self._run(ASK_SECONDS, self._pip(), "-m", "pip", "index", "versions", *words, package)
        listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
        if done.returncode or listed is None:
            raise HubError(
                f"pip finds no releases of {package}",
                found=_last_line(done.stderr),
                fix="check pip's configuration (`pip config list`) and the network",
            )
        return sorted(filter(None, map(_version, listed[1].split(","))))

    def _pip(self) -> Path:
        """Return a Python with pip; the running one may lack it."""
        home = self.root / f"pip-cp{sys.version_info[0]}{sys.version_info[1]}"
        if not home.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            with temporary_folder(self.root) as work:
                self._venv(work / "environment")
                publish(work / "environment", home)
        return home / "bin" / "python"

    def _venv(self, home: Path, *words: str) -> None:
        done = self._run(INSTALL_SECONDS, Path(sys.executable), "-m", "venv", *words, str(home))
        if done.returncode:
            raise HostError(
                "Python cannot create a virtual environment here",
                found=_last_line(done.stderr or done.stdout),
                fix="install the system package for virtual environments, such as python3-venv",
            )

    def _run(self, seconds: float, python: Path, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [str(python), *words], capture_output=True, text=True, timeout=seconds, check=False, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess([], 1, "", f"no answer within {seconds:g} s")


def _version(text: str) -> Version | None:
    try:
        return Version(text.strip())
    except InvalidVersion:
        return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return (lines[-1] if lines else "no reason given")[:300]
