"""Which JetPack a Jetson has, and how its TensorRT gets into the Python that runs the agent.

JetPack brings TensorRT as Debian packages; `python3-libnvinfer` is for the Python of that system alone, and PyPI's
wheels of TensorRT are not for a Jetson's driver. Sources: NVIDIA's release notes of Jetson Linux R32 to R39 (the system
that each is based on), NVIDIA TensorRT documentation, "Installing TensorRT", Debian packages.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.devices.agent.board import BoardState
from vitdeploy.devices.wheels import pair

LEAST_PYTHON = (3, 10)


@dataclass(frozen=True)
class JetPack:
    """`python` of its system; `boards` that get no newer one; `index` of wheels that are built for its CUDA, where one
    is known (Jetson AI Lab's)."""

    major: int
    python: str
    boards: str = ""
    index: str = ""


# By the major release of Jetson Linux.
BY_RELEASE = {
    32: JetPack(4, "3.6", boards="Nano and TX2"),
    34: JetPack(5, "3.8", boards="Xavier"),
    35: JetPack(5, "3.8", boards="Xavier"),
    36: JetPack(6, "3.10", index="https://pypi.jetson-ai-lab.io/jp6/cu126"),
    38: JetPack(7, "3.12"),
    39: JetPack(7, "3.12"),
}


def jetpack(board: BoardState) -> JetPack | None:
    """None where it is no Jetson, or a release that is not known here."""
    return BY_RELEASE.get(pair(board.tegra_release)[0])


def described(board: BoardState) -> str:
    """ "JetPack 6 (6.2.1+b38), Jetson Linux 36.4.3"; "" of another machine."""
    if not board.tegra_release:
        return ""
    known = jetpack(board)
    exact = f" ({board.debian['nvidia-jetpack']})" if "nvidia-jetpack" in board.debian else ""
    return f"{f'JetPack {known.major}{exact}, ' if known else ''}Jetson Linux {board.tegra_release}"


def too_old(board: BoardState) -> str:
    """Why no Python that vitdeploy takes has this JetPack's TensorRT; "" where one has."""
    known = jetpack(board)
    if known is None or pair(known.python) >= LEAST_PYTHON:
        return ""
    return (
        f"JetPack {known.major} brings TensorRT for Python {known.python} alone, and vitdeploy needs 3.10: flash "
        f"JetPack 6 where the board takes it (Jetson {known.boards} does not), or use a target on the CPU"
    )


def environment_line(board: BoardState) -> str:
    """The shell line on the board that makes ~/venv with its TensorRT."""
    known = jetpack(board)
    python = f"python{known.python}" if known else "python3"
    needed = [] if "python3-libnvinfer" in board.debian or known is None else ["python3-libnvinfer"]
    needed += [] if board.venv else ["python3-venv"]
    install = f"sudo apt-get install -y {' '.join(needed)} && " if needed else ""
    return f"{install}{python} -m venv --system-site-packages ~/venv && ~/venv/bin/python -m pip install numpy pillow"
