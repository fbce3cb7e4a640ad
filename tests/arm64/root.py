"""Debian for arm64 in a folder, with what a device of ours has: Python, the runtimes, and a compiler for its programs.

Nothing is emulated to make it: this machine's own apt, with a configuration of its own, resolves and checks the
packages, dpkg-deb unpacks them, and pip fetches the wheels for the other platform at the versions and hashes of
requirements/all.txt. No package's configuration scripts run; Python, gcc and the runtimes need none.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = ("base-files", "bash", "coreutils", "python3", "g++", "cmake", "make", "libjpeg-dev", "libpng-dev")
# Debian 12 has QEMU 7.2, which shows this machine's /proc/cpuinfo to the programs that it runs.
QEMU_SUITE, QEMU_PACKAGE, LEAST_QEMU = "trixie", "qemu-user", (10, 0)
LOCK = Path(__file__).parents[2] / "requirements" / "all.txt"
WHEELS = ("numpy", "pillow", "onnxruntime", "openvino", "openvino-telemetry", "protobuf", "flatbuffers", "packaging")
# glibc 2.36 of Debian 12 takes them all.
PLATFORMS = (*(f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)), "manylinux2014_aarch64")
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"


class Unable(Exception):
    """This machine cannot run arm64; the text says why."""


@dataclass(frozen=True)
class Root:
    """`folder` is Debian's `/`, `qemu` the program that runs its programs here."""

    folder: Path
    qemu: Path


def make_root(work: Path) -> Root:
    """The root in `work`, made where it is not there yet.

    Raises:
        Unable: something is missing here, or cannot be fetched.
    """
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Unable(f"it needs Linux on x86-64, and this is {sys.platform} on {os.uname().machine}")
    if os.geteuid() != 0:
        raise Unable("it needs root, to enter the other root and to tell the kernel who runs its programs")
    missing = [name for name in ("apt-get", "dpkg-deb", "tar", "unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        raise Unable(f"install {', '.join(missing)}")
    if not KEYRING.is_file():
        raise Unable(f"install debian-archive-keyring: {KEYRING} is missing")
    work.mkdir(parents=True, exist_ok=True)
    return Root(_root(work), _qemu(work))


def _run(*argv: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        why = next((line for line in said if "Failed to fetch" in line), said[-1])
        raise Unable(f"`{argv[0]} ... {argv[-1]}` failed: {why[:300]}")
    return done.stdout


def _qemu(work: Path) -> Path:
    """This machine's own QEMU if it is new enough and needs no library of its root, else Debian's newer one."""
    for name in ("qemu-aarch64-static", "qemu-aarch64"):
        if (found := shutil.which(name)) is not None and _version(Path(found)) >= LEAST_QEMU and _is_static(found):
            return Path(found)
    qemu = work / "qemu" / "usr" / "bin" / "qemu-aarch64"
    if not qemu.is_file():
        [archive] = _fetch(work / "apt-qemu", QEMU_SUITE, "amd64", QEMU_PACKAGE, alone=True)
        _unpack([archive], work / "qemu", "./usr/bin/qemu-aarch64")
    return qemu


def _version(qemu: Path) -> tuple[int, int]:
    found = re.search(r"version (\d+)\.(\d+)", _run(qemu, "--version"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _is_static(program: str) -> bool:
    """Whether the ELF file has no interpreter (a program header of type 3), which would be looked for in the root."""
    with Path(program).open("rb") as file:
        head = file.read(4096)
    offset, size, count = (int.from_bytes(head[at : at + width], "little") for at, width in ((32, 8), (54, 2), (56, 2)))
    return all(int.from_bytes(head[offset + size * i :][:4], "little") != 3 for i in range(count))


def _root(work: Path) -> Path:
    root, stamp = work / "root", work / "root.made"
    key = hashlib.sha256(Path(__file__).read_bytes() + LOCK.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="ascii") == key:
        return root
    stamp.unlink(missing_ok=True)
    shutil.rmtree(root, ignore_errors=True)
    _unpack(_fetch(work / "apt-root", SUITE, "arm64", *PACKAGES), root)
    for name in ("proc", "sys", "dev", "tmp", "root"):
        (root / name).mkdir(exist_ok=True)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n", encoding="ascii")
    (root / "etc" / "group").write_text("root:x:0:\n", encoding="ascii")
    shell = root / "usr" / "bin" / "sh"
    if not shell.exists():
        shell.symlink_to("bash")
    _install(root / SITE, work / "wheels.txt")
    stamp.write_text(key, encoding="ascii")
    return root


def _fetch(folder: Path, suite: str, architecture: str, *packages: str, alone: bool = False) -> list[Path]:
    """Debian's archives of packages and, unless `alone`, of all that they depend on; apt checks who signed them."""
    state, cache = folder / "state", folder / "cache"
    for each in (state / "lists" / "partial", cache / "archives" / "partial"):
        each.mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n", encoding="utf-8")
    options = {
        "Dir::State": state,
        "Dir::State::status": folder / "status",
        "Dir::Cache": cache,
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",
    }
    apt = ("apt-get", "--quiet=2", *(f"-o{key}={value}" for key, value in options.items()))
    _run(*apt, "--error-on=any", "update")
    if alone:
        names = _run(*apt, "--print-uris", "download", *packages)
        [name] = re.findall(r"^'\S+' (\S+) ", names, flags=re.MULTILINE)
        done = subprocess.run([*apt, "download", *packages], cwd=cache / "archives", capture_output=True, text=True)
        if done.returncode:
            raise Unable(f"apt-get download {packages[0]} failed: {done.stderr.strip()[-200:]}")
        return [cache / "archives" / name]
    _run(*apt, "--yes", "--download-only", "install", *packages)
    return sorted((cache / "archives").glob("*.deb"))


def _unpack(archives: list[Path], root: Path, *members: str) -> None:
    """All of them, or only some members. The links such as /lib come first: files of many packages go through them."""
    root.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "sbin"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for archive in archives:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as reader:
            command = ["tar", "--extract", "--keep-directory-symlink", "--directory", root, *members]
            done = subprocess.run(command, stdin=reader.stdout, capture_output=True, text=True, check=False)
        if done.returncode or reader.returncode:
            raise Unable(f"{archive.name} cannot be unpacked: {done.stderr.strip()[-200:]}")


def _install(site: Path, requirements: Path) -> None:
    """The wheels for the other platform; pip takes those that the lock file names by their hashes."""
    blocks = re.split(r"^(?=\S)", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    chosen = [block for block in blocks if block.partition("==")[0] in WHEELS]
    requirements.write_text("".join(chosen), encoding="utf-8")
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    _run(
        *(*_pip(), "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"),
        *("--python-version", PYTHON, "--implementation", "cp", *platforms),
        *("--target", site, "--requirement", requirements),
        env=environment,
    )


def _pip() -> tuple[str, ...]:
    """pip of this Python, or the one in PATH: what it installs is for another machine anyway."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return (sys.executable, "-m", "pip")
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise Unable("install pip")
    return (found,)
